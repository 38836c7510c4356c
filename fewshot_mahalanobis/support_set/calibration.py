"""Probabilities and rejection calibrated on the support set alone.

Every support example is unseen by the classifier fitted to the others, and its logits under that classifier are exact
and cheap (``Head.leave_one_out_logits``). So a few-shot task has validation data after all: for the temperature of its
probabilities (``gaussians/temperature.py``), and for the threshold of rejection (``unknown.py``).
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fewshot_mahalanobis.gaussians.temperature import fit_temperature
from fewshot_mahalanobis.heads import Head
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.unknown import SIMILARITIES, OutlierScore


def calibrate(
    head: Head[Any],
    support: Features,
    labels: Tensor,
    *,
    temperature: float | str,
    false_rejection_rate: float,
    reject: bool,
    similarities: bool,
) -> tuple[float, OutlierScore | None]:
    """Choose the temperature and, where queries may be rejected, fit the outlier score on a support set.

    Parameters
    ----------
    head : Head
        With the settings that it has chosen on the support set.
    support : Features
        n support examples.
    labels : int64 Tensor of shape (n,)
        0..k-1, every class with at least one example.
    temperature : float or "auto"
        "auto" fits it to left-out examples. It is 1 where no class has two examples and nothing can be left out.
    false_rejection_rate : float
        Share of the queries of known classes that the threshold is to reject, in (0, 1).
    reject : bool
        Whether to fit an outlier score.
    similarities : bool
        Whether that has the terms ``SIMILARITIES`` beside the head's.

    Returns
    -------
    temperature : float
    outliers : OutlierScore or None

    Raises
    ------
    ValueError
        A setting is out of its range, an outlier score is wanted and no class has two examples, or as ``head``.
    """
    check_settings(temperature, false_rejection_rate)
    counts = labels.bincount()[labels]
    paired = counts > 1  # a class of one is gone when its example is left out
    if reject and not paired.any():
        raise ValueError(
            "unknown_label needs a class of at least two examples, because the threshold is found by leaving one out: "
            "add examples, or set a threshold of your own on outlier_score instead"
        )
    if not paired.any() or not (reject or temperature == "auto"):
        return (1.0 if isinstance(temperature, str) else float(temperature)), None
    terms = [(head, support.adapted)]
    if reject and similarities:
        terms += [(term.head, term.of(support)) for term in SIMILARITIES]
    paired = paired.cpu()
    left_out = [_left_out(term, features, labels)[paired] for term, features in terms]
    own = labels.cpu()[paired]
    if isinstance(temperature, str):
        # Where the metric is estimated too, most of a left-out example's distance is common to all classes: what the
        # support set does not span. No share of that may be taken off its own class alone.
        logits = _as_far_as_queries(left_out[0], own) if head.has_fixed_metric else left_out[0]
        temperature = fit_temperature(logits, own)
    if not reject:
        return float(temperature), None
    if head.is_squared_distance:
        left_out[0] = _as_far_as_queries(left_out[0], own)
    return float(temperature), OutlierScore.fit(left_out, support, labels, false_rejection_rate)


def _left_out(head: Head[Any], features: Tensor, labels: Tensor) -> Tensor:
    """Logits (n, k) of left-out examples, float64 on the CPU."""
    with torch.no_grad():
        return head.leave_one_out_logits(features, labels).cpu().double()


def _as_far_as_queries(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits (n, k) of left-out examples with squared distances as far from their own class as those of queries.

    Of n_k examples with covariance S, one lies tr(Q^-1 S) (1 + 1 / (n_k - 1)) from the mean of the others on average,
    but a query tr(Q^-1 S) (1 + 1 / n_k) from the mean of all. The ratio is 1 - 1 / n_k^2.
    """
    own = labels[:, None]
    shrink = 1 - 1 / labels.bincount()[own].double().square()
    return logits.scatter(1, own, shrink * logits.gather(1, own))


def check_settings(temperature: float | str, false_rejection_rate: float) -> None:
    """Raise ValueError unless :func:`calibrate` takes these settings."""
    if temperature != "auto" and not (isinstance(temperature, Real) and 0 < temperature < math.inf):
        raise ValueError(f'temperature must be positive and finite, or "auto", got {temperature!r}')
    if not (isinstance(false_rejection_rate, Real) and 0 < false_rejection_rate < 1):
        raise ValueError(f"false_rejection_rate must lie between 0 and 1, got {false_rejection_rate!r}")
