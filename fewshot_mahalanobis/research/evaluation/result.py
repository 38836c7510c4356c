"""What an evaluation measured, and the JSON file that keeps it.

Accuracies are shares of 1 here and in the file; tables and plots show them in per cent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fewshot_mahalanobis.checkpoints.files import atomic_replace

Protocol = Literal["fixed", "variable"]


class Accuracy(NamedTuple):
    """Mean accuracy over episodes and the half-width of its 95 % interval, as shares of 1."""

    mean: float
    half_width: float
    episodes: int

    @classmethod
    def of(cls, accuracies: NDArray[np.float64]) -> Accuracy:
        """From one accuracy per episode: 1.96 standard errors, as is usual in the field."""
        n = len(accuracies)
        return cls(float(accuracies.mean()), float(1.96 * accuracies.std(ddof=1) / math.sqrt(n)) if n > 1 else 0.0, n)

    @classmethod
    def averaged(cls, accuracies: Sequence[Accuracy]) -> Accuracy:
        """Mean over sources. Their episodes are drawn independently, so the variances of the means add."""
        n = len(accuracies)
        mean = float(np.mean([accuracy.mean for accuracy in accuracies]))
        half_width = math.hypot(*(accuracy.half_width for accuracy in accuracies)) / n
        return cls(mean, half_width, sum(accuracy.episodes for accuracy in accuracies))

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} ± {100 * self.half_width:.1f}"


class Group(NamedTuple):
    """Accuracies that share a number of ways or shots: how many there are, their mean and standard deviation."""

    number: int
    size: int
    mean: float
    deviation: float


@dataclass(frozen=True)
class Scores:
    """What one method scored on the episodes of one source.

    Attributes
    ----------
    accuracy : Accuracy
    by_episode : tuple of float
        Share of correct queries in each episode.
    by_way : tuple of Group
        Accuracies of episodes, grouped by their number of classes.
    by_shot : tuple of Group
        Accuracies of single classes, grouped by their number of support images.
    """

    accuracy: Accuracy
    by_episode: tuple[float, ...]
    by_way: tuple[Group, ...]
    by_shot: tuple[Group, ...]

    @classmethod
    def of(
        cls,
        accuracies: NDArray[np.float64],
        ways: NDArray[np.int64],
        class_accuracies: NDArray[np.float64],
        shots: NDArray[np.int64],
    ) -> Scores:
        """From e episodes with c classes altogether.

        Each episode has an accuracy and a number of ways (e,); each class of each episode the share of its queries that
        were right and its number of shots (c,).
        """
        return cls(
            Accuracy.of(accuracies),
            tuple(accuracies.tolist()),
            _grouped(ways, accuracies),
            _grouped(shots, class_accuracies),
        )


def _grouped(numbers: NDArray[np.int64], accuracies: NDArray[np.float64]) -> tuple[Group, ...]:
    groups = []
    for number in np.unique(numbers):
        chosen = accuracies[numbers == number]
        deviation = float(chosen.std(ddof=1)) if len(chosen) > 1 else 0.0
        groups.append(Group(int(number), len(chosen), float(chosen.mean()), deviation))
    return tuple(groups)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Accuracies in one setting: a row of a table, a point of a curve.

    Attributes
    ----------
    name : str
        The source, or what is averaged.
    way, shot : int, optional
        None where they vary from episode to episode.
    accuracy : mapping of str to Accuracy
        By method, which is the heading of its column.
    protocol : {"fixed", "variable"}
    queries : int
        Query images per class; at most so many in the variable protocol.
    sources : tuple of str
        The sources of an average; empty for a single source.
    """

    name: str
    way: int | None
    shot: int | None
    accuracy: Mapping[str, Accuracy]
    protocol: Protocol = "fixed"
    queries: int = 10
    sources: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """First cell of its row: "omniglot/test, 5-way 1-shot"."""
        if self.protocol == "variable":
            return self.name + f", {self.way}-way" * (self.way is not None)
        return f"{self.name}, {self.way}-way {self.shot}-shot"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one model scored on the episodes of one source, with one number of shots.

    Attributes
    ----------
    source : str
    protocol : {"fixed", "variable"}
    way : int, optional
        Of the variable protocol None, or the number of classes of a source that has fewer than five.
    shot : int, optional
        None in the variable protocol.
    queries, episodes, seed : int
    precision : str
        Of the convolutions.
    model : str
        Digest of its settings and weights.
    images : str
        Digest of the source's classes and their numbers of images.
    scores : mapping of str to Scores
        By method, which is the heading of its column.
    """

    source: str
    protocol: Protocol
    way: int | None
    shot: int | None
    queries: int
    episodes: int
    seed: int
    precision: str
    model: str
    images: str = ""
    scores: Mapping[str, Scores] = field(default_factory=dict)

    @property
    def key(self) -> tuple[object, ...]:
        """What two results have in common that are of the same model on the same episodes."""
        return (
            self.source, self.protocol, self.way, self.shot, self.queries, self.episodes, self.seed, self.precision,
            self.model, self.images,
        )  # fmt: skip

    @property
    def row(self) -> Row:
        """Its row of a table."""
        return Row(
            name=self.source,
            way=self.way,
            shot=self.shot,
            accuracy={method: scores.accuracy for method, scores in self.scores.items()},
            protocol=self.protocol,
            queries=self.queries,
        )


def read_results(file: str | Path) -> list[Result]:
    """Results that :func:`write_results` wrote; ValueError if the file holds something else."""
    try:
        return msgspec.json.decode(Path(file).read_bytes(), type=list[Result])
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} is no file of results that `evaluate` wrote: {error}") from error


def write_results(file: str | Path, results: Sequence[Result]) -> None:
    """Write results as JSON, at once or not at all; the folder is made if absent."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace(Path(file)) as temporary:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(list(results)), indent=1) + b"\n")
