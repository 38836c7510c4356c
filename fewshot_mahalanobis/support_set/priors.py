"""Priors: the shares of the classes among the queries.

The head's probabilities are those of equal shares, p_k. With shares pi_k, Bayes' rule makes them pi_k p_k, divided by
their sum. The support set says nothing of the shares: it has as many examples of each class as somebody collected.
Unlabelled examples do, and where ``fit`` gets some and no priors, the shares among them take their place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewshot_mahalanobis.plain import plain
from fewshot_mahalanobis.support_set.caller_warnings import warn_caller

#: Shares whose sum is further from one than this are rescaled with a warning, as in LinearDiscriminantAnalysis.
TOLERANCE = 1e-5
_IN_THE_TERMINAL = "On the command line: fit --priors LABEL=SHARE,..."


def checked_priors(
    priors: Any, classes: NDArray[Any], allowed: NDArray[Any] | None = None, *, warn: bool = True
) -> NDArray[Any] | None:
    """Return the share of each class, float64 (k,) with sum one; None if none are given.

    Parameters
    ----------
    priors : array-like of shape (k,), mapping of label to share, "equal", or None
    classes : ndarray of shape (k,)
        The labels, sorted.
    allowed : ndarray, optional
        Every label that may occur. A mapping may have a share for those that have not; it is left out.
    warn : bool
        False leaves out the warning.

    Raises
    ------
    ValueError
        A class has no share, a label is no class, or a share is negative or no number. The message names it.

    Warns
    -----
    UserWarning
        The shares do not sum to one. They are rescaled.
    """
    if priors is None:
        return None
    if isinstance(priors, str) and priors == "equal":
        return np.full(len(classes), 1 / len(classes))
    labels = classes.tolist()
    shares = _by_label(priors, labels, [] if allowed is None else allowed.tolist())
    for label, share in shares.items():
        if not isinstance(share, Real) or not 0 <= float(share) < math.inf:
            raise ValueError(f"priors: the share of {label!r} is {share!r}; give a number that is 0 or more")
    total = float(sum(shares.values()))
    class_shares = np.array([float(shares[label]) for label in labels])
    if class_shares.sum() == 0:
        raise ValueError(f"priors: every class of {labels} has the share 0; give one of them more")
    if warn and abs(total - 1) > TOLERANCE:
        warn_caller(f"the priors sum to {total:g}, not to 1: they are divided by that")
    return class_shares / class_shares.sum()


def _by_label(priors: Any, labels: list[Any], allowed: Sequence[Any]) -> dict[Any, Any]:
    """The share of each label, and of no other than these and those that are allowed."""
    if hasattr(priors, "to_dict"):  # a pandas Series: its index names the labels, in any order
        priors = plain(priors.to_dict())
    if isinstance(priors, Mapping):
        if unknown := [label for label in priors if label not in labels and label not in allowed]:
            raise ValueError(f"priors: {unknown[0]!r} is none of the classes {labels}")
        if missing := [label for label in labels if label not in priors]:
            raise ValueError(
                f"priors: the class {missing[0]!r} has no share. Give every class one: set_params(priors={{...}}) "
                f"before fit or partial_fit, with a share for each of {labels}. {_IN_THE_TERMINAL}"
            )
        return dict(priors)
    values = np.asarray(priors, dtype=object)
    if values.shape != (len(labels),):
        raise ValueError(
            f"priors have the shape {values.shape}, but there are {len(labels)} classes: set_params(priors=[...]) "
            f"before fit or partial_fit, with a share for each of {labels} in this order, or a mapping from label to "
            f"share. {_IN_THE_TERMINAL}"
        )
    return dict(zip(labels, values.tolist(), strict=True))
