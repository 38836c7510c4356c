"""Beta of the covariance chosen on the support set, by exact leave-one-out."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from fewshot_mahalanobis.gaussians.checks import check_support
from fewshot_mahalanobis.gaussians.groups import joined_groups, left_out_weights
from fewshot_mahalanobis.gaussians.leave_one_out import leave_one_out_distance
from fewshot_mahalanobis.gaussians.settings import CovarianceSettings
from fewshot_mahalanobis.gaussians.temperature import temperature_fit

#: Candidates for beta, in units of the features' mean variance, strongest first: 10^2 to 10^-2.5.
BETA_GRID = tuple(10.0 ** (half / 2) for half in range(4, -6, -1))
#: Prior: log10(beta / v) ~ Normal(CENTRE, SPREAD).
_PRIOR_CENTRE, _PRIOR_SPREAD = 1.0, 0.5


def choose_beta(
    settings: CovarianceSettings, features: Tensor, labels: Tensor, groups: Tensor | None = None
) -> CovarianceSettings:
    """Replace a beta of "auto" by the most probable one under leave-one-out and a prior.

    Twenty-five examples say little about beta, and the best of many candidates on so few is the luckiest. So beta has a
    log-normal prior: with v the mean variance of a feature over the support set, log10(beta / v) has mean 1 and
    standard deviation 1/2, numbers chosen on validation classes. The beta returned minimises the sum of the left-out
    examples' cross-entropies, each at its beta's best temperature, less the logarithm of the prior. With many examples
    the prior hardly counts.

    Targets of the cross-entropy are smoothed by Laplace's rule: with N examples the true class gets (N + 1) / (N + k).

    Parameters
    ----------
    settings : CovarianceSettings
        Returned unchanged if beta is a number.
    features : Tensor of shape (n, d)
    labels : int64 Tensor of shape (n,)
        0..k-1, every class with at least one example.
    groups : int64 Tensor of shape (n,), optional
        Examples of equal number are left out together, and count as one.

    Returns
    -------
    CovarianceSettings
        Beta is one of ``BETA_GRID`` times v. If no class has two groups nothing can be left out, and beta is v. If v
        is zero beta does not matter, and is 1.

    Raises
    ------
    ValueError
        As :class:`~fewshot_mahalanobis.RegularizedCovariance`.
    """
    if settings.beta != "auto":
        return settings
    check_support(features, labels)
    features = features.detach().double()
    variance = float(features.var(dim=0).mean()) if len(features) > 1 else 0.0
    groups = joined_groups(groups)
    weights = left_out_weights(labels, groups)
    left_out = float(weights.sum())
    if variance == 0.0 or left_out == 0.0:
        return replace(settings, beta=variance or 1.0)
    posterior: list[tuple[float, CovarianceSettings]] = []
    for factor in BETA_GRID:
        candidate = replace(settings, beta=factor * variance)
        loss = temperature_fit(-leave_one_out_distance(candidate, features, labels, groups), labels, 1.0, weights).loss
        deviation = (math.log10(factor) - _PRIOR_CENTRE) / _PRIOR_SPREAD
        posterior.append((left_out * loss + 0.5 * deviation**2, candidate))
    return min(posterior, key=lambda pair: pair[0])[1]
