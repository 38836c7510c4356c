"""Pooling: statistics of maps against plain loops, in bfloat16, at their edges, and learned by meta-training."""

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
            if statistic.kind == "deviation":
                mean = average(values, weights)
                found = math.sqrt(average([(value - mean) ** 2 for value in values], weights))
            elif statistic.exponent == 1:
                found = average(values, weights)
            else:
                powers = [max(value, 0.0) ** statistic.exponent for value in values]
                found = average(powers, weights) ** (1 / statistic.exponent)
            rows[-1].append(statistic.weight * found)
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
@pytest.mark.parametrize("values", [{}, {"exponent": 2.0}, {"exponent": 3.3, "weight": 0.7}, {"kind": "deviation"}])
def test_a_statistic_is_that_of_a_plain_loop(maps, values, sigma):
    drawn, statistic = drawn_maps(), Statistic(maps, **values, sigma=sigma)
    wanted = torch.tensor(by_loop(getattr(drawn, maps), statistic))
    torch.testing.assert_close(statistic(drawn), wanted, rtol=1e-4, atol=1e-4)


def test_features_are_the_statistics_side_by_side():
    drawn = drawn_maps()
    statistics = Statistic("last_block", weight=0.6), Statistic("final", kind="deviation"), Statistic("final")
    features = Pooling(statistics)(drawn)
    assert features.shape == (2, 3 + 4 + 4)
    assert torch.equal(features, torch.cat([statistic(drawn) for statistic in statistics], dim=1))


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


@pytest.mark.parametrize(
    "statistic",
    [
        Statistic("final"),
        Statistic("final", sigma=0.7),
        Statistic("final", kind="deviation"),
        Statistic("final", "mean", 3.0),
    ],
)
def test_sums_over_bfloat16_maps_are_exact_in_float32(statistic):
    # In bfloat16 a sum of 4,096 values near 1 would stop at 256.
    values = (1 + torch.rand(1, 2, 64, 64, generator=torch.Generator().manual_seed(1)) / 8).bfloat16()
    rough = statistic(Maps(values, values))
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, statistic(Maps(values.double().float(), values.float())), rtol=0, atol=0)
    wanted = torch.tensor(by_loop(values.double(), statistic))
    torch.testing.assert_close(rough, wanted, rtol=1e-4, atol=1e-6)


def test_a_deviation_far_from_zero_loses_no_digits():
    x = 1000 + torch.tensor([-0.25, 0.25]).repeat(18).view(1, 1, 6, 6)
    assert float(Statistic("final", kind="deviation")(Maps(x, x))) == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0])
@pytest.mark.parametrize(
    "statistic",
    [Statistic("final", kind="deviation"), Statistic("final", "mean", 2.0), Statistic("final", "mean", 8.0)],
)
def test_gradients_are_finite_where_a_map_is_constant(level, statistic):
    x = torch.full((1, 2, 3, 3), level, requires_grad=True)
    features = statistic(Maps(x, x))
    features.sum().backward()
    assert features.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    "statistic", [Statistic("last_block", kind="deviation"), Statistic("last_block", "mean", 2.5, 0.5)]
)
def test_gradients_are_those_of_small_steps(statistic):
    x = drawn_maps().last_block.requires_grad_()
    statistic(Maps(x, x)).sum().backward()
    step = 1e-2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        up, down = (float(statistic(Maps(x, x + sign * step)).sum()) for sign in (1, -1))
    assert float((x.grad * step).sum()) == pytest.approx((up - down) / 2, rel=0.02)


def test_of_one_position_the_mean_is_its_value_and_the_deviation_zero():
    drawn = drawn_maps(1, 1)
    torch.testing.assert_close(Statistic("final", sigma=1.0)(drawn), drawn.final[:, :, 0, 0])
    torch.testing.assert_close(Statistic("final", "mean", 3.0)(drawn), drawn.final[:, :, 0, 0], rtol=1e-5, atol=2e-4)
    assert float(Statistic("last_block", kind="deviation")(drawn).max()) < 1e-3
