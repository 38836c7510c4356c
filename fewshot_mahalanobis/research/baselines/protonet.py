"""Prototypical networks (Snell, Swersky & Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017)."""

from __future__ import annotations

from torch import Tensor

from fewshot_mahalanobis.gaussians.checks import class_means
from fewshot_mahalanobis.heads import EuclideanHead
from fewshot_mahalanobis.research.baselines.method import Method


class ProtoNet(Method[Tensor]):
    """Logits = -||x - c_k||^2, c_k the mean support feature of the class: equations 1 and 2."""

    name, title, paper_title = "protonet", "ProtoNet", "ProtoNet"
    is_squared_distance = True

    def fit_features(self, features: Tensor, labels: Tensor) -> Tensor:
        """Prototypes c_k (k, d), equation 1."""
        return class_means(features, labels)

    def compare(self, state: Tensor, queries: Tensor) -> Tensor:
        """Logits of equation 2, as the package's Euclidean head computes them."""
        return EuclideanHead().compare(queries, state.to(queries.dtype))
