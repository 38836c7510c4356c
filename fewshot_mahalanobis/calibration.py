"""What the support set alone can settle: the temperature of probabilities, the threshold of rejection, the ridge beta.

Every support example was unseen by the classifier fitted to the others, and its logits under that classifier are
exact and cheap (``Head.leave_one_out_logits``). So a few-shot task has validation data after all: for the temperature
of Guo et al., "On Calibration of Modern Neural Networks", ICML 2017, without which a softmax over distances (Bateni et
al., CVPR 2020, equation 1) is as sure as the distances are large, right or wrong; for how far from all classes a query
may be before it is of none (``rejection.py``); and for beta of equation 3, which presumes a scale of features that not
every network has.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from fewshot_mahalanobis.gaussians.covariance import RegularizedCovariance, check_support
from fewshot_mahalanobis.heads import EuclideanHead, Head, MahalanobisHead
from fewshot_mahalanobis.gaussians.leave_one_out import leave_one_out_distance
from fewshot_mahalanobis.rejection import outlier_score, rejection_threshold

#: Candidates for beta, in units of the features' mean variance, strongest first: 10^2 to 10^-2.5.
BETA_GRID = tuple(10.0 ** (half / 2) for half in range(4, -6, -1))
#: What beta is taken for before any example is left out: its log10, in those units, is normal around the one with the
#: other for its standard deviation.
_PRIOR_CENTRE, _PRIOR_SPREAD = 1.0, 0.5
#: Of one made-up example, spread over all classes, this much is added to those that a temperature is fitted to.
_DOUBT = 0.25


class Calibration(NamedTuple):
    """What turns logits into probabilities and refusals."""

    temperature: float  # predict_proba is softmax(logits / temperature)
    threshold: float | None  # outlier scores above it are of no class; None where no query is refused


def calibrate(
    head: Head[Any],
    features: Tensor,
    labels: Tensor,
    *,
    temperature: float | str,
    false_rejection_rate: float,
    reject: bool,
) -> Calibration:
    """Settle the temperature and, where queries may be rejected, the threshold on a support set.

    Parameters
    ----------
    head : Head
    features : Tensor of shape (n, d)
    labels : int64 Tensor of shape (n,)
        0..k-1, every class with at least one example.
    temperature : float or "auto"
        "auto" fits it to left-out examples; where no class has two and nothing can be left out, it is 1.
    false_rejection_rate : float
        Share of the queries of known classes that the threshold is to reject, in (0, 1).
    reject : bool
        Whether a threshold is wanted.

    Returns
    -------
    Calibration

    Raises
    ------
    ValueError
        A setting is out of its range, a threshold is wanted and no class has two examples, or as ``head``.
    """
    check_settings(temperature, false_rejection_rate)
    on_cpu = labels.cpu()
    counts = on_cpu.bincount()[on_cpu]
    paired = counts > 1  # the others have no class of their own left when they are left out
    if reject and not paired.any():
        raise ValueError(
            "unknown_label needs a class of at least two examples, as the threshold is found by leaving one out: add "
            "examples, or leave unknown_label out and set a threshold of your own on outlier_score"
        )
    if not paired.any() or not (reject or temperature == "auto"):
        return Calibration(1.0 if isinstance(temperature, str) else float(temperature), None)
    with torch.no_grad():
        logits = head.leave_one_out_logits(features, labels).cpu().double()
    if isinstance(head, MahalanobisHead | EuclideanHead):
        # Of n_k examples with covariance S, one lies tr(Q^-1 S) (1 + 1 / (n_k - 1)) from the mean of the others on
        # average, but a query tr(Q^-1 S) (1 + 1 / n_k) from the mean of all. The ratio is 1 - 1 / n_k^2.
        own = on_cpu[:, None]
        logits = logits.scatter(1, own, (1 - 1 / counts.double().square())[:, None] * logits.gather(1, own))
    return Calibration(
        fit_temperature(logits[paired], on_cpu[paired]) if isinstance(temperature, str) else float(temperature),
        rejection_threshold(outlier_score(logits[paired]), false_rejection_rate) if reject else None,
    )


def check_settings(temperature: float | str, false_rejection_rate: float) -> None:
    """Raise ValueError unless :func:`calibrate` takes these settings."""
    if temperature != "auto" and (isinstance(temperature, str) or not (temperature > 0 and math.isfinite(temperature))):
        raise ValueError(f'temperature must be positive and finite, or "auto", got {temperature!r}')
    if not 0 < false_rejection_rate < 1:
        raise ValueError(f"false_rejection_rate must lie between 0 and 1, got {false_rejection_rate!r}")


class _Fit(NamedTuple):
    temperature: float
    loss: float  # cross-entropy at that temperature, in nats an example


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Temperature T under which softmax(logits / T) has the smallest cross-entropy on ``labels``.

    Where every example is classified rightly, the likelihood is largest for T = 0, which no finite sample can mean.
    So a quarter of an example is spread over the k classes, in the way of Platt: with c = 1 / 4k, of N examples the
    true class gets (N + c) / (N + 1 / 4) and each other class c / (N + 1 / 4). A whole example for each class, as Platt
    adds, made probabilities of few shots far too modest on validation classes.

    Parameters
    ----------
    logits : Tensor of shape (n, k)
        As by ``Head.leave_one_out_logits``. An example whose own class is at minus infinity, the only one of its
        class, says nothing about T and is left out.
    labels : int64 Tensor of shape (n,)
        0..k-1.

    Returns
    -------
    float
        T > 0.

    Raises
    ------
    ValueError
        No class has two examples.

    References
    ----------
    Platt: Probabilistic Outputs for Support Vector Machines. Advances in Large Margin Classifiers, 1999.
    """
    return _fit(logits, labels, _DOUBT / logits.shape[1]).temperature


def choose_beta(covariance: RegularizedCovariance, features: Tensor, labels: Tensor) -> float:
    """Beta of equation 3 that left-out examples make most probable, beside what is known of it without them.

    Twenty-five examples say little of beta, and the best of many candidates on so few is the luckiest. So beta has a
    prior, a log-normal one: with v the mean variance of a feature over the support set, log10 (beta / v) has mean 1 and
    standard deviation 1/2. What is smallest is the sum of the left-out examples' cross-entropies, each beta's
    temperature fitted, less the logarithm of the prior. Where many examples speak, the prior says next to nothing. Its
    two numbers were chosen on validation classes.

    Targets of the cross-entropy are softened by Laplace's rule: of N examples the true class gets (N + 1) / (N + k).

    Parameters
    ----------
    covariance : RegularizedCovariance
        Its other settings are kept; its own beta does not matter.
    features : Tensor of shape (n, d)
    labels : int64 Tensor of shape (n,)
        0..k-1, every class with at least one example.

    Returns
    -------
    float
        One of ``BETA_GRID`` times v; v itself if no class has two examples, when nothing can be left out and classes
        have no covariance of their own; 1 if v is zero, when beta does not matter.

    Raises
    ------
    ValueError
        As ``covariance``.
    """
    counts = check_support(features, labels)
    features = features.detach().double()
    variance = float(features.var(dim=0).mean()) if len(features) > 1 else 0.0
    if variance == 0.0:
        return 1.0
    if counts.max() == 1:
        return variance
    told = int(counts[counts > 1].sum())
    improbability = []
    for factor in BETA_GRID:
        candidate = RegularizedCovariance(factor * variance, covariance.task_covariance, covariance.one_shot_covariance)
        loss = _fit(-leave_one_out_distance(candidate, features, labels), labels, 1.0).loss
        improbability.append(told * loss + 0.5 * ((math.log10(factor) - _PRIOR_CENTRE) / _PRIOR_SPREAD) ** 2)
    return BETA_GRID[int(np.argmin(improbability))] * variance


def _fit(logits: Tensor, labels: Tensor, added: float) -> _Fit:
    """Temperature of the smallest cross-entropy, with ``added`` examples of every class beside each one's own."""
    logits, labels = logits.detach().double().cpu(), labels.cpu()
    told = torch.isfinite(logits.gather(1, labels[:, None]))[:, 0]
    if not told.any():
        raise ValueError("a temperature is fitted on left-out examples: at least one class needs two")
    logits, labels = logits[told], labels[told]
    n, k = logits.shape
    total = n + k * added
    targets = torch.full_like(logits, added / total).scatter(1, labels[:, None], (n + added) / total)
    spread = float(logits.std(dim=1).mean()) if k > 1 else 0.0
    if spread == 0.0:
        return _Fit(1.0, math.log(k))
    logits = logits / spread

    def loss(log_temperature: float) -> float:
        return -float((targets * torch.log_softmax(logits / math.exp(log_temperature), dim=1)).sum()) / n

    # Convex in 1 / T, so of one valley in log T; ten e-foldings from the logits' spread all is uniform or one-hot.
    best = minimize_scalar(loss, bounds=(-10.0, 10.0), method="bounded", options={"xatol": 1e-6})
    return _Fit(spread * math.exp(best.x), float(best.fun))
