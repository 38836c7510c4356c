"""Pooling: means of maps against plain loops, in bfloat16, at their edges."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from torch import Tensor

from fewshot_mahalanobis.networks.pooling import Maps, Pooling, Statistic


def drawn_maps(height: int = 5, width: int = 7) -> Maps:
    rng = torch.Generator().manual_seed(0)
    final = torch.randn(2, 4, height, width, generator=rng).relu()
    return Maps(final, torch.randn(2, 3, height, width, generator=rng))


def by_loop(x: Tensor, statistic: Statistic) -> list[list[float]]:
    rows = []
    for image in x.tolist():
        rows.append([])
        for one in image:
            values = [value for line in one for value in line]
            weights = by_distance(len(one), len(one[0]), statistic.sigma)
            rows[-1].append(statistic.weight * average(values, weights))
    return rows


def average(values: list[float], weights: list[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights)) / sum(weights)


def by_distance(height: int, width: int, sigma: float | msgspec.UnsetType) -> list[float]:
    """Weights of the positions, by their distance from the middle in halves of the sides."""
    if sigma is msgspec.UNSET:
        return [1.0] * (height * width)
    down, across = (height - 1) / 2, (width - 1) / 2
    return [
        math.exp(-(((row - down) / down) ** 2 + ((column - across) / across) ** 2) / (2 * sigma**2))
        for row in range(height)
        for column in range(width)
    ]


@pytest.mark.parametrize("maps", ["final", "last_block"])
@pytest.mark.parametrize("sigma", [msgspec.UNSET, 0.5, 1.0])
@pytest.mark.parametrize("values", [{}, {"weight": 0.7}])
def test_a_statistic_is_that_of_a_plain_loop(maps, values, sigma):
    drawn, statistic = drawn_maps(), Statistic(maps, **values, sigma=sigma)
    wanted = torch.tensor(by_loop(getattr(drawn, maps), statistic))
    torch.testing.assert_close(Pooling([statistic])(drawn), wanted, rtol=1e-5, atol=1e-6)


def test_features_are_the_statistics_side_by_side():
    drawn = drawn_maps()
    statistics = Statistic("last_block", weight=0.6), Statistic("final", sigma=0.7), Statistic("final")
    features = Pooling(statistics)(drawn)
    assert features.shape == (2, 3 + 4 + 4)
    assert torch.equal(features, torch.cat([Pooling([statistic])(drawn) for statistic in statistics], dim=1))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_features_of_one_length_do_not_depend_on_the_strength_of_the_maps(scale):
    drawn, statistics = drawn_maps(), (Statistic("final"), Statistic("last_block", weight=0.6, sigma=1.0))
    plain = Pooling(statistics)(drawn)
    features = Pooling(statistics, 23.0)(Maps(scale * drawn.final, scale * drawn.last_block))
    torch.testing.assert_close(features, 23 * plain / plain.square().sum(dim=1, keepdim=True).sqrt())


def test_features_without_length_stay_zero_and_have_finite_gradients():
    x = torch.zeros(1, 2, 3, 3, requires_grad=True)
    features = Pooling([Statistic("final")], 23.0)(Maps(x, x))
    features.sum().backward()
    assert not features.any()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("statistic", [Statistic("final"), Statistic("final", sigma=0.7)])
def test_sums_over_bfloat16_maps_are_exact_in_float32(statistic):
    # In bfloat16 a sum of 4,096 values near 1 would stop at 256.
    values = (1 + torch.rand(1, 2, 64, 64, generator=torch.Generator().manual_seed(1)) / 8).bfloat16()
    pooling = Pooling([statistic])
    rough = pooling(Maps(values, values))
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, pooling(Maps(values.float(), values.float())), rtol=0, atol=0)
    wanted = torch.tensor(by_loop(values.double(), statistic))
    torch.testing.assert_close(rough, wanted, rtol=1e-4, atol=1e-6)


def test_of_one_position_the_mean_is_its_value():
    drawn = drawn_maps(1, 1)
    torch.testing.assert_close(Pooling([Statistic("final", sigma=1.0)])(drawn), drawn.final[:, :, 0, 0])
