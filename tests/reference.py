"""Naive twins of the fast code: float64, one class or one pair at a time, formulas as the paper prints them."""

from __future__ import annotations

import torch
from torch import Tensor


def covariance(features: Tensor) -> Tensor:
    """Unbiased covariance (d, d) of features (n, d); zero for one example."""
    if len(features) == 1:
        return features.new_zeros(features.shape[1], features.shape[1])
    difference = features - features.mean(dim=0)
    return difference.T @ difference / (len(features) - 1)


def pooled_covariance(features: Tensor, labels: Tensor) -> Tensor:
    """Covariance (d, d) pooled within k classes, of divisor n - k; zero if every class has one example."""
    scatter = features.new_zeros(features.shape[1], features.shape[1])
    for label in labels.unique():
        members = features[labels == label]
        scatter = scatter + (len(members) - 1) * covariance(members)
    return scatter / max(len(labels) - len(labels.unique()), 1)


def class_covariances(
    features: Tensor,
    labels: Tensor,
    beta: float = 1.0,
    task_covariance: bool = True,
    one_shot_covariance: str = "zero",
    shared: str = "task",
    prior_shots: float = 1.0,
) -> Tensor:
    """Q_k of equation 3 for every class, (k, d, d), in float64."""
    features = features.double()
    identity = torch.eye(features.shape[1], dtype=torch.float64)
    s = covariance(features) if shared == "task" else pooled_covariance(features, labels)
    matrices = []
    for label in range(int(labels.max()) + 1):
        members = features[labels == label]
        sigma_k = covariance(members)
        if len(members) == 1 and one_shot_covariance == "published":
            sigma_k = sigma_k + members[0].var()
        weight = 1 / (1 + prior_shots / len(members)) if task_covariance else 1.0
        matrices.append(weight * sigma_k + (1 - weight) * s + beta * identity)
    return torch.stack(matrices)


def squared_mahalanobis(features: Tensor, labels: Tensor, queries: Tensor, **settings: object) -> Tensor:
    """(x - mu_k)^T Q_k^-1 (x - mu_k), (m, k), in float64."""
    features, queries = features.double(), queries.double()
    columns = []
    for label, q in enumerate(class_covariances(features, labels, **settings)):  # type: ignore[arg-type]
        difference = queries - features[labels == label].mean(dim=0)
        whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(q), difference.T, upper=False)
        columns.append(whitened.square().sum(dim=0))
    return torch.stack(columns, dim=1)


def pairwise(features: Tensor, labels: Tensor, queries: Tensor, compare) -> Tensor:  # type: ignore[no-untyped-def]
    """``compare(query, class mean)`` for every pair, (m, k), in float64."""
    means = [features[labels == label].double().mean(dim=0) for label in range(int(labels.max()) + 1)]
    return torch.stack([torch.stack([compare(query, mean) for mean in means]) for query in queries.double()])
