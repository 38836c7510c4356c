"""Metric heads: support features and labels in, logits of query features out.

Every head has one interface, in one call or in two steps:

    logits = head(support_features, support_labels, query_features)
    state = head.fit(support_features, support_labels); logits = head.logits(state, query_features)

``MahalanobisHead`` is Simple CNAPS (Bateni et al., "Improved Few-Shot Visual Classification", CVPR 2020, equations
1-3), ``LinearHead`` the learned classifier of CNAPS (Requeima et al., NeurIPS 2019) and the others the metrics that
the paper compares with. Probabilities are the softmax of the logits (equation 1).
"""

from __future__ import annotations

import math
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.covariance import (
    ClassGaussians,
    RegularizedCovariance,
    check_features,
    check_support,
    class_means,
    full_precision,
    result_dtype,
)
from fewshot_mahalanobis.gaussians.leave_one_out import leave_one_out_distance

State = TypeVar("State")

#: Examples that are compared with as many means at a time where only the diagonal is wanted.
_PAIRS = 128


class Head(nn.Module, Generic[State]):
    """A classifier fitted to the support features of one task.

    Features are finite floating-point tensors of shape (n, d), labels int64 of shape (n,) in 0..k-1, each with at
    least one example. Heads compute in float32 or float64 outside autocast whatever the features' dtype, and are
    differentiable with respect to support and query features. ValueError on anything else.
    """

    def fit(self, support_features: Tensor, support_labels: Tensor) -> State:
        """Fit to support features (n, d) and labels (n,); the state serves any number of queries."""
        raise NotImplementedError

    def logits(self, state: State, query_features: Tensor) -> Tensor:
        """Logits (m, k) of query features (m, d)."""
        raise NotImplementedError

    def leave_one_out_logits(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        """Logits (n, k) of each support example, features (n, d), by the head fitted to the others.

        Minus infinity where a class has no other example. By n fits; the heads of this module know shorter ways.
        """
        counts = check_support(support_features, support_labels)
        rows = []
        for i, label in enumerate(support_labels.tolist()):
            rest = torch.arange(len(support_labels), device=support_labels.device) != i
            present, labels = support_labels[rest].unique(return_inverse=True)
            row = self(support_features[rest], labels, support_features[i : i + 1])[0]
            if counts[label] == 1:
                row = row.new_full((len(counts),), -torch.inf).index_copy(0, present, row)
            rows.append(row)
        return torch.stack(rows)

    def forward(self, support_features: Tensor, support_labels: Tensor, query_features: Tensor) -> Tensor:
        """Logits (m, k) of query features (m, d), given support features (n, d) and labels (n,)."""
        return self.logits(self.fit(support_features, support_labels), query_features)


class MahalanobisHead(Head[ClassGaussians]):
    """Logits = -s (x - mu_k)^T Q_k^-1 (x - mu_k), the head of Simple CNAPS (CVPR 2020, equations 1-3).

    Parameters
    ----------
    covariance : RegularizedCovariance, optional
        How Q_k is estimated; with the paper's settings if left out.
    scale : float
        s > 0: 1/2 is the paper's equation 2; 1 is the published implementation and the paper's numbers.

    Raises
    ------
    ValueError
        If ``scale`` is not positive and finite.
    """

    def __init__(self, covariance: RegularizedCovariance | None = None, scale: float = 1.0) -> None:
        super().__init__()
        if not (scale > 0 and math.isfinite(scale)):
            raise ValueError(f"scale must be positive and finite, got {scale!r}")
        self.covariance = RegularizedCovariance() if covariance is None else covariance
        self.scale = float(scale)

    def fit(self, support_features: Tensor, support_labels: Tensor) -> ClassGaussians:
        """Fit a Gaussian to each class of the support features (n, d), labels (n,)."""
        gaussians: ClassGaussians = self.covariance(support_features, support_labels)
        return gaussians

    def logits(self, state: ClassGaussians, query_features: Tensor) -> Tensor:
        """Minus s times the squared Mahalanobis distance of queries (m, d) to each class: (m, k)."""
        return -self.scale * state.squared_distance(query_features)

    def leave_one_out_logits(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        """Logits (n, k) of each support example by the head fitted to the others, exactly, by downdating."""
        return -self.scale * leave_one_out_distance(self.covariance, support_features, support_labels)

    def extra_repr(self) -> str:
        """Name the setting in ``repr``."""
        return f"scale={self.scale}"


class _PrototypeHead(Head[Tensor]):
    """A head whose state is the class means mu_k (k, d)."""

    def fit(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        """Class means (k, d) of the support features (n, d), labels (n,)."""
        return class_means(support_features, support_labels)

    def logits(self, state: Tensor, query_features: Tensor) -> Tensor:
        """Compare queries (m, d) with each class mean: logits (m, k)."""
        check_features(query_features, "query features", width=state.shape[1])
        with full_precision(query_features):
            dtype = torch.promote_types(result_dtype(query_features), state.dtype)
            return self.compare(query_features.to(dtype), state.to(dtype))

    def leave_one_out_logits(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        """Logits (n, k) of each support example by the head fitted to the others: only its own mean moves."""
        with full_precision(support_features):
            means = self.fit(support_features, support_labels)
            features = support_features.to(means.dtype)
            pairs = zip(features.split(_PAIRS), _means_without(features, support_labels).split(_PAIRS), strict=True)
            own = torch.cat([self.compare(x, without).diagonal() for x, without in pairs])
            return _with_own(self.compare(features, means), own, support_labels)

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Logits (m, k) of ``queries`` (m, d) against ``means`` (k, d), of one dtype."""
        raise NotImplementedError


class EuclideanHead(_PrototypeHead):
    """Logits = -||x - mu_k||^2: prototypical networks (Snell et al., NeurIPS 2017), from differences."""

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Minus the squared Euclidean distances."""
        return -torch.cdist(queries, means, compute_mode="donot_use_mm_for_euclid_dist").square()


class ManhattanHead(_PrototypeHead):
    """Logits = -||x - mu_k||_1: the absolute difference of the paper's metric ablation."""

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Minus the sums of absolute differences."""
        return -torch.cdist(queries, means, p=1.0)


class CosineHead(_PrototypeHead):
    """Logits = cosine of the angle between x and mu_k, in [-1, 1]; 0 where either is zero."""

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Cosine similarities."""
        return F.normalize(queries, dim=1) @ F.normalize(means, dim=1).T


class DotProductHead(_PrototypeHead):
    """Logits = x . mu_k: the negative dot product as a distance, of the paper's metric ablation."""

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Dot products."""
        return queries @ means.T


def _means_without(features: Tensor, labels: Tensor) -> Tensor:
    """Mean of the other examples of each example's class, (n, d); zero where there are none."""
    counts = labels.bincount()[labels, None]
    return (counts * class_means(features, labels)[labels] - features) / (counts - 1).clamp(min=1)


def _with_own(logits: Tensor, own: Tensor, labels: Tensor) -> Tensor:
    """``logits`` (n, k) with ``own`` (n,) for each example's own class, minus infinity where it is alone in it."""
    own = torch.where(labels.bincount()[labels] == 1, -torch.inf, own)
    return logits.scatter(1, labels[:, None], own[:, None])


class LinearClassifier(NamedTuple):
    """Weights of a linear classifier generated for one task."""

    weight: Tensor  # (k, d)
    bias: Tensor  # (k,)


class LinearHead(Head[LinearClassifier]):
    """The learned classifier of CNAPS: logits = W x + b, each class's row generated from its mean support feature.

    w_k = f(mu_k) + mu_k and b_k = g(mu_k), where f and g are three linear layers with ELU between (Requeima et al.,
    "Fast and Flexible Multi-Task Classification Using Conditional Neural Adaptive Processes", NeurIPS 2019). For 512
    features that is 788,485 parameters, which Simple CNAPS does without.

    Parameters
    ----------
    in_features : int
        Feature width d.
    """

    def __init__(self, in_features: int = 512) -> None:
        super().__init__()
        self.in_features = in_features
        self.weight_generator = _ThreeLayers(in_features, in_features)
        self.bias_generator = _ThreeLayers(in_features, 1)

    def fit(self, support_features: Tensor, support_labels: Tensor) -> LinearClassifier:
        """Generate the classifier from the class means of the support features (n, d), labels (n,)."""
        check_features(support_features, "support features")
        if support_features.shape[1] != self.in_features:
            raise ValueError(
                f"support features have {support_features.shape[1]} columns, but LinearHead was made for "
                f"in_features={self.in_features}"
            )
        with full_precision(support_features):
            return self._generate(class_means(support_features, support_labels))

    def logits(self, state: LinearClassifier, query_features: Tensor) -> Tensor:
        """W x + b of queries (m, d): (m, k), in the dtype of the head's parameters."""
        check_features(query_features, "query features", width=self.in_features)
        with full_precision(query_features):
            return F.linear(query_features.to(state.weight.dtype), state.weight, state.bias)

    def leave_one_out_logits(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        """Logits (n, k) of each support example by the head fitted to the others: only its own row moves."""
        logits = self(support_features, support_labels, support_features)
        with full_precision(support_features):
            features = support_features.to(logits.dtype)
            without = self._generate(_means_without(features, support_labels))
            return _with_own(logits, (without.weight * features).sum(dim=1) + without.bias, support_labels)

    def _generate(self, means: Tensor) -> LinearClassifier:
        means = means.to(self.weight_generator.linear1.weight.dtype)
        return LinearClassifier(self.weight_generator(means) + means, self.bias_generator(means)[:, 0])


class _ThreeLayers(nn.Module):
    """linear3(ELU(linear2(ELU(linear1(x))))); hidden layers are as wide as the output."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(in_features, out_features)
        self.linear2 = nn.Linear(out_features, out_features)
        self.linear3 = nn.Linear(out_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear3(F.elu(self.linear2(F.elu(self.linear1(x)))))


#: Heads by the name that a configuration gives them; each is made without arguments.
HEADS: dict[str, type[Head[Any]]] = {
    "mahalanobis": MahalanobisHead,
    "euclidean": EuclideanHead,
    "manhattan": ManhattanHead,
    "cosine": CosineHead,
    "dot_product": DotProductHead,
    "linear": LinearHead,
}
