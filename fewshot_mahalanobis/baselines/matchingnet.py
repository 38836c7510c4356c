"""Matching networks (Vinyals, Blundell, Lillicrap, Kavukcuoglu & Wierstra, NeurIPS 2016).

"Matching Networks for One Shot Learning", without full context embeddings, as in Meta-Dataset.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.baselines.method import Method


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
        """Log of equation 1."""
        cosine = F.normalize(queries, dim=1) @ state.features.to(queries.dtype).T
        attention = cosine.softmax(dim=1)  # section 2.1.1
        ways = int(state.labels.max()) + 1
        return attention.new_zeros(len(queries), ways).index_add(1, state.labels, attention).log()
