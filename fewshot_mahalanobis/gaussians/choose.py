"""Settings of the covariance chosen on the support set, by exact leave-one-out."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

from torch import Tensor

from fewshot_mahalanobis.gaussians.inputs import check_support
from fewshot_mahalanobis.gaussians.leave_one_out import leave_one_out_distance
from fewshot_mahalanobis.gaussians.settings import CovarianceSettings
from fewshot_mahalanobis.temperature import temperature_fit

#: Candidates for beta, in units of the features' mean variance, strongest first: 10^2 to 10^-2.5.
BETA_GRID = tuple(10.0 ** (half / 2) for half in range(4, -6, -1))
#: Candidates for S and for nu.
SHARED_CHOICES, PRIOR_SHOTS_GRID = ("within", "task"), (math.inf, 25.0, 5.0, 1.0)
#: Prior: log10(beta / v) ~ Normal(CENTRE, SPREAD).
_PRIOR_CENTRE, _PRIOR_SPREAD = 1.0, 0.5


def choose_settings(settings: CovarianceSettings, features: Tensor, labels: Tensor) -> CovarianceSettings:
    """Replace every "auto" by what leave-one-out makes most probable, beside a prior of beta.

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
        With beta one of ``BETA_GRID`` times v, S one of ``SHARED_CHOICES`` and nu one of ``PRIOR_SHOTS_GRID``. If no
        class has two examples nothing can be left out: beta is v, S and nu are the paper's. If v is zero beta does not
        matter, and is 1.

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
    if variance == 0.0 or counts.max() == 1:  # nothing to learn from: the paper's settings
        paper: dict[str, Any] = {"beta": variance or 1.0, "shared": "task", "prior_shots": 1.0}
        return replace(settings, **{name: value for name, value in paper.items() if getattr(settings, name) == "auto"})
    told = int(counts[counts > 1].sum())
    candidates: list[tuple[float, CovarianceSettings]] = []
    for shared, prior_shots, factor in product(
        SHARED_CHOICES if settings.shared == "auto" else (settings.shared,),
        PRIOR_SHOTS_GRID if settings.prior_shots == "auto" else (settings.prior_shots,),
        BETA_GRID if settings.beta == "auto" else (None,),
    ):
        beta = settings.beta if factor is None else factor * variance
        candidate = replace(settings, beta=beta, shared=shared, prior_shots=prior_shots)
        loss = temperature_fit(-leave_one_out_distance(candidate, features, labels), labels, 1.0).loss
        deviation = 0.0 if factor is None else (math.log10(factor) - _PRIOR_CENTRE) / _PRIOR_SPREAD
        candidates.append((told * loss + 0.5 * deviation**2, candidate))
    return min(candidates, key=lambda pair: pair[0])[1]
