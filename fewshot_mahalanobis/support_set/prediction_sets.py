"""Sets of classes with a promise: conformal prediction by leaving support examples out.

A picture gets every class k whose surprise, -log p_k(x), is at most a limit. The limit comes from the support set:
each example, left out of the fit, is a query whose class is known, and the surprises of their own classes show how
large that of the right class gets. With n of them, the right class of a query is in its set with the promised
probability c at the order statistic of rank (n + 1) c, as for the threshold of rejection (``unknown.py``); so n can
keep c <= n / (n + 1).

The promise is for queries of known classes, drawn as the support examples are, and on average over them.

References
----------
Vovk: Cross-conformal predictors. Annals of Mathematics and Artificial Intelligence 74, 2015.
Barber, Candes, Ramdas, Tibshirani: Predictive inference with the jackknife+. Annals of Statistics 49, 2021.
"""

from __future__ import annotations

from numbers import Real

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewshot_mahalanobis.gaussians.support import left_out_weights, remaining_examples
from fewshot_mahalanobis.support_set.calibration import left_out_logits
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.unknown import LeftOutScores, rejection_threshold

#: Most parts of the support set that are left out, where each time unlabelled examples are learned from anew.
_MOST_PARTS = 10


def largest_surprise(fitted: FittedHead, coverage: float) -> float:
    """Limit of the surprise of a class up to which it is in the set of a query.

    Parameters
    ----------
    fitted : FittedHead
    coverage : float
        Share of the queries of known classes whose right class is to be in their set, in (0, 1).

    Raises
    ------
    ValueError
        The coverage is not between 0 and 1, or the examples are too few to keep it. The message says what they can.
    """
    if not (isinstance(coverage, Real) and 0 < coverage < 1):
        raise ValueError(
            f"coverage must lie between 0 and 1, got {coverage!r}: with 0.9 the sets of 90 of 100 queries have the "
            "right class"
        )
    surprises = _left_out_surprises(fitted)
    n = len(surprises.scores) if surprises.groups is None else len(surprises.groups.unique())
    if n == 0:
        raise ValueError(
            "sets of classes need a class of at least two examples that are not copies or of one group, because a "
            "promise is found by leaving one out: add examples"
        )
    if coverage > n / (n + 1) * (1 + 1e-9):
        raise ValueError(
            f"{n} left-out examples can promise a coverage of at most {np.floor(1e3 * n / (n + 1)) / 1e3:g}, not "
            f"{coverage:g}: add examples, or ask for less"
        )
    return rejection_threshold(surprises.scores, 1 - coverage, surprises.groups)


def surprises_within(log_probabilities: NDArray[np.float64], limit: float) -> NDArray[np.bool_]:
    """Which classes are in the sets of queries, (m, k), by their log-probabilities (m, k); the most probable one is."""
    inside = -log_probabilities <= limit
    np.put_along_axis(inside, log_probabilities.argmax(axis=1)[:, None], True, axis=1)
    return inside


def _left_out_surprises(fitted: FittedHead) -> LeftOutScores:
    """Surprises of the own classes of left-out support examples, and their groups."""
    labels, groups = fitted.labels.cpu(), fitted.apart
    groups = None if groups is None else groups.cpu()
    counted = left_out_weights(labels, groups) > 0  # an example whose class has others outside its group
    if fitted.pool is None:
        logits = left_out_logits(fitted.settled, fitted.support.adapted, fitted.labels, groups)
        own = fitted.log_probabilities(fitted.with_priors(logits))
    else:
        own = _left_out_in_parts(fitted, labels, groups)
    surprises = -own.gather(1, labels[:, None])[:, 0]
    return LeftOutScores(surprises[counted], None if groups is None else groups[counted])


def _left_out_in_parts(fitted: FittedHead, labels: Tensor, groups: Tensor | None) -> Tensor:
    """Log-probabilities (n, k) of support examples by heads that learned from the others and the unlabelled examples.

    A part has at most one group of each class, where there are no more than ten of it.
    """
    assert fitted.pool is not None
    numbers = torch.arange(len(labels)) if groups is None else groups
    places, part_of = dict[int, int](), dict[int, int]()  # groups of a class so far; the part of each group
    for label, number, remaining in zip(
        labels.tolist(), numbers.tolist(), remaining_examples(labels, groups).tolist(), strict=True
    ):
        if remaining and number not in part_of:
            part_of[number] = places.setdefault(label, 0) % _MOST_PARTS
            places[label] += 1
    parts = torch.tensor([part_of.get(number, -1) for number in numbers.tolist()])
    found = torch.zeros(len(labels), len(fitted.classes), dtype=torch.float64)
    for part in range(int(parts.max()) + 1):
        out = parts == part
        rest = fitted.without(out.numpy()).with_unlabelled(fitted.pool.features)
        found[out] = rest.log_probabilities(rest.logits(fitted.support.adapted[out])).cpu()
    return found
