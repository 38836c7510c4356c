"""Pooling: maps of a network -> features, a few numbers for each map.

A map (h, w) says where a pattern is, and its mean how much of it there is. Two more statistics of its values x_i say
whether it is concentrated:

    generalised mean    (mean of x_i^p)^(1/p)
    deviation           sqrt(mean of (x_i - m)^2), m the mean of the x_i

All of them may count positions near the middle of the picture for more, by a Gaussian. And features may be brought to
one length, so that their direction alone matters.

The generalised mean is the mean for p = 1 and tends to the maximum as p grows, so it counts strong responses for more
(Radenovic, Tolias & Chum, "Fine-tuning CNN Image Retrieval with No Human Annotation", TPAMI 2019). It is meant for maps
that are never negative, as after a ReLU: values below zero count as zero.

All sums are in float32, whatever the type of the maps, and both roots have a finite gradient everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Values of a map below this count as this, and so does a deviation: there the roots have a finite gradient.
_LEAST = 1e-4


class Maps(NamedTuple):
    """Maps (n, C, h, w) of a network from which features are made; C differs."""

    final: Tensor
    last_block: Tensor


class Statistic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of the features: a statistic of each map, times a weight.

    Attributes
    ----------
    maps : {"final", "last_block"}
        Which maps.
    kind : {"mean", "deviation"}
    exponent : float
        p of a generalised mean, above 0 and at most 8, where ``_LEAST``^p would vanish; with 1 it is the mean.
    weight : float
        Factor above 0 and at most 1000, so that all parts of the features can vary alike.
    sigma : float
        Standard deviation of the Gaussian around the middle by which positions are weighted, in halves of the picture's
        side; unset, all count alike.
    """

    maps: Literal["final", "last_block"]
    kind: Literal["mean", "deviation"] = "mean"
    exponent: Annotated[float, msgspec.Meta(gt=0, le=8)] = 1.0
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    sigma: Annotated[float, msgspec.Meta(ge=0.1, le=100)] | msgspec.UnsetType = msgspec.UNSET

    def __call__(self, maps: Maps) -> Tensor:
        """Maps (n, C, h, w) -> features (n, C), float32."""
        x: Tensor = getattr(maps, self.maps).float()
        if self.kind == "deviation":
            variance = self._mean((x - self._mean(x)[:, :, None, None]).square())
            return self.weight * variance.clamp(min=_LEAST**2).sqrt()
        if isinstance(self.exponent, float) and self.exponent == 1:
            return self.weight * self._mean(x)
        return self.weight * self._mean(x.clamp(min=_LEAST).pow(self.exponent)).pow(1 / self.exponent)

    def _mean(self, x: Tensor) -> Tensor:
        """Mean (n, C) over the positions of maps (n, C, h, w)."""
        if isinstance(self.sigma, msgspec.UnsetType):
            return x.mean((2, 3))
        down, across = (_weights(side, self.sigma, x.device) for side in x.shape[2:])
        return (x * (down[:, None] * across)).sum((2, 3))


def _weights(side: int, sigma: float | Tensor, device: torch.device) -> Tensor:
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
    """Maps of a network -> features (n, d): one statistic beside the other.

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
        features = torch.cat([statistic(maps) for statistic in self.current_statistics()], dim=1)
        return features if self.length is None else self.length * F.normalize(features)

    def current_statistics(self) -> Sequence[Statistic]:
        """The statistics as they are applied."""
        return self.statistics


class Poolings(nn.ModuleList):
    """Poolings of the same maps, one beside the other."""

    def forward(self, maps: Maps) -> Tensor:
        """Maps (n, C, h, w) -> features (n, d), float32."""
        return torch.cat([pooling(maps) for pooling in self], dim=1)
