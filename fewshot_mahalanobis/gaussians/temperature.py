"""The temperature of probabilities: softmax(logits / T) that fits labelled examples best.

Guo et al., "On Calibration of Modern Neural Networks", ICML 2017. Without it, a softmax over distances (Bateni et al.,
CVPR 2020, equation 1) is as confident as the distances are large, right or wrong.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from scipy.optimize import brentq, minimize_scalar
from torch import Tensor

#: Label smoothing of :func:`fit_temperature`, in pseudo-examples over all classes.
_PSEUDO_EXAMPLES = 0.25


class TemperatureFit(NamedTuple):
    """A temperature and how well it fits."""

    temperature: float
    loss: float  # cross-entropy at that temperature, in nats an example
    gain: float  # cross-entropy that it saves over a temperature of 1, in nats, sum of the examples


def fit_temperature(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    """Temperature T under which softmax(logits / T) has the smallest cross-entropy on ``labels``, or 1.

    It is 1 unless another saves more than one nat, which is what Akaike's criterion charges for a fitted parameter:
    ten left-out examples cannot tell 1 from 1.5, and a head that was trained at a temperature of 1 is right about it.

    If every example is classified correctly, the likelihood is largest for T = 0, a certainty that no finite sample
    supports. So labels are smoothed, as Platt does, by a quarter of a pseudo-example: with c = 1 / 4k, of N examples
    the true class gets (N + c) / (N + 1 / 4) and each other class c / (N + 1 / 4). Platt's whole pseudo-example for
    each class made probabilities of few shots far too modest on validation classes.

    Parameters
    ----------
    logits : Tensor of shape (n, k)
        From ``Head.leave_one_out_logits``: minus infinity where a class has no example outside the group. An example
        whose own class has none is not counted; the others are examples of the classes that remain.
    labels : int64 Tensor of shape (n,)
        0..k-1.
    weights : Tensor of shape (n,), optional
        How many examples each counts as; by default one.

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
    Akaike: A New Look at the Statistical Model Identification. IEEE Transactions on Automatic Control, 1974.
    Platt: Probabilistic Outputs for Support Vector Machines. Advances in Large Margin Classifiers, 1999.
    """
    fit = temperature_fit(logits, labels, _PSEUDO_EXAMPLES / logits.shape[1], weights)
    return fit.temperature if fit.gain > 1 else 1.0


def temperature_fit(logits: Tensor, labels: Tensor, smoothing: float, weights: Tensor | None = None) -> TemperatureFit:
    """Fit a temperature with ``smoothing`` pseudo-examples of every class beside each example's own.

    Classes at minus infinity are no classes of that example: it has no pseudo-examples of them.
    """
    logits, labels = logits.detach().double().cpu(), labels.cpu()
    weights = logits.new_ones(len(labels)) if weights is None else weights.double().cpu()
    present = logits > -torch.inf
    counted = present.gather(1, labels[:, None])[:, 0]
    if not counted.any():
        raise ValueError("a temperature is fitted on left-out examples: at least one class needs two")
    logits, labels, weights, present = logits[counted], labels[counted], weights[counted, None], present[counted]
    n, k = float(weights.sum()), present.sum(dim=1, keepdim=True).double()
    total = n + k * smoothing
    targets = weights * (smoothing / total * present).scatter(1, labels[:, None], (n + smoothing) / total)
    mean = logits.where(present, 0.0).sum(dim=1, keepdim=True) / k
    spread = float(logits.where(present, mean).std(dim=1).mean()) if logits.shape[1] > 1 else 0.0
    scaled = (logits / (spread or 1.0)).clamp(min=-1e100)  # finite, as an absent class is multiplied by a target of 0

    def loss(log_temperature: float) -> float:
        return -float((targets * torch.log_softmax(scaled / math.exp(log_temperature), dim=1)).sum()) / n

    if spread == 0.0:
        return TemperatureFit(1.0, loss(0.0), 0.0)
    # Convex in 1 / T, so log T has one minimum; ten e-foldings from the logits' spread all is uniform or one-hot.
    best = minimize_scalar(loss, bounds=(-10.0, 10.0), method="bounded", options={"xatol": 1e-6})
    gain = n * (loss(-math.log(spread)) - float(best.fun))
    return TemperatureFit(spread * math.exp(best.x), float(best.fun), gain)


def temperature_of_confidence(logits: Tensor, confidence: float) -> float:
    """T >= 1 under which the largest of softmax(logits / T), logits (m, k), is ``confidence`` on average.

    It is 1 where that is smaller already.
    """
    logits = logits.detach().double().cpu()

    def excess(log_temperature: float) -> float:
        return float((logits / math.exp(log_temperature)).softmax(dim=1).amax(dim=1).mean()) - confidence

    most = math.log1p(float((logits.amax(dim=1) - logits.amin(dim=1)).max())) + 10.0  # there all is uniform
    if confidence <= 1 / logits.shape[1] or excess(0.0) <= 0 or excess(most) >= 0:
        return 1.0
    return math.exp(brentq(excess, 0.0, most))
