"""How well ``summary()`` predicts what more images would bring: benchmarks/results/enough.md.

    python -m benchmarks.enough DATA_DIR --features FOLDER

Support sets of 5 classes (3 for DTD) and 5 images each under the default classifier predict their accuracy with 10
images a class. It is measured on 12 queries a class by the classifier fitted, adaptation and all, to 10: the five and
five more. A single task's accuracy is uncertain on both sides, so errors are given for a set's mean over tasks and
for single tasks. Features are kept, so that an interrupted run resumes. The extrapolation was chosen on validation
classes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm.auto import tqdm

from benchmarks.suspects import SETS
from fewshot_mahalanobis import SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.heads import AutoHead
from fewshot_mahalanobis.images.same_picture import same_pictures, small_pictures
from fewshot_mahalanobis.networks.devices import choose_dtype
from fewshot_mahalanobis.networks.simple_cnaps import adapted_network
from fewshot_mahalanobis.research.data.sources import ImageSource, load_source
from fewshot_mahalanobis.research.episodes.sampling import FixedEpisodes
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.summary import summarise

FEW, MANY, QUERIES = 5, 10, 12
COLUMNS = (
    "set", "left out of 5, %", "predicted for 10, %", "measured with 10, %", "error", "of a task", "in interval, %"
)  # fmt: skip


class Measured(NamedTuple):
    """Accuracies of one task, from 0 to 1."""

    left_out: float
    predicted: float
    measured: float
    within: bool  # whether what was measured lies in the interval of the prediction, give or take one query


def features(model: SimpleCNAPS, source: ImageSource, n: int, first: int) -> Iterator[dict[str, Any]]:
    """Labels and adapted features of tasks ``first`` to ``n``: few images, many images, and queries by the many."""
    dtype = choose_dtype("auto", model.feature_extractor)
    episodes = FixedEpisodes(source, min(5, len(source.class_names)), MANY, QUERIES, seed=0)
    for index in tqdm(range(first, n), source.name):
        episode = episodes.draw(index)
        labels, images = torch.from_numpy(episode.support_labels), source.network_input(episode.support)
        few = torch.cat([(labels == label).nonzero()[:FEW, 0] for label in range(episode.way)])
        by_few = adapted_network(model, images[few], dtype=dtype)
        by_many = adapted_network(model, images, dtype=dtype)
        yield {
            "few": _support(by_few.features(images[few]), images[few], labels[few]),
            "many": _support(by_many.features(images), images, labels),
            "queries": (by_many.features(source.network_input(episode.query)), torch.from_numpy(episode.query_labels)),
        }


def measure(task: dict[str, Any]) -> Measured:
    """Accuracy that five images a class predict, and the measured one with ten."""
    (few, many), (queries, truth) = (_fitted(*task[name]) for name in ("few", "many")), task["queries"]
    summary = summarise(few)
    assert summary.curve is not None
    accuracy, low, high = summary.curve.expected(more=MANY - FEW)
    right = float((many.logits(queries).argmax(dim=1) == truth).double().mean())
    return Measured(summary.accuracy, accuracy, right, low <= right + 1 / len(truth) and right - 1 / len(truth) <= high)


def _support(features: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> tuple[Any, ...]:
    return features, labels, same_pictures(small_pictures(images), features)


def _fitted(support: torch.Tensor, labels: torch.Tensor, copies: NDArray[np.int64]) -> FittedHead:
    return FittedHead.fit(AutoHead(), Features(support), labels, copies=copies)


def collect(file: Path, model: SimpleCNAPS, path: str, n: int) -> list[dict[str, Any]]:
    """Features of ``n`` tasks of a set. Those in ``file`` are not computed again; new ones are added in fours."""
    found: list[dict[str, Any]] = torch.load(file) if file.exists() else []
    if len(found) < n:
        for task in features(model, load_source(path, size=model.image_size, lazy=True), n, len(found)):
            found.append(task)
            if len(found) % 4 == 0 or len(found) == n:
                torch.save(found, file.with_suffix(".part"))
                file.with_suffix(".part").replace(file)
    return found[:n]


def row(tasks: list[Measured]) -> list[float]:
    """Means over the tasks of a set, in per cent, and errors in points."""
    left_out, predicted, measured, within = 100 * np.array(tasks, dtype=float).T
    error = predicted - measured
    return [left_out.mean(), predicted.mean(), measured.mean(), error.mean(), np.abs(error).mean(), within.mean()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--image-size", type=int, help="in pixels; default: the checkpoint's")
    parser.add_argument("--sets", nargs="+", default=SETS)
    arguments = parser.parse_args()
    arguments.features.mkdir(parents=True, exist_ok=True)
    model = load_checkpoint("default")
    if arguments.image_size is not None:
        model = model.at_size(arguments.image_size)
    rows = []
    for path in arguments.sets:
        file = arguments.features / f"{path.replace(':', '-')}.pt"
        tasks = [measure(task) for task in collect(file, model, str(arguments.data / path), arguments.tasks)]
        rows.append((path.partition(".")[0], row(tasks)))
    values = np.array([of_set for _, of_set in rows])
    mean = values.mean(axis=0)
    mean[3] = np.abs(values[:, 3]).mean()
    cells = [[name, *(f"{v:.1f}" for v in of_set)] for name, of_set in [*rows, ("mean (errors: mean absolute)", mean)]]
    print(markdown_table(cells, COLUMNS))


if __name__ == "__main__":
    main()
