"""Rejecting unknown classes: the outlier score of a query, and a conformal threshold.

The score of a query is a sum over looks at it, each standardised,

    a(x) = sum_j w_j (a_j(x) - m_j) / s_j,    a_j(x) = -max_k l_jk(x),

l_jk the similarity of the query to class k as look j has it. The first look is the head's, whose logits are minus
distances (Lee et al., "A Simple Unified Framework for Detecting Out-of-Distribution Samples and Adversarial Attacks",
NeurIPS 2018). The second and the third are cosines of adapted features to the class means, about zero and about the
centre of the classes. Adapted features tell the classes of a task apart, and lose what pictures of another kind look
like; the fourth look, the cosine in cube roots of the features of the network without adaptation, keeps it.

Mean m_j, standard deviation s_j and the threshold come from the support set: each of its examples, left out of the fit,
is a query known to belong. The threshold is the order statistic of conformal prediction (Vovk et al., "Algorithmic
Learning in a Random World", 2005), with leave-one-out in place of a split.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.inputs import class_means
from fewshot_mahalanobis.heads import CosineHead, Head

#: The unknown label's type and its name, by the kind of the classes' dtype; else a string.
_WANTED: dict[str, tuple[type, str]] = {
    "i": (Integral, "an integer"),
    "u": (Integral, "an integer"),
    "f": (Real, "a number"),
}

#: w_j of the unadapted look, chosen on validation classes; the others have 1.
_WEIGHT = 2.0

#: m_j and s_j / w_j of each look.
Units = tuple[tuple[float, float], ...]


class CentredCosineHead(Head[tuple[Tensor, Tensor]]):
    """Logits = cos(x - c, mu_k - c), c the mean of the class means mu_k; float64."""

    def fit(self, support_features: Tensor, support_labels: Tensor) -> tuple[Tensor, Tensor]:
        """M_k = mu_k - c (k, d), and c (d,), of the support features (n, d), labels (n,)."""
        means = class_means(support_features.double(), support_labels)
        return means - means.mean(dim=0), means.mean(dim=0)

    def logits(self, state: tuple[Tensor, Tensor], query_features: Tensor) -> Tensor:
        """Cosines (m, k) of queries (m, d)."""
        means, centre = state
        return F.normalize(query_features.double() - centre, dim=1) @ F.normalize(means, dim=1).T

    def leave_one_out_logits(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        """Logits (n, k) of each support example by the head fitted to the others, exactly, without n fits."""
        means, centre = self.fit(support_features, support_labels)
        x, y, k = support_features.double() - centre, support_labels, len(means)
        counts = y.bincount()[y, None].double()
        alone, own = counts == 1, F.one_hot(y, k).bool()
        # Without x its class mean moves by -e v, v = x - M_y, and c by -e v / k; without class y c moves by
        # -M_y / (k - 1). So M_j becomes M_j + g_j w, and x - c becomes x + a w.
        e = 1 / (counts - 1).clamp(min=1)
        w = torch.where(alone, means[y], x - means[y])
        a = torch.where(alone, 1 / max(k - 1, 1), e / k)
        g = torch.where(alone | ~own, a, a - e)
        x = x + a * w
        length = means.square().sum(dim=1) + 2 * g * (w @ means.T) + g.square() * w.square().sum(dim=1, keepdim=True)
        product = x @ means.T + g * (x * w).sum(dim=1, keepdim=True)
        scale = length.clamp(min=0).sqrt().clamp(min=1e-12) * x.norm(dim=1, keepdim=True).clamp(min=1e-12)
        return (product / scale).masked_fill(alone & own, -torch.inf)


class Look(NamedTuple):
    """One look at examples."""

    head: Head[Any]
    features: Tensor  # (n, d), which the head compares with those of the support set
    weight: float = 1.0  # w_j


def looks_of(head: Head[Any], head_features: Tensor, adapted: Tensor, unadapted: Tensor) -> list[Look]:
    """All looks at examples, by the features (n, d) that the head classifies, by adapted and by unadapted features.

    Without an adapted network the last two are the same.
    """
    roots = unadapted.sign() * unadapted.abs().pow(1 / 3)  # a few large features no longer decide the cosine
    return [
        Look(head, head_features),
        Look(CosineHead(), adapted),
        Look(CentredCosineHead(), adapted),
        Look(CosineHead(), roots, _WEIGHT),
    ]


def outlier_score(logits: Sequence[Tensor], units: Units | None = None) -> Tensor:
    """Outlier score (m,) of each query, float64; larger is farther from all classes.

    Parameters
    ----------
    logits : Tensors of shape (m, k)
        Of each look, the head's first.
    units : optional
        By :func:`score_units`. Without them the score is that of the head alone, minus the largest logit: for a
        Mahalanobis head s times the squared distance to the nearest class.
    """
    scores = [-look.double().amax(dim=1) for look in logits]  # a_j(x)
    if units is None:
        return scores[0]
    parts = [(a - mean) / unit for a, (mean, unit) in zip(scores, units, strict=True)]
    return torch.stack(parts).sum(dim=0)


def score_units(logits: Sequence[Tensor], weights: Sequence[float]) -> Units:
    """m_j and s_j / w_j of each look, by its logits (n, k) of left-out examples, of which it takes two.

    Where all scores are equal but for rounding, as cosines of copies, s_j is 1.
    """
    units = []
    for look, weight in zip(logits, weights, strict=True):
        score = outlier_score([look])
        mean, std = float(score.mean()), float(score.std())
        units.append((mean, (std if std > 1e-6 * abs(mean) else 1.0) / weight))
    return tuple(units)


def rejection_threshold(scores: Tensor, false_rejection_rate: float) -> float:
    """Score that a query of a known class exceeds with the promised probability.

    Of n scores and one more, all exchangeable, the new one exceeds the j-th smallest of the n with probability
    1 - j / (n + 1), whatever their distribution. The threshold is the score of rank j = (n + 1) (1 - rate), on the
    line between its neighbours where that is not whole.

    Parameters
    ----------
    scores : Tensor of shape (n,)
        Of examples of known classes, each unseen by the classifier that scored it.
    false_rejection_rate : float
        Between 0 and 1.

    Returns
    -------
    float

    Warns
    -----
    UserWarning
        The rate is below 1 / (n + 1), the smallest that n examples can guarantee. The threshold is the largest score.
    """
    n = len(scores)
    finest = 1 / (n + 1)
    if false_rejection_rate < finest * (1 - 1e-9):
        warnings.warn(
            f"{n} left-out examples cannot guarantee false_rejection_rate={false_rejection_rate:g}: about {finest:.2g} "
            f"of the queries of known classes will be rejected. Add examples, or set {finest:.2g} or more",
            stacklevel=_level_of_caller(),
        )
    return float(np.quantile(scores.numpy(), 1 - false_rejection_rate, method="weibull"))  # of rank (n + 1) (1 - rate)


def _level_of_caller() -> int:
    """``stacklevel`` of the first line outside this package, as seen from the function that calls this one."""
    package, level = __name__.partition(".")[0], 1
    frame = inspect.currentframe()
    while (frame := frame and frame.f_back) and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level += 1
    return level


def predict_or_reject(logits: Tensor, scores: Tensor, threshold: float | None) -> NDArray[np.int64]:
    """Index (m,) of each query's nearest class by logits (m, k); k where its outlier score (m,) is above the threshold.

    A threshold of None rejects no query.
    """
    nearest = logits.argmax(dim=1)
    if threshold is not None:
        nearest = nearest.masked_fill(scores > threshold, logits.shape[1])
    return nearest.cpu().numpy()


def output_labels(classes: NDArray[Any], unknown_label: Any) -> NDArray[Any]:
    """Every label that can be predicted: the classes (k,), and after them the unknown label if there is one.

    The type is that of ``classes``, wider where the unknown label needs that. ValueError if the unknown label is a
    class, or of another type than the classes.
    """
    if unknown_label is None:
        return classes
    kind = classes.dtype.kind
    if kind == "b":
        raise ValueError("True and False leave no value for unknown_label: fit to integers or strings instead")
    wanted, name = _WANTED.get(kind, (str, "a string"))
    fits = isinstance(unknown_label, wanted) and not isinstance(unknown_label, bool)
    if not fits or unknown_label != unknown_label:  # NaN is not itself
        raise ValueError(
            f"unknown_label={unknown_label!r} is not of the type of the labels, such as {classes.tolist()[0]!r}: "
            f"give {name}"
        )
    if unknown_label in classes.tolist():
        raise ValueError(f"unknown_label={unknown_label!r} is the label of a class: choose another")
    dtype = np.promote_types(classes.dtype, np.min_scalar_type(unknown_label))
    if kind in "iu" and dtype.kind not in "iu":
        raise ValueError(f"no integer type holds unknown_label={unknown_label!r} and labels of type {classes.dtype}")
    labels = np.empty(len(classes) + 1, dtype)
    labels[:-1], labels[-1] = classes, unknown_label
    return labels
