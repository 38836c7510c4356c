"""Matching networks (Vinyals, Blundell, Lillicrap, Kavukcuoglu & Wierstra, NeurIPS 2016).

"Matching Networks for One Shot Learning", without full context embeddings. As in Meta-Dataset (Triantafillou et al.,
ICLR 2020) queries keep their lengths, so the network learns how sharp the attention is. Between unit vectors, whose
products differ by 2 at most, a class with many examples would nearly always get more attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.support import check_features, check_support, full_precision, result_dtype
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

    def fit(self, support_features: Tensor, support_labels: Tensor) -> Support:
        """Keep the support features (n, d), at unit length, and the labels (n,)."""
        check_support(support_features, support_labels)
        return Support(F.normalize(support_features.to(result_dtype(support_features)), dim=1), support_labels)

    def logits(self, state: Support, query_features: Tensor) -> Tensor:
        """Log of equation 1 for queries (m, d): (m, k).

        The attention is that of section 2.1.1, the softmax of cosines, times a query's length.
        """
        check_features(query_features, "query features", width=state.features.shape[1])
        with full_precision(query_features):
            similarity = query_features.to(state.features.dtype) @ state.features.T
            classes = range(int(state.labels.max()) + 1)
            class_logits = [similarity[:, state.labels == k].logsumexp(dim=1) for k in classes]
            return torch.stack(class_logits, dim=1).log_softmax(dim=1)
