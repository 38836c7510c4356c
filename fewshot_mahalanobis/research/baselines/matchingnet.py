"""Matching networks (Vinyals, Blundell, Lillicrap, Kavukcuoglu & Wierstra, NeurIPS 2016).

"Matching Networks for One Shot Learning", without full context embeddings. As in Meta-Dataset (Triantafillou et al.,
ICLR 2020) queries keep their lengths, so the network learns how sharp the attention is. Between unit vectors, whose
products differ by 2 at most, a class with many examples would nearly always get more of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.research.baselines.method import Method


class Support(NamedTuple):
    """Unit features (n, d) and labels (n,) of the support set."""

    features: Tensor
    labels: Tensor


class MatchingNet(Method[Support]):
    """P(k | x) = sum of the attention a(x, x_i) to the support examples of the class; logits are log P.

    A class with more examples gets more attention.
    """

    name, title, paper_title = "matchingnet", "MatchingNet", "MatchingNet"

    def fit_features(self, features: Tensor, labels: Tensor) -> Support:
        """Keep the support set."""
        return Support(F.normalize(features, dim=1), labels)

    def compare(self, state: Support, queries: Tensor) -> Tensor:
        """Log of equation 1, with the attention of section 2.1.1: the softmax of cosines, times a query's length."""
        similarity = queries @ state.features.to(queries.dtype).T
        of_class = [similarity[:, state.labels == k].logsumexp(dim=1) for k in range(int(state.labels.max()) + 1)]
        return torch.stack(of_class, dim=1).log_softmax(dim=1)
