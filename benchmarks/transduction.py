"""Accuracy gained when queries refine the classes: docs/transduction.md.

Both heads with transduction are measured with and without it on the same 5-way episodes. Queries are balanced (15 a
class), unbalanced (35, the shares of the classes drawn from a Dirichlet distribution), from two of the classes, or
balanced with 30 more from two classes that have no support image. Accuracy counts queries of the five classes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.feature_peers import AUTO, PAPER, gain
from benchmarks.feature_tasks import Features, classes_of, extractors, measure, test_sets
from benchmarks.record import Record, Table
from fewshot_mahalanobis.heads import AutoHead, Head, MahalanobisHead
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.episodes.sampling import Episode, episode_rng

WAYS, SHOTS, QUERIES = 5, (1, 5), 15
#: Classes without support images, and the number of unbalanced queries with the concentration of their shares.
FOREIGN, UNBALANCED, CONCENTRATION = 2, 35, 2.0
BALANCED = "balanced"

#: Accuracy without and with.
Pair = tuple[float, float]


def run(record: Record) -> list[Table]:
    tables: list[Table] = []
    for extractor in extractors(record) if record.data is not None else ():
        found: dict[int, dict[str, dict[str, list[Pair]]]] = {}
        for name, source in test_sets(record, extractor.size).items():
            for shots in SHOTS:
                if classes_of(source, shots + QUERIES, WAYS) is None:
                    continue
                values = measure(record, extractor, source, f"{shots} shots", _drawn(source, shots), _accuracies)
                found.setdefault(shots, {})[name] = values
        tables += [_table(extractor.name, shots, sets) for shots, sets in found.items()]
    return tables


def _drawn(source: ImageSource, shots: int) -> Callable[[int], Sequence[Episode]]:
    classes = classes_of(source, shots + QUERIES, WAYS)
    assert classes is not None
    ways = min(WAYS, len(classes))

    def draw(index: int) -> Sequence[Episode]:
        rng = episode_rng("transduction", source.name, str(shots), index)
        chosen = rng.choice(len(classes), min(ways + FOREIGN, len(classes)), replace=False)
        drawn = [rng.permutation(classes[k])[: shots + QUERIES] for k in chosen]
        support = np.concatenate([images[:shots] for images in drawn[:ways]])
        query = np.concatenate([images[shots:] for images in drawn])
        labels = np.arange(len(drawn))
        return [Episode(support, np.repeat(labels[:ways], shots), query, np.repeat(labels, QUERIES))]

    return draw


def queries_of(labels: NDArray[np.int64], ways: int, rng: np.random.Generator) -> dict[str, NDArray[np.bool_]]:
    """Which queries there are, by kind."""
    own = labels < ways
    shares = rng.dirichlet(np.full(ways, CONCENTRATION))
    numbers = np.minimum(rng.multinomial(UNBALANCED, shares), QUERIES)
    rank = np.concatenate([np.arange(n) for n in np.bincount(labels)])
    unbalanced = own & (rank < np.append(numbers, np.zeros(FOREIGN, dtype=int))[labels])
    kinds = {BALANCED: own, "unbalanced": unbalanced, "of two classes": labels < 2}
    return kinds if own.all() else {**kinds, "with foreign ones": np.ones(len(labels), dtype=bool)}


def _accuracies(episode: Sequence[Features]) -> dict[str, Pair]:
    (features,) = episode
    support, labels, queries = features.tensors()
    truth, ways = torch.from_numpy(features.query_labels), int(labels.max()) + 1
    rng = np.random.default_rng(zlib.crc32(features.support.tobytes()))
    kinds = queries_of(features.query_labels, ways, rng)
    heads: dict[str, Head] = {AUTO: AutoHead(), PAPER: MahalanobisHead()}
    found = {}
    for name, head in heads.items():
        state = head.fit(support, labels)
        for kind, mask in kinds.items():
            of = torch.from_numpy(mask)
            own = truth[of] < ways
            alone = head.logits(state, queries[of])
            together = head.transductive_logits(state, support, labels, queries[of])
            right = [(logits.argmax(dim=1) == truth[of])[own].double().mean() for logits in (alone, together)]
            found[f"{name}, {kind}"] = float(right[0]), float(right[1])
    return found


def _table(kind: str, shots: int, sets: dict[str, dict[str, list[Pair]]]) -> Table:
    rows = []
    for name in dict.fromkeys(name for values in sets.values() for name in values):
        pairs = {of: ([p[1] for p in v[name]], [p[0] for p in v[name]]) for of, v in sets.items() if name in v}
        means = [100 * np.mean([np.mean(values[i]) for values in pairs.values()]) for i in (1, 0)]
        each = " ".join(f"{100 * (np.mean(ours) - np.mean(theirs)):+.1f}" for ours, theirs in pairs.values())
        rows.append([name, *(f"{mean:.1f}" for mean in means), gain(pairs), each])
    note = f"Sets, in order: {', '.join(sets)}. With 95 % interval, and the set with the least."
    header = ["head, queries", "without", "with", "points within episodes", "by set"]
    return Table(f"Transduction, {kind} features, 5-way {shots}-shot", header, rows, note)
