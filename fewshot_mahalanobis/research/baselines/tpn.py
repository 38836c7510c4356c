"""TPN, transductive propagation network: labels spread from the support set to all queries along a graph.

Liu, Lee, Park, Kim, Yang, Hwang & Yang, "Learning to Propagate Labels: Transductive Propagation Network for Few-shot
Learning", ICLR 2019. Propagation needs no training; the network that sets each example's length scale does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.support import (
    check_features,
    check_support,
    full_precision,
    result_dtype,
    working_dtype,
)
from fewshot_mahalanobis.research.baselines.method import Method

#: Length scale of the graph, as a share of the root mean squared distance to the nearest example: chosen on validation
#: classes.
LENGTH_SCALE = 0.15


class TPN(Method[tuple[Tensor, Tensor]]):
    """Logits = F*, the labels that propagation gives the queries (equation 5).

    A query's logits depend on the other queries of the call. Without training all examples have one length scale; the
    trained one is that times exp g(x), g two linear layers on the feature vector (published: on feature maps).

    Parameters
    ----------
    in_features : int, optional
        Feature width d; without it there is no g.
    """

    name, title, paper_title = "tpn", "TPN", "TPN"
    neighbours, alpha = 20, 0.99

    def __init__(self, in_features: int | None = None) -> None:
        super().__init__()
        self.log_scale: nn.Sequential | None = None
        if in_features is not None:
            last = nn.Linear(64, 1)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
            self.log_scale = nn.Sequential(nn.Linear(in_features, 64), nn.ReLU(), last)

    @classmethod
    def for_model(cls, settings: Mapping[str, Any], in_features: int) -> TPN:
        """Make the method, with weights yet to be learned or loaded, for features of this width."""
        return cls(in_features)

    def fit(self, support_features: Tensor, support_labels: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the support features (n, d) and labels (n,)."""
        check_support(support_features, support_labels)
        weight = next(self.parameters(), None)
        dtype = result_dtype(support_features) if weight is None else weight.dtype
        return support_features.to(dtype), support_labels

    def logits(self, state: tuple[Tensor, Tensor], query_features: Tensor) -> Tensor:
        """Propagate the labels of the support set to queries (m, d): (m, k)."""
        support, labels = state
        check_features(query_features, "query features", width=support.shape[1])
        with full_precision(query_features):
            return self._propagated(support, labels, query_features.to(support.dtype))

    def _propagated(self, support: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
        weights = self.graph(torch.cat([support, queries]))
        root = weights.sum(dim=1).clamp(min=torch.finfo(weights.dtype).tiny).rsqrt()
        normalised = root[:, None] * weights * root  # S = D^-1/2 W D^-1/2
        known = F.one_hot(labels).to(weights.dtype)
        start = torch.cat([known, known.new_zeros(len(queries), known.shape[1])])  # Y
        identity = torch.eye(len(start), dtype=start.dtype, device=start.device)
        spread = torch.linalg.solve(identity - self.alpha * normalised, start)  # F* = (I - alpha S)^-1 Y, equation 4
        return spread[len(support) :].to(queries.dtype)

    def graph(self, features: Tensor) -> Tensor:
        """Return weights W (n, n) between each example and its nearest ones: equation 2."""
        nearest = _squared_distances(features.detach()).fill_diagonal_(torch.inf).amin(dim=1)
        scaled = features / (LENGTH_SCALE * nearest.mean().sqrt().clamp(min=1e-12))
        if self.log_scale is not None:
            scaled = scaled * torch.exp(-self.log_scale(features))
        # float64: far examples have weights that float32 cannot hold.
        weights = torch.exp(-0.5 * _squared_distances(scaled.to(working_dtype(scaled))))
        weights = weights * (1 - torch.eye(len(weights), dtype=weights.dtype, device=weights.device))
        chosen = weights.topk(min(self.neighbours, len(weights))).indices
        kept = torch.zeros_like(weights, dtype=torch.bool).scatter_(1, chosen, True)
        return weights * (kept | kept.T)


def _squared_distances(x: Tensor) -> Tensor:
    """Squared distances between all pairs (n, n), with a finite gradient everywhere."""
    x = x - x.mean(dim=0)
    norms = x.square().sum(dim=1)
    return (norms[:, None] + norms - 2 * x @ x.T).clamp(min=0)
