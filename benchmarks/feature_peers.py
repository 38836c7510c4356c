"""Our heads against scikit-learn's linear classifiers on the same features: adapted ones, and a frozen timm network's.

Part of ``python -m benchmarks peers``. Every method sees the same episodes, so differences are taken within episodes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.covariance import ledoit_wolf_shrinkage
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold

from benchmarks.feature_tasks import Classes, Features, classes_of, extractors, measure, test_sets
from benchmarks.record import Record, Table
from fewshot_mahalanobis import EuclideanHead, MahalanobisHead
from fewshot_mahalanobis.heads import AutoHead
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.episodes.meta_dataset import EVALUATION, VariableEpisodes
from fewshot_mahalanobis.research.episodes.sampling import Episode, draw_episode, episode_rng
from fewshot_mahalanobis.research.evaluation import Accuracy

#: (ways, shots); left out where a set lacks the images.
TASKS = ((5, 1), (5, 5), (5, 20), (5, 50), (20, 5), (20, 20))
#: Meta-Dataset's episodes, of 5 to 50 ways and a number of shots for each class; half as many, because they are large.
VARIABLE = "variable"
QUERIES = 5
PAPER, AUTO, MEANS = "mahalanobis", "auto", "class means"
LOGISTIC, LOGISTIC_CV, LDA = "LogisticRegression", "LogisticRegression, C by CV", "LDA (Ledoit-Wolf)"
METHODS = (PAPER, AUTO, MEANS, LOGISTIC, LOGISTIC_CV, LDA)

Array = NDArray[Any]
#: Task -> set -> method -> accuracy of each episode.
Found = dict[str, dict[str, dict[str, list[float]]]]


def feature_tables(record: Record) -> list[Table]:
    """Measure what is not recorded yet, and make tables of everything."""
    tables: list[Table] = []
    for extractor in extractors(record) if record.data is not None else ():
        found: Found = {}
        for name, source in test_sets(record, extractor.size).items():
            for task, draw in drawn(source).items():
                of, accuracies = record, _accuracies
                if task == VARIABLE:
                    of, accuracies = replace(record, episodes=record.episodes // 2), _all_accuracies
                found.setdefault(task, {})[name] = measure(of, extractor, source, task, draw, accuracies)
        tables += [
            _averages(extractor.name, found),
            _differences(extractor.name, found),
            _by_set(extractor.name, found),
        ]
    return tables


def drawn(source: ImageSource) -> dict[str, Callable[[int], Sequence[Episode]]]:
    """Episode of this index for every task for which the set has enough images."""
    tasks: dict[str, Callable[[int], Sequence[Episode]]] = {}
    for ways, shots in TASKS:
        if (classes := classes_of(source, shots + QUERIES, ways)) is not None:
            tasks[f"{ways}-way {shots}-shot"] = partial(_drawn, source, classes, ways, shots)
    if len(source.class_names) >= EVALUATION.min_way:
        episodes = VariableEpisodes(source)
        tasks[VARIABLE] = lambda index: [episodes.draw(index)]
    return tasks


def _drawn(source: ImageSource, classes: Classes, ways: int, shots: int, index: int) -> Sequence[Episode]:
    rng = episode_rng("feature peers", source.name, ways, shots, index)
    return [draw_episode(classes, [shots] * min(ways, len(classes)), QUERIES, rng)]


def _accuracies(episode: Sequence[Features]) -> dict[str, float]:
    (features,) = episode
    return {method: float((labels == features.query_labels).mean()) for method, labels in predictions(features)}


def _all_accuracies(episode: Sequence[Features]) -> dict[str, float]:
    """All accuracies; methods that refuse a class of one image get that of LogisticRegression."""
    found = _accuracies(episode)
    return {**dict.fromkeys((LOGISTIC_CV, LDA), found[LOGISTIC]), **found}


def predictions(features: Features) -> Iterator[tuple[str, Array]]:
    """Labels of the queries by each method that takes such a support set."""
    for name, head in ((PAPER, MahalanobisHead()), (AUTO, AutoHead()), (MEANS, EuclideanHead())):
        yield name, head(*features.tensors()).argmax(dim=1).numpy()
    x, queries = in_support_span(features.support, features.query)
    y = features.support_labels
    fewest = int(np.bincount(y).min())
    plain = LogisticRegression(max_iter=1000)
    search = GridSearchCV(plain, {"C": [0.01, 0.1, 1.0, 10.0]}, cv=StratifiedKFold(3 if fewest > 2 else 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield LOGISTIC, plain.fit(x, y).predict(queries)
        if fewest > 1:
            yield LOGISTIC_CV, search.fit(x, y).predict(queries)
    if np.bincount(y).max() > 1:
        yield LDA, lda_scores(features.support, y, features.query).argmax(axis=1)


def in_support_span(x: Array, queries: Array) -> tuple[Array, Array]:
    """Support features (n, d) and queries in an orthonormal basis of the span of the centred support features.

    A linear classifier with an L2 penalty and a free intercept needs no more: its weights are combinations of support
    features whose coefficients add up to zero. A row has at most n numbers instead of the network's d.
    """
    centre = x.mean(axis=0)
    x, queries = x - centre, queries - centre
    if len(x) >= x.shape[1]:
        return x, queries
    basis = np.linalg.qr(x.T).Q
    return x @ basis, queries @ basis


def lda_scores(x: Array, y: Array, queries: Array) -> Array:
    """Scores (m, k) of LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"), without its d x d matrices.

    It standardises each class, takes Ledoit and Wolf's shrinkage, and averages the covariances by class size: a
    diagonal matrix and one of at most n dimensions, so Woodbury's identity solves for the weights.
    """
    x, queries = x.astype(np.float64), queries.astype(np.float64)
    means, rows, diagonal = [], [], np.zeros(x.shape[1])
    for label in range(int(y.max()) + 1):
        members = x[y == label]
        mean, prior = members.mean(axis=0), len(members) / len(x)
        z = members - mean
        scale = z.std(axis=0)
        scale[scale == 0] = 1.0
        shrinkage = ledoit_wolf_shrinkage(z / scale) if len(z) > 1 else 0.0
        diagonal += prior * shrinkage * np.square(z / scale).mean() * scale**2
        rows.append(np.sqrt(prior * (1 - shrinkage) / len(z)) * z)
        means.append(mean)
    diagonal[diagonal == 0] = np.inf  # constant in every class: least squares gives such a feature no weight
    m, u = np.stack(means), np.concatenate(rows)
    solved = m / diagonal
    solved -= np.linalg.solve(np.eye(len(u)) + (u / diagonal) @ u.T, u @ solved.T).T @ u / diagonal
    return queries @ solved.T - (m * solved).sum(axis=1) / 2 + np.log(np.bincount(y) / len(y))


def _averages(kind: str, found: Found) -> Table:
    rows = []
    for method in METHODS:
        means = [[np.mean(of[method]) for of in sets.values() if of.get(method)] for sets in found.values()]
        rows.append([method, *(f"{100 * np.mean(values):.1f}" if values else "—" for values in means)])
    header = ["", *(f"{task} ({len(sets)} sets)" for task, sets in found.items())]
    episodes = {task: min(len(of[AUTO]) for of in sets.values()) for task, sets in found.items()}
    note = f"Episodes of a set: {', '.join(f'{number} {task}' for task, number in episodes.items())}."
    return Table(f"Accuracy on {kind} features, mean of the sets, per cent", header, rows, note)


def _differences(kind: str, found: Found) -> Table:
    """Gains of the auto head within episodes: the mean of the sets with its 95 % interval, and the worst set."""
    rows = []
    for method in METHODS:
        if method == AUTO:
            continue
        cells = [
            gain({name: (of[AUTO], of[method]) for name, of in sets.items() if of.get(method)})
            for sets in found.values()
        ]
        rows.append([f"auto less {method}", *cells])
    note = "Points within episodes, mean of the sets with its 95 % interval; in brackets the least favourable set."
    return Table(f"Gain of the auto head on {kind} features", ["", *found], rows, note)


def _by_set(kind: str, found: Found) -> Table:
    """The auto head's accuracy on every set, and its gain over the best linear classifier there."""
    rows = []
    for name in dict.fromkeys(name for sets in found.values() for name in sets):
        cells = []
        for sets in found.values():
            of = sets.get(name, {})
            linear = [of[method] for method in (LOGISTIC, LOGISTIC_CV, LDA) if of.get(method)]
            if not linear:
                cells.append("—")
                continue
            gains = Accuracy.of(np.array(of[AUTO]) - np.array(max(linear, key=np.mean)))
            cells.append(f"{100 * np.mean(of[AUTO]):.1f} ({100 * gains.mean:+.1f} ± {100 * gains.half_width:.1f})")
        rows.append([name, *cells])
    note = "In brackets the gain over the best of the linear classifiers on that set, points within episodes."
    return Table(f"The auto head on {kind} features, set by set", ["set", *found], rows, note)


def gain(pairs: dict[str, tuple[Sequence[float], Sequence[float]]]) -> str:
    """Mean over sets of the differences within episodes, its 95 % interval, and the set with the least."""
    if not pairs:
        return "—"
    gains = {name: 100 * (np.array(ours) - np.array(theirs)) for name, (ours, theirs) in pairs.items()}
    errors = [of.var(ddof=1) / len(of) if len(of) > 1 else np.nan for of in gains.values()]
    worst = min(gains, key=lambda name: float(gains[name].mean()))
    mean, half = np.mean([of.mean() for of in gains.values()]), 1.96 * np.sqrt(np.sum(errors)) / len(errors)
    return f"{mean:+.1f} ± {half:.1f} ({gains[worst].mean():+.1f} {worst})"
