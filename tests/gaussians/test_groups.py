"""Whole groups left out by downdating, against fitting again without each group."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fewshot_mahalanobis.gaussians.covariance import CovarianceSettings
from fewshot_mahalanobis.gaussians.leave_out import BETA_PRIOR, MeansWithout, choose_beta, leave_one_out_distance
from fewshot_mahalanobis.gaussians.plda import PldaSettings, choose_plda_settings, leave_one_out_plda_logits
from fewshot_mahalanobis.gaussians.support import (
    class_means,
    effective_counts,
    group_weights,
    groups_by_size,
    joined_groups,
    left_out_weights,
    remaining_examples,
)
from fewshot_mahalanobis.gaussians.temperature import fit_temperature, temperature_fit
from fewshot_mahalanobis.heads import AutoHead, MahalanobisHead
from fewshot_mahalanobis.heads.mahalanobis import RegularizedCovariance
from tests import reference
from tests.drawn_tasks import make_task
from tests.gaussians.test_covariance import SETTINGS

BETA_FACTORS = [10.0**exponent for exponent in BETA_PRIOR.candidates]
Task = tuple[Tensor, Tensor, Tensor]


@st.composite
def grouped_tasks(draw: st.DrawFn) -> Task:
    """Features (n, d), labels and groups (n,), which may have examples of several classes or all there are."""
    shots = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    features, labels, _ = make_task(draw(st.integers(0, 2**16)), shots, draw(st.integers(2, 30)), dtype=torch.float64)
    n = len(labels)
    groups = torch.tensor(draw(st.lists(st.integers(0, draw(st.integers(0, n))), min_size=n, max_size=n)))
    return features, labels, 10 * groups + labels if draw(st.booleans()) else groups


def sorted_by_class(task: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Support features and labels of a task, class after class."""
    features, labels, _ = task
    order = labels.argsort(stable=True)
    return features[order], labels[order]


def without_groups(task: Task, missing: float, fitted) -> Tensor:  # type: ignore[no-untyped-def]
    """The definition: ``fitted(features, labels, groups, queries)`` (1, k') of the others, one example at a time."""
    features, labels, groups = task
    rows = torch.full((len(labels), int(labels.max()) + 1), missing, dtype=torch.float64)
    for i in range(len(labels)):
        rest = groups != groups[i]
        present, renumbered = labels[rest].unique(return_inverse=True)
        if len(present):
            rows[i, present] = fitted(features[rest], renumbered, groups[rest], features[i : i + 1])[0]
    return rows


def of_head(head):  # type: ignore[no-untyped-def]
    return lambda x, y, groups, queries: head.logits(head.fit_groups(x, y, groups), queries)


@settings(max_examples=30, deadline=None)
@given(task=grouped_tasks(), of_covariance=st.sampled_from(SETTINGS))
def test_distances_equal_those_of_refitting_without_each_group(task: Task, of_covariance: dict[str, object]) -> None:
    got = leave_one_out_distance(CovarianceSettings(**of_covariance), *task)  # type: ignore[arg-type]
    expected = without_groups(
        task, torch.inf, lambda x, y, _, q: reference.squared_mahalanobis(x, y, q, **of_covariance)
    )
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(task=grouped_tasks(), power=st.sampled_from([0.5, 1.0]))
def test_plda_logits_equal_those_of_refitting_without_each_group(task: Task, power: float) -> None:
    assume(int(task[1].max()) > 0)  # the model is of two classes or more
    of_plda = PldaSettings(0.7, 0.9, 1.3, 0.5, "within", power)
    got = leave_one_out_plda_logits(of_plda, *task)
    torch.testing.assert_close(got, without_groups(task, -torch.inf, of_head(AutoHead(of_plda))), rtol=1e-7, atol=1e-8)


def test_groups_of_one_give_the_same_bits_as_none() -> None:
    features, labels, _ = make_task(0, [4, 1, 3], 9, dtype=torch.float64)
    features, alone = features.abs(), torch.arange(8).flip(0)
    for of_covariance in (CovarianceSettings("auto"), CovarianceSettings(2.0, shared="within")):
        assert choose_beta(of_covariance, features, labels, alone) == choose_beta(of_covariance, features, labels)
    of_plda = choose_plda_settings(features, labels, alone)
    assert of_plda == choose_plda_settings(features, labels)
    for leave_out in (leave_one_out_distance, leave_one_out_plda_logits):
        of = CovarianceSettings() if leave_out is leave_one_out_distance else of_plda
        assert torch.equal(leave_out(of, features, labels, alone), leave_out(of, features, labels))  # type: ignore[arg-type]


def test_distances_without_groups_have_gradients() -> None:
    features, labels, _ = make_task(3, [3, 2, 4], 4, dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1, 2, 3, 3, 4, 3])
    finite = leave_one_out_distance(CovarianceSettings(), features, labels, groups).isfinite()

    def distances(x: Tensor) -> Tensor:
        return leave_one_out_distance(CovarianceSettings(), x, labels, groups)[finite]

    assert torch.autograd.gradcheck(distances, features.requires_grad_(), atol=1e-6)


def test_a_group_whose_removal_is_lost_to_rounding_is_refused() -> None:
    features, labels, _ = make_task(4, [4, 3], 6, dtype=torch.float64)
    features[0] *= 1e8
    with pytest.raises(ValueError, match="lost to rounding"):
        leave_one_out_distance(CovarianceSettings(), features, labels, torch.tensor([0, 1, 2, 3, 4, 5, 5]))


def naive_fit(task: Task, beta: float, share: float = 0.0) -> tuple[PldaSettings, float, float]:
    """Settings that suit a beta and f = share * t, by refitting; their loss, and its sum over means of classes."""
    x, labels, groups = task
    k = int(labels.max()) + 1
    sizes = [groups[labels == label].bincount().double() for label in range(k)]
    effective = torch.stack([size.sum() ** 2 / size.square().sum() for size in sizes])

    def inverse(rows: Tensor) -> Tensor:
        _, renumbered = labels[rows].unique(return_inverse=True)
        return torch.linalg.inv(reference.pooled_covariance(x[rows], renumbered) + beta * torch.eye(x.shape[1]))

    own, told = torch.zeros(len(x), dtype=torch.float64), torch.zeros(len(x), dtype=torch.bool)
    for i in range(len(x)):
        rest = groups != groups[i]
        others = rest & (labels == labels[i])
        told[i] = others.any()
        if told[i]:
            number = groups[others].bincount().double()
            z = x[i] - x[others].mean(dim=0)
            own[i] = z @ inverse(rest) @ z / (1 + number.square().sum() / number.sum() ** 2)
    weights = 1 / ((groups[:, None] == groups) & told).sum(dim=1)  # each group counts as one
    distance = float((weights * own)[told].sum() / weights[told].sum())
    means = torch.stack([x[labels == label].mean(dim=0) for label in range(k)])
    centred = means - means.mean(dim=0)
    between = float((centred @ inverse(labels >= 0) * centred).sum(dim=1).mean()) * k / (k - 1)
    spread = (between - distance * float((1 / effective).mean())) / distance
    of_beta = PldaSettings(beta, min(max(spread, 0.01), 1e4), share * distance, 1.0, "within")
    logits = without_groups(task, -torch.inf, of_head(AutoHead(of_beta)))
    fit = temperature_fit(logits, labels, 0.25 / k, weights)
    losses = weights * torch.nn.functional.cross_entropy(logits / fit.temperature, labels, reduction="none")
    of_classes = [
        losses[told & (labels == label)].sum() / weights[told & (labels == label)].sum()
        for label in labels[told].unique()
    ]
    total = fit.loss * float(weights[told].sum())
    return replace(of_beta, scale=1 / fit.temperature), total, float(sum(of_classes))


def naive_choice(task: Task) -> PldaSettings:
    """What ``choose_plda_settings`` promises, by refitting."""
    x, labels, groups = task
    power = 1.0
    if (x >= 0).all():
        few = torch.isin(labels, labels.bincount().argsort(descending=True, stable=True)[:10])
        of_few = labels[few].unique(return_inverse=True)[1]
        losses = {
            power: naive_fit((x[few] ** power, of_few, groups[few]), 10 * float((x[few] ** power).var(dim=0).mean()))[1]
            for power in (1.0, 0.5)
        }
        power = min(losses, key=lambda power: losses[power])
        task = x**power, labels, groups
    unit, exponents = float(task[0].var(dim=0).mean()), torch.linspace(-1, 2, 7, dtype=torch.float64)
    losses_at = torch.tensor([naive_fit(task, unit * 10**exponent)[1] for exponent in exponents.tolist()])
    posterior = torch.softmax(torch.distributions.Normal(1.0, 0.35).log_prob(exponents) - losses_at, dim=0)
    beta, share = unit * 10 ** float(posterior @ exponents), 0.0
    if len(effective_counts(labels, groups)[0].unique()) > 1:
        shares = torch.linspace(0, 1, 6, dtype=torch.float64)
        losses_at = 5 * torch.tensor([naive_fit(task, beta, share)[2] for share in shares.tolist()])
        share = float(torch.softmax(torch.distributions.Normal(0.0, 0.2).log_prob(shares) - losses_at, dim=0) @ shares)
    return replace(naive_fit(task, beta, share)[0], power=power)


@pytest.mark.parametrize(
    ("shots", "groups"),
    [
        ([4, 4, 4], [0, 0, 1, 2, 3, 4, 3, 5, 6, 7, 7, 8]),
        ([4, 4, 4], [0, 1, 2, 2, 3, 0, 4, 4, 5, 5, 6, 7]),
        ([5, 3, 4], [0, 1, 2, 0, 3, 4, 0, 5, 1, 6, 7, 6]),  # unequal; three in one group
        ([3, 4, 2], [0, 1, 2, 3, 4, 4, 5, 6, 6]),  # a class that is one group
        ([2, 2, 2], [*range(6)]),  # one example remains
        ([3] * 10 + [2, 2], [0, 0, *range(1, 33)]),  # more classes than choose the power
        ([3, 2], [0, 1, 2, 0, 0]),  # a whole class with part of the other
        ([4, 2, 3], [0, 1, 2, 3, 1, 1, 4, 5, 6]),  # a whole class with part of one of two
        ([3, 4, 2, 1], [0, 1, 2, 3, 4, 5, 3, 0, 0, 5]),  # two whole classes, each with part of another
    ],
)
@pytest.mark.parametrize("kind", ["of both signs", "even", "skewed"])
def test_plda_settings_are_those_that_refitting_without_each_group_says(
    shots: list[int], groups: list[int], kind: str
) -> None:
    x, labels = sorted_by_class(make_task(3, shots, 8, dtype=torch.float64))
    x = x + labels[:, None]
    if kind != "of both signs":
        x = x - x.min() if kind == "even" else x.exp()
    task = x, labels, torch.tensor(groups)
    found, expected = choose_plda_settings(*task), naive_choice(task)
    assert found.shared == "within"
    for name in ("power", "beta", "spread", "freedom", "scale"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-5), name


@pytest.mark.parametrize(("seed", "power"), [(4, 0.5), (29, 1.0)])
def test_copies_count_once_in_the_choice_of_the_power(seed: int, power: float) -> None:
    x, labels, _ = make_task(seed, [4, 4, 4], 8, dtype=torch.float64)
    x = x + 0.5 * labels[:, None]
    x = (x - x.min()) ** 1.5
    x[[1, 2, 5]] = x[[0, 0, 4]]
    task = x, labels, torch.tensor([0, 0, 0, 1, 2, 2, 3, 4, 5, 6, 7, 8])
    assert naive_choice(task).power == power
    assert choose_plda_settings(*task).power == power
    assert choose_plda_settings(x, labels).power != power


@pytest.mark.parametrize("groups", [None, [0, 0, 1, 2, 2, 3], [0, 1, 2, 2, 0, 2], [0, 0, 0, 1, 1, 2]])
@pytest.mark.parametrize("shots", [[3, 2, 1], [6], [1] * 6])
@pytest.mark.parametrize("shared", ["within", "task"])
def test_a_head_with_given_settings_equals_refitting_without_each_group(
    groups: list[int] | None, shots: list[int], shared: str
) -> None:
    x, labels, _ = make_task(2, shots, 4, dtype=torch.float64)
    head, given = AutoHead(PldaSettings(0.7, 0.9, 1.3, 0.5, shared)), groups and torch.tensor(groups)
    task = x, labels, torch.arange(6) if given is None else given
    torch.testing.assert_close(
        head.leave_one_out_logits(x, labels, given), without_groups(task, -torch.inf, of_head(head))
    )


def test_copies_are_no_further_evidence_for_a_temperature() -> None:
    logits, labels = torch.tensor([[3.0, 0.0], [0.0, 3.0], [0.0, 2.0]], dtype=torch.float64), torch.tensor([0, 1, 0])
    assert 0.5 < temperature_fit(logits, labels, 0.125).gain < 1
    twice = torch.cat([logits, logits]), torch.cat([labels, labels])
    assert fit_temperature(*twice) > 1
    assert fit_temperature(*twice, torch.full((6,), 0.5)) == 1.0


#: Groups of make_task(5, [4, 3, 5], 12) twice: copies; a whole class with part of another; two of them with parts.
BETA_GROUPS = [
    [*range(12)] * 2,
    [*range(4), 3, 3, 3, *range(4, 9), *range(9, 13), 3, 3, 3, *range(13, 18)],
    [0, 1, 2, 3, 3, 3, 3, 4, 5, 5, 5, 5, 6, 7, 8, 3, 3, 3, 3, 5, 5, 5, 5, 5],
]


@pytest.mark.parametrize("groups", BETA_GROUPS)
def test_beta_is_what_left_out_groups_and_the_prior_make_most_probable(groups: list[int]) -> None:
    features, labels = sorted_by_class(make_task(5, [4, 3, 5], 12, dtype=torch.float64))
    features = features + 8 * torch.randn(features.shape, generator=torch.Generator().manual_seed(1)).double()
    task = torch.cat([features, features]), labels.repeat(2), torch.tensor(groups)
    weights = left_out_weights(task[1], task[2])
    variance, losses = float(task[0].var(dim=0).mean()), []
    for factor in BETA_FACTORS:
        head = MahalanobisHead(RegularizedCovariance(factor * variance))
        fit = temperature_fit(without_groups(task, -torch.inf, of_head(head)), task[1], 1.0, weights)
        losses.append(float(weights.sum()) * fit.loss + (math.log10(factor) - 1) ** 2 / (2 * 0.5**2))
    assert all(math.isfinite(loss) for loss in losses)
    expected = BETA_FACTORS[losses.index(min(losses))] * variance
    assert choose_beta(CovarianceSettings("auto"), *task).ridge == pytest.approx(expected)


def test_one_group_a_class_is_like_one_example_a_class() -> None:
    features, labels, _ = make_task(6, [3, 3], 8, dtype=torch.float64)
    assert choose_plda_settings(features, labels, labels).shared == "task"
    variance = float(features.var(dim=0).mean())
    assert choose_beta(CovarianceSettings("auto"), features, labels, labels).ridge == pytest.approx(variance)


def test_copies_make_classes_of_one_size_unequal() -> None:
    features, labels, _ = make_task(6, [4, 4], 8, dtype=torch.float64)
    assert choose_plda_settings(features, labels).freedom == 0
    copies = torch.tensor([0, 0, 1, 0, 2, 3, 4, 5])  # three of the first class
    assert choose_plda_settings(features, labels, copies).freedom > 0


def test_helpers_of_groups() -> None:
    labels, groups = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([7, 7, 3, 3, 5, 9])
    assert joined_groups(None) is None
    assert joined_groups(torch.tensor([4, 2, 9])) is None
    assert joined_groups(groups) is groups
    assert [rows.tolist() for rows in groups_by_size(groups)] == [[[4], [5]], [[2, 3], [0, 1]]]
    assert remaining_examples(labels, groups).tolist() == [1, 1, 2, 2, 2, 2]
    assert remaining_examples(labels, None).tolist() == [2] * 6
    assert group_weights(groups).tolist() == [0.5, 0.5, 0.5, 0.5, 1.0, 1.0]
    assert left_out_weights(labels, groups).tolist() == [0.5, 0.5, 0.5, 0.5, 1.0, 1.0]
    assert left_out_weights(labels, torch.tensor([0, 1, 0, 0, 0, 0])).tolist() == [0.5, 1.0, 0.5, 0.0, 0.0, 0.0]
    assert left_out_weights(torch.tensor([0, 1, 1]), None).tolist() == [0.0, 1.0, 1.0]
    of_classes, without_groups = effective_counts(labels, groups)
    assert of_classes.tolist() == pytest.approx([9 / 5, 3])
    assert without_groups.tolist() == pytest.approx([1, 1, 1, 2, 2, 2])


@pytest.mark.parametrize("groups", [None, [0, 1, 2, 2, 3, 4, 4], [0, 0, 1, 2, 3, 3, 4]])
def test_the_centre_of_the_classes_that_remain_is_the_mean_of_their_means(groups: list[int] | None) -> None:
    """The groups empty a class of one example, a class of two, or two classes at once."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 3])
    features = torch.randn(len(labels), 5, generator=rng, dtype=torch.float64)
    of_group = torch.arange(len(labels)) if groups is None else torch.tensor(groups)
    expected = []
    for group in of_group:
        kept = of_group != group
        means = [features[kept & (labels == label)].mean(dim=0) for label in labels[kept].unique()]
        expected.append(torch.stack(means).mean(dim=0))
    without = MeansWithout.of(features, labels, None if groups is None else of_group)
    found = without.centres(class_means(features, labels), len(labels))
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-12, atol=1e-12)
