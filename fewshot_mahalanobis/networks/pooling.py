"""Pooling: maps of a network -> features, one mean for each map.

A map (h, w) says where a pattern is, and its mean how much of it there is. Positions near the middle of the picture may
count for more, by a Gaussian. Features may be brought to one length, so that only their direction matters.

All sums are in float32, whatever the type of the maps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Maps(NamedTuple):
    """Maps (n, C, h, w) of a network from which features are made; C differs."""

    final: Tensor
    last_block: Tensor


class Statistic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of the features: the mean of each map, times a weight.

    Attributes
    ----------
    maps : {"final", "last_block"}
        Which maps.
    weight : float
        Factor above 0 and at most 1000, so that all parts of the features can vary alike.
    sigma : float
        Standard deviation of the Gaussian around the middle by which positions are weighted, in halves of the picture's
        side; unset, all count alike.
    kind, exponent
        Constants of the file format: a plain mean.
    """

    maps: Literal["final", "last_block"]
    kind: Literal["mean"] = "mean"
    exponent: Annotated[float, msgspec.Meta(ge=1, le=1)] = 1.0
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    sigma: Annotated[float, msgspec.Meta(ge=0.1, le=100)] | msgspec.UnsetType = msgspec.UNSET


def weighted_mean(
    x: Tensor, weight: float | Tensor = 1.0, sigma: float | Tensor | msgspec.UnsetType = msgspec.UNSET
) -> Tensor:
    """Means of maps (n, C, h, w) as :class:`Statistic` has them -> features (n, C), float32."""
    x = x.float()
    if isinstance(sigma, msgspec.UnsetType):
        return weight * x.mean((2, 3))
    return weight * (x * position_weights(x.shape[2], x.shape[3], sigma, x.device)).sum((2, 3))


def position_weights(height: int, width: int, sigma: float | Tensor, device: torch.device | None = None) -> Tensor:
    """Weights (h, w) of the positions of a map, of sum 1."""
    down, across = (_weights(side, sigma, device) for side in (height, width))
    return down[:, None] * across


def _weights(side: int, sigma: float | Tensor, device: torch.device | None) -> Tensor:
    """Weights (side,) of the rows or columns of a map by their distance from the middle, of sum 1."""
    from_middle = torch.arange(1 - side, side, 2, dtype=torch.float32, device=device) / max(side - 1, 1)
    return torch.softmax(-from_middle.square() / (2 * sigma**2), 0)


def read_statistics(pooling: Sequence[Mapping[str, Any]]) -> tuple[Statistic, ...]:
    """Statistics from their attributes, as a file or a recipe has them; ValueError if an entry is none."""
    try:
        return msgspec.convert(pooling, Annotated[tuple[Statistic, ...], msgspec.Meta(min_length=1)])
    except msgspec.ValidationError as error:
        raise ValueError(f"pooling: {error}") from error


class Pooling(nn.Module):
    """Maps of a network -> features (n, d): the means of one part beside those of the other.

    Parameters
    ----------
    statistics : sequence of Statistic
        At least one.
    length : float, optional
        Euclidean length to which every feature vector is brought; by default it keeps its own.
    """

    def __init__(self, statistics: Sequence[Statistic], length: float | None = None) -> None:
        super().__init__()
        self.statistics, self.length = tuple(statistics), length

    def forward(self, maps: Maps) -> Tensor:
        """Maps (n, C, h, w) -> features (n, d), float32."""
        parts = [getattr(maps, statistic.maps) for statistic in self.statistics]
        features = torch.cat([weighted_mean(*part) for part in zip(parts, *self.numbers(), strict=True)], dim=1)
        return features if self.length is None else self.length * F.normalize(features)

    def numbers(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Weight and sigma of each statistic."""
        return [s.weight for s in self.statistics], [s.sigma for s in self.statistics]


class Poolings(nn.ModuleList):
    """Poolings of the same maps, one beside the other."""

    def forward(self, maps: Maps) -> Tensor:
        """Maps (n, C, h, w) -> features (n, d), float32."""
        return torch.cat([pooling(maps) for pooling in self], dim=1)
