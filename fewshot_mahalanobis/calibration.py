"""Probabilities and rejection calibrated on the support set alone: the temperature and the threshold.

Every support example was unseen by the classifier fitted to the others, and its logits under that classifier are exact
and cheap (``Head.leave_one_out_logits``). So a few-shot task has validation data after all: for the temperature of its
probabilities (``temperature.py``), and for how far from all classes a query may be before it is of none
(``rejection.py``).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewshot_mahalanobis.heads import Head
from fewshot_mahalanobis.rejection import outlier_score, rejection_threshold
from fewshot_mahalanobis.temperature import fit_temperature


class Calibration(NamedTuple):
    """Temperature of the probabilities and threshold of rejection."""

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
    """Choose the temperature and, where queries may be rejected, the threshold on a support set.

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
        return Calibration(1.0 if isinstance(temperature, str) else float(temperature), None)
    with torch.no_grad():
        logits = head.leave_one_out_logits(features, labels).cpu().double()
    if head.is_squared_distance:
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
