"""Properties that every class covariance should have, searched for counterexamples by hypothesis.

How equal is equal? Two correct algorithms differ by rounding, and how much is a matter of the task: the bounds below
are derived, not tuned. Write z for x - mu_k, u for the unit roundoff, M for the largest entry of a feature.

For covariances the Mahalanobis length sqrt(z^T Q_k^-1 z) is a norm, so errors are bounded on its scale. (a) Forming and
factoring Q_k commits an error E with ||E|| <= c u tr Q_k, c of the order of n + d; as (1 - ||E|| / l) Q_k <= Q_k + E <=
(1 + ||E|| / l) Q_k for the smallest eigenvalue l of Q_k, lengths change by a factor of at most 1 +- c u tr(Q_k) / l.
(b) Features rounded when they are centred, u M sqrt(d) in norm, change Q_k's root by a factor 1 +- c u r and lengths by
c u r, where r = M sqrt(d / l) is the longest that a feature can be. (c) A distance that is taken as a difference of
larger terms loses digits; in float64 12 bits are allowed for that. (d) Below its normal numbers a dtype has nothing but
multiples of the smallest, s: each operation on squares may lose s / 2, and a length sqrt(c s / 2) by them. So lengths
agree within c u (tr(Q_k) / l + r) of themselves plus 2^12 c u r plus sqrt(c s / 2), and those in float32 with those in
float64 likewise, with its u and s and without the 2^12.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from torch import Tensor

from fewshot_mahalanobis.testing import (
    HeadTask,
    Property,
    assert_gradients,
    assert_untouched,
    assert_within,
    at_unit_scale,
    in_float64,
    largest_entry,
    moved,
    renamed_labels,
    rotated,
    roundoff,
    search,
    shuffled,
    smallest_number,
)

#: Bits that a distance may lose to cancellation.
_CANCELLED = 2.0**12


def check_covariance(
    make: Callable[[int], Any],
    *,
    without: Collection[str] = (),
    strategy: st.SearchStrategy[HeadTask] | None = None,
    settings: hypothesis.settings | None = None,
) -> None:
    """Search a covariance estimator for counterexamples to each of ``COVARIANCE_PROPERTIES``.

    Parameters
    ----------
    make : callable
        Feature width d -> an estimator of the interface of ``RegularizedCovariance``: called with features (n, d) and
        labels (n,) it returns an object with ``means`` (k, d), ``counts`` (k,), ``squared_distance(queries)`` (m, k),
        ``covariance()`` and ``precision()`` (k, d, d). The same one every time.
    without : collection of str
        Names of properties that the estimator is not meant to have: a diagonal covariance is not rotated with the
        features.
    strategy : hypothesis strategy of HeadTask, optional
        Where to search; of scale 1e-6 to 1e3 if left out. An error is a counterexample, so leave out what the
        estimator refuses.
    settings : hypothesis.settings, optional
        How long to search; the current profile's if left out. Nothing is written to hypothesis's database.

    Raises
    ------
    AssertionError
        Naming the property and the smallest task found for which it fails.
    ValueError
        If ``without`` names something else than a property.
    """
    search(make, COVARIANCE_PROPERTIES, without, strategy, settings)


def _covariance_means_and_counts_are_those_of_the_classes(covariance: Any, task: HeadTask) -> None:
    """``means`` and ``counts`` describe the support examples of each class."""
    task = in_float64(task)
    gaussians = covariance(task.support_features, task.support_labels)
    counts = torch.bincount(task.support_labels)
    assert torch.equal(gaussians.counts, counts), f"counts are {gaussians.counts.tolist()}, not {counts.tolist()}"
    members = [task.support_features[task.support_labels == label] for label in range(len(counts))]
    means = torch.stack([member.mean(dim=0) for member in members])
    error = (gaussians.means - means).abs().max()
    bound = 4 * (len(task.support_labels) * roundoff(means.dtype) * largest_entry(task) + smallest_number(means.dtype))
    assert error <= bound, f"a mean is off by {error:.3g}, more than rounding explains ({bound:.3g})"


def _covariance_covariances_are_symmetric_and_positive_definite(covariance: Any, task: HeadTask) -> None:
    """Every Q_k equals its transpose and has positive eigenvalues, both but for rounding."""
    task = in_float64(task)
    q = covariance(task.support_features, task.support_labels).covariance()
    rounding = 16 * len(q[0]) * roundoff(q.dtype) * traces(q)
    asymmetry = (q - q.mT).abs().amax(dim=(1, 2))
    assert (asymmetry <= rounding).all(), f"an entry differs from its mirror by {asymmetry.max():.3g}"
    smallest = torch.linalg.eigvalsh(q)[:, 0]
    assert (smallest > -rounding).all(), f"the smallest eigenvalue is {smallest.min():.3g}"
    assert (q.diagonal(dim1=1, dim2=2) > 0).all(), "a variance is not positive"


def _covariance_precisions_are_the_inverses(covariance: Any, task: HeadTask) -> None:
    """``precision()`` inverts ``covariance()``, as far as its condition allows."""
    task = in_float64(task)
    gaussians = covariance(task.support_features, task.support_labels)
    q, precision = gaussians.covariance(), gaussians.precision()
    error = torch.linalg.matrix_norm(q @ precision - torch.eye(q.shape[-1], dtype=q.dtype))
    bound = 16 * q.shape[-1] * roundoff(q.dtype) * torch.linalg.matrix_norm(q) * torch.linalg.matrix_norm(precision)
    assert (error <= bound).all(), f"covariance times precision is off the identity by {error.max():.3g}"


def _covariance_distances_follow_from_the_covariances(covariance: Any, task: HeadTask) -> None:
    """Distances are finite, not negative, and z^T Q_k^-1 z by a dense Cholesky factor of Q_k."""
    task = in_float64(task)
    gaussians = covariance(task.support_features, task.support_labels)
    distances = gaussians.squared_distance(task.query_features)
    shape = (len(task.query_features), len(gaussians.counts))
    assert distances.shape == shape, f"distances have shape {tuple(distances.shape)}, not {shape}"
    assert (distances >= 0).all(), f"a squared distance is {distances.min()}"
    q = gaussians.covariance()
    cholesky, failed = torch.linalg.cholesky_ex(q)
    # Where Q_k is singular but for rounding the dense formula has no answer, and no other can be held against it.
    singular = torch.linalg.eigvalsh(q)[:, 0] <= 16 * len(q[0]) * roundoff(q.dtype) * traces(q)
    assert (singular | (failed == 0)).all(), "a covariance is not positive definite"
    difference = task.query_features - gaussians.means[:, None]
    plain = torch.linalg.solve_triangular(cholesky, difference.mT, upper=False).square().sum(dim=1).T
    assert_same_lengths(distances, torch.where(failed == 0, plain, distances), gaussians, task)


def _covariance_distances_are_zero_at_the_means(covariance: Any, task: HeadTask) -> None:
    """The squared distance of mu_k to class k is zero, but for the rounding of mu_k."""
    task = in_float64(task)
    gaussians = covariance(task.support_features, task.support_labels)
    distances = gaussians.squared_distance(gaussians.means).diagonal()[None]
    assert_same_lengths(distances, torch.zeros_like(distances), gaussians, task)


def _covariance_repeats_give_the_same_bits(covariance: Any, task: HeadTask) -> None:
    """A second fit gives the same bits; features, labels and torch's random state stay as they were."""
    before, state = copy.deepcopy(task), torch.get_rng_state()
    first, second = (
        covariance(task.support_features, task.support_labels).squared_distance(task.query_features) for _ in range(2)
    )
    assert torch.equal(first, second), f"distances differ by {(first - second).abs().max():.3g}"
    assert_untouched(task, before, state)


def _covariance_support_order_does_not_matter(covariance: Any, task: HeadTask) -> None:
    """Distances are the same for support examples in another order."""
    _assert_same_task(covariance, in_float64(task), shuffled(in_float64(task)))


def _covariance_renaming_labels_permutes_the_columns(covariance: Any, task: HeadTask) -> None:
    """Classes are told apart by their examples alone, not by their label."""
    renamed, names = renamed_labels(in_float64(task))
    _assert_same_task(covariance, in_float64(task), renamed, columns=names)


def _covariance_every_query_is_served_on_its_own(covariance: Any, task: HeadTask) -> None:
    """A query's distances do not depend on the other queries."""
    task = in_float64(task)
    gaussians = covariance(task.support_features, task.support_labels)
    together = gaussians.squared_distance(task.query_features)
    alone = torch.cat([gaussians.squared_distance(query[None]) for query in task.query_features])
    assert_same_lengths(alone, together, gaussians, task)
    empty = gaussians.squared_distance(task.query_features[:0])
    assert empty.shape == (0, together.shape[1]), f"no queries have distances of shape {tuple(empty.shape)}"


def _covariance_translation_changes_nothing(covariance: Any, task: HeadTask) -> None:
    """Distances are the same when all support and query features move by one vector."""
    _assert_same_task(covariance, in_float64(task), moved(in_float64(task)))


def _covariance_rotation_changes_nothing(covariance: Any, task: HeadTask) -> None:
    """Distances are the same when all support and query features turn by one orthogonal matrix."""
    _assert_same_task(covariance, in_float64(task), rotated(in_float64(task)))


def _covariance_gradients_equal_finite_differences(covariance: Any, task: HeadTask) -> None:
    """Derivatives of distances, in support and queries, are those of differences, for the task at unit scale."""
    task = at_unit_scale(task)
    assert_gradients(lambda x, q: covariance(x, task.support_labels).squared_distance(q), task)


def _covariance_float32_is_close_to_float64(covariance: Any, task: HeadTask) -> None:
    """Distances of features in their own dtype are those of the same numbers in float64, to the bound for float32.

    They come back in float32 at least.
    """
    wide = in_float64(task)
    gaussians = covariance(wide.support_features, wide.support_labels)
    expected = gaussians.squared_distance(wide.query_features)
    found = covariance(task.support_features, task.support_labels).squared_distance(task.query_features)
    dtype = torch.promote_types(task.query_features.dtype, torch.float32)
    assert found.dtype == dtype, f"distances are {found.dtype}, not {dtype}"
    assert (found >= 0).all(), f"a squared distance is {found.min()}"
    relative, absolute = length_rounding(gaussians, wide, dtype=dtype, cancelled=1.0)
    found, expected = found.double().sqrt(), expected.sqrt()
    assert_within(found, expected, relative * torch.maximum(found, expected) + absolute)


#: Properties of covariance estimators by name.
COVARIANCE_PROPERTIES: Mapping[str, Property] = {
    holds.__name__.removeprefix("_covariance_"): holds
    for holds in (
        _covariance_means_and_counts_are_those_of_the_classes,
        _covariance_covariances_are_symmetric_and_positive_definite,
        _covariance_precisions_are_the_inverses,
        _covariance_distances_follow_from_the_covariances,
        _covariance_distances_are_zero_at_the_means,
        _covariance_repeats_give_the_same_bits,
        _covariance_support_order_does_not_matter,
        _covariance_renaming_labels_permutes_the_columns,
        _covariance_every_query_is_served_on_its_own,
        _covariance_translation_changes_nothing,
        _covariance_rotation_changes_nothing,
        _covariance_gradients_equal_finite_differences,
        _covariance_float32_is_close_to_float64,
    )
}


def _assert_same_task(covariance: Any, task: HeadTask, other: HeadTask, columns: Tensor | slice = slice(None)) -> None:
    """Distances of ``other``, in the order of ``columns``, are those of ``task``."""
    gaussians = covariance(task.support_features, task.support_labels)
    expected = gaussians.squared_distance(task.query_features)
    found = covariance(other.support_features, other.support_labels).squared_distance(other.query_features)
    assert_same_lengths(
        found[:, columns], expected, gaussians, task, largest=max(largest_entry(task), largest_entry(other))
    )


def assert_same_lengths(
    found: Tensor, expected: Tensor, gaussians: Any, task: HeadTask, largest: float | None = None
) -> None:
    """Compare squared distances (m, k) of one task, whose features may have been moved up to ``largest``."""
    relative, absolute = length_rounding(gaussians, task, largest)
    found, expected = found.sqrt(), expected.sqrt()
    assert_within(found, expected, relative * torch.maximum(found, expected) + absolute)


def length_rounding(
    gaussians: Any,
    task: HeadTask,
    largest: float | None = None,
    dtype: torch.dtype = torch.float64,
    cancelled: float = _CANCELLED,
) -> tuple[Tensor, Tensor]:
    """Relative and absolute rounding error of Mahalanobis lengths to each class, (k,): see the head of this module."""
    n, d = task.support_features.shape
    q = gaussians.covariance()
    # The least eigenvalue is known to the last digits of the trace: below that the relative bound is above 1 and void.
    smallest = torch.maximum(torch.linalg.eigvalsh(q)[:, 0], roundoff(q.dtype) * traces(q))
    reach = (largest_entry(task) if largest is None else largest) * (d / smallest).sqrt()
    operations = 4 * (n + d + 10)
    unit, underflow = operations * roundoff(dtype), math.sqrt(operations / 2 * smallest_number(dtype))
    return unit * (traces(q) / smallest + reach), cancelled * unit * reach + underflow


def traces(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=1, dim2=2).sum(dim=1)
