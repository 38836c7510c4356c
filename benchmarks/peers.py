"""Other ways to classify from a few examples: their accuracy on every image set, and their time.

easyfsl's PrototypicalNetworks gets the images and the same pretrained backbone, unadapted, as it is. scikit-learn's
classifiers get the same adapted features as our head. Both are what a user of those libraries would write.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from benchmarks.feature_peers import feature_tables
from benchmarks.record import Record, Table
from benchmarks.tasks import drawn_images, image_sets
from benchmarks.timing import Times, show, take_turns
from fewshot_mahalanobis import SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.data.sources import ImageSource
from fewshot_mahalanobis.episodes.sampling import draw_episode, episode_rng
from fewshot_mahalanobis.evaluation import Accuracy
from fewshot_mahalanobis.images import to_network_range

SHOTS = (1, 5, 20)
WAY, QUERIES, EPISODES = 5, 10, 30
OURS, EASYFSL = "Simple CNAPS", "easyfsl PrototypicalNetworks"


def sklearn_peers(shots: int) -> dict[str, ClassifierMixin]:
    return {
        "LDA(shrinkage='auto')": LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"),
        "QDA(reg_param=0.5)": QuadraticDiscriminantAnalysis(reg_param=0.5),
        "LogisticRegression": LogisticRegression(max_iter=1000),
        "KNeighborsClassifier": KNeighborsClassifier(min(shots, 5)),
    }


def run(record: Record) -> list[Table]:
    names = [OURS, EASYFSL, *sklearn_peers(1)]
    times = record.value("times", lambda: _times(record.repeats))
    accuracies: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, source in ({} if record.data is None else image_sets(record.data)).items():
        if "train" not in name and "val" not in name:
            accuracies[name] = record.value(name, lambda: _accuracies(source, 1 if record.quick else EPISODES))  # noqa: B023
    rows = []
    for method in names:
        row = [method]
        for shots in map(str, SHOTS):
            found = [of[shots][method] for of in accuracies.values() if of.get(shots, {}).get(method)]
            row.append(f"{100 * np.mean([np.mean(values) for values in found]):.1f}" if found else "—")
        rows.append([*row, *(show(times[str(s)][method]) if method in times[str(s)] else "—" for s in SHOTS)])
    header = ["", *(f"accuracy, {s}-shot" for s in SHOTS), *(f"time, {s}-shot" for s in SHOTS)]
    note = (
        f"5-way, {QUERIES} queries a class. Accuracy: mean over the image sets below. Time: for the first two images "
        "in and labels out; for the others fit and predict on features, to which the extraction of the features comes, "
        "that is nearly all of the first row's time. —: refuses such a task."
    )
    tables = [Table("Other libraries, 5-way tasks", header, rows, note)]
    for shots in map(str, SHOTS):
        of_shots = {name: of[shots] for name, of in accuracies.items() if shots in of}
        if of_shots:
            tables.append(_by_set(of_shots, names, shots))
    return tables + feature_tables(record)


def _by_set(accuracies: dict[str, dict[str, list[float]]], names: list[str], shots: str) -> Table:
    rows = []
    for name, of in accuracies.items():
        best = max(float(np.mean(values)) for values in of.values())
        cells = [str(Accuracy.of(np.array(of[method]))) if method in of else "—" for method in names]
        bold = [method in of and float(np.mean(of[method])) > best - 1e-9 for method in names]
        rows.append([name, *(f"**{cell}**" if b else cell for cell, b in zip(cells, bold))])
    note = f"Per cent over {EPISODES} episodes, the same for all, with 95 % intervals; the best in bold."
    return Table(f"Who wins where, 5-way {shots}-shot", ["set", *names], rows, note)


def easyfsl(backbone: torch.nn.Module, support: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    from easyfsl.methods import PrototypicalNetworks

    method = PrototypicalNetworks(backbone).eval()
    with torch.no_grad():
        method.process_support_set(support, labels)
        return method(queries).argmax(dim=1)


def sklearn_labels(
    peer: ClassifierMixin, x: NDArray[Any], y: NDArray[Any], queries: NDArray[Any]
) -> NDArray[Any] | None:
    """What a classifier predicts; None if it refuses such a support set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of collinear features, which few shots always have
        try:
            return peer.fit(x, y).predict(queries)
        except (ValueError, np.linalg.LinAlgError):
            return None


def _times(repeats: int) -> dict[str, dict[str, Times]]:
    model, found = load_checkpoint("resnet18"), {}
    classifier = SimpleCNAPSClassifier(model, device="cpu")
    others = drawn_images(WAY * QUERIES, seed=1)
    for shots in SHOTS:
        pictures, labels = drawn_images(WAY * shots), np.repeat(np.arange(WAY), shots)
        support, query = (to_network_range(torch.from_numpy(x).permute(0, 3, 1, 2)) for x in (pictures, others))
        calls: dict[str, Callable[[], Any]] = {
            OURS: lambda x=pictures, y=labels: classifier.fit(x, y).predict(others),
            EASYFSL: lambda x=support, y=labels, q=query: easyfsl(model.feature_extractor, x, torch.from_numpy(y), q),
        }
        x, queries = classifier.fit(pictures, labels).transform(pictures), classifier.transform(others)
        for name, peer in sklearn_peers(shots).items():
            if sklearn_labels(peer, x, labels, queries) is not None:
                calls[name] = lambda p=peer, x=x, y=labels, q=queries: sklearn_labels(p, x, y, q)
        found[str(shots)] = take_turns(calls, repeats)
    return found


def _accuracies(source: ImageSource, episodes: int) -> dict[str, dict[str, list[float]]]:
    """Of each number of shots and method, over episodes in which the support sets of more shots contain the others."""
    model = load_checkpoint("resnet18")
    plain = model.with_film(None, dtype=torch.bfloat16)
    classes = source.indices_of_class()
    most = sorted(map(len, classes))[-min(WAY, len(classes))]
    usable = [shots for shots in SHOTS if shots + QUERIES <= most]
    found: dict[str, dict[str, list[float]]] = {str(shots): {} for shots in usable}
    for index in range(episodes):
        ways = min(WAY, len(classes))
        episode = draw_episode(classes, [max(usable)] * ways, QUERIES, episode_rng("peers", source.name, index))
        truth, query = episode.query_labels, source.network_input(episode.query)
        all_support, plain_query = source.network_input(episode.support), plain.features(query)
        plain_support = plain.features(all_support)
        for shots in usable:
            chosen = np.flatnonzero(np.arange(len(episode.support)) % max(usable) < shots)
            y = episode.support_labels[chosen]
            codes = torch.from_numpy(y)
            task = model.adapt(all_support[chosen], codes, dtype=torch.bfloat16)
            features = task.features(query)
            predicted: dict[str, Any] = {
                OURS: task.head_logits(features).argmax(dim=1).numpy(),
                EASYFSL: easyfsl(torch.nn.Identity(), plain_support[chosen], codes, plain_query).numpy(),
            }
            x = task.support_features.numpy()
            for name, peer in sklearn_peers(shots).items():
                predicted[name] = sklearn_labels(peer, x, y, features.numpy())
            for name, labels in predicted.items():
                if labels is not None:
                    found[str(shots)].setdefault(name, []).append(float((labels == truth).mean()))
    return found
