"""Which method when: accuracy and seconds against the number of shots, every method on the same episodes.

5-way tasks with ten queries a class, on the test sets: methods that need no training and scikit-learn's
LogisticRegression, on features of the network, adapted to the task or not. Seconds are those of one method alone:
support images and queries in, labels out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from tqdm.auto import tqdm

from benchmarks.feature_peers import in_support_span
from benchmarks.feature_tasks import test_sets
from benchmarks.record import Record, Table
from fewshot_mahalanobis import SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.checkpoints.catalogue import DEFAULT
from fewshot_mahalanobis.heads import AutoHead, MahalanobisHead
from fewshot_mahalanobis.networks.devices import choose_dtype
from fewshot_mahalanobis.research.baselines import METHODS
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.episodes.sampling import draw_episode, episode_rng
from fewshot_mahalanobis.research.evaluation.result import Accuracy

WAYS, QUERIES, SHOTS = 5, 10, (1, 2, 5, 10, 20, 50, 100)
#: Sets with no class that one of our checkpoints has seen in training.
#: Shots in the table of seconds.
ROUNDS = 3


#: Support features, their labels and query features in, predicted labels out.
Classify = Callable[[Tensor, Tensor, Tensor], NDArray[np.int64]]


def logistic_regression(support: Tensor, labels: Tensor, queries: Tensor) -> NDArray[np.int64]:
    x, q = in_support_span(support.numpy(), queries.numpy())
    return LogisticRegression(max_iter=1000).fit(x, labels.numpy()).predict(q)


def _head(make: Callable[[], torch.nn.Module]) -> Classify:
    return lambda support, labels, queries: make()(support, labels, queries).argmax(dim=1).numpy()


OURS = "adapted: the default"
ADAPTED: dict[str, Classify] = {OURS: _head(AutoHead), "adapted, the paper's head": _head(MahalanobisHead)}
FROZEN: dict[str, Classify] = {
    "not adapted": _head(AutoHead),
    "not adapted, LogisticRegression": logistic_regression,
    **{f"not adapted, {m.title}": _head(m) for m in METHODS.values() if not m.needs_training},
}
NAMES = (*ADAPTED, *FROZEN)

#: Accuracy (or seconds) of each method in each episode, by set.
Found = dict[str, dict[str, list[float]]]


def run(record: Record) -> list[Table]:
    if record.data is None:
        return []
    checkpoint = DEFAULT if record.checkpoint == "default" else record.checkpoint
    model = load_checkpoint(checkpoint)
    sets, few = test_sets(record, model.image_size), record.quick
    shots = SHOTS[:2] if few else SHOTS
    found: dict[int, Found] = {number: {} for number in shots}
    for index in tqdm(range(1 if few else record.episodes), desc="episodes of every set"):  # all sets grow together
        for name, source in sets.items():
            for number in shots:
                if _enough(source, number) is not None:
                    key = f"{checkpoint}, {name}, {number} shots, {index}"
                    of = record.value(key, lambda: _accuracies(model, source, number, index))  # noqa: B023
                    methods = found[number].setdefault(name, {})
                    for method, accuracy in of.items():
                        methods.setdefault(method, []).append(accuracy)
    timed = next(iter(sets.values()) if few else (s for n, s in sets.items() if n.startswith("mini_imagenet")))
    seconds = {n: record.value(f"{checkpoint}, seconds, {n} shots", lambda: _seconds(model, timed, n)) for n in shots}  # noqa: B023
    header = [f"{number} shot{'s'[: number > 1]}" for number in shots]
    counted = [f"{title} ({len(found[number])} sets)" for title, number in zip(header, shots)]
    accuracy = [[name, *(_mean(found[number], name) for number in shots)] for name in NAMES]
    times = [[name, *(f"{median(seconds[number][name]):.2g}" for number in shots)] for name in NAMES]
    note = "Mean over the sets with so many images. Sets differ between columns: compare within one."
    return [
        Table("Accuracy by shots, 5-way, %", ["", *counted], accuracy, note),
        Table("Seconds of a task with 50 queries", ["", *header], times, f"Median of {ROUNDS} tasks."),
    ]


def _enough(source: ImageSource, shots: int) -> Sequence[NDArray[np.int64]] | None:
    """Classes with enough images for a task; None if there are too few."""
    every = source.indices_of_class()
    enough = [indices for indices in every if len(indices) >= shots + QUERIES]
    return enough if len(enough) >= min(WAYS, len(every)) else None


def _accuracies(model: SimpleCNAPS, source: ImageSource, shots: int, index: int) -> dict[str, float]:
    support, labels, queries, truth = _drawn(source, shots, index)
    return {name: float((found == truth).mean()) for name, (found, _) in _answers(model, support, labels, queries)}


def _seconds(model: SimpleCNAPS, source: ImageSource, shots: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for index in range(ROUNDS):
        for name, (_, seconds) in _answers(model, *_drawn(source, shots, index)[:3]):
            times[name].append(seconds)
    return times


def _drawn(source: ImageSource, shots: int, index: int) -> tuple[Tensor, Tensor, Tensor, NDArray[np.int64]]:
    classes = _enough(source, shots)
    assert classes is not None
    rng = episode_rng("methods", source.name, shots, index)
    episode = draw_episode(classes, [shots] * min(WAYS, len(classes)), QUERIES, rng)
    support, queries = source.network_input(episode.support), source.network_input(episode.query)
    return support, torch.from_numpy(episode.support_labels), queries, episode.query_labels


def _answers(
    model: SimpleCNAPS, support: Tensor, labels: Tensor, queries: Tensor
) -> list[tuple[str, tuple[NDArray[np.int64], float]]]:
    """Every method's predicted labels, and its seconds: those of the network's features and its own."""
    dtype, answers = choose_dtype("auto", model.feature_extractor), []
    for adapt, methods in ((True, ADAPTED), (False, FROZEN)):
        start = time.perf_counter()
        task = model.adapt(support, labels, head=AutoHead(), adapt=adapt, dtype=dtype)
        features = task.features(queries)
        shared = time.perf_counter() - start
        for name, classify in methods.items():
            start = time.perf_counter()
            found = classify(task.fitted_head.support.adapted, labels, features)
            answers.append((name, (found, shared + time.perf_counter() - start)))
    return answers


def _mean(sets: Found, name: str) -> str:
    return str(Accuracy.averaged([Accuracy.of(np.array(of[name])) for of in sets.values()])) if sets else "—"
