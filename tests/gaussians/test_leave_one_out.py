"""Downdated leave-one-out distances against refitting without each example."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewshot_mahalanobis.gaussians.covariance import CovarianceSettings
from fewshot_mahalanobis.gaussians.leave_out import leave_one_out_distance, squared_distance_to_others
from tests import reference
from tests.drawn_tasks import make_task
from tests.gaussians.test_covariance import SETTINGS


def refitted(features: Tensor, labels: Tensor, **settings: object) -> Tensor:
    """The definition: fit the dense formula to the others, one example at a time; float64."""
    rows = []
    for i in range(len(labels)):
        rest = torch.arange(len(labels)) != i
        row = torch.full((int(labels.max()) + 1,), torch.inf, dtype=torch.float64)
        present, renumbered = labels[rest].unique(return_inverse=True)
        row[present] = reference.squared_mahalanobis(features[rest], renumbered, features[i : i + 1], **settings)[0]
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("shots", "d"),
    [
        ([5] * 5, 40),
        ([1, 2, 3, 7], 30),
        ([1, 2, 3, 7, 12], 6),
        ([2, 2], 5),
        ([1, 1, 1], 4),
        ([1, 1], 3),
        ([3, 1], 2),
        ([2, 1, 1], 4),
        ([9, 8, 1], 3),
    ],
)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_distances_equal_those_of_refitting_without_each_example(
    shots: list[int], d: int, settings: dict[str, object], scale: float
) -> None:
    features, labels, _ = make_task(sum(shots) + d, shots, d, scale=scale, dtype=torch.float64)
    got = leave_one_out_distance(CovarianceSettings(**settings), features, labels)  # type: ignore[arg-type]
    torch.testing.assert_close(got, refitted(features, labels, **settings), rtol=1e-8, atol=1e-12)


def test_a_single_feature_will_do() -> None:
    features, labels, _ = make_task(8, [9, 8, 1], 1, dtype=torch.float64)
    got = leave_one_out_distance(CovarianceSettings(), features, labels)
    torch.testing.assert_close(got, refitted(features, labels), rtol=1e-8, atol=1e-12)


def test_duplicated_and_constant_features_and_examples_are_exact() -> None:
    features, labels, _ = make_task(2, [1, 4, 9, 2], 20, dtype=torch.float64)
    features[:, 1] = 0.5
    features[:, 4] = features[:, 3]
    features[labels == 1] = features[labels == 1][0]
    got = leave_one_out_distance(CovarianceSettings(), features, labels)
    torch.testing.assert_close(got, refitted(features, labels), rtol=1e-8, atol=1e-10)


def test_an_example_that_is_all_there_is_to_its_class_is_infinitely_far_from_it() -> None:
    features, labels, _ = make_task(0, [1, 3], 5)
    got = leave_one_out_distance(CovarianceSettings(), features, labels)
    assert torch.isinf(got).nonzero().tolist() == [[int((labels == 0).nonzero()), 0]]
    assert got.dtype == torch.float32


def test_distances_have_gradients() -> None:
    features, labels, _ = make_task(3, [3, 2, 4], 4, dtype=torch.float64)
    finite = leave_one_out_distance(CovarianceSettings(), features, labels).isfinite()

    def distances(x: Tensor) -> Tensor:
        return leave_one_out_distance(CovarianceSettings(), x, labels)[finite]

    assert torch.autograd.gradcheck(distances, features.requires_grad_(), atol=1e-6)


def test_an_example_whose_removal_is_lost_to_rounding_is_refused() -> None:
    features, labels, _ = make_task(4, [3, 3], 6, dtype=torch.float64)
    features[0] *= 1e8
    with pytest.raises(ValueError, match="lost to rounding"):
        leave_one_out_distance(CovarianceSettings(), features, labels)


def naive_squared_distance(x: Tensor, others: Tensor) -> float:
    """To the affine span of the rows of ``others``, by least squares."""
    directions, centred = (others - others[0]).T, x - others[0]
    weights = torch.linalg.lstsq(directions, centred, driver="gelsd").solution
    return float((centred - directions @ weights).square().sum())


@pytest.mark.parametrize(("n", "d"), [(2, 5), (6, 9), (6, 5), (9, 3)])
def test_distance_to_the_span_of_the_others(n: int, d: int) -> None:
    x = torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(n + d)) + 7
    expected = [naive_squared_distance(x[i], x[torch.arange(n) != i]) for i in range(n)]
    torch.testing.assert_close(
        squared_distance_to_others(x), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )
    groups = torch.arange(n).repeat(2)  # each example twice: a copy is no other
    found = squared_distance_to_others(torch.cat([x, x]), groups)
    torch.testing.assert_close(found, torch.tensor(expected * 2, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    if n > 2:
        assert squared_distance_to_others(torch.cat([x, x[:1]]))[[0, n]].abs().max() < 1e-9
