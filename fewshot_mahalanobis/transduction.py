"""Many queries at once: classes refined by the queries themselves.

Soft k-means with Mahalanobis distances (Bateni, Barber, van de Meent & Wood, "Enhancing Few-Shot Image Classification
with Unlabelled Examples", WACV 2022): a query belongs to class k with probability p_k, the classes are estimated again
from the support set and the queries with these weights, and so on until no query changes its class. The paper counts a
query like a support image. That hurts where queries are of few classes, and at one shot fifteen queries outvote the one
image that is sure; so here a query counts w = 0.3 of a support image, and all queries of a class together at most three
times its support images. Both were chosen on validation classes (``benchmarks/transduction.py``, docs/transduction.md).

Nothing is presumed of the shares of the classes among the queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.inputs import check_features, full_precision, result_dtype, working_dtype
from fewshot_mahalanobis.gaussians.settings import CovarianceSettings
from fewshot_mahalanobis.gaussians.uncertain_means import UncertainMeans, relative_distance, to_power
from fewshot_mahalanobis.heads import Head, MahalanobisHead

#: What a query counts, in support images, and the most that the queries of a class count, in its support images.
QUERY_WEIGHT, MAX_QUERY_WEIGHT = 0.3, 3.0
#: Refinements: at least and at most.
MIN_STEPS, MAX_STEPS = 2, 10


def soft_k_means(logits: Tensor, refined: Callable[[Tensor], Tensor], min_steps: int, max_steps: int) -> Tensor:
    """Refine logits (m, k) until no query changes its class.

    Parameters
    ----------
    logits : Tensor of shape (m, k)
        Of the classes as the support set has them.
    refined : callable
        Logits (m, k) by classes estimated with the queries, from their logits (m, k) before.
    min_steps, max_steps : int
        Refinements.
    """
    chosen = logits.argmax(dim=1)
    for step in range(1, max_steps + 1):
        logits = refined(logits)
        before, chosen = chosen, logits.argmax(dim=1)
        if step >= min_steps and torch.equal(before, chosen):
            break
    return logits


def transductive_logits(
    head: Head[Any], state: Any, support: Tensor, labels: Tensor, queries: Tensor, temperature: float = 1.0
) -> Tensor:
    """Logits (m, k) of queries, each of which depends on all of them.

    ``AutoHead`` keeps its covariance and all other settings, and gets weighted class means and counts. For
    ``MahalanobisHead`` the covariances are weighted too (:func:`weighted_distance`).

    Parameters
    ----------
    head, state : Head and what its ``fit`` gave
    support : Tensor of shape (n, d)
    labels : int64 Tensor of shape (n,)
        What the head was fitted to.
    queries : Tensor of shape (m, d)
        All queries of the task.
    temperature : float
        The assignments are the softmax of the logits divided by it.

    Raises
    ------
    ValueError
        The head is another one, or the queries are not finite or of another width.
    """
    uncertain = isinstance(state, UncertainMeans)
    if not uncertain and not isinstance(head, MahalanobisHead):
        raise ValueError(f'transductive=True is for the heads "auto" and "mahalanobis", not {type(head).__name__}')
    check_features(queries, "query features", width=support.shape[1])
    counts = labels.bincount().to(device=support.device, dtype=working_dtype(support))

    def weights(logits: Tensor) -> Tensor:
        w = QUERY_WEIGHT * (logits / temperature).softmax(dim=1)
        return w * (MAX_QUERY_WEIGHT * counts / w.sum(dim=0).clamp(min=1e-12)).clamp(max=1.0)

    with torch.no_grad(), full_precision(queries):
        start = head.logits(state, queries)
        if len(queries) == 0:
            return start
        power = state.settings.power if uncertain else 1.0
        x, q = _coordinates(*(to_power(f.to(working_dtype(f)), power) for f in (support, queries)))
        one_hot = F.one_hot(labels).to(x.dtype)
        if uncertain:
            refined = _moved_means(state, x, one_hot, q, weights)
        else:
            refined = weighted_refinement(state.settings, cast(MahalanobisHead, head).scale, x, one_hot, q, weights)
        return soft_k_means(start.to(x.dtype), refined, MIN_STEPS, MAX_STEPS).to(result_dtype(queries))


def weighted_refinement(
    settings: CovarianceSettings,
    scale: float,
    x: Tensor,
    one_hot: Tensor,
    queries: Tensor,
    weights: Callable[[Tensor], Tensor],
) -> Callable[[Tensor], Tensor]:
    """The refinement of the Mahalanobis head: weighted means and covariances.

    Of a support set x (n, d), its labels one-hot (n, k), and queries (m, d), whose weights (m, k) follow from logits.
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
        None of them "auto".
    """
    counts = weights.sum(dim=0)  # N_k
    means = weights.T @ x / counts[:, None]
    scatters = [((x - mean) * w[:, None]).T @ (x - mean) for mean, w in zip(means, weights.T, strict=True)]
    if settings.shared == "within":
        shared = sum(scatters) / (counts.sum() - len(counts)).clamp(min=1.0)
    else:
        centred = x - x.mean(dim=0)
        shared = centred.T @ centred / max(len(x) - 1, 1)
    ridge = settings.ridge * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    columns = []
    for mean, scatter, count in zip(means, scatters, counts, strict=True):
        weight = 1.0 if settings.without_shared else count / (count + float(settings.prior_shots))  # lambda_k
        root = torch.linalg.cholesky(weight * scatter / count + (1 - weight) * shared + ridge)  # equation 3
        whitened = torch.linalg.solve_triangular(root, (queries - mean).T, upper=False)
        columns.append(whitened.square().sum(dim=0))
    return torch.stack(columns, dim=1)


def _moved_means(
    state: UncertainMeans, x: Tensor, one_hot: Tensor, queries: Tensor, weights: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """The refinement of ``AutoHead``'s model: weighted means m_k and counts n_k under the same P."""
    settings, counts = state.settings, one_hot.sum(dim=0)
    of_support = one_hot.T @ x / counts[:, None]
    within = settings.shared == "within"
    centred = x - (of_support[one_hot.argmax(dim=1)] if within else x.mean(dim=0))
    scatter = centred.T @ centred / max(len(x) - (len(counts) if within else 1), 1)
    root = torch.linalg.cholesky(scatter + settings.beta * torch.eye(x.shape[1], dtype=x.dtype, device=x.device))  # P
    at_means, at_queries = (torch.linalg.solve_triangular(root, z.T, upper=False).T for z in (of_support, queries))

    def refined(logits: Tensor) -> Tensor:
        w = weights(logits)
        n = counts + w.sum(dim=0)
        means = (counts[:, None] * at_means + w.T @ at_queries) / n[:, None]
        shrink = n * settings.spread / (n * settings.spread + 1)  # s_k
        ratio = 1 + 1 / (n + 1 / settings.spread)  # r_k
        to_means = torch.cdist(at_queries, means, compute_mode="donot_use_mm_for_euclid_dist").square()
        to_centre = (means - means.mean(dim=0)).square().sum(dim=1)
        return -settings.scale * relative_distance(to_means, shrink, ratio, to_centre, settings.freedom)

    return refined


def _coordinates(support: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Both in an orthonormal basis of their span, about their mean: there d is at most n + m."""
    everything = torch.cat([support, queries])
    everything = everything - everything.mean(dim=0)
    if len(everything) < everything.shape[1]:
        everything = everything @ torch.linalg.qr(everything.T).Q
    x, q = everything.split([len(support), len(queries)])
    return x, q
