"""Properties that every class covariance and every head should have, searched for counterexamples by hypothesis.

They serve your own estimators as they serve the package's:

    from fewshot_mahalanobis.testing import check_covariance, check_head

    check_covariance(lambda width: MyCovariance())
    check_head(lambda width: MyHead(width), without=["translation_changes_nothing"])

A property is a function ``(estimator, task)`` that raises AssertionError where it does not hold: write more of your own
over the tasks of ``tasks()``, with hypothesis as usual. The package needs hypothesis in this module alone.

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

Heads in general have no such formula: their logits must agree within the change that random perturbations of every
example, by 2^-30 of its largest entry, make; and float32 logits with float64 ones within that of 2^-16, 256 times the
roundoff of float32, plus what c operations below its normal numbers lose, c s / 2.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewshot_mahalanobis.extras import install_command

try:
    import hypothesis
    from hypothesis import strategies as st
    from hypothesis.extra.numpy import arrays
except ImportError as error:
    raise ImportError(f"fewshot_mahalanobis.testing needs hypothesis: {install_command('test')}") from error

# ---------------------------------------------------------------- tasks

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """Features of a few-shot task. Its ``repr`` is Python that makes it again.

    Attributes
    ----------
    support_features : Tensor of shape (n, d)
    support_labels : int64 Tensor of shape (n,)
        0..k-1, each at least once.
    query_features : Tensor of shape (m, d)
        Of the support features' dtype.
    """

    support_features: Tensor
    support_labels: Tensor
    query_features: Tensor

    def __repr__(self) -> str:
        tensors = (
            f"{name}=torch.tensor({tensor.tolist()}, dtype={tensor.dtype})" for name, tensor in vars(self).items()
        )
        return f"Task({', '.join(tensors)})"


def tasks(
    *,
    classes: tuple[int, int] = (1, 5),
    shots: tuple[int, int] = (1, 6),
    width: tuple[int, int] = (1, 10),
    scale: tuple[float, float] = (1e-6, 1e6),
    dtypes: Collection[torch.dtype] = _DTYPES,
) -> st.SearchStrategy[Task]:
    """Strategy of few-shot tasks, easy and awkward: a hypothesis strategy for ``@given``.

    Entries are small integers, floats in [-1, 1] or Gaussian; then features may become constant or linear combinations
    of others, examples (queries too) copies of others, and all may move far from the origin.

    Parameters
    ----------
    classes, shots, width : (int, int)
        Least and greatest k, n_k and d. Every class has its own number of shots.
    scale : (float, float)
        Least and greatest factor, drawn log-uniformly, on entries of the order of 1. Where the dtype cannot hold the
        product it is cut off at a quarter of the largest number.
    dtypes : collection of torch.dtype
        Of the features.

    Returns
    -------
    hypothesis.strategies.SearchStrategy of Task
        With one to four queries.
    """
    return _draw_task(classes, shots, width, scale, tuple(dtypes))


@st.composite
def _draw_task(
    draw: st.DrawFn,
    classes: tuple[int, int],
    shots: tuple[int, int],
    width: tuple[int, int],
    scale: tuple[float, float],
    dtypes: tuple[torch.dtype, ...],
) -> Task:
    counts = draw(st.lists(st.integers(*shots), min_size=classes[0], max_size=classes[1]))
    n, d = sum(counts), draw(st.integers(*width))
    rows = n + draw(st.integers(1, 4))
    integers = arrays(np.int8, (rows, d), elements=st.integers(-4, 4))
    floats = arrays(np.float64, (rows, d), elements=st.floats(-1, 1))
    gaussian = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).standard_normal((rows, d)))
    x = draw(st.one_of(integers, floats, gaussian)).astype(np.float64)

    row, column = st.integers(0, rows - 1), st.integers(0, d - 1)
    for target, first, second in draw(st.lists(st.tuples(column, column, column), max_size=2)):
        x[:, target] = 2 * x[:, first] - x[:, second]
    for target in draw(st.lists(column, max_size=2)):
        x[:, target] = x[0, target]
    for target, source in draw(st.lists(st.tuples(row, row), max_size=4)):
        x[target] = x[source]
    x += draw(st.sampled_from([0.0, 0.0, 100.0]))

    x *= 10.0 ** draw(st.floats(*np.log10(scale).tolist()))
    dtype = draw(st.sampled_from(dtypes))
    largest = torch.finfo(dtype).max / 4
    features = torch.from_numpy(x).clamp(-largest, largest).to(dtype)
    labels = np.random.default_rng(draw(st.integers(0, 2**16))).permutation(np.repeat(np.arange(len(counts)), counts))
    return Task(features[:n], torch.from_numpy(labels), features[n:])


def _in_float64(task: Task) -> Task:
    """The task in float64."""
    return Task(task.support_features.double(), task.support_labels, task.query_features.double())


def _at_unit_scale(task: Task) -> Task:
    """The task in float64, its largest entry 1."""
    task = _in_float64(task)
    factor = 1 / max(largest_entry(task), torch.finfo(torch.float64).tiny)
    return Task(factor * task.support_features, task.support_labels, factor * task.query_features)


def _shuffled(task: Task) -> Task:
    """The task with its examples in another order."""
    order = torch.randperm(len(task.support_labels), generator=_fixed_generator())
    return Task(task.support_features[order], task.support_labels[order], task.query_features)


def _renamed_labels(task: Task) -> tuple[Task, Tensor]:
    """The task with class j called names[j], and ``names`` (k,)."""
    names = torch.randperm(len(task.support_labels.unique()), generator=_fixed_generator())
    return Task(task.support_features, names[task.support_labels], task.query_features), names


def _moved(task: Task) -> Task:
    """The task moved by one vector, as long as its features."""
    shift = largest_entry(task) * torch.randn(
        task.query_features.shape[1], dtype=torch.float64, generator=_fixed_generator()
    )
    return Task(task.support_features + shift, task.support_labels, task.query_features + shift)


def _rotated(task: Task) -> Task:
    """The task turned by one orthogonal matrix."""
    d = task.query_features.shape[1]
    rotation = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=_fixed_generator())).Q
    return Task(task.support_features @ rotation, task.support_labels, task.query_features @ rotation)


def largest_entry(task: Task) -> float:
    """Largest entry of a feature, M."""
    return max(float(task.support_features.abs().max()), float(task.query_features.abs().max()))


def _fixed_generator() -> torch.Generator:
    """Random numbers that are the same for every example, so that counterexamples stay ones."""
    return torch.Generator().manual_seed(0)


# ---------------------------------------------------------------- properties

__all__ = ["COVARIANCE_PROPERTIES", "HEAD_PROPERTIES", "Task", "check_covariance", "check_head", "tasks"]

#: Bits that a distance may lose to cancellation.
_CANCELLED = 2.0**12
#: Relative perturbations of examples by whose effect float64 logits may differ, and float32 ones from float64.
_NUDGE, _NUDGE_FLOAT32 = 2.0**-30, 2.0**-16
_PROBES = 4

Property = Callable[[Any, Task], None]


def check_covariance(
    make: Callable[[int], Any],
    *,
    without: Collection[str] = (),
    strategy: st.SearchStrategy[Task] | None = None,
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
    strategy : hypothesis strategy of Task, optional
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
    _search(make, COVARIANCE_PROPERTIES, without, strategy, settings)


def check_head(
    make: Callable[[int], Any],
    *,
    without: Collection[str] = (),
    strategy: st.SearchStrategy[Task] | None = None,
    settings: hypothesis.settings | None = None,
) -> None:
    """Search a head for counterexamples to each of ``HEAD_PROPERTIES``.

    Parameters
    ----------
    make : callable
        Feature width d -> a module of the interface of ``fewshot_mahalanobis.heads.Head``, with the same parameters
        every time.
    without : collection of str
        Names of properties that the head is not meant to have. Few have ``translation_changes_nothing`` and
        ``rotation_changes_nothing``.
    strategy : hypothesis strategy of Task, optional
        Where to search; by default scales from 1e-6 to 1e3. An error is a counterexample, so leave out what the head
        refuses.
    settings : hypothesis.settings, optional
        How long to search; by default as the current profile. Nothing is written to hypothesis's database.

    Raises
    ------
    AssertionError
        Naming the property and the smallest task found for which it fails.
    ValueError
        If ``without`` names something else than a property.
    """
    _search(make, HEAD_PROPERTIES, without, strategy, settings)


def _search(
    make: Callable[[int], Any],
    properties: Mapping[str, Property],
    without: Collection[str],
    strategy: st.SearchStrategy[Task] | None,
    settings: hypothesis.settings | None,
) -> None:
    if unknown := sorted(set(without) - set(properties)):
        raise ValueError(f"there is no property {unknown[0]!r}: they are {', '.join(properties)}")
    parent = hypothesis.settings(settings)
    # Explaining an example would replace the simplest one by the shortest to draw.
    phases = [phase for phase in parent.phases if phase is not hypothesis.Phase.explain]
    # A machine that is busy with something else draws tasks slowly; that is no property's failure.
    unchecked = {*parent.suppress_health_check, hypothesis.HealthCheck.too_slow}
    settings = hypothesis.settings(
        parent,
        phases=phases,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=tuple(unchecked),
    )
    for name in properties:
        if name not in without:
            settings(hypothesis.given(task=strategy or tasks(scale=(1e-6, 1e3)))(_test_of(make, name, properties)))()


def _test_of(make: Callable[[int], Any], name: str, properties: Mapping[str, Property]) -> Callable[..., None]:
    def test(task: Task) -> None:
        try:
            properties[name](make(task.support_features.shape[1]), task)
        except Exception as error:
            reason = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            raise AssertionError(f"{name} does not hold: {reason}\nfor {task!r}") from error

    return test


# ---------------------------------------------------------------- covariances


def _covariance_means_and_counts_are_those_of_the_classes(covariance: Any, task: Task) -> None:
    """``means`` and ``counts`` describe the support examples of each class."""
    task = _in_float64(task)
    gaussians = covariance(task.support_features, task.support_labels)
    counts = torch.bincount(task.support_labels)
    _assert(torch.equal(gaussians.counts, counts), f"counts are {gaussians.counts.tolist()}, not {counts.tolist()}")
    members = [task.support_features[task.support_labels == label] for label in range(len(counts))]
    means = torch.stack([member.mean(dim=0) for member in members])
    error = (gaussians.means - means).abs().max()
    bound = 4 * (len(task.support_labels) * _roundoff(means.dtype) * largest_entry(task) + _smallest(means.dtype))
    _assert(error <= bound, f"a mean is off by {error:.3g}, more than rounding explains ({bound:.3g})")


def _covariance_covariances_are_symmetric_and_positive_definite(covariance: Any, task: Task) -> None:
    """Every Q_k equals its transpose and has positive eigenvalues, both but for rounding."""
    task = _in_float64(task)
    q = covariance(task.support_features, task.support_labels).covariance()
    rounding = 16 * len(q[0]) * _roundoff(q.dtype) * _trace(q)
    asymmetry = (q - q.mT).abs().amax(dim=(1, 2))
    _assert((asymmetry <= rounding).all(), f"an entry differs from its mirror by {asymmetry.max():.3g}")
    smallest = torch.linalg.eigvalsh(q)[:, 0]
    _assert((smallest > -rounding).all(), f"the smallest eigenvalue is {smallest.min():.3g}")
    _assert((q.diagonal(dim1=1, dim2=2) > 0).all(), "a variance is not positive")


def _covariance_precisions_are_the_inverses(covariance: Any, task: Task) -> None:
    """``precision()`` inverts ``covariance()``, as far as its condition allows."""
    task = _in_float64(task)
    gaussians = covariance(task.support_features, task.support_labels)
    q, precision = gaussians.covariance(), gaussians.precision()
    error = torch.linalg.matrix_norm(q @ precision - torch.eye(q.shape[-1], dtype=q.dtype))
    bound = 16 * q.shape[-1] * _roundoff(q.dtype) * torch.linalg.matrix_norm(q) * torch.linalg.matrix_norm(precision)
    _assert((error <= bound).all(), f"covariance times precision is off the identity by {error.max():.3g}")


def _covariance_distances_follow_from_the_covariances(covariance: Any, task: Task) -> None:
    """Distances are finite, not negative, and z^T Q_k^-1 z by a dense Cholesky factor of Q_k."""
    task = _in_float64(task)
    gaussians = covariance(task.support_features, task.support_labels)
    distances = gaussians.squared_distance(task.query_features)
    shape = (len(task.query_features), len(gaussians.counts))
    _assert(distances.shape == shape, f"distances have shape {tuple(distances.shape)}, not {shape}")
    _assert((distances >= 0).all(), f"a squared distance is {distances.min()}")
    q = gaussians.covariance()
    cholesky, failed = torch.linalg.cholesky_ex(q)
    # Where Q_k is singular but for rounding the dense formula has no answer, and no other can be held against it.
    singular = torch.linalg.eigvalsh(q)[:, 0] <= 16 * len(q[0]) * _roundoff(q.dtype) * _trace(q)
    _assert((singular | (failed == 0)).all(), "a covariance is not positive definite")
    difference = task.query_features - gaussians.means[:, None]
    plain = torch.linalg.solve_triangular(cholesky, difference.mT, upper=False).square().sum(dim=1).T
    _assert_same_lengths(distances, torch.where(failed == 0, plain, distances), gaussians, task)


def _covariance_distances_are_zero_at_the_means(covariance: Any, task: Task) -> None:
    """The squared distance of mu_k to class k is zero, but for the rounding of mu_k."""
    task = _in_float64(task)
    gaussians = covariance(task.support_features, task.support_labels)
    distances = gaussians.squared_distance(gaussians.means).diagonal()[None]
    _assert_same_lengths(distances, torch.zeros_like(distances), gaussians, task)


def _covariance_repeats_give_the_same_bits(covariance: Any, task: Task) -> None:
    """A second fit gives the same bits; features, labels and torch's random state stay as they were."""
    before, state = copy.deepcopy(task), torch.get_rng_state()
    first, second = (
        covariance(task.support_features, task.support_labels).squared_distance(task.query_features) for _ in range(2)
    )
    _assert(torch.equal(first, second), f"distances differ by {(first - second).abs().max():.3g}")
    _assert_untouched(task, before, state)


def _covariance_support_order_does_not_matter(covariance: Any, task: Task) -> None:
    """Distances are the same for support examples in another order."""
    _assert_same_task(covariance, _in_float64(task), _shuffled(_in_float64(task)))


def _covariance_renaming_labels_permutes_the_columns(covariance: Any, task: Task) -> None:
    """Classes are told apart by their examples alone, not by their label."""
    renamed, names = _renamed_labels(_in_float64(task))
    _assert_same_task(covariance, _in_float64(task), renamed, columns=names)


def _covariance_every_query_is_served_on_its_own(covariance: Any, task: Task) -> None:
    """A query's distances do not depend on the other queries."""
    task = _in_float64(task)
    gaussians = covariance(task.support_features, task.support_labels)
    together = gaussians.squared_distance(task.query_features)
    alone = torch.cat([gaussians.squared_distance(query[None]) for query in task.query_features])
    _assert_same_lengths(alone, together, gaussians, task)
    empty = gaussians.squared_distance(task.query_features[:0])
    _assert(empty.shape == (0, together.shape[1]), f"no queries have distances of shape {tuple(empty.shape)}")


def _covariance_translation_changes_nothing(covariance: Any, task: Task) -> None:
    """Distances are the same when all support and query features move by one vector."""
    _assert_same_task(covariance, _in_float64(task), _moved(_in_float64(task)))


def _covariance_rotation_changes_nothing(covariance: Any, task: Task) -> None:
    """Distances are the same when all support and query features turn by one orthogonal matrix."""
    _assert_same_task(covariance, _in_float64(task), _rotated(_in_float64(task)))


def _covariance_gradients_equal_finite_differences(covariance: Any, task: Task) -> None:
    """Derivatives of distances, in support and queries, are those of differences, for the task at unit scale."""
    task = _at_unit_scale(task)
    _assert_gradients(lambda x, q: covariance(x, task.support_labels).squared_distance(q), task)


def _covariance_float32_is_close_to_float64(covariance: Any, task: Task) -> None:
    """Distances of features in their own dtype are those of the same numbers in float64, to the bound for float32.

    They come back in float32 at least.
    """
    wide = _in_float64(task)
    gaussians = covariance(wide.support_features, wide.support_labels)
    expected = gaussians.squared_distance(wide.query_features)
    found = covariance(task.support_features, task.support_labels).squared_distance(task.query_features)
    dtype = torch.promote_types(task.query_features.dtype, torch.float32)
    _assert(found.dtype == dtype, f"distances are {found.dtype}, not {dtype}")
    _assert((found >= 0).all(), f"a squared distance is {found.min()}")
    relative, absolute = _length_rounding(gaussians, wide, dtype=dtype, cancelled=1.0)
    found, expected = found.double().sqrt(), expected.sqrt()
    _assert_within(found, expected, relative * torch.maximum(found, expected) + absolute)


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


def _assert_same_task(covariance: Any, task: Task, other: Task, columns: Tensor | slice = slice(None)) -> None:
    """Distances of ``other``, in the order of ``columns``, are those of ``task``."""
    gaussians = covariance(task.support_features, task.support_labels)
    expected = gaussians.squared_distance(task.query_features)
    found = covariance(other.support_features, other.support_labels).squared_distance(other.query_features)
    _assert_same_lengths(
        found[:, columns], expected, gaussians, task, largest=max(largest_entry(task), largest_entry(other))
    )


def _assert_same_lengths(
    found: Tensor, expected: Tensor, gaussians: Any, task: Task, largest: float | None = None
) -> None:
    """Compare squared distances (m, k) of one task, whose features may have been moved up to ``largest``."""
    relative, absolute = _length_rounding(gaussians, task, largest)
    found, expected = found.sqrt(), expected.sqrt()
    _assert_within(found, expected, relative * torch.maximum(found, expected) + absolute)


def _assert_within(found: Tensor, expected: Tensor, bound: Tensor) -> None:
    wrong = (~((found - expected).abs() <= bound)).nonzero()
    if len(wrong):
        m, k = wrong[0].tolist()
        raise AssertionError(
            f"the value of query {m} and class {k} is {found[m, k]:.17g}, but should be {expected[m, k]:.17g} "
            f"within {bound[m, k]:.3g}"
        )


def _length_rounding(
    gaussians: Any,
    task: Task,
    largest: float | None = None,
    dtype: torch.dtype = torch.float64,
    cancelled: float = _CANCELLED,
) -> tuple[Tensor, Tensor]:
    """Relative and absolute rounding error of Mahalanobis lengths to each class, (k,): see the head of this module."""
    n, d = task.support_features.shape
    q = gaussians.covariance()
    # The least eigenvalue is known to the last digits of the trace: below that the relative bound is above 1 and void.
    smallest = torch.maximum(torch.linalg.eigvalsh(q)[:, 0], _roundoff(q.dtype) * _trace(q))
    reach = (largest_entry(task) if largest is None else largest) * (d / smallest).sqrt()
    operations = 4 * (n + d + 10)
    unit, underflow = operations * _roundoff(dtype), math.sqrt(operations / 2 * _smallest(dtype))
    return unit * (_trace(q) / smallest + reach), cancelled * unit * reach + underflow


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=1, dim2=2).sum(dim=1)


# ---------------------------------------------------------------- heads


def _head_one_call_equals_two_steps(head: Any, task: Task) -> None:
    """``head(...)`` gives the same bits as ``fit`` and ``logits``: finite (m, k), in float32 at least."""
    whole = head(task.support_features, task.support_labels, task.query_features)
    state = head.fit(task.support_features, task.support_labels)
    steps = head.logits(state, task.query_features)
    shape = (len(task.query_features), len(task.support_labels.unique()))
    _assert(whole.shape == shape, f"logits have shape {tuple(whole.shape)}, not {shape}")
    _assert(whole.dtype in (torch.float32, torch.float64), f"logits are {whole.dtype}")
    _assert(torch.isfinite(whole).all(), "a logit is not finite")
    _assert(torch.equal(whole, steps), f"one call and two steps differ by {(whole - steps).abs().max():.3g}")


def _head_calls_leave_no_trace(head: Any, task: Task) -> None:
    """A second call gives the same bits; features, labels, parameters and torch's random state stay as they were."""
    before, parameters, state = copy.deepcopy(task), copy.deepcopy(head.state_dict()), torch.get_rng_state()
    first, second = (head(task.support_features, task.support_labels, task.query_features) for _ in range(2))
    _assert(torch.equal(first, second), f"logits differ by {(first - second).abs().max():.3g}")
    _assert_untouched(task, before, state)
    for name, value in head.state_dict().items():
        _assert(torch.equal(value, parameters[name]), f"{name} was changed")


def _head_support_order_does_not_matter(head: Any, task: Task) -> None:
    _assert_same_logits(head, _in_float64(task), _shuffled(_in_float64(task)))


def _head_renaming_labels_permutes_the_columns(head: Any, task: Task) -> None:
    renamed, names = _renamed_labels(_in_float64(task))
    _assert_same_logits(head, _in_float64(task), renamed, columns=names)


def _head_every_query_is_served_on_its_own(head: Any, task: Task) -> None:
    task, head = _in_float64(task), copy.deepcopy(head).double()
    state = head.fit(task.support_features, task.support_labels)
    alone = torch.cat([head.logits(state, query[None]) for query in task.query_features])
    _assert_close_logits(alone, head, task)


def _head_translation_changes_nothing(head: Any, task: Task) -> None:
    _assert_same_logits(head, _moved(_in_float64(task)), _in_float64(task))  # the moved one has the larger numbers


def _head_rotation_changes_nothing(head: Any, task: Task) -> None:
    _assert_same_logits(head, _in_float64(task), _rotated(_in_float64(task)))


def _head_gradients_equal_finite_differences(head: Any, task: Task) -> None:
    # Metrics have kinks and poles where features coincide or vanish: noise moves the task off them.
    task, head, generator = _at_unit_scale(task), copy.deepcopy(head).double(), _fixed_generator()
    noisy = [
        x + torch.randn(x.shape, dtype=x.dtype, generator=generator)
        for x in (task.support_features, task.query_features)
    ]
    task = Task(noisy[0], task.support_labels, noisy[1])
    _assert_gradients(lambda x, q: head(x, task.support_labels, q), task)


def _head_float32_is_close_to_float64(head: Any, task: Task) -> None:
    single = Task(task.support_features.float(), task.support_labels, task.query_features.float())
    found = copy.deepcopy(head).float()(single.support_features, single.support_labels, single.query_features)
    _assert(found.dtype == torch.float32, f"logits are {found.dtype}")
    n, d = task.support_features.shape
    underflow = 2 * (n + d + 10) * _smallest(torch.float32)
    _assert_close_logits(
        found.double(), copy.deepcopy(head).double(), _in_float64(single), nudge=_NUDGE_FLOAT32, underflow=underflow
    )


#: Properties of heads by name.
HEAD_PROPERTIES: Mapping[str, Property] = {
    holds.__name__.removeprefix("_head_"): holds
    for holds in (
        _head_one_call_equals_two_steps,
        _head_calls_leave_no_trace,
        _head_support_order_does_not_matter,
        _head_renaming_labels_permutes_the_columns,
        _head_every_query_is_served_on_its_own,
        _head_translation_changes_nothing,
        _head_rotation_changes_nothing,
        _head_gradients_equal_finite_differences,
        _head_float32_is_close_to_float64,
    )
}


def _assert_same_logits(head: Any, task: Task, other: Task, columns: Tensor | slice = slice(None)) -> None:
    """Logits of ``other``, in the order of ``columns``, are those of ``task``."""
    head = copy.deepcopy(head).double()
    found = head(other.support_features, other.support_labels, other.query_features)[:, columns]
    _assert_close_logits(found, head, task)


def _assert_close_logits(found: Tensor, head: Any, task: Task, nudge: float = _NUDGE, underflow: float = 0.0) -> None:
    """Compare logits with those of ``task`` within what nudging its features changes, and an absolute ``underflow``."""
    expected = head(task.support_features, task.support_labels, task.query_features)
    tiny = torch.finfo(expected.dtype).tiny  # numbers below it have no relative precision
    bound = nudge * expected.abs().max().expand_as(expected) + max(underflow, tiny)
    generator = _fixed_generator()
    for _ in range(_PROBES):
        support, queries = (
            x + nudge * x.abs().amax(dim=1, keepdim=True) * torch.randn(x.shape, dtype=x.dtype, generator=generator)
            for x in (task.support_features, task.query_features)
        )
        bound = torch.maximum(bound, (head(support, task.support_labels, queries) - expected).abs())
    _assert_within(found, expected, bound)


# ---------------------------------------------------------------- shared


def _assert(condition: Tensor | bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _assert_untouched(task: Task, before: Task, state: Tensor) -> None:
    for name, tensor in vars(task).items():
        _assert(torch.equal(tensor, getattr(before, name)), f"{name} were changed in place")
    _assert(torch.equal(torch.get_rng_state(), state), "torch's global random state was changed")


def _assert_gradients(function: Callable[[Tensor, Tensor], Tensor], task: Task) -> None:
    """The derivative along a random direction lies between those of a step back and a step forward.

    So it does for a smooth function, whose central difference is their mean, and at a kink of a concave or convex one.
    """
    generator = _fixed_generator()
    points = task.support_features, task.query_features
    directions = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in points]
    weights = torch.rand(len(task.query_features), len(task.support_labels.unique()), generator=generator).double()

    def value(step: float) -> float:
        return float((weights * function(*(x + step * v for x, v in zip(points, directions))).detach()).sum())

    inputs = [x.clone().requires_grad_() for x in points]
    gradients = torch.autograd.grad((weights * function(*inputs)).sum(), inputs, materialize_grads=True)
    slope = sum(float((gradient * v).sum()) for gradient, v in zip(gradients, directions))
    step = 1e-6
    back, here, forward = (value(shift) for shift in (-step, 0.0, step))
    slopes = sorted([(here - back) / step, (forward - here) / step])
    # Rounding of the values over the step, and a third derivative of the size of the values.
    slack = 1e-6 * max(abs(slope), abs(here), 1.0)
    _assert(
        slopes[0] - slack <= slope <= slopes[1] + slack,
        f"the derivative is {slope:.9g}, but differences give {slopes[0]:.9g} to {slopes[1]:.9g}",
    )


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _smallest(dtype: torch.dtype) -> float:
    """The smallest positive number, subnormal."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
