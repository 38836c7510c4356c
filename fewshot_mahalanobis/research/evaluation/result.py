"""What an evaluation measured, and the JSON file that keeps it.

Accuracies are shares of 1 here and in the file; tables and plots show them in per cent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fewshot_mahalanobis.checkpoints.files import atomic_replace

Protocol = Literal["fixed", "variable"]


#: Accuracies that share a number of ways or shots: that number, how many there are, their mean and standard deviation.
Group = tuple[int, int, float, float]


class Accuracy(NamedTuple):
    """Mean accuracy over episodes, as a share of 1.

    Attributes
    ----------
    mean : float
    half_width : float
        Half-width of the 95 % interval, as a share of 1.
    episodes : int
    by_episode : tuple of float
        Share of correct queries in each episode; empty for an average over sources.
    by_way : tuple of (int, int, float, float)
        Accuracies of episodes, grouped by their number of classes: that number, how many there are, their mean and
        standard deviation.
    by_shot : tuple of (int, int, float, float)
        Accuracies of single classes, grouped by their number of support images.
    """

    mean: float
    half_width: float
    episodes: int
    by_episode: tuple[float, ...] = ()
    by_way: tuple[Group, ...] = ()
    by_shot: tuple[Group, ...] = ()

    @classmethod
    def of(cls, accuracies: NDArray[np.float64]) -> Accuracy:
        """Make it from one accuracy per episode, with 1.96 standard errors, as is usual in the field."""
        n = len(accuracies)
        return cls(float(accuracies.mean()), float(1.96 * accuracies.std(ddof=1) / math.sqrt(n)) if n > 1 else 0.0, n)

    @classmethod
    def from_classes(
        cls,
        accuracies: NDArray[np.float64],
        ways: NDArray[np.int64],
        class_accuracies: NDArray[np.float64],
        shots: NDArray[np.int64],
    ) -> Accuracy:
        """Make it with its parts, from e episodes with c classes altogether.

        Parameters
        ----------
        accuracies, ways : arrays of shape (e,)
            Accuracy and number of classes of each episode.
        class_accuracies, shots : arrays of shape (c,)
            Share of correct queries and number of support images of each class of each episode.
        """
        return cls.of(accuracies)._replace(
            by_episode=tuple(accuracies.tolist()),
            by_way=_grouped(ways, accuracies),
            by_shot=_grouped(shots, class_accuracies),
        )

    @classmethod
    def averaged(cls, accuracies: Sequence[Accuracy]) -> Accuracy:
        """Average over sources. Their episodes are drawn independently, so the variances of the means add."""
        n = len(accuracies)
        mean = float(np.mean([accuracy.mean for accuracy in accuracies]))
        half_width = math.hypot(*(accuracy.half_width for accuracy in accuracies)) / n
        return cls(mean, half_width, sum(accuracy.episodes for accuracy in accuracies))

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} ± {100 * self.half_width:.1f}"


def _grouped(numbers: NDArray[np.int64], accuracies: NDArray[np.float64]) -> tuple[Group, ...]:
    groups = []
    for number in np.unique(numbers):
        chosen = accuracies[numbers == number]
        deviation = float(chosen.std(ddof=1)) if len(chosen) > 1 else 0.0
        groups.append((int(number), len(chosen), float(chosen.mean()), deviation))
    return tuple(groups)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Accuracies in one setting: a row of a table, a point of a curve, an entry of the file of results.

    Attributes
    ----------
    source : str
        Name of the source; the title of an average.
    way, shot : int, optional
        None where they vary from episode to episode. The number of ways of a source with too few classes to vary is
        that of its classes.
    scores : mapping of str to Accuracy
        By variant or method, which is the heading of a column.
    protocol : {"fixed", "variable"}
    queries : int
        Query images per class; the maximum in the variable protocol.
    episodes, seed : int
    precision : str
        Precision of the convolutions.
    model : str
        Digest of the model's settings and weights.
    images : str
        Digest of the source's classes and their numbers of images.
    sources : tuple of str
        Sources of an average; empty for a single source.
    """

    source: str
    way: int | None
    shot: int | None
    scores: Mapping[str, Accuracy] = field(default_factory=dict)
    protocol: Protocol = "fixed"
    queries: int = 10
    episodes: int = 0
    seed: int = 0
    precision: str = ""
    model: str = ""
    images: str = ""
    sources: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """First cell of its row: "omniglot/test, 5-way 1-shot"."""
        if self.protocol == "variable":
            return self.source + f", {self.way}-way" * (self.way is not None)
        return f"{self.source}, {self.way}-way {self.shot}-shot"

    @property
    def key(self) -> tuple[object, ...]:
        """The fields that results of the same model on the same episodes have in common."""
        return tuple(getattr(self, name) for name in _KEY)


#: Fields of a result that stand in the file beside its scores, in this order.
_KEY = ("source", "protocol", "way", "shot", "queries", "episodes", "seed", "precision", "model", "images")


def to_record(result: Result) -> dict[str, Any]:
    """Return the result of a single source as an entry of the file of results."""
    scores = {
        title: {
            "accuracy": accuracy[:3],
            "by_episode": accuracy.by_episode,
            "by_way": accuracy.by_way,
            "by_shot": accuracy.by_shot,
        }
        for title, accuracy in result.scores.items()
    }
    return {**{name: getattr(result, name) for name in _KEY}, "scores": scores}


def _from_record(record: dict[str, Any]) -> Result:
    scores = {}
    for title, parts in msgspec.convert(record.get("scores"), dict[str, dict[str, Any]]).items():
        mean, half_width, episodes = msgspec.convert(parts.pop("accuracy", None), tuple[float, float, int])
        scores[title] = msgspec.convert([mean, half_width, episodes, *map(parts.get, Accuracy._fields[3:])], Accuracy)
    if missing := [name for name in _KEY[:-1] if name not in record]:
        raise msgspec.ValidationError(f"a result has no {missing[0]!r}")
    return replace(msgspec.convert({**record, "scores": {}}, Result), scores=scores)


def read_results(file: str | Path) -> list[Result]:
    """Read results that :func:`write_results` wrote; ValueError if the file holds something else."""
    try:
        return [_from_record(r) for r in msgspec.json.decode(Path(file).read_bytes(), type=list[dict[str, Any]])]
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} is no file of results that `evaluate` wrote: {error}") from error


def write_results(file: str | Path, results: Sequence[Result]) -> None:
    """Write results as JSON, at once or not at all; the folder is made if absent."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace(Path(file)) as temporary:
        temporary.write_bytes(
            msgspec.json.format(msgspec.json.encode([to_record(result) for result in results]), indent=1) + b"\n"
        )
