"""Many queries at once: classes refined by the queries themselves.

Soft k-means with Mahalanobis distances (Bateni, Barber, van de Meent & Wood, "Enhancing Few-Shot Image Classification
with Unlabelled Examples", WACV 2022): a query belongs to class k with probability p_k, the classes are estimated again
from the support set and the queries with these weights, and so on until no query changes its class. The paper counts a
query like a support image. That hurts where queries are of few classes, and at one shot fifteen queries outvote the one
image that is sure; so here a query counts w = 0.3 of a support image, and all queries of a class together at most three
times its support images. Both were chosen on validation classes (``benchmarks/transduction.py``, docs/transduction.md).

The classes may have any shares among the queries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.covariance import CovarianceSettings, regularized_covariance
from fewshot_mahalanobis.gaussians.support import (
    check_features,
    full_precision,
)

#: Weight of a query, in support images, and largest weight of all queries of a class, in its support images.
QUERY_WEIGHT, MAX_QUERY_WEIGHT = 0.3, 3.0
#: Fewest and most refinements.
MIN_STEPS, MAX_STEPS = 2, 10

#: Query logits (m, k) -> weights (m, k) with which the queries belong to the classes.
Weights = Callable[[Tensor], Tensor]
#: Query logits (m, k) -> logits (m, k) by classes that are estimated anew with the queries.
Refinement = Callable[[Tensor], Tensor]


def soft_k_means(logits: Tensor, refined: Refinement) -> Tensor:
    """Refine logits (m, k) until no query changes its class, at least twice and at most ten times.

    Parameters
    ----------
    logits : Tensor of shape (m, k)
        Logits before any refinement, from the support set alone.
    refined : Refinement
    """
    chosen = logits.argmax(dim=1)
    for step in range(1, MAX_STEPS + 1):
        logits = refined(logits)
        before, chosen = chosen, logits.argmax(dim=1)
        if step >= MIN_STEPS and torch.equal(before, chosen):
            break
    return logits


def refined_by_queries(
    start: Tensor,
    refinement: Callable[[Tensor, Tensor, Tensor, Weights], Refinement],
    support: Tensor,
    labels: Tensor,
    queries: Tensor,
    temperature: float,
) -> Tensor:
    """Logits (m, k) of queries, each of which depends on all of them.

    Parameters
    ----------
    start : Tensor of shape (m, k)
        Logits by the support set alone.
    refinement : callable
        Makes the refinement of a head from the support set (n, d), its labels as one-hot rows (n, k), the queries
        (m, d) and the function that gives their weights. Support set and queries are in a basis of their span.
    support, queries : Tensors of shape (n, d) and (m, d)
        In the working precision.
    labels : int64 Tensor of shape (n,)
    temperature : float
        Queries belong to classes with the probabilities softmax(logits / temperature).
    """
    check_features(queries, "query features", width=support.shape[1])
    if len(queries) == 0:
        return start
    counts = labels.bincount().to(support)

    def weights(logits: Tensor) -> Tensor:
        w = QUERY_WEIGHT * (logits / temperature).softmax(dim=1)
        return w * (MAX_QUERY_WEIGHT * counts / w.sum(dim=0).clamp(min=1e-12)).clamp(max=1.0)

    with torch.no_grad(), full_precision(queries):
        x, q = _coordinates(support, queries)
        refined = refinement(x, F.one_hot(labels).to(x.dtype), q, weights)
        return soft_k_means(start.to(x.dtype), refined).to(start.dtype)


def weighted_refinement(
    settings: CovarianceSettings,
    scale: float,
    x: Tensor,
    one_hot: Tensor,
    queries: Tensor,
    weights: Weights,
) -> Refinement:
    """Return the refinement of the Mahalanobis head: weighted means and covariances.

    It reads the support set x (n, d) with one-hot labels (n, k), and queries (m, d), whose weights (m, k) follow from
    their logits.
    """
    everything = torch.cat([x, queries])
    return lambda logits: (
        -scale * weighted_distance(everything, torch.cat([one_hot, weights(logits)]), queries, settings)
    )


def weighted_distance(x: Tensor, weights: Tensor, queries: Tensor, settings: CovarianceSettings) -> Tensor:
    """Squared Mahalanobis distances (m, k) of queries (m, d) to Gaussians of weighted examples.

    With N_k the sum of the weights of class k, mu_k and Sigma_k are weighted by them, the latter with divisor N_k, and
    lambda_k = N_k / (N_k + nu) in equation 3. S is the covariance of all examples (n - 1), or that pooled within
    classes. Differentiable.

    Parameters
    ----------
    x : Tensor of shape (n, d)
    weights : Tensor of shape (n, k)
    queries : Tensor of shape (m, d)
    settings : CovarianceSettings
        Beta is a number.
    """
    counts = weights.sum(dim=0)  # N_k
    means = weights.T @ x / counts[:, None]
    scatters = [((x - mean) * w[:, None]).T @ (x - mean) for mean, w in zip(means, weights.T, strict=True)]
    if settings.shared == "within":
        shared = sum(scatters) / (counts.sum() - len(counts)).clamp(min=1.0)
    else:
        centred = x - x.mean(dim=0)
        shared = centred.T @ centred / max(len(x) - 1, 1)
    columns = []
    for mean, scatter, count in zip(means, scatters, counts, strict=True):
        q = regularized_covariance(scatter / count, shared, settings.class_weight(count), settings.ridge)
        whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(q), (queries - mean).T, upper=False)
        columns.append(whitened.square().sum(dim=0))
    return torch.stack(columns, dim=1)


def _coordinates(support: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Both in an orthonormal basis of their span, about their mean: there d is at most n + m."""
    everything = torch.cat([support, queries])
    everything = everything - everything.mean(dim=0)
    if len(everything) < everything.shape[1]:
        everything = everything @ torch.linalg.qr(everything.T).Q
    x, q = everything.split([len(support), len(queries)])
    return x, q
