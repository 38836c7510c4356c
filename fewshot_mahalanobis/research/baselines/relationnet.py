"""Relation networks: a learned comparison of a query with each class.

Sung, Yang, Zhang, Xiang, Torr & Hospedales, "Learning to Compare: Relation Network for Few-Shot Learning", CVPR 2018.
The published relation module has two convolutional blocks of 64 maps, with batch normalisation, before its layers of 8
and 1; here the maps are pooled first, as for all methods, and linear layers take the place of the convolutions. The
features of several shots are averaged, as in Meta-Dataset, not added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.heads import PrototypeHead
from fewshot_mahalanobis.research.baselines.method import Method


class RelationNet(PrototypeHead, Method[Tensor]):
    """Logits = relation scores r in [0, 1] between query and class, equation 1."""

    name, title, paper_title = "relationnet", "RelationNet", "RelationNet"
    needs_training = True

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.relation = nn.Sequential(
            *_block(2 * in_features), *_block(64), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid()
        )

    @classmethod
    def for_model(cls, settings: Mapping[str, Any], in_features: int) -> RelationNet:
        """Make the method, with weights yet to be learned or loaded, for features of this width."""
        return cls(in_features)

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Relation scores g(C(f(class), f(query))), C the concatenation: equation 1."""
        shape = (len(queries), *means.shape)
        pairs = torch.cat([means.expand(shape), queries[:, None].expand(shape)], dim=2)
        pairs = pairs.to(next(self.parameters()).dtype)
        return self.relation(pairs.flatten(0, 1)).view(shape[:2])

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Squared error of the scores, 1 for the right class and 0 for the others: equation 2."""
        return F.mse_loss(logits, F.one_hot(labels, logits.shape[1]).to(logits.dtype))


def _block(in_features: int) -> tuple[nn.Module, ...]:
    return nn.Linear(in_features, 64), nn.BatchNorm1d(64), nn.ReLU()
