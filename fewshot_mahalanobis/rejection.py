"""Rejecting unknown classes: the outlier score of a query, and a conformal threshold.

The score of a query is a sum over looks at it, each standardised,

    a(x) = sum_j (a_j(x) - m_j) / s_j,    a_j(x) = -max_k l_jk(x),

l_jk the similarity of the query to class k as look j has it. The first look is the head's, whose logits are minus
distances (Lee et al., "A Simple Unified Framework for Detecting Out-of-Distribution Samples and Adversarial Attacks",
NeurIPS 2018), the second the cosine of adapted features to the class means. Adapted features tell the classes of a task
apart, and lose what pictures of another kind look like; the third look is the same cosine in features of the network
without adaptation, which keep it.

Mean m_j, standard deviation s_j and the threshold come from the support set: each of its examples, left out of the fit,
is a query known to belong. The threshold is the order statistic of conformal prediction (Vovk et al., "Algorithmic
Learning in a Random World", 2005), with leave-one-out in place of a split.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: The unknown label's type and its name, by the kind of the classes' dtype; else a string.
_WANTED: dict[str, tuple[type, str]] = {
    "i": (Integral, "an integer"),
    "u": (Integral, "an integer"),
    "f": (Real, "a number"),
}


#: Mean m_j and standard deviation s_j of each look's score.
Units = tuple[tuple[float, float], ...]


def outlier_score(looks: Sequence[Tensor], units: Units | None = None) -> Tensor:
    """Outlier score (m,) of each query, float64; larger is farther from all classes.

    Parameters
    ----------
    looks : Tensors of shape (m, k)
        Logits of the queries, the head's first.
    units : optional
        By :func:`score_units`. Without them the score is that of the head alone, minus the largest logit: for a
        Mahalanobis head s times the squared distance to the nearest class.
    """
    scores = [-logits.double().amax(dim=1) for logits in looks]  # a_j(x)
    if units is None:
        return scores[0]
    return sum(((a - mean) / std for a, (mean, std) in zip(scores, units, strict=True)), torch.zeros_like(scores[0]))


def score_units(looks: Sequence[Tensor]) -> Units:
    """Mean and standard deviation of the scores of left-out examples (n of at least 2), by their logits (n, k).

    Where all scores are equal, as those of copies, the deviation is 1.
    """
    scores = [outlier_score([logits]) for logits in looks]
    return tuple((float(a.mean()), float(a.std()) or 1.0) for a in scores)


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
