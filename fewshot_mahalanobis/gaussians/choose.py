"""Settings of the covariance chosen on the support set, by exact leave-one-out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from torch import Tensor

from fewshot_mahalanobis.gaussians.inputs import check_support
from fewshot_mahalanobis.gaussians.leave_one_out import leave_one_out_distance
from fewshot_mahalanobis.gaussians.settings import CovarianceSettings
from fewshot_mahalanobis.temperature import temperature_fit

#: Candidates for beta, in units of the features' mean variance, strongest first: 10^2 to 10^-2.5.
BETA_GRID = tuple(10.0 ** (half / 2) for half in range(4, -6, -1))
#: Prior: log10(beta / v) ~ Normal(CENTRE, SPREAD).
_PRIOR_CENTRE, _PRIOR_SPREAD = 1.0, 0.5


def choose_settings(settings: CovarianceSettings, features: Tensor, labels: Tensor) -> CovarianceSettings:
    """Replace beta "auto" by the beta that leave-one-out makes most probable, beside a prior.

    Twenty-five examples say little about beta, and the best of many candidates on so few is the luckiest. So beta has a
    log-normal prior: with v the mean variance of a feature over the support set, log10(beta / v) has mean 1 and
    standard deviation 1/2, numbers chosen on validation classes. The sum of the left-out examples' cross-entropies,
    each at its beta's best temperature, less the logarithm of the prior is smallest for the beta returned. With many
    examples the prior hardly counts.

    Targets of the cross-entropy are smoothed by Laplace's rule: of N examples the true class gets (N + 1) / (N + k).

    Parameters
    ----------
    settings : CovarianceSettings
        Those that are not "auto" are kept.
    features : Tensor of shape (n, d)
    labels : int64 Tensor of shape (n,)
        0..k-1, every class with at least one example.

    Returns
    -------
    CovarianceSettings
        With beta one of ``BETA_GRID`` times v; v itself if no class has two examples, when nothing can be left out and
        classes have no covariance of their own; 1 if v is zero, when beta does not matter.

    Raises
    ------
    ValueError
        As :class:`~fewshot_mahalanobis.RegularizedCovariance`.
    """
    if not settings.to_choose:
        return settings
    counts = check_support(features, labels)
    features = features.detach().double()
    variance = float(features.var(dim=0).mean()) if len(features) > 1 else 0.0
    if variance == 0.0:
        return replace(settings, beta=1.0)
    if counts.max() == 1:
        return replace(settings, beta=variance)
    told = int(counts[counts > 1].sum())
    improbability = []
    for factor in BETA_GRID:
        candidate = replace(settings, beta=factor * variance)
        loss = temperature_fit(-leave_one_out_distance(candidate, features, labels), labels, 1.0).loss
        improbability.append(told * loss + 0.5 * ((math.log10(factor) - _PRIOR_CENTRE) / _PRIOR_SPREAD) ** 2)
    return replace(settings, beta=BETA_GRID[int(np.argmin(improbability))] * variance)
