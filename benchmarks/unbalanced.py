"""Accuracy with very different numbers of support images: over all classes, and of the smallest.

Each episode is measured with all its images, and with all classes cut to the size of the smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.feature_peers import AUTO, LDA, LOGISTIC, PAPER, gain, predictions
from benchmarks.feature_tasks import CLASSES, Features, extractors, measure, test_sets
from benchmarks.record import Record, Table
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.episodes.sampling import Episode, episode_rng

#: Support images of each class; fewer if a class has not enough beside its queries.
TASKS = {
    "3 against 30": [3, 30],
    "3 against 160": [3, 160],
    "1 to 50, 10-way": np.geomspace(1, 50, 10).round().astype(int).tolist(),
}
QUERIES = 10
CUT = "all cut to the smallest, auto"
METHODS = (PAPER, AUTO, LOGISTIC, LDA)

#: One episode: mean of the recalls of all classes, recall of the smallest.
Recalls = tuple[float, float]


def run(record: Record) -> list[Table]:
    tables: list[Table] = []
    for extractor in extractors(record) if record.data is not None else ():
        found: dict[str, dict[str, dict[str, list[Recalls]]]] = {}
        for name, source in test_sets(record, extractor.size).items():
            for task, shots in TASKS.items():
                values = measure(record, extractor, source, task, _drawn(source, task, shots), _recalls)
                found.setdefault(task, {})[name] = values
        tables += [_table(extractor.name, found, which) for which in (0, 1)]
    return tables


def _drawn(source: ImageSource, task: str, shots: Sequence[int]) -> Callable[[int], Sequence[Episode]]:
    classes = [indices for indices in source.indices_of_class() if len(indices) > QUERIES][:CLASSES]

    def draw(index: int) -> Sequence[Episode]:
        rng = episode_rng("unbalanced", source.name, task, index)
        chosen = rng.choice(len(classes), min(len(shots), len(classes)), replace=False)
        drawn = [rng.permutation(classes[k]) for k in chosen]
        support = [images[QUERIES:][:number] for images, number in zip(drawn, shots)]
        query = np.concatenate([images[:QUERIES] for images in drawn])
        query_labels = np.repeat(np.arange(len(drawn)), QUERIES)
        whole, cut = ([images[:most] for images in support] for most in (None, len(support[0])))
        return [
            Episode(np.concatenate(s), np.repeat(np.arange(len(s)), [len(images) for images in s]), query, query_labels)
            for s in (whole, cut)
        ]

    return draw


def _recalls(episode: Sequence[Features]) -> dict[str, Recalls]:
    whole, cut = episode
    labels = {method: found for method, found in predictions(whole) if method in METHODS}
    labels[CUT] = dict(predictions(cut))[AUTO]
    correct = {method: found == whole.query_labels for method, found in labels.items()}
    return {method: (float(of.mean()), float(of[whole.query_labels == 0].mean())) for method, of in correct.items()}


def _table(kind: str, found: dict[str, dict[str, dict[str, list[Recalls]]]], which: int) -> Table:
    rows = []
    for method in (*METHODS, CUT):
        means = [[np.mean([r[which] for r in of[method]]) for of in sets.values()] for sets in found.values()]
        rows.append([method, *(f"{100 * np.mean(values):.1f}" for values in means)])
    cells = []
    for sets in found.values():
        pairs = {name: ([r[which] for r in of[AUTO]], [r[which] for r in of[CUT]]) for name, of in sets.items()}
        cells.append(gain(pairs))
    rows.append(["auto less auto with all cut", *cells])
    title = ("balanced accuracy", "recall of the smallest class")[which]
    note = "Per cent, mean of the sets. Last row: points within episodes, with 95 % interval; the least favourable set."
    return Table(f"Unbalanced tasks, {kind} features: {title}", ["", *found], rows, note)
