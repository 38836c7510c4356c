"""Episodes: which images of a source are support and which are query.

An episode is a pure function of (data set, split, seed, index): the same on any worker, in any order. The first
two are the source's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fewshot_mahalanobis.data.sources import ImageSource


@dataclass(frozen=True)
class Episode:
    """Image indices of one task. Labels are 0 to way - 1, every class among the support.

    Attributes
    ----------
    support, query : int64 arrays of shape (n,), (m,)
        Image indices into the source; no image is in both.
    support_labels, query_labels : int64 arrays of shape (n,), (m,)
    """

    support: NDArray[np.int64]
    support_labels: NDArray[np.int64]
    query: NDArray[np.int64]
    query_labels: NDArray[np.int64]

    @property
    def way(self) -> int:
        """Number of classes."""
        return int(self.support_labels.max()) + 1


def episode_rng(*parts: int | str) -> np.random.Generator:
    """The generator of the episode that ``parts`` (source, seed, index) name."""
    # Not hash(): it differs from process to process.
    words = [int.from_bytes(hashlib.sha256(p.encode()).digest(), "big") if isinstance(p, str) else p for p in parts]
    return np.random.default_rng(np.random.SeedSequence(words))


class FixedEpisodes:
    """Plain N-way K-shot episodes of one source: index -> :class:`Episode`.

    Parameters
    ----------
    source : ImageSource
    way, shot, queries : int
        Classes an episode, support and query images a class; see :func:`draw_episode`.
    seed : int

    Raises
    ------
    ValueError
        From :meth:`draw`: too few classes have ``shot + 1`` images.
    """

    def __init__(self, source: ImageSource, way: int, shot: int, queries: int = 10, *, seed: int = 0) -> None:
        self.source_name = source.name
        self.seed = seed
        self._classes = source.indices_of_class()
        self._shots = [shot] * way
        self._queries = queries

    def draw(self, index: int) -> Episode:
        """Episode ``index``."""
        return draw_episode(self._classes, self._shots, self._queries, episode_rng(self.source_name, self.seed, index))


def draw_episode(
    classes: Sequence[NDArray[np.int64]], shots: Sequence[int], queries: int, rng: np.random.Generator
) -> Episode:
    """Draw ``len(shots)`` classes without replacement, then ``shots[k]`` + ``queries`` images of the k-th.

    Parameters
    ----------
    classes : list of int64 arrays
        Image indices of each class of the source.
    shots : list of int
        Support images of each class; their number is the way.
    queries : int
        Query images a class; a class with too few images gives those it has left.
    rng : numpy Generator

    Raises
    ------
    ValueError
        Too few classes have ``max(shots) + 1`` images.
    """
    large = [k for k, images in enumerate(classes) if len(images) > max(shots)]
    if len(large) < len(shots):
        raise ValueError(
            f"a {len(shots)}-way {max(shots)}-shot episode needs {len(shots)} classes of at least {max(shots) + 1} "
            f"images; this source has {len(large)}"
        )
    chosen = rng.choice(large, len(shots), replace=False)
    return draw_images([classes[k] for k in chosen], shots, queries, rng)


def draw_images(
    classes: Sequence[NDArray[np.int64]],
    shots: Sequence[int] | NDArray[np.int64],
    queries: int,
    rng: np.random.Generator,
) -> Episode:
    """Draw ``shots[k]`` support and up to ``queries`` query images of each class ``k``, without replacement."""
    support, query = [], []
    for images, shot in zip(classes, shots, strict=True):
        drawn = rng.permutation(images)
        support.append(drawn[:shot])
        query.append(drawn[shot : shot + queries])
    return Episode(
        np.concatenate(support),
        np.repeat(np.arange(len(shots)), [len(s) for s in support]),
        np.concatenate(query),
        np.repeat(np.arange(len(shots)), [len(q) for q in query]),
    )


def draw_training_shots(classes: Sequence[NDArray[np.int64]], rng: np.random.Generator) -> list[int]:
    """Ways and shots for meta-training on tasks like those a user brings: 5 to 10 ways, 1 to 6 shots.

    Half of the tasks have one number of shots, half a number for each class.
    """
    way = int(rng.integers(5, 11))
    most = min(6, int(np.median([len(images) for images in classes])) - 2)
    enough = sum(len(images) > most for images in classes)
    way = min(way, enough)
    if rng.random() < 0.5:
        return [int(rng.integers(1, most + 1))] * way
    return rng.integers(1, most + 1, way).tolist()
