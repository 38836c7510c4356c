"""How good proposed classes are: how pure, how much of each hidden class they find, and what naming them brings.

    python -m benchmarks.new_classes --features FOLDER NAME ... -o new_classes.json

Of each task up to five classes are known, and as many others hidden; a set of fewer than ten classes gives half to
each. Fifteen pictures of every class come unlabelled. Those that the classifier rejects are clustered, and each
proposed class is named by the class that most of its pictures have, as a person would name the heap. The next round
learns all pictures of the heaps by these names, and is asked about ten others of every class, hidden ones too. It is
compared with a round that names as many single pictures in place of heaps, drawn from the rejected ones. With one shot,
one class has two pictures, or nothing could be rejected.

Features are those of the network without adaptation, from files NAME.npz with ``x`` (n, d) and ``y`` (n,), the class of
each picture. Everything else is what ``SimpleCNAPSClassifier(adapt=False, unknown_label=...)`` does. The linkage, the
metric and the height of the cut were chosen on validation sets.
"""

from __future__ import annotations

import argparse
import json
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm.auto import tqdm

from fewshot_mahalanobis.heads import AutoHead
from fewshot_mahalanobis.research.evaluation.result import Accuracy
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table
from fewshot_mahalanobis.support_set.copies import equal_rows
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.new_classes import proposed_classes

WAY, QUERIES, ASKED = 5, 15, 10
#: What is measured, in the order of the columns.
MEASURES = (
    "hidden rejected",
    "proposed classes",
    "purity",
    "hidden found",
    "hidden classes found",
    "next round",
    "singles",
    "gain",
)


class Task(NamedTuple):
    """Features and classes of the support set, of the pictures that come, and of those that the next round is asked."""

    support: torch.Tensor
    labels: torch.Tensor
    queries: torch.Tensor
    query_classes: NDArray[np.int64]
    asked: torch.Tensor
    asked_classes: NDArray[np.int64]
    way: int  # classes from this number on are hidden


def draw(x: torch.Tensor, y: NDArray[np.int64], shot: int, rng: np.random.Generator) -> Task:
    """Draw a task from features (n, d) and classes (n,)."""
    first = max(shot, 2)
    members = [rows for c in range(y.max() + 1) if len(rows := np.flatnonzero(y == c)) >= first + QUERIES + 1]
    way = min(WAY, len(members) // 2)
    chosen = [rng.permutation(members[c]) for c in rng.permutation(len(members))[: 2 * way]]
    shots = [shot] * way
    shots[0] = first
    ends = [first + QUERIES, first + QUERIES + ASKED]
    support = np.concatenate([rows[:n] for rows, n in zip(chosen, shots)])
    parts = [[rows[first : ends[0]] for rows in chosen], [rows[ends[0] : ends[1]] for rows in chosen]]
    queries, asked = (np.concatenate(part) for part in parts)
    of_queries, of_asked = (np.repeat(np.arange(2 * way), [len(rows) for rows in part]) for part in parts)
    labels = torch.from_numpy(np.repeat(np.arange(way), shots))
    return Task(x[support], labels, x[queries], of_queries, x[asked], of_asked, way)


def accuracy(task: Task, rows: NDArray[np.int64], names: NDArray[np.int64]) -> float:
    """Share of right answers after learning some of the queries by these names too; each class counts the same."""
    x = torch.cat([task.support, task.queries[rows]])
    classes, codes = torch.cat([task.labels, torch.from_numpy(names)]).unique(return_inverse=True)
    fitted = FittedHead.fit(AutoHead(), Features(x), codes)
    right = classes[fitted.logits(task.asked).argmax(dim=1)].numpy() == task.asked_classes
    return float(np.mean([right[task.asked_classes == c].mean() for c in np.unique(task.asked_classes)]))


def measure(task: Task, rng: np.random.Generator) -> list[float]:
    """One task by ``MEASURES``; purity is NaN where nothing is proposed."""
    features = Features(task.queries)
    fitted = FittedHead.fit(AutoHead(), Features(task.support), task.labels, unknown_label=-1)
    unknown = fitted.predict(features).indices.numpy() == task.way
    found = proposed_classes(fitted, task.queries, unknown, equal_rows(task.queries))
    names = np.full(len(found), -1)
    for number in range(found.max() + 1):
        names[found == number] = np.bincount(task.query_classes[found == number]).argmax()
    in_heap, hidden = np.flatnonzero(found >= 0), task.query_classes >= task.way
    right = names == task.query_classes
    singles = rng.permutation(np.flatnonzero(unknown))[: found.max() + 1]
    after = accuracy(task, in_heap, names[in_heap])
    with_singles = accuracy(task, singles, task.query_classes[singles])
    return [
        float(unknown[hidden].mean()),
        float(found.max() + 1),
        float(right[in_heap].mean()) if len(in_heap) else np.nan,
        float(right[hidden].mean()),
        len({*names[in_heap].tolist()} & {*range(task.way, 2 * task.way)}) / task.way,
        after,
        with_singles,
        after - with_singles,
    ]


def table(records: Sequence[dict[str, object]], shot: int) -> Iterator[str]:
    """Markdown: a row for each set and their mean, per cent with 95 % intervals over tasks."""
    rows = list[list[object]]()
    chosen = [np.array(r["tasks"], float) for r in records if r["shot"] == shot]
    names = [r["set"] for r in records if r["shot"] == shot]
    for name, tasks in [*zip(names, chosen), ("all", np.concatenate(chosen))]:
        cells = [name]
        for column, measure_name in zip(tasks.T, MEASURES):
            of = Accuracy.of(column[~np.isnan(column)]) if (~np.isnan(column)).sum() > 1 else None
            unit = 1 if measure_name == "proposed classes" else 100
            cells.append("" if of is None else f"{unit * of.mean:.1f} ± {unit * of.half_width:.1f}")
        rows.append(cells)
    yield f"\n**{shot} shot{'s' * (shot > 1)}**\n"
    yield markdown_table(rows, ["set", *MEASURES])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="+", help="names of the sets")
    parser.add_argument("--features", type=Path, required=True, help="folder of NAME.npz")
    parser.add_argument("--tasks", type=int, default=20, help="tasks of a set and number of shots")
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--results", "-o", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "[0-9]+ left-out examples cannot guarantee")  # of one shot
    records = list[dict[str, object]]()
    for name in arguments.names:
        with np.load(arguments.features / f"{name}.npz") as file:
            x, y = torch.from_numpy(file["x"]), file["y"]
        for shot in arguments.shots:
            tasks = list[list[float]]()
            for number in tqdm(range(arguments.tasks), desc=f"{name}, {shot} shots"):
                rng = np.random.default_rng([zlib.crc32(name.encode()), shot, number])
                tasks.append(measure(draw(x, y, shot, rng), rng))
            records.append({"set": name, "shot": shot, "tasks": tasks})
            if arguments.results:
                arguments.results.write_text(json.dumps(records) + "\n")
    for shot in arguments.shots:
        print("\n".join(table(records, shot)))


if __name__ == "__main__":
    main()
