"""Which queries to label next: those that the classifier is least sure of, and unlike each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["doubt", "most_useful"]


def doubt(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """One minus the margin between the two most probable classes.

    Parameters
    ----------
    probabilities : ndarray of shape (m, k)

    Returns
    -------
    float64 ndarray of shape (m,)
        From 0, sure, to 1, the two are equally probable.

    References
    ----------
    Scheffer, Decomain, Wrobel: Active Hidden Markov Models for Information Extraction. IDA 2001.
    """
    best = np.sort(np.asarray(probabilities, dtype=np.float64), axis=1)[:, -2:]
    return 1 - (best[:, 1] - best[:, 0])


def most_useful(probabilities: NDArray[np.float64], features: NDArray[np.floating], n: int) -> NDArray[np.int64]:
    """Queries whose labels would teach the classifier most, the most useful first.

    The first is the one most in doubt. Each other has the largest product of its doubt and its Euclidean distance to
    the nearest one chosen before: of many similar pictures in doubt, one is enough.

    Parameters
    ----------
    probabilities : ndarray of shape (m, k)
        As ``predict_proba`` gives them.
    features : ndarray of shape (m, d)
        As ``transform`` gives them.
    n : int
        How many; all if there are fewer.

    Returns
    -------
    int64 ndarray of shape (min(n, m),)
        Their indices.

    Raises
    ------
    ValueError
        ``n`` is negative, or the numbers of rows differ.
    """
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    if len(probabilities) != len(features):
        raise ValueError(f"there are {len(probabilities)} rows of probabilities but {len(features)} of features")
    unsure = doubt(probabilities)
    free, chosen = np.ones(len(unsure), dtype=bool), list[int]()
    nearest = np.ones(len(unsure))  # any constant: nothing is chosen yet
    while len(chosen) < min(n, len(unsure)):
        index = int(np.where(free, unsure * nearest, -1).argmax())
        distance = np.linalg.norm(features - features[index], axis=1)
        nearest = np.minimum(nearest, distance) if chosen else distance
        free[index] = False
        chosen.append(index)
    return np.array(chosen, dtype=np.int64)
