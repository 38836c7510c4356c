"""Episodes: which images of a source are support and which are query.

An episode is a pure function of (source, seed, index): the same in every process, drawn in any order. The samplers also
seed by the source's name (data set and split), so that sources of the same shape get different episodes. Only the
evaluation of N-way K-shot episodes does not (see :class:`FixedEpisodes`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fewshot_mahalanobis.research.data.sources import ImageSource


@dataclass(frozen=True)
class Episode:
    """Image indices of one task. Labels are 0 to way - 1; every class is in the support set.

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


class Episodes(Protocol):
    """Sampler of the episodes of one source."""

    def draw(self, index: int) -> Episode:
        """Episode ``index``."""


def episode_rng(*parts: int | str) -> np.random.Generator:
    """Random generator of the episode that ``parts`` identify: source name, seed, index."""
    # Not hash(): it differs from process to process.
    words = [int.from_bytes(hashlib.sha256(p.encode()).digest(), "big") if isinstance(p, str) else p for p in parts]
    return np.random.default_rng(np.random.SeedSequence(words))


class FixedEpisodes:
    """N-way K-shot episodes of one source.

    :meth:`draw` raises ValueError if fewer than ``way`` classes have ``shot + 1`` images.
    """

    def __init__(self, source: ImageSource, way: int, shot: int, queries: int = 10, *, seed: int = 0) -> None:
        self._source_name = source.name
        self._seed = seed
        self._classes = source.indices_of_class()
        self._shots = [shot] * way
        self._queries = queries

    def draw(self, index: int) -> Episode:
        """Episode ``index``."""
        rng = episode_rng(self._source_name, self._seed, index)
        return draw_episode(self._classes, self._shots, self._queries, rng)


def evaluation_episodes(
    source: ImageSource, way: int, shot: int, queries: int, *, seed: int = 0
) -> Callable[[int], Episode]:
    """Return the function that draws the N-way K-shot episodes of evaluation, by their number.

    The source's name does not seed them: the published accuracies were measured on these episodes. ValueError as for
    :class:`FixedEpisodes`.
    """
    classes = source.indices_of_class()
    return lambda index: draw_episode(classes, [shot] * way, queries, episode_rng(seed, index))


class SmallEpisodes:
    """Episodes like a user's tasks: 5 to 10 ways, 1 to 6 shots; in half of them the classes differ in shots.

    With small classes, shots stay two below the median class size; ways never exceed the number of classes that have
    more images than that. ValueError if half of the classes have fewer than 3 images.
    """

    def __init__(self, source: ImageSource, queries: int, *, seed: int = 0) -> None:
        self._source_name = source.name
        self._seed = seed
        self._classes = source.indices_of_class()
        self._queries = queries
        sizes = [len(images) for images in self._classes]
        self._max_shot = min(6, int(np.median(sizes)) - 2, sorted(sizes)[-2:][0] - 1)  # leaves two classes
        if self._max_shot < 1:
            raise ValueError(f"{source.name}: half of the classes have fewer than 3 images; leave them out")
        self._max_way = sum(size > self._max_shot for size in sizes)

    def draw(self, index: int) -> Episode:
        """Episode ``index``."""
        rng = episode_rng(self._source_name, self._seed, index)
        return draw_episode(self._classes, self._draw_shots(rng), self._queries, rng)

    def _draw_shots(self, rng: np.random.Generator) -> list[int]:
        way = min(int(rng.integers(5, 11)), self._max_way)
        if rng.random() < 0.5:
            return [int(rng.integers(1, self._max_shot + 1))] * way
        return rng.integers(1, self._max_shot + 1, way).tolist()


def draw_episode(
    classes: Sequence[NDArray[np.int64]], shots: Sequence[int], queries: int, rng: np.random.Generator
) -> Episode:
    """Draw ``len(shots)`` classes without replacement, then ``shots[k]`` + ``queries`` images of the k-th.

    ``classes`` has the image indices of each class of the source; one with too few images gives the queries that are
    left. ValueError if too few classes have ``max(shots) + 1`` images.
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
