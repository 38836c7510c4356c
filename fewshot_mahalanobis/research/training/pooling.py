"""Pooling whose weights and exponents are learned by meta-training."""

from __future__ import annotations

from typing import cast

import msgspec
import torch
from torch import Tensor, nn

from fewshot_mahalanobis.networks.pooling import Maps, Pooling, Statistic


class LearnedPooling(Pooling):
    """The same pooling with learned weights and exponents, each by its logarithm; those of 1 stay.

    So the first part keeps the scale of the features, and a plain mean remains one.
    """

    def __init__(self, pooling: Pooling) -> None:
        super().__init__(pooling.statistics)
        self.logs = nn.ModuleList(nn.ParameterDict() for _ in pooling.statistics)
        for statistic, logs in zip(pooling.statistics, self.logs, strict=True):
            for name in ("weight", "exponent"):
                if (value := getattr(statistic, name)) != 1:
                    cast(nn.ParameterDict, logs)[name] = nn.Parameter(torch.tensor(value).log())

    def forward(self, maps: Maps) -> Tensor:
        """Maps (n, C, h, w) -> features (n, d), float32; gradients flow to weights and exponents."""
        return torch.cat([statistic(maps) for statistic in self._learned()], dim=1)

    @torch.no_grad()
    def store(self) -> None:
        """Put what was learned into :attr:`statistics`."""
        self.statistics = tuple(
            msgspec.structs.replace(statistic, weight=float(statistic.weight), exponent=float(statistic.exponent))
            for statistic in self._learned()
        )

    def _learned(self) -> list[Statistic]:
        """Statistics whose learned values are tensors."""
        logs = cast("list[nn.ParameterDict]", [*self.logs])
        return [
            msgspec.structs.replace(statistic, **{name: log.exp() for name, log in of_statistic.items()})
            for statistic, of_statistic in zip(self.statistics, logs, strict=True)
        ]
