"""k-nearest neighbours on a frozen network's features, a baseline of Meta-Dataset.

Triantafillou et al., "Meta-Dataset: A Dataset of Datasets for Learning to Learn from Few Examples", ICLR 2020, section
3.1; the published settings are one neighbour and the cosine distance. scikit-learn's classifier does the work.
"""

from __future__ import annotations

import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from fewshot_mahalanobis.gaussians.support import check_features, check_support, result_dtype
from fewshot_mahalanobis.research.baselines.method import Method


class KNN(Method[KNeighborsClassifier]):
    """Logits = log of the share of each class among the nearest support examples by cosine distance."""

    name, title, paper_title = "knn", "k-NN", "k-NN"
    trains_network = False
    neighbours = 1

    def fit(self, support_features: Tensor, support_labels: Tensor) -> KNeighborsClassifier:
        """Keep the support features (n, d) and labels (n,)."""
        check_support(support_features, support_labels)
        neighbours = KNeighborsClassifier(min(self.neighbours, len(support_labels)), metric="cosine")
        features = support_features.detach().to(result_dtype(support_features))
        return neighbours.fit(features.cpu().numpy(), support_labels.cpu().numpy())

    def logits(self, state: KNeighborsClassifier, query_features: Tensor) -> Tensor:
        """Logits (m, k) of queries (m, d), minus infinity for a class without neighbours. Not differentiable."""
        check_features(query_features, "query features", width=state.n_features_in_)
        queries = query_features.detach().to(result_dtype(query_features))
        return torch.from_numpy(state.predict_proba(queries.cpu().numpy())).to(queries).log()
