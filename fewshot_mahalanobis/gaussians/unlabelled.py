"""Memberships of unlabelled examples: expectation-maximisation of the model of the default head.

Unlabelled examples u_i say where classes lie and how many of each there are. They are taken as a mixture of the classes
of ``plda.py`` with shares pi_k:

    p(u_i) = sum_k pi_k N(u_i; c + s_k (m_k - c), r_k P).

Each round finds the memberships R_ik = p(k | u_i) by the means m_k, the covariance P and the shares so far, and then
these anew from the memberships, as ``pool.py`` says. The labels of the support set are never doubted. An example that
is further from every class than most are counts for less, because it may be of none.

This is the mixture of labelled and unlabelled examples of McLachlan (JASA 1975) and of Nigam, McCallum, Thrun and
Mitchell ("Text Classification from Labeled and Unlabeled Documents using EM", Machine Learning, 2000), who let
unlabelled ones count for less too. With few shots, soft k-means moves the means alone (Ren et al., ICLR 2018; Bateni,
Barber, van de Meent & Wood, "Enhancing Few-Shot Image Classification with Unlabelled Examples", WACV 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewshot_mahalanobis.gaussians.low_rank import shared_whitening
from fewshot_mahalanobis.gaussians.plda import PldaSettings, relative_distance, shrinkage, to_power
from fewshot_mahalanobis.gaussians.pool import Pool, pooled_covariance
from fewshot_mahalanobis.gaussians.support import (
    check_features,
    check_support,
    effective_counts,
    exact_class_means,
    full_precision,
    joined_groups,
    working_dtype,
)

#: Rounds, and the rounds after which P is factored anew where the unlabelled examples change it.
ROUNDS, _FACTORED = 9, 3
#: An example at more than this many times the median distance to the nearest class counts (that ratio)^-power.
_FAR, _FAR_POWER = 1.2, 8
#: Memberships below this are none; distances below this are zero.
_LEAST_MEMBERSHIP, _LEAST_DISTANCE = 1e-3, 1e-30


@torch.no_grad()
def memberships(
    settings: PldaSettings,
    features: Tensor,
    labels: Tensor,
    groups: Tensor | None,
    unlabelled: Tensor,
    log_priors: Tensor | None = None,
) -> Tensor:
    """Find the classes of unlabelled examples: memberships R_ik (m, k).

    Parameters
    ----------
    settings : PldaSettings
        Of the model of the support set.
    features, labels, groups : Tensors of shape (n, d), (n,) and (n,)
        The support set, as for :class:`~fewshot_mahalanobis.gaussians.plda.Plda`.
    unlabelled : Tensor of shape (m, d)
    log_priors : Tensor of shape (k,), optional
        Logarithms of known shares; by default they are estimated.

    Returns
    -------
    Tensor of shape (m, k)
        Each row sums to 1, or to less where the example is far from every class.

    Raises
    ------
    ValueError
        On a wrong shape or dtype, NaN or infinity.
    """
    counts = check_support(features, labels)
    check_features(unlabelled, "unlabelled features", width=features.shape[1])
    with full_precision(features):
        x, u = (to_power(z.to(working_dtype(z)), settings.power) for z in (features, unlabelled))
        centre = x.mean(dim=0)
        x, u = x - centre, u - centre
        means = exact_class_means(x, labels, counts)
        numbers = effective_counts(labels, joined_groups(groups))[0].to(x)
        found = u.new_zeros(len(u), len(counts))
        for step in range(ROUNDS if len(u) else 0):
            if step == 0 or (settings.shared == "task" and step % _FACTORED == 0):
                moved, _ = Pool(u, found).moved_means(means, numbers)
                shared = pooled_covariance(x, labels, counts, settings.covariance, Pool(u, found), moved)
                whitening = shared_whitening(shared, 1.0, settings.beta)
                at_means, at_pool = whitening(means), whitening(u)
            pool = Pool(at_pool, found)
            distance = _distance(at_pool, *pool.moved_means(at_means, numbers), settings)
            log_shares = pool.shares().log() if log_priors is None else log_priors.to(x)
            nearest = distance.amin(dim=1, keepdim=True).clamp(min=_LEAST_DISTANCE)
            near = (_FAR * nearest.median() / nearest).clamp(max=1.0) ** _FAR_POWER
            found = near * (log_shares - settings.scale * distance).softmax(dim=1)
        return found * (found >= _LEAST_MEMBERSHIP)


def _distance(at_queries: Tensor, at_means: Tensor, numbers: Tensor, settings: PldaSettings) -> Tensor:
    """d_k^2 / r_k + f log r_k (m, k) of whitened queries (m, p), whitened means (k, p) and N_k (k,)."""
    shrink, ratio = shrinkage(numbers, settings.spread)
    # By products of matrices. Their rounding matters for queries that lie on a mean, and those belong to it anyway.
    lengths, lengths_of_means = (torch.linalg.vector_norm(z, dim=1).square() for z in (at_queries, at_means))
    to_means = torch.addmm(lengths[:, None] + lengths_of_means, at_queries, at_means.T, alpha=-2.0).clamp(min=0)
    to_centre = (at_means - at_means.mean(dim=0)).square().sum(dim=1)
    return relative_distance(to_means, shrink, ratio, to_centre, settings.freedom)
