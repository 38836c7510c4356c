"""k-nearest neighbours on a frozen network's features, a baseline of Meta-Dataset.

Triantafillou et al., "Meta-Dataset: A Dataset of Datasets for Learning to Learn from Few Examples", ICLR 2020, section
3.1; the published settings are one neighbour and the cosine distance. scikit-learn's classifier does the work.
"""

from __future__ import annotations

import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from fewshot_mahalanobis.research.baselines.method import Method


class KNN(Method[KNeighborsClassifier]):
    """Logits = log of the share of each class among the nearest support examples by cosine distance."""

    name, title, paper_title = "knn", "k-NN", "k-NN"
    trains_network = False
    neighbours = 1

    def fit_features(self, features: Tensor, labels: Tensor) -> KNeighborsClassifier:
        """Keep the support set."""
        neighbours = KNeighborsClassifier(min(self.neighbours, len(labels)), metric="cosine")
        return neighbours.fit(features.detach().cpu().numpy(), labels.cpu().numpy())

    def compare(self, state: KNeighborsClassifier, queries: Tensor) -> Tensor:
        """Minus infinity where no neighbour is of the class. Not differentiable."""
        shares = state.predict_proba(queries.detach().cpu().numpy())
        return torch.from_numpy(shares).to(queries).log()
