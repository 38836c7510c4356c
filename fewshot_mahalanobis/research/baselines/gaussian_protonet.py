"""Gaussian prototypical networks: ProtoNet with a diagonal covariance that the network predicts for each image.

Fort, "Gaussian Prototypical Networks for Few-Shot Learning on Omniglot", 2017: the encoder gives a vector and a
diagonal inverse covariance S = 1 + softplus(S_raw). Here S_raw is a linear layer on the features; the paper takes it
from the encoder's last layer. The inverse covariance of a class is the mean over its images, not the sum: the paper's
classes all have the same number of images, and a sum would make the class with the most images the farthest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.support import check_features, check_support, class_means, full_precision
from fewshot_mahalanobis.research.baselines.method import Method


class Gaussians(NamedTuple):
    """Centres and diagonal inverse covariances of the classes, both (k, d)."""

    centres: Tensor
    precisions: Tensor


class GaussianProtoNet(Method[Gaussians]):
    """Logits = -(x - p_k)^T S_k (x - p_k), S_k diagonal.

    Images that the network is sure about count for more.
    """

    name, title = "gaussian_protonet", "ProtoNet, diagonal covariance"
    needs_training = True

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.raw = nn.Linear(in_features, in_features)

    @classmethod
    def for_model(cls, settings: Mapping[str, Any], in_features: int) -> GaussianProtoNet:
        """Make the method, with weights yet to be learned or loaded, for features of this width."""
        return cls(in_features)

    def fit(self, support_features: Tensor, support_labels: Tensor) -> Gaussians:
        """Combine the Gaussians of the images of each class, from support features (n, d) and labels (n,)."""
        check_support(support_features, support_labels)
        with full_precision(support_features):
            features = support_features.to(self.raw.weight.dtype)
            precision = 1 + F.softplus(self.raw(features))
            means = class_means(precision, support_labels)  # S_k = mean of s_i
            # p_k = mean of s_i x_i / S_k
            return Gaussians(class_means(precision * features, support_labels) / means, means)

    def logits(self, state: Gaussians, query_features: Tensor) -> Tensor:
        """Minus the squared distances of queries (m, d): (m, k), expanded about the mean of the centres."""
        check_features(query_features, "query features", width=state.centres.shape[1])
        with full_precision(query_features):
            origin = state.centres.mean(dim=0)
            x, centres = query_features.to(origin.dtype) - origin, state.centres - origin
            cross = x @ (state.precisions * centres).T
            return 2 * cross - x.square() @ state.precisions.T - (state.precisions * centres.square()).sum(dim=1)
