"""Probabilities and rejection calibrated on the support set alone: the temperature and the threshold.

Every support example was unseen by the classifier fitted to the others, and its logits under that classifier are exact
and cheap (``Head.leave_one_out_logits``). So a few-shot task has validation data after all: for the temperature of its
probabilities (``temperature.py``), and for how far from all classes a query may be before it is of none
(``rejection.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from fewshot_mahalanobis.rejection import Look, Units, outlier_score, rejection_threshold, score_units
from fewshot_mahalanobis.temperature import fit_temperature


class Calibration(NamedTuple):
    """Temperature of the probabilities, threshold of rejection and units of its score."""

    temperature: float  # predict_proba is softmax(logits / temperature)
    threshold: float | None = None  # outlier scores above it are of no class; None where no query is refused
    units: Units | None = None  # of the looks that the outlier score adds up; None where it is the head's alone


def calibrate(
    looks: Sequence[Look], labels: Tensor, *, temperature: float | str, false_rejection_rate: float, reject: bool
) -> Calibration:
    """Choose the temperature and, where queries may be rejected, the threshold on a support set.

    Parameters
    ----------
    looks : sequence of Look
        At the support set: the head's, then what else the outlier score is made of.
    labels : int64 Tensor of shape (n,)
        0..k-1, every class with at least one example.
    temperature : float or "auto"
        "auto" fits it to left-out examples; where no class has two and nothing can be left out, it is 1.
    false_rejection_rate : float
        Share of the queries of known classes that the threshold is to reject, in (0, 1).
    reject : bool
        Whether to find a threshold.

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
    paired = counts > 1  # a class of one is gone when its example is left out
    if reject and not paired.any():
        raise ValueError(
            "unknown_label needs a class of at least two examples, because the threshold is found by leaving one out: "
            "add examples, or set a threshold of your own on outlier_score instead"
        )
    if not paired.any() or not (reject or temperature == "auto"):
        return Calibration(1.0 if isinstance(temperature, str) else float(temperature))
    left_out = [_left_out(look, labels)[paired] for look in (looks if reject else looks[:1])]
    if isinstance(temperature, str):
        temperature = fit_temperature(left_out[0], on_cpu[paired])
    if not reject:
        return Calibration(float(temperature))
    if len(left_out) == 1:
        return Calibration(float(temperature), rejection_threshold(outlier_score(left_out), false_rejection_rate))
    units, n = score_units(left_out, [look.weight for look in looks]), len(left_out[0])
    # The units are made of the left-out examples: their own squared deviations from the mean are (1 - 1 / n) s_j^2 on
    # average, those of queries (1 + 1 / n) s_j^2.
    scores = outlier_score(left_out, units) * math.sqrt((n + 1) / (n - 1))
    return Calibration(float(temperature), rejection_threshold(scores, false_rejection_rate), units)


def _left_out(look: Look, labels: Tensor) -> Tensor:
    """Logits (n, k) of left-out examples, float64, as far from their own class as queries are."""
    with torch.no_grad():
        logits = look.head.leave_one_out_logits(look.features, labels).cpu().double()
    if look.head.is_squared_distance:
        # Of n_k examples with covariance S, one lies tr(Q^-1 S) (1 + 1 / (n_k - 1)) from the mean of the others on
        # average, but a query tr(Q^-1 S) (1 + 1 / n_k) from the mean of all. The ratio is 1 - 1 / n_k^2.
        own = labels.cpu()[:, None]
        shrink = 1 - 1 / own.flatten().bincount()[own].double().square()
        logits = logits.scatter(1, own, shrink * logits.gather(1, own))
    return logits


def check_settings(temperature: float | str, false_rejection_rate: float) -> None:
    """Raise ValueError unless :func:`calibrate` takes these settings."""
    if temperature != "auto" and not (isinstance(temperature, Real) and 0 < temperature < math.inf):
        raise ValueError(f'temperature must be positive and finite, or "auto", got {temperature!r}')
    if not (isinstance(false_rejection_rate, Real) and 0 < false_rejection_rate < 1):
        raise ValueError(f"false_rejection_rate must lie between 0 and 1, got {false_rejection_rate!r}")
