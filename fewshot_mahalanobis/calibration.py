"""What the support set alone can settle: the temperature of probabilities and the ridge beta.

Every support example was unseen by the classifier fitted to the others, and its logits under that classifier are
exact and cheap (``Head.leave_one_out_logits``). So a few-shot task has validation data after all: for the temperature
of Guo et al., "On Calibration of Modern Neural Networks", ICML 2017, without which a softmax over distances (Bateni et
al., CVPR 2020, equation 1) is as sure as the distances are large, right or wrong; and for beta of equation 3, which
presumes a scale of features that not every network has.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from fewshot_mahalanobis.covariance import RegularizedCovariance, check_support
from fewshot_mahalanobis.leave_one_out import leave_one_out_distance

#: Candidates for beta, in units of the features' mean variance, strongest first: 10^1.5 to 10^-3.
BETA_GRID = tuple(10.0 ** (half / 2) for half in range(3, -7, -1))


class _Fit(NamedTuple):
    temperature: float
    loss: float  # cross-entropy at that temperature, in nats an example


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Temperature T under which softmax(logits / T) has the smallest cross-entropy on ``labels``.

    Where every example is classified rightly, the likelihood is largest for T = 0, which no finite sample can mean.
    So the targets are those of Laplace's rule, as Platt uses them for two classes: of N examples the true class gets
    (N + 1) / (N + k) and each other class 1 / (N + k).

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
    return _fit(logits, labels).temperature


def choose_beta(covariance: RegularizedCovariance, features: Tensor, labels: Tensor) -> float:
    """Beta of equation 3 under which left-out examples are told best: the smallest cross-entropy, T fitted to each.

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
        One of ``BETA_GRID`` times the mean variance of a feature over the support set; that variance itself if no
        class has two examples, when nothing can be left out, and 1 if it is zero, when beta does not matter.

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
    losses = []
    for factor in BETA_GRID:
        candidate = RegularizedCovariance(factor * variance, covariance.task_covariance, covariance.one_shot_covariance)
        losses.append(_fit(-leave_one_out_distance(candidate, features, labels), labels).loss)
    return BETA_GRID[int(np.argmin(losses))] * variance


def _fit(logits: Tensor, labels: Tensor) -> _Fit:
    logits, labels = logits.detach().double().cpu(), labels.cpu()
    told = torch.isfinite(logits.gather(1, labels[:, None]))[:, 0]
    if not told.any():
        raise ValueError("a temperature is fitted on left-out examples: at least one class needs two")
    logits, labels = logits[told], labels[told]
    n, k = logits.shape
    targets = torch.full_like(logits, 1 / (n + k)).scatter(1, labels[:, None], (n + 1) / (n + k))
    spread = float(logits.std(dim=1).mean()) if k > 1 else 0.0
    if spread == 0.0:
        return _Fit(1.0, math.log(k))
    logits = logits / spread

    def loss(log_temperature: float) -> float:
        return -float((targets * torch.log_softmax(logits / math.exp(log_temperature), dim=1)).sum()) / n

    # Convex in 1 / T, so of one valley in log T; ten e-foldings from the logits' spread all is uniform or one-hot.
    best = minimize_scalar(loss, bounds=(-10.0, 10.0), method="bounded", options={"xatol": 1e-6})
    return _Fit(spread * math.exp(best.x), float(best.fun))
