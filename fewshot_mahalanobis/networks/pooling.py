"""Pooling: maps of a network -> features, a few numbers for each map.

A map (h, w) says where a pattern is, and its mean how much of it there is. Two more statistics of its values x_i say
whether it is concentrated:

    generalised mean    (mean of x_i^p)^(1/p)
    deviation           sqrt(mean of (x_i - m)^2), m the mean of the x_i

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
    """

    maps: Literal["final", "last_block"]
    kind: Literal["mean", "deviation"] = "mean"
    exponent: Annotated[float, msgspec.Meta(gt=0, le=8)] = 1.0
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0

    def __call__(self, maps: Maps) -> Tensor:
        """Maps (n, C, h, w) -> features (n, C), float32."""
        x: Tensor = getattr(maps, self.maps).float()
        if self.kind == "deviation":
            variance = (x - x.mean((2, 3), keepdim=True)).square().mean((2, 3))
            return self.weight * variance.clamp(min=_LEAST**2).sqrt()
        if isinstance(self.exponent, float) and self.exponent == 1:
            return self.weight * x.mean((2, 3))
        return self.weight * x.clamp(min=_LEAST).pow(self.exponent).mean((2, 3)).pow(1 / self.exponent)


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
    """

    def __init__(self, statistics: Sequence[Statistic]) -> None:
        super().__init__()
        self.statistics = tuple(statistics)

    def forward(self, maps: Maps) -> Tensor:
        """Maps (n, C, h, w) -> features (n, d), float32."""
        return torch.cat([statistic(maps) for statistic in self.statistics], dim=1)
