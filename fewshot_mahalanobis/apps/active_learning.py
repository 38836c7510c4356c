"""Which picture to label next: one that is in doubt, like many others, and unlike those whose label is known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["density", "doubt", "most_useful", "typicality"]

#: Nearest pictures whose similarity counts.
_NEAREST = 5
#: Rows of similarities in memory at a time.
_BLOCK = 1024


def most_useful(probabilities: NDArray[np.floating], typical: NDArray[np.floating]) -> int:
    """Index of the picture whose label would teach most: the most typical of those in doubt.

    These are at least half as much in doubt as the one most in doubt: nearly all as long as the classifier knows
    little, and later those that it may get wrong. Measured on validation classes in
    ``benchmarks/results/which_next.md``.

    Parameters
    ----------
    probabilities : ndarray of shape (m, k)
        As ``predict_proba`` gives them.
    typical : ndarray of shape (m,)
        :func:`typicality` of the same pictures.
    """
    unsure = doubt(probabilities)
    return int(np.where(unsure >= unsure.max() / 2, typical, -np.inf).argmax())


def doubt(probabilities: NDArray[np.floating]) -> NDArray[np.float64]:
    """One minus the margin between the two most probable classes.

    Parameters
    ----------
    probabilities : ndarray of shape (m, k)

    Returns
    -------
    float64 ndarray of shape (m,)
        From 0 (sure) to 1 (both are equally probable). A single class is never in doubt.

    References
    ----------
    Scheffer, Decomain, Wrobel: Active Hidden Markov Models for Information Extraction. IDA 2001.
    """
    best = np.sort(np.asarray(probabilities, dtype=np.float64), axis=1)[:, -2:]
    return 1 - (best[:, -1] - best[:, :-1].sum(axis=1))


def typicality(
    features: NDArray[np.floating], densities: NDArray[np.floating], known: NDArray[np.floating]
) -> NDArray[np.float32]:
    """How like others, and unlike those with a label: density less the largest cosine to a picture with a label.

    Parameters
    ----------
    features : ndarray of shape (m, d)
        Features of pictures without a label, from ``transform``.
    densities : ndarray of shape (m,)
        Their :func:`density` among all pictures that are to be labelled.
    known : ndarray of shape (n, d)
        Features of pictures with a label, those of no class too.

    Returns
    -------
    float32 ndarray of shape (m,)

    References
    ----------
    After TypiClust: Hacohen, Dekel, Weinshall: Active Learning on a Budget: Opposite Strategies Suit High and Low
    Budgets. ICML 2022.
    """
    return np.asarray(densities - (_unit(features) @ _unit(known).T).max(axis=1), np.float32)


def density(features: NDArray[np.floating]) -> NDArray[np.float32]:
    """Mean cosine of each picture (m, d) to the five nearest others, (m,); 0 for a single one."""
    unit = _unit(features)
    means, count = np.zeros(len(unit), np.float32), min(_NEAREST, len(unit) - 1)
    for start in range(0, len(unit) if count > 0 else 0, _BLOCK):
        cosines = unit[start : start + _BLOCK] @ unit.T
        rows = np.arange(len(cosines))
        cosines[rows, start + rows] = -np.inf  # itself
        means[start : start + _BLOCK] = np.partition(cosines, -count, axis=1)[:, -count:].mean(axis=1)
    return means


def _unit(features: NDArray[np.floating]) -> NDArray[np.float32]:
    rows = np.asarray(features, np.float32)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1), np.float32)
