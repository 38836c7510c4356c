"""Probabilities and rejection calibrated on the support set alone.

Every support example is unseen by the classifier fitted to the others, and its logits under that classifier are exact
and cheap (``Head.leave_one_out_logits``). So a few-shot task has validation data after all: for the temperature of its
probabilities (``gaussians/temperature.py``), and for the threshold of rejection (``unknown.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fewshot_mahalanobis.gaussians.support import effective_counts, left_out_weights
from fewshot_mahalanobis.gaussians.temperature import fit_temperature
from fewshot_mahalanobis.heads import Head
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.unknown import HEAD, OutlierScore, Similarity


def calibrate(
    head: Head[Any],
    support: Features,
    labels: Tensor,
    groups: Tensor | None = None,
    *,
    temperature: float | str,
    false_rejection_rate: float,
    reject: bool,
    similarities: Sequence[Similarity] = (),
    negatives: Mapping[str, Tensor] | None = None,
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
    groups : int64 Tensor of shape (n,), optional
        Examples of equal number are left out together, and count as one.
    temperature : float or "auto"
        "auto" fits it to left-out examples. It is 1 where no class has two groups and nothing can be left out.
    false_rejection_rate : float
        Share of the queries of known classes that the threshold is to reject, in (0, 1).
    reject : bool
        Whether to fit an outlier score.
    similarities : sequence of Similarity
        Terms of the outlier score beside the head's.
    negatives : mapping of str to Tensor of shape (m, k), optional
        Logits of left-out examples of no class by each term.

    Returns
    -------
    temperature : float
    outliers : OutlierScore or None

    Raises
    ------
    ValueError
        An outlier score is wanted and no class has two groups, or as ``head``.
    """
    weights = left_out_weights(labels, groups).cpu()
    counted = weights > 0  # an example whose class has others outside its group
    if reject and not counted.any():
        copies = "" if groups is None else " that are not copies or of one group"
        raise ValueError(
            f"unknown_label needs a class of at least two examples{copies}, because the threshold is found by leaving "
            "one out: add examples, or set a threshold of your own on outlier_score instead"
        )
    if not counted.any() or not (reject or temperature == "auto"):
        return (1.0 if isinstance(temperature, str) else float(temperature)), None
    left_out = {HEAD: _left_out(head, support.adapted, labels, groups)[counted]}
    if reject:
        left_out |= {
            term.name: _left_out(term.head, term.of(support), labels, groups)[counted] for term in similarities
        }
    labels_on_cpu, groups_on_cpu = labels.cpu(), None if groups is None else groups.cpu()
    shrink = left_out_shrinkage(labels_on_cpu, groups_on_cpu)[counted]
    left_out_labels = labels_on_cpu[counted]
    left_out_groups = None if groups_on_cpu is None else groups_on_cpu[counted]
    if isinstance(temperature, str):
        logits = left_out_logits(head, support.adapted, labels, groups)[counted]
        temperature = fit_temperature(logits, left_out_labels, weights[counted])
    if not reject:
        return float(temperature), None
    if head.distance_power == 2:
        left_out[HEAD] = as_far_as_queries(left_out[HEAD], left_out_labels, shrink, torch.zeros_like(shrink))
    return float(temperature), OutlierScore.fit(
        left_out, support, labels, false_rejection_rate, left_out_groups, similarities, negatives
    )


def left_out_logits(head: Head[Any], features: Tensor, labels: Tensor, groups: Tensor | None) -> Tensor:
    """Logits (n, k) of left-out examples, float64 on the CPU, as if they were queries of the head fitted to all."""
    shrink = left_out_shrinkage(labels.cpu(), None if groups is None else groups.cpu())
    # Shrink only the class-specific part of the distance: a mean closer to its examples does not change the rest.
    with torch.no_grad():
        common = head.common_distance(features, labels, groups).cpu().double()
    logits = _left_out(head, features, labels, groups)
    return as_far_as_queries(logits, labels.cpu(), shrink ** (head.distance_power / 2), common)


def _left_out(head: Head[Any], features: Tensor, labels: Tensor, groups: Tensor | None) -> Tensor:
    """Logits (n, k) of left-out examples, float64 on the CPU."""
    with torch.no_grad():
        return head.leave_one_out_logits(features, labels, groups).cpu().double()


def as_far_as_queries(logits: Tensor, labels: Tensor, shrink: Tensor, common: Tensor) -> Tensor:
    """Logits (n, k) with what each distance to the own class has beyond ``common`` (n,) times ``shrink`` (n,)."""
    own, common = labels[:, None], common[:, None]
    return logits.scatter(1, own, shrink[:, None] * (logits.gather(1, own) + common) - common)


def left_out_shrinkage(labels: Tensor, groups: Tensor | None) -> Tensor:
    """Factor (n,) that puts left-out examples as far from their own class as queries are.

    In a class of n_k examples with covariance S, a left-out example lies tr(Q^-1 S) (1 + 1 / (n_k - 1)) from the mean
    of the others on average, and a query tr(Q^-1 S) (1 + 1 / n_k) from the mean of all. The ratio is 1 - 1 / n_k^2.
    """
    if groups is None:
        return 1 - 1 / labels.bincount()[labels].double().square()
    class_counts, without_groups = effective_counts(labels, groups)
    return (1 + 1 / class_counts[labels]) / (1 + 1 / without_groups)


def check_settings(temperature: float | str, false_rejection_rate: float) -> None:
    """Raise ValueError unless these are settings of :func:`calibrate`."""
    if temperature != "auto" and not (isinstance(temperature, Real) and 0 < temperature < math.inf):
        raise ValueError(f'temperature must be positive and finite, or "auto", got {temperature!r}')
    if not (isinstance(false_rejection_rate, Real) and 0 < false_rejection_rate < 1):
        raise ValueError(
            f"false_rejection_rate must lie between 0 and 1, got {false_rejection_rate!r}: 0.05 rejects 5 of 100 "
            "queries of known classes"
        )
