"""Calibration of probabilities, and shares of known queries that are rejected, promised and measured, for each head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from benchmarks.feature_peers import AUTO, PAPER, drawn
from benchmarks.feature_tasks import Adapted, Extractor, Features, extractors, measure, test_sets
from benchmarks.record import Record, Table
from fewshot_mahalanobis import MahalanobisClassifier, MahalanobisHead

#: Some tasks of :mod:`benchmarks.feature_peers`, on the same episodes.
TASKS = ("5-way 5-shot", "5-way 20-shot", "20-way 5-shot")
BINS, RATE = 15, 0.1
TEMPERATURES = (1.0, "auto")

#: One episode: confidence of each query's label and whether it is right, and the share of queries that is rejected.
Found = tuple[list[float], list[bool], float]


def run(record: Record) -> list[Table]:
    tables = []
    for extractor in extractors(record) if record.data is not None else ():
        found: dict[str, dict[str, dict[str, list[Found]]]] = {}
        for name, source in test_sets(record, extractor.size).items():
            for task, draw in drawn(source).items():
                if task in TASKS:
                    of = partial(_episode, heads(extractor))
                    found.setdefault(task, {})[name] = measure(record, extractor, source, task, draw, of)
        tables.append(_table(extractor.name, found))
    return tables


def heads(extractor: Extractor) -> dict[str, dict[str, object]]:
    """Arguments of MahalanobisClassifier by method: the paper's head as the checkpoint has it, or choosing beta."""
    paper: dict[str, object] = {"beta": "auto"}
    if isinstance(extractor, Adapted) and isinstance(head := extractor.model.head, MahalanobisHead):
        paper = {"beta": head.covariance.settings.beta, "scale": head.scale}
    of = {PAPER: {"head": PAPER, **paper}, AUTO: {"head": AUTO}}
    return {f"{h}, temperature {t}": {**given, "temperature": t} for t in TEMPERATURES for h, given in of.items()}


def _episode(of: dict[str, dict[str, object]], episode: Sequence[Features]) -> dict[str, Found]:
    (features,) = episode
    found = {}
    for method, given in of.items():
        classifier = MahalanobisClassifier(**given, unknown_label=-1, false_rejection_rate=RATE)
        classifier.fit(features.support, features.support_labels)
        p = classifier.predict_proba(features.query)
        correct, rejected = p.argmax(axis=1) == features.query_labels, classifier.predict(features.query) == -1
        found[method] = (p.max(axis=1).round(4).tolist(), correct.tolist(), float(rejected.mean()))
    return found


def expected_calibration_error(confidence: np.ndarray, correct: np.ndarray) -> float:
    """Mean distance between confidence and accuracy in bins of confidence, weighted by their queries."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, weights=confidence - correct, minlength=BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def _table(kind: str, found: dict[str, dict[str, dict[str, list[Found]]]]) -> Table:
    rows = []
    for method in next(iter(next(iter(found.values())).values())):
        cells = []
        for sets in found.values():
            errors, rejected = [], []
            for of in sets.values():
                confidence, correct, rates = zip(*of[method])
                errors.append(expected_calibration_error(np.concatenate(confidence), np.concatenate(correct)))
                rejected.append(np.mean(rates))
            cells.append(f"{100 * np.mean(errors):.1f} / {100 * np.mean(rejected):.1f}")
        rows.append([method, *cells])
    header = ["", *(f"{task} ({len(sets)} sets)" for task, sets in found.items())]
    note = (
        f"Per cent, mean of the sets: expected calibration error ({BINS} bins over all queries of a set) / queries of "
        f"known classes that are rejected, of {100 * RATE:.0f} promised."
    )
    return Table(f"Calibration on {kind} features", header, rows, note)
