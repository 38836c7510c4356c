"""The properties of covariances, heads and MahalanobisClassifier, searched for counterexamples by hypothesis.

Every day a few examples each (10, and 25 in ``.ci/run``), from a seed that is new each week and printed, and that
FEWSHOT_PROPERTY_SEED repeats. A long run is

    FEWSHOT_PROPERTY_EXAMPLES=5000 FEWSHOT_PROPERTY_RECORD=properties.json pytest tests/gaussians/test_properties.py

It searches in rounds of other examples, notes after each round in the record how many it has tried, and goes on there
when started again. The number of examples of each property is printed at the end, and how many of their support sets
were refused because beta was lost to rounding.
"""

from __future__ import annotations

import copy
import datetime
import functools
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sklearn.covariance
import torch
from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
from torch import Tensor

from fewshot_mahalanobis import testing
from fewshot_mahalanobis.extras import install_command
from fewshot_mahalanobis.feature_classifier import MahalanobisClassifier
from fewshot_mahalanobis.gaussians.plda import PldaSettings
from fewshot_mahalanobis.gaussians.support import working_dtype
from fewshot_mahalanobis.heads import HEADS, AutoHead, EuclideanHead, Head, LinearHead, MahalanobisHead
from fewshot_mahalanobis.heads.mahalanobis import RegularizedCovariance
from fewshot_mahalanobis.testing import HEAD_PROPERTIES, HeadTask, check_head, tasks
from tests import reference
from tests.gaussians.covariance_properties import (
    COVARIANCE_PROPERTIES,
    assert_same_lengths,
    check_covariance,
    length_rounding,
    traces,
)

EPS = torch.finfo(torch.float64).eps
EXAMPLES = int(os.environ.get("FEWSHOT_PROPERTY_EXAMPLES", "10"))
RECORD = os.environ.get("FEWSHOT_PROPERTY_RECORD")
EVERYDAY = EXAMPLES <= 100
WEEK = "{}{:02}".format(*datetime.date.today().isocalendar()[:2])
SEED = int(os.environ.get("FEWSHOT_PROPERTY_SEED", WEEK))
ROUND = 500

Counts = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Iterator[Counts]:
    """Examples tried and refused of each property; kept in the record from run to run, printed at the end."""
    found: Counts = json.loads(Path(RECORD).read_text()) if RECORD and Path(RECORD).exists() else {}
    yield found
    plugins = request.config.pluginmanager
    reporter, capture = plugins.get_plugin("terminalreporter"), plugins.get_plugin("capturemanager")
    if reporter is None or capture is None:
        return
    with capture.global_and_fixture_disabled():
        reporter.ensure_newline()
        if EVERYDAY:
            reporter.write_line(f"properties searched with FEWSHOT_PROPERTY_SEED={SEED}")
        else:
            for name, count in found.items():
                reporter.write_line(f"{name}: {count['tried']} examples, {count['refused']} refused")
            reporter.write_line(f"{sum(count['tried'] for count in found.values())} examples in all")


class Search:
    """Tries examples of one property until ``EXAMPLES`` are tried, this time and in earlier runs together."""

    def __init__(self, name: str, counts: Counts) -> None:
        self.count = counts.setdefault(name, {"tried": 0, "refused": 0})
        self.counts = counts

    def __call__(self, holds: Callable[..., None], **strategies: st.SearchStrategy[Any]) -> None:
        """Run ``holds`` on drawn keyword arguments."""

        def example(**arguments: Any) -> None:
            holds(**arguments)
            self.count["tried"] += 1

        while (before := self.count["tried"]) < EXAMPLES:
            search = seed(SEED if EVERYDAY else before)(given(**strategies)(example))
            hypothesis_settings(
                max_examples=min(ROUND, EXAMPLES - before),
                deadline=None,
                database=None,
                report_multiple_bugs=False,
                suppress_health_check=[HealthCheck.too_slow],
            )(search)()
            if RECORD:
                temporary = Path(RECORD + ".new")
                temporary.write_text(json.dumps(self.counts, indent=1))
                temporary.replace(RECORD)

    def of_covariance(
        self,
        holds: Callable[..., None],
        covariance: st.SearchStrategy[RegularizedCovariance],
        task: st.SearchStrategy[HeadTask],
        known: Iterable[tuple[RegularizedCovariance, HeadTask]] = (),
        **more: st.SearchStrategy[Any],
    ) -> None:
        """Run ``holds`` on drawn settings and tasks. A refusal passes where beta may be lost, and is counted.

        Before, on the ``known`` ones: counterexamples of earlier searches.
        """
        for settings, counterexample in known:
            holds(settings, counterexample)

        def holds_or_is_refused(covariance: RegularizedCovariance, task: HeadTask, **more: Any) -> None:
            try:
                holds(covariance, task, **more)
            except ValueError as error:
                if "beta I is lost to rounding" not in str(error):
                    raise
                assert beta_may_be_lost(covariance, task)
                self.count["refused"] += 1

        self(holds_or_is_refused, covariance=covariance, task=task, **more)


@pytest.fixture
def search(request: pytest.FixtureRequest, counts: Counts) -> Search:
    return Search(request.node.name.removeprefix("test_"), counts)


def beta_may_be_lost(covariance: RegularizedCovariance, task: HeadTask) -> bool:
    """Whether a pivot of at most 2^10 roundings of its diagonal entry may occur.

    Every pivot of every matrix that is factored is at least beta, in the units of that matrix, and every diagonal entry
    at most the trace of Q_k: where beta > 2^11 eps tr Q_k no class may be refused.
    """
    q = reference.class_covariances(task.support_features, task.support_labels, **settings_of(covariance, task))
    return covariance.settings.ridge <= 2**11 * EPS * float(traces(q).max())


def settings_of(covariance: RegularizedCovariance, task: HeadTask) -> dict[str, Any]:
    """Arguments of ``reference``, whose variance of a single entry is NaN where ours is zero."""
    settings = covariance.settings
    return vars(settings if task.support_features.shape[1] > 1 else replace(settings, one_shot_covariance="zero"))


def in_float64(task: HeadTask) -> HeadTask:
    return HeadTask(task.support_features.double(), task.support_labels, task.query_features.double())


def distances_of(covariance: RegularizedCovariance, task: HeadTask) -> Tensor:
    return covariance(task.support_features, task.support_labels).squared_distance(task.query_features)


def covariances(*one_shot: str) -> st.SearchStrategy[RegularizedCovariance]:
    return st.builds(
        RegularizedCovariance,
        beta=st.floats(-3, 3).map(lambda exponent: 10.0**exponent),
        task_covariance=st.booleans(),
        one_shot_covariance=st.sampled_from(one_shot or ("zero", "published")),
        shared=st.sampled_from(["task", "task", "within"]),
        prior_shots=st.sampled_from([1.0, 1.0, 0.3, 10.0, math.inf]),
    )


def task_of(support: list[Any], labels: list[int], queries: list[Any], dtype: torch.dtype = torch.float64) -> HeadTask:
    return HeadTask(torch.tensor(support, dtype=dtype), torch.tensor(labels), torch.tensor(queries, dtype=dtype))


# ---------------------------------------------------------------- RegularizedCovariance

#: Counterexamples to earlier bounds.
KNOWN = {
    "means_and_counts_are_those_of_the_classes": [task_of([[5e-324], [1e-323], [5e-324]], [0, 0, 1], [[0.0]])],
    "rotation_changes_nothing": [task_of([[0.0, 0.0]], [0], [[1.6e-162, 0.0]])],
    "float32_is_close_to_float64": [task_of([[5.9488e-25]], [0], [[0.0]], torch.float32)],
}


@pytest.mark.parametrize("name", COVARIANCE_PROPERTIES)
def test_covariance(name: str, search: Search) -> None:
    # As published, a class of one example has a covariance along (1, ..., 1), which neither turns nor moves.
    moves = name in ("translation_changes_nothing", "rotation_changes_nothing")
    known = [(RegularizedCovariance(), example) for example in KNOWN.get(name, [])]
    if name in ("distances_follow_from_the_covariances", "support_order_does_not_matter"):
        # Thin factors lose seven digits on this class, so it must get dense ones.
        members = [[345584.1921], [821618.1435], [330437.0762], [-1303157.2316]]
        known.append((RegularizedCovariance(task_covariance=False), task_of(members, [0] * 4, [[905355.8667]])))
    search.of_covariance(COVARIANCE_PROPERTIES[name], covariances("zero") if moves else covariances(), tasks(), known)


def test_covariances_are_symmetric_with_eigenvalues_of_at_least_beta(search: Search) -> None:
    def holds(covariance: RegularizedCovariance, task: HeadTask) -> None:
        q = covariance(task.support_features, task.support_labels).covariance()
        assert torch.equal(q, q.mT)
        # Entries are rounded to their dtype, which moves eigenvalues by that part of the trace.
        rounding = 4 * len(q[0]) * torch.finfo(q.dtype).eps * traces(q.double())
        smallest = torch.linalg.eigvalsh(q.double())[:, 0]
        assert (smallest >= covariance.settings.ridge * (1 - 1e-4) - rounding).all()

    # On some processors the last bits of this A^T A differ above and below the diagonal.
    rows = [[0.5530395572622416, 0.75, *[0.0] * 7], *[[0.0] * 9] * 7]
    shared = RegularizedCovariance(prior_shots=math.inf), task_of(rows, [2, 3, 3, 3, 3, 0, 1, 3], [[0.0] * 9])
    search.of_covariance(holds, covariances(), tasks(), [shared])


def test_covariances_and_distances_equal_the_plain_formula(search: Search) -> None:
    def holds(covariance: RegularizedCovariance, task: HeadTask) -> None:
        task, settings = in_float64(task), settings_of(covariance, task)
        gaussians = covariance(task.support_features, task.support_labels)
        plain = reference.class_covariances(task.support_features, task.support_labels, **settings)
        # Sums of n products of features that were centred far from the origin.
        n, largest = len(task.support_features), testing.largest_entry(task)
        trace = traces(plain)[:, None, None]
        bound = 16 * n * EPS * (trace + largest * trace.sqrt() + EPS * largest**2)
        assert ((gaussians.covariance() - plain).abs() <= bound).all()
        distances = gaussians.squared_distance(task.query_features)
        try:
            expected = reference.squared_mahalanobis(
                task.support_features, task.support_labels, task.query_features, **settings
            )
        except torch.linalg.LinAlgError:  # the plain formula is refused where the low-rank one need not be
            assert beta_may_be_lost(covariance, task)
        else:
            assert_same_lengths(distances, expected, gaussians, task)

    search.of_covariance(holds, covariances(), tasks())


def test_low_rank_equals_dense(search: Search) -> None:
    """Features that are zero everywhere turn the dense algebra of n >= d / 2 into the low-rank one of fewer.

    Both are bounded by the conditioning of the problem without those features, Q_k with the smallest eigenvalue l, as
    all other lengths here are. The low-rank one factors K = I + F F^T (n x n), whose smallest eigenvalue is 1 whatever
    l is, and minimises ||z - F^T b||^2 + ||b||^2, of which l(z)^2 is the minimum. So it has errors of its own:

    1. Of second order. Forming K takes d u tr K, adding I and factoring (n + 2) u tr K, and solving L G = F leaves D
       with ||D|| <= n sqrt(d) u tr(K)^1/2 (Higham, Accuracy and Stability of Numerical Algorithms, 2002, sections 8.1
       and 10.1; the appended zeros are exact). With E the sum of the first, b solves (K + E) b = (F + D) z: it is off
       by delta with K delta = D z - E b. As ||b|| <= l(z) and ||z|| <= tr(K)^1/2 l(z),

           delta^T K delta <= ||D z - E b||^2 <= e^2 l(z)^2,    e = (n + d + 2 + n sqrt(d)) u tr K,

       and off its minimum the sum of squares grows by just delta^T K delta: lengths grow by e^2 / 2 of themselves.
    2. The residual, of entries up to M / sqrt(beta), is rounded too. Where it matters in first order r counts, as
       everywhere; the squares of these roundings are added to those of the length.
    3. Without the task covariance, ||z||^2 - ||G z||^2 is taken where it is at least 2^-13 ||z||^2: only if l <= 2^13
       beta. There b^T E b counts in first order, at most e / 2 of the length.
    """

    def holds(covariance: RegularizedCovariance, task: HeadTask) -> None:
        task = in_float64(task)
        wide = [
            torch.nn.functional.pad(x, (0, 2 * len(task.support_labels)))
            for x in (task.support_features, task.query_features)
        ]
        padded = HeadTask(wide[0], task.support_labels, wide[1])
        gaussians = covariance(task.support_features, task.support_labels)
        found = distances_of(covariance, padded).sqrt()
        expected = gaussians.squared_distance(task.query_features).sqrt()
        relative, absolute = length_rounding(gaussians, padded)

        own, residual = low_rank_rounding(covariance, gaussians, task)
        absolute = absolute + torch.hypot(expected, residual) - expected
        testing.assert_within(found, expected, (relative + own) * torch.maximum(found, expected) + absolute)

    known = [
        (RegularizedCovariance(0.1, task_covariance), task_of([[0.0], [1e6], [1e6]], [0, 0, 0], [[1e6]]))
        for task_covariance in (False, True)
    ]
    search.of_covariance(holds, covariances("zero"), tasks(width=(1, 5)), known)


def low_rank_rounding(covariance: RegularizedCovariance, gaussians: Any, task: HeadTask) -> tuple[Tensor, Tensor]:
    """Relative errors (k,) of 1. and 3. above, and the rounding of the residual of 2."""
    n, d = task.support_features.shape
    beta, q = covariance.settings.ridge, gaussians.covariance()
    operations = (n + d + 2 + n * math.sqrt(d)) * EPS / 2
    e = operations * (n + traces(q) / beta)
    difference = (torch.linalg.eigvalsh(q)[:, 0] <= 2**13 * beta) & (not covariance.settings.task_covariance)
    own = torch.minimum(e.square() / 2, torch.tensor(1e-5)) + torch.where(difference, e / 2, 0.0)
    return own, torch.tensor(4 * operations * testing.largest_entry(task) * math.sqrt(d / beta))


def test_scaling_features_and_beta_alike_gives_the_same_bits(search: Search) -> None:
    """Features times 2^j and beta times 4^j: powers of two are exact, so a difference would be a hidden constant."""

    def holds(covariance: RegularizedCovariance, task: HeadTask, exponent: int) -> None:
        # Squares of numbers below 1e-100 vanish, at one scale before the other.
        support, queries = (torch.where(x.abs() > 1e-100, x, 0.0) for x in (task.support_features, task.query_features))
        task, factor = in_float64(HeadTask(support, task.support_labels, queries)), 2.0**exponent
        scaled = RegularizedCovariance.of(replace(covariance.settings, beta=covariance.settings.ridge * factor**2))
        other = HeadTask(factor * task.support_features, task.support_labels, factor * task.query_features)
        assert torch.equal(distances_of(scaled, other), distances_of(covariance, task))

    search.of_covariance(holds, covariances(), tasks(), exponent=st.integers(-60, 60))


def test_distances_of_lower_precision_are_those_in_float64(search: Search) -> None:
    def holds(covariance: RegularizedCovariance, task: HeadTask) -> None:
        expected = distances_of(covariance, in_float64(task))
        found = distances_of(covariance, task)
        assert torch.equal(found, expected.to(found.dtype))

    task = task_of([[1.0], *[[0.0]] * 8], [0, 1, 0, 1, 0, 1, 1, 1, 1], [[0.0]], torch.float32)
    search.of_covariance(holds, covariances(), tasks(), [(RegularizedCovariance(), task)])


def test_rounding_the_features_to_float32_moves_distances_no_further_than_the_bound(search: Search) -> None:
    """With features of at most M and e = h sqrt(2 d / beta) a length l becomes (l +- sqrt(2) e) / (1 -+ e).

    An entry moves by h = 2^-24 M + 2^-150 at most: half a unit in its last place, or half the smallest number where it
    is below the normal ones. So the rows of Q_k - beta I's root move by at most h sqrt(2 d) in the Frobenius norm
    (contrasts of n_k examples by h sqrt(n_k d / (n_k - 1)), weighted by lambda_k; those of all examples alike, by
    1 - lambda_k). With sqrt(beta) I below it the root has singular values of at least sqrt(beta), so it is multiplied
    by I + E, ||E|| <= e, and (1 - e)^2 Q_k <= Q_k' <= (1 + e)^2 Q_k. Query and mean move by h sqrt(d) each.
    """

    def holds(covariance: RegularizedCovariance, task: HeadTask) -> None:
        rounded = HeadTask(task.support_features.float(), task.support_labels, task.query_features.float())
        gaussians = covariance(task.support_features, task.support_labels)
        exact = gaussians.squared_distance(task.query_features).sqrt()
        found = distances_of(covariance, in_float64(rounded)).sqrt()
        moved = 2.0**-24 * testing.largest_entry(task) + 2.0**-150
        e = moved * math.sqrt(2 * task.query_features.shape[1] / covariance.settings.ridge)
        relative, absolute = length_rounding(gaussians, task)
        slack = 2 * relative * torch.maximum(exact, found) + 2 * absolute
        assert (found >= (exact - math.sqrt(2) * e) / (1 + e) - slack).all()
        if e < 1:
            assert (found <= (exact + math.sqrt(2) * e) / (1 - e) + slack).all()

    known = [(RegularizedCovariance(task_covariance=False), task_of([[1.781098990408089e-58]], [0], [[0.0]]))]
    search.of_covariance(holds, covariances(), tasks(dtypes=[torch.float64]), known)


@pytest.mark.parametrize("dense", [False, True])
def test_features_that_lose_beta_are_refused(dense: bool, search: Search) -> None:
    """Support features of deficient rank, scaled until a pivot of at most 2 beta or n is 2^9 roundings or fewer."""

    def holds(covariance: RegularizedCovariance, task: HeadTask) -> None:
        task = in_float64(task)
        # Squares of numbers below 1e-100 vanish, and no scale brings them back.
        x = torch.where(task.support_features.abs() > 1e-100, task.support_features, 0.0)
        x, labels, beta = x - x[0], task.support_labels, covariance.settings.ridge
        n = len(labels)
        weight = 1 / (int(torch.bincount(labels).min()) + 1)  # 1 - lambda_k of the smallest class
        if dense:
            # Sigma has the null vector e_j - e_d: the last pivot of Q_k, or of its shared part, is at most 2 beta.
            x = torch.cat([x, x[:, [int(x.var(dim=0).argmax())]]], dim=1)
            spread, pivot = x[:, -1].var(), 2 * beta
        else:
            # I + F F^T with F of n centred rows has the eigenvector (1, ..., 1) to 1: its last pivot is at most n.
            x = torch.nn.functional.pad(x, (0, 2 * n))
            distances = (x - x.mean(dim=0)).square().sum(dim=1)
            order = distances.argsort()
            x, labels = x[order], labels[order]
            spread, pivot = distances.max() / (n - 1), n * beta
        if spread > 0:
            x = x * (pivot / (2**9 * EPS * weight * spread)).sqrt()
            with pytest.raises(ValueError, match="scale the features down or raise beta"):
                covariance(x, labels)
        else:  # identical examples lose nothing at any scale, where their mean is exact
            covariance(x + 2.0**200, labels)

    betas = st.floats(-3, 3).map(lambda exponent: RegularizedCovariance(10.0**exponent))
    classes, width = ((2, 5), (1, 3)) if dense else ((1, 5), (1, 10))
    task = tasks(classes=classes, shots=(2, 6), width=width, scale=(1e-3, 1e3), dtypes=[torch.float64])
    holds(RegularizedCovariance(), task_of([[2.19e-151], [0.0]], [0, 0], [[0.0]]))
    search(holds, covariance=betas, task=task)


@pytest.mark.parametrize("width", [2, 20])
def test_tensors_are_made_on_the_features_device_whatever_the_default_is(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, labels = torch.randn(9, width, generator=generator), torch.tensor([0, 1, 1, 2, 2, 2, 2, 2, 3])
    heads: list[Head[Any]] = [make_head(name, width) for name in HEADS]
    for one_shot in ("zero", "published"):
        for task_covariance in (True, False):
            covariance = RegularizedCovariance(1.0, task_covariance, one_shot)
            heads.append(MahalanobisHead(covariance))
            within = RegularizedCovariance(1.0, task_covariance, one_shot, "within", 3.0)
            heads.append(MahalanobisHead(within))
            here = covariance(x, labels)
            with torch.device("meta"):  # holds no numbers: whatever is made there cannot be computed with
                there = covariance(x, labels)
                assert torch.equal(there.covariance(), here.covariance())
                assert torch.equal(there.precision(), here.precision())
    for head in heads:
        expected = logits_in_three_ways(head, x, labels)
        with torch.device("meta"):
            found = logits_in_three_ways(head, x, labels)
        assert all(torch.equal(*pair) for pair in zip(found, expected))


@pytest.mark.parametrize("width", [2, 20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_results_are_of_the_features_dtype_and_of_float32_at_least(dtype: torch.dtype, width: int) -> None:
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    gaussians = RegularizedCovariance()(x, torch.tensor([0, 0, 0, 1, 1, 2]))
    results = gaussians.means, gaussians.covariance(), gaussians.precision(), gaussians.squared_distance(x)
    assert {result.dtype for result in results} == {torch.promote_types(dtype, torch.float32)}


@pytest.mark.parametrize("name", sorted(HEADS.keys() - {"linear"}))
def test_logits_are_of_the_wider_dtype_of_support_and_queries(name: str) -> None:
    head, labels = HEADS[name](), torch.tensor([0, 0, 1])
    single = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    expected = head(single.double(), labels, single.double())
    for support, queries in ((single, single.double()), (single.double(), single)):
        found = head(support, labels, queries)
        assert found.dtype == (queries.dtype if name == "mahalanobis" else torch.float64)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("a", [1e3, 1e6])
def test_a_distance_that_is_a_small_part_of_what_it_is_a_difference_of_keeps_its_digits(a: float) -> None:
    """Of the class +a, -a on one axis without task covariance, Q is 2 a^2 there, and beta: for 3 a that is exact."""
    x = torch.zeros(3, 9, dtype=torch.float64)
    x[:, 0] = torch.tensor([a, -a, 3 * a])
    gaussians = RegularizedCovariance(task_covariance=False)(x[:2], torch.tensor([0, 0]))
    assert float(gaussians.squared_distance(x[2:])) == pytest.approx(9 * a**2 / (2 * a**2 + 1), rel=1e-12)


def test_euclidean_logits_of_many_classes_far_from_the_origin_are_those_of_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    means, queries = (torch.randn(40, 8, generator=generator) + 1e4 for _ in range(2))
    expected = -(queries[:, None].double() - means.double()).square().sum(dim=2)
    found = EuclideanHead()(means, torch.arange(40), queries)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def logits_in_three_ways(head: Head[Any], x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Of a head fitted to all of the support, and to all but each example, by its own way and by refitting."""
    return head(x, labels, x), head.leave_one_out_logits(x, labels), Head.leave_one_out_logits(head, x, labels)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_features_of_16_bits_have_the_logits_of_the_same_numbers_in_32(name: str, dtype: torch.dtype) -> None:
    head = make_head(name, 6)
    x, labels = (
        torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).to(dtype),
        torch.tensor([0, 1, 1, 2, 2, 2]),
    )
    found, expected = logits_in_three_ways(head, x, labels), logits_in_three_ways(head, x.float(), labels)
    assert {logits.dtype for logits in found} == {torch.float32}
    assert all(torch.equal(*pair) for pair in zip(found, expected))


def test_a_device_without_float64_is_served_in_float32() -> None:
    on_mps = SimpleNamespace(device=torch.device("mps"))
    assert working_dtype(on_mps) == torch.float32  # type: ignore[arg-type]
    assert working_dtype(torch.zeros(1)) == torch.float64


# ---------------------------------------------------------------- scikit-learn


def sample_of_covariance(covariance: RegularizedCovariance, task: HeadTask, label: int) -> NDArray[np.float64]:
    """Points of mean mu_k whose biased covariance is Q_k: mu_k +- sqrt(N / 2) r for each of the N / 2 rows r of a root.

    Of equation 3 the root's rows are the centred examples of the class and of all classes, and sqrt(beta) e_j.
    """
    x, labels, settings = task.support_features.numpy(), task.support_labels.numpy(), covariance.settings
    members = x[labels == label]
    shots, centre, freedom = len(members), x.mean(axis=0), len(x) - 1
    if settings.shared == "within":
        centre = np.stack([x[labels == k].mean(axis=0) for k in range(labels.max() + 1)])[labels]
        freedom = len(x) - (labels.max() + 1)
    weight = 1 / (1 + settings.prior_shots / shots) if settings.task_covariance else 1.0
    root = np.concatenate(
        [
            np.sqrt(weight / max(shots - 1, 1)) * (members - members.mean(axis=0)),
            np.sqrt((1 - weight) / max(freedom, 1)) * (x - centre),
            np.sqrt(covariance.settings.ridge) * np.eye(x.shape[1]),
        ]
    )
    return np.concatenate([members.mean(axis=0) + sign * np.sqrt(len(root)) * root for sign in (-1, 1)])


def test_distances_are_those_of_scikit_learns_empirical_covariance(search: Search) -> None:
    def holds(covariance: RegularizedCovariance, task: HeadTask) -> None:
        gaussians = covariance(task.support_features, task.support_labels)
        distances = gaussians.squared_distance(task.query_features)
        columns, largest = [], testing.largest_entry(task)
        for label in range(len(gaussians.counts)):
            sample = sample_of_covariance(covariance, task, label)
            largest = max(largest, np.abs(sample).max())
            columns.append(
                sklearn.covariance.EmpiricalCovariance().fit(sample).mahalanobis(task.query_features.numpy())
            )
        found, expected = distances.sqrt(), torch.from_numpy(np.stack(columns, axis=1)).sqrt()
        relative, absolute = length_rounding(gaussians, task, largest)
        own, residual = low_rank_rounding(covariance, gaussians, task)  # theirs is dense
        absolute = absolute + torch.hypot(expected, residual) - expected
        testing.assert_within(found, expected, (relative + own) * torch.maximum(found, expected) + absolute)

    members = [125730.2211, -132104.8633, 640422.6504, 104900.1172, -535669.3732, 361595.0549, 1304000.0451]
    example = task_of([[x] for x in members], [1, 1, 1, 3, 2, 0, 1], [[947080.9631]])
    known = [(RegularizedCovariance(task_covariance=False), example)]
    search.of_covariance(holds, covariances("zero"), tasks(dtypes=[torch.float64]), known)


def test_distances_are_those_of_scikit_learns_quadratic_discriminant_analysis(search: Search) -> None:
    # scikit-learn changed the divisor of its class covariances from n - 1 to n: two points show which it is.
    two_points = QuadraticDiscriminantAnalysis().fit([[-1.0], [1.0], [-1.0], [1.0]], [0, 0, 1, 1])
    unbiased = bool(two_points.scalings_[0][0] > 1.5)

    def holds(covariance: RegularizedCovariance, task: HeadTask) -> None:
        gaussians = covariance(task.support_features, task.support_labels)
        classes = range(len(gaussians.counts))
        samples = [sample_of_covariance(covariance, task, label) for label in classes]
        sizes = torch.tensor([len(sample) for sample in samples], dtype=torch.float64)
        y = np.repeat(classes, [len(sample) for sample in samples])
        theirs = QuadraticDiscriminantAnalysis(priors=[1 / len(classes)] * len(classes), tol=0.0)
        theirs.fit(np.concatenate(samples), y)
        # log(prior) - (d_k + log det) / 2
        log_det = torch.tensor([np.log(scaling).sum() for scaling in theirs.scalings_])
        posterior = torch.from_numpy(theirs.decision_function(task.query_features.numpy()))
        expected = 2 * (math.log(1 / len(classes)) - posterior) - log_det
        if unbiased:
            expected = expected * sizes / (sizes - 1)
        distances = gaussians.squared_distance(task.query_features)
        relative, absolute = length_rounding(gaussians, task, max(np.abs(sample).max() for sample in samples))
        length = distances.sqrt()
        bound = relative * length + absolute
        rounding = 16 * EPS * (log_det.abs() + distances + 1)
        assert ((distances - expected).abs() <= 2 * length * bound + bound**2 + rounding).all()

    # With two classes scikit-learn gives the difference alone.
    search.of_covariance(holds, covariances("zero"), tasks(classes=(3, 5), dtypes=[torch.float64], scale=(1e-6, 1e3)))


# ---------------------------------------------------------------- MahalanobisClassifier


def test_partial_fit_in_any_split_and_order_equals_one_fit(search: Search) -> None:
    def holds(task: HeadTask, cuts: list[int], seed: int, task_covariance: bool) -> None:
        x, y, queries = (tensor.numpy() for tensor in vars(task).values())
        names = np.array(["e", "b", "d", "a", "c"])[y]

        def fitted(order: NDArray[np.intp]) -> MahalanobisClassifier:
            classifier = MahalanobisClassifier(head="mahalanobis", task_covariance=task_covariance)
            for part in np.split(order, sorted({cut for cut in cuts if cut < len(y)})):
                classifier.partial_fit(x[part], names[part])
            return classifier

        whole = MahalanobisClassifier(head="mahalanobis", task_covariance=task_covariance).fit(x, names)
        parts, shuffled = fitted(np.arange(len(y))), fitted(np.random.default_rng(seed).permutation(len(y)))
        gaussians = RegularizedCovariance(1.0, task_covariance)(
            task.support_features, torch.from_numpy(np.unique(names, return_inverse=True)[1])
        )
        expected = torch.from_numpy(whole.decision_function(queries))
        assert torch.equal(torch.from_numpy(parts.decision_function(queries)), expected)
        found = torch.from_numpy(shuffled.decision_function(queries))
        assert_same_lengths(-found, -expected, gaussians, task)
        for classifier in (parts, shuffled):
            assert classifier.classes_.tolist() == whole.classes_.tolist()
            assert classifier.class_counts_.tolist() == whole.class_counts_.tolist()

    search(
        holds,
        task=tasks(classes=(3, 5), scale=(1e-6, 1e3), dtypes=[torch.float64]),
        cuts=st.lists(st.integers(1, 25), max_size=4),
        seed=st.integers(0, 2**16),
        task_covariance=st.booleans(),
    )


# ---------------------------------------------------------------- heads

#: Heads that do not have a property, and need not.
WITHOUT = {
    "manhattan": ["rotation_changes_nothing"],
    "cosine": ["translation_changes_nothing"],
    "dot_product": ["translation_changes_nothing"],
    "linear": ["translation_changes_nothing", "rotation_changes_nothing"],
}


def make_head(name: str, width: int) -> Head[Any]:
    if name == "auto":  # what it chooses is not smooth in the features
        return AutoHead(PldaSettings(beta=0.8, spread=0.3, freedom=4.0, scale=0.7, shared="within"))
    if name != "linear":
        return HEADS[name]()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LinearHead(width)


@pytest.mark.parametrize("name", HEAD_PROPERTIES)
def test_heads(name: str, search: Search) -> None:
    heads = st.sampled_from([head for head in HEADS if name not in WITHOUT.get(head, [])])
    # Beyond a scale of 1e3 the bound of a head without a formula is finer than what dense factors keep;
    # RegularizedCovariance is held to its own at every scale.
    drawn = heads.flatmap(
        lambda head: st.tuples(st.just(head), tasks(scale=(1e-6, 1e3 if head in ("mahalanobis", "auto") else 1e6)))
    )

    def holds(head_and_task: tuple[str, HeadTask]) -> None:
        head, task = head_and_task
        HEAD_PROPERTIES[name](make_head(head, task.query_features.shape[1]), task)

    search(holds, head_and_task=drawn)


def test_the_smallest_numbers_have_no_relative_precision() -> None:
    task = task_of([[1.0, 5e-324]], [0], [[5e-324, 5e-324]])  # turned, the cosine head's logit is 8e-312, not 5e-312
    HEAD_PROPERTIES["rotation_changes_nothing"](HEADS["cosine"](), task)


def test_mahalanobis_logits_are_minus_the_scaled_distances_to_the_bit(search: Search) -> None:
    def holds(covariance: RegularizedCovariance, task: HeadTask, scale: float) -> None:
        logits = MahalanobisHead(covariance, scale)(task.support_features, task.support_labels, task.query_features)
        assert torch.equal(logits, -scale * distances_of(covariance, task))

    search.of_covariance(holds, covariances(), tasks(), scale=st.sampled_from([0.5, 1.0, 3.0]))


def test_the_linear_head_computes_in_the_dtype_of_its_parameters() -> None:
    x, labels = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(5) % 2
    head = make_head("linear", 3)
    for logits, single in (
        (head(x, labels, x), head(x.float(), labels, x.float())),
        (head.leave_one_out_logits(x, labels), head.leave_one_out_logits(x.float(), labels)),
    ):
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, single)


# ---------------------------------------------------------------- the checks for users

QUICK = hypothesis_settings(max_examples=60, derandomize=True, phases=[Phase.generate])


def test_users_can_check_a_covariance_and_a_head() -> None:
    few = hypothesis_settings(max_examples=3, derandomize=True)
    check_covariance(lambda width: RegularizedCovariance(), settings=few)
    check_head(lambda width: MahalanobisHead(), settings=few)
    check_head(lambda width: make_head("linear", width), without=WITHOUT["linear"], settings=few)


class Broken:
    """Delegates to RegularizedCovariance but for what it was told to break."""

    def __init__(self, **broken: Callable[..., Any]) -> None:
        self.broken = broken

    def __call__(self, features: Tensor, labels: Tensor) -> Any:
        gaussians = RegularizedCovariance()(features, labels)
        proxy = copy.copy(gaussians)
        for name, replacement in self.broken.items():
            value: Any = functools.partial(replacement, gaussians, features, labels)
            setattr(proxy, name, value() if name in ("means", "counts") else value)
        return proxy


def distance_plus(term: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {"squared_distance": lambda g, x, y, queries: g.squared_distance(queries) + term(g, x, y, queries)}


BREAKAGES: dict[str, dict[str, Callable[..., Any]]] = {
    "means_and_counts_are_those_of_the_classes": {"means": lambda g, x, y: g.means * 1.001},
    "covariances_are_symmetric_and_positive_definite": {
        "covariance": lambda g, x, y: g.covariance() + x.new_ones(x.shape[1], x.shape[1]).triu(1)
    },
    "precisions_are_the_inverses": {"precision": lambda g, x, y: 1.001 * g.precision()},
    "distances_follow_from_the_covariances": {"squared_distance": lambda g, x, y, q: 1.001 * g.squared_distance(q)},
    "distances_are_zero_at_the_means": distance_plus(lambda g, x, y, q: 1e-3),
    "repeats_give_the_same_bits": distance_plus(lambda g, x, y, q: torch.rand(())),
    "support_order_does_not_matter": distance_plus(lambda g, x, y, q: x[0].abs().sum()),
    "renaming_labels_permutes_the_columns": distance_plus(lambda g, x, y, q: torch.arange(len(g.counts))),
    "every_query_is_served_on_its_own": distance_plus(lambda g, x, y, q: q.abs().sum()),
    "translation_changes_nothing": distance_plus(lambda g, x, y, q: x.abs().sum()),
    "rotation_changes_nothing": distance_plus(lambda g, x, y, q: x.abs().sum()),
    "gradients_equal_finite_differences": {
        "squared_distance": lambda g, x, y, q: (
            g.squared_distance(q)
            + (g.squared_distance(q.detach()) - g.squared_distance(q)).detach()
            - 0.1 * (q.sum() - q.sum().detach())
        )
    },
    "float32_is_close_to_float64": {
        "squared_distance": lambda g, x, y, q: (
            g.squared_distance(q).bfloat16().to(g.means.dtype) if x.dtype != torch.float64 else g.squared_distance(q)
        )
    },
}


@pytest.mark.parametrize("name", COVARIANCE_PROPERTIES)
def test_a_covariance_without_a_property_is_caught_and_both_are_named(name: str) -> None:
    others = [other for other in COVARIANCE_PROPERTIES if other != name]
    with pytest.raises(AssertionError, match=rf"{name} does not hold: [\s\S]*for HeadTask\(support_features=torch"):
        check_covariance(lambda width: Broken(**BREAKAGES[name]), without=others, settings=QUICK)


class BrokenHead(EuclideanHead):
    """Wrong in the way it was told."""

    def __init__(self, wrong: Callable[..., Any]) -> None:
        super().__init__()
        self.wrong = wrong
        self.register_buffer("calls", torch.zeros(()))

    def fit(self, support_features: Tensor, support_labels: Tensor) -> Any:
        return super().fit(support_features, support_labels), support_features, support_labels

    def logits(self, state: Any, query_features: Tensor) -> Tensor:
        means, features, labels = state
        return super().logits(means, query_features) + self.wrong(self, means, features, labels, query_features)


HEAD_BREAKAGES: dict[str, Callable[..., Any]] = {
    "one_call_equals_two_steps": lambda head, means, x, y, q: head.calls.add_(1).clone(),
    "calls_leave_no_trace": lambda head, means, x, y, q: 0.0 * head.calls.add_(1),
    "support_order_does_not_matter": lambda head, means, x, y, q: x[0].abs().sum(),
    "renaming_labels_permutes_the_columns": lambda head, means, x, y, q: torch.arange(len(means)),
    "every_query_is_served_on_its_own": lambda head, means, x, y, q: q.abs().sum(),
    "gradients_equal_finite_differences": lambda head, means, x, y, q: q.sum().detach(),
    "float32_is_close_to_float64": lambda head, means, x, y, q: 0.1 if x.dtype == torch.float32 else 0.0,
}


@pytest.mark.parametrize("name", HEAD_BREAKAGES)
def test_a_head_without_a_property_is_caught_and_both_are_named(name: str) -> None:
    others = [other for other in HEAD_PROPERTIES if other != name]
    with pytest.raises(AssertionError, match=rf"{name} does not hold: [\s\S]*for HeadTask\(support_features=torch"):
        check_head(lambda width: BrokenHead(HEAD_BREAKAGES[name]), without=others, settings=QUICK)


@pytest.mark.parametrize(("head", "name"), [(head, name) for head, names in WITHOUT.items() for name in names])
def test_properties_that_a_head_need_not_have_are_told_apart(head: str, name: str) -> None:
    others = [other for other in HEAD_PROPERTIES if other != name]
    with pytest.raises(AssertionError, match=f"{name} does not hold"):
        check_head(lambda width: make_head(head, width), without=others, settings=QUICK)


def test_the_error_holds_the_smallest_example_as_python() -> None:
    others = [other for other in COVARIANCE_PROPERTIES if other != "distances_are_zero_at_the_means"]
    broken = Broken(**BREAKAGES["distances_are_zero_at_the_means"])
    with pytest.raises(AssertionError) as caught:
        check_covariance(lambda width: broken, without=others, settings=hypothesis_settings(QUICK, phases=list(Phase)))
    task = eval(str(caught.value).rpartition("\nfor ")[2], {"HeadTask": HeadTask, "torch": torch})
    assert task.support_features.shape == task.query_features.shape == (1, 1)
    with pytest.raises(AssertionError, match="within"):
        COVARIANCE_PROPERTIES["distances_are_zero_at_the_means"](broken, task)


def test_an_error_of_the_estimator_is_a_counterexample() -> None:
    def refuse(features: Tensor, labels: Tensor) -> None:
        raise RuntimeError("no covariance today")

    with pytest.raises(AssertionError, match=r"means_and_counts.* does not hold: RuntimeError: no covariance today"):
        check_covariance(lambda width: refuse, settings=QUICK)


def test_a_property_that_does_not_exist_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match=r"no property 'symmetry': they are .*support_order_does_not_matter"):
        check_covariance(lambda width: RegularizedCovariance(), without=["symmetry"])


def test_drawn_tasks_keep_to_what_was_asked_for() -> None:
    seen: set[tuple[int, int]] = set()

    def holds(task: HeadTask) -> None:
        counts = torch.bincount(task.support_labels)
        assert 2 <= len(counts) <= 3
        assert ((counts >= 2) & (counts <= 4)).all()
        assert task.support_features.dtype == task.query_features.dtype == torch.float16
        assert torch.isfinite(task.support_features).all()
        assert task.support_features.shape == (len(task.support_labels), 2)
        assert repr(eval(repr(task), {"HeadTask": HeadTask, "torch": torch})) == repr(task)
        seen.add((len(counts), len(task.support_labels)))

    of_two_columns = tasks(classes=(2, 3), shots=(2, 4), width=(2, 2), scale=(1e-6, 1e6), dtypes=[torch.float16])
    hypothesis_settings(max_examples=30, derandomize=True, database=None, deadline=None)(
        given(task=of_two_columns)(holds)
    )()
    assert len(seen) > 3


def test_without_hypothesis_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "fewshot_mahalanobis.testing")
    with pytest.raises(ImportError, match=re.escape(install_command("test"))):
        importlib.import_module("fewshot_mahalanobis.testing")
