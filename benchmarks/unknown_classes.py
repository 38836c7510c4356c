"""How well unknown classes are separated from known ones, and calibration of probabilities: docs/unknown_classes.md.

    python -m benchmarks.unknown_classes DATA_DIR --backbone default --features features -o results.json

An episode has as many unknown classes as known ones. The support set is of the known classes, the queries are of
both, and unknown classes differ from episode to episode. Features come from the checkpoint, adapted to the support
set, and from frozen networks (``--backbone``, by the names of benchmarks/beta.py; at most 20 classes of a set, 15
images each). Everything else is :class:`fewshot_mahalanobis.MahalanobisClassifier` on them. On adapted features it
has the checkpoint's settings and so is the classifier of images; on a frozen network's it chooses beta itself.
Choices were made on the validation sets.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax, logsumexp
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors
from tqdm.auto import tqdm

from benchmarks.beta import features_of, load_backbone, open_set
from benchmarks.calibration import expected_calibration_error
from fewshot_mahalanobis import MahalanobisClassifier, RegularizedCovariance, SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.research.data.sources import ImageSource, load_source
from fewshot_mahalanobis.research.episodes.sampling import Episode, FixedEpisodes
from fewshot_mahalanobis.research.evaluation.result import Accuracy
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table

VALIDATION = ("mini_imagenet_val.zip", "omniglot.zip:valid", "cub200_2010.zip:valid", "quickdraw345.zip:valid")
TEST = (
    "mini_imagenet_test.zip",
    "omniglot.zip:test",
    "cub200_2010.zip:test",
    "quickdraw345.zip:test",
    "gtsrb.zip",
    "mnist.zip:test",
    "cifar10.zip:test",
    "cifar100_test.zip",
    "fashion_mnist.zip:test",
)
WAY, SHOT = 5, 5
#: Most classes of a set, and most images of each, that a frozen network reads once for all episodes.
CLASSES, IMAGES = 20, 15
RATES = (0.05, 0.1)
#: Resamples of the episodes for the interval of a pooled figure.
RESAMPLES = 200

Array = NDArray[np.float64]


class Features(NamedTuple):
    """One episode. ``known`` holds queries of the support's classes, ``unknown`` those of others."""

    support: Array
    labels: NDArray[np.int64]
    known: Array
    known_labels: NDArray[np.int64]
    unknown: Array


def split_of(episode: Episode) -> tuple[list[NDArray[np.int64]], NDArray[np.int64], NDArray[np.int64]]:
    """Images of support, known and unknown queries, and labels: the first half of an episode's classes is known."""
    support, known = episode.support_labels < WAY, episode.query_labels < WAY
    images = [episode.support[support], episode.query[known], episode.query[~known]]
    return images, episode.support_labels[support], episode.query_labels[known]


def adapted_features(model: SimpleCNAPS, source: ImageSource, episode: Episode, dtype: torch.dtype) -> Features:
    (support, known, unknown), labels, known_labels = split_of(episode)
    task = model.adapt(source.network_input(support), torch.from_numpy(labels), dtype=dtype)
    queries = task.features(source.network_input(np.concatenate([known, unknown])), 128).cpu().numpy()
    return Features(
        task.fitted_head.support.adapted.cpu().numpy(),
        labels,
        queries[: len(known)],
        known_labels,
        queries[len(known) :],
    )


def stored(file: Path | None) -> list[Features]:
    """Episodes that an earlier run has kept."""
    return [] if file is None or not file.exists() else [Features(*e) for e in torch.load(file, weights_only=False)]


def collect(
    source: ImageSource, episodes: int, queries: int, seed: int, of: Callable[[Episode], Features], file: Path | None
) -> list[Features]:
    """Features of that many episodes. Those in ``file`` are not computed again; new ones are added in tens."""
    drawn = FixedEpisodes(source, 2 * WAY, SHOT, queries, seed=seed)
    found = stored(file)
    for index in tqdm(range(len(found), episodes), desc=source.name):
        found.append(of(drawn.draw(index)))
        if file is not None and (len(found) % 10 == 0 or len(found) == episodes):
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save([tuple(e) for e in found], file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)
    return found[:episodes]


def outlier_scores(
    model: MahalanobisClassifier, temperature: float, support: Array, labels: NDArray[np.int64], x: Array
) -> dict[str, Array]:
    """Every compared score for the rows of ``x``; larger is less like any class."""
    logits = model.decision_function(x)
    background = RegularizedCovariance(model.beta_, task_covariance=False)(
        torch.from_numpy(support), torch.zeros(len(support), dtype=torch.int64)
    )
    to_background = model.scale * background.squared_distance(torch.from_numpy(x))[:, 0].numpy()
    # One covariance for all classes, of the deviations from their means (Lee et al., 2018), with the same ridge.
    deviations = (support - model.means_[labels]) * math.sqrt((len(support) - 1) / (len(support) - len(model.means_)))
    tied = RegularizedCovariance(model.beta_, task_covariance=False)(
        torch.from_numpy(deviations), torch.zeros(len(support), dtype=torch.int64)
    )
    tied_distance = np.stack([tied.squared_distance(torch.from_numpy(x - mean))[:, 0].numpy() for mean in model.means_])
    neighbours = NearestNeighbors(n_neighbors=3).fit(support).kneighbors(x)[0]
    return {
        "distance": model.outlier_score(x),
        "plain Mahalanobis": tied_distance.min(axis=0),
        "relative": model.outlier_score(x) - to_background,
        "half relative": model.outlier_score(x) - to_background / 2,
        "energy": -temperature * logsumexp(logits / temperature, axis=1),
        "max softmax": -np.exp(log_softmax(logits, axis=1).max(axis=1)),
        "nearest neighbour": neighbours[:, 0],
        "third neighbour": neighbours[:, 2],
    }


class Measured(NamedTuple):
    """Results of one episode."""

    auroc: dict[str, float]
    rejected: dict[str, tuple[float, float]]  # promised rate -> shares of known and of unknown queries rejected
    confidence: dict[str, Array]  # temperature -> largest probability of each known query
    right: NDArray[np.bool_]
    loss: dict[str, float]  # temperature -> cross-entropy in nats a query
    temperature: float


def measure(episode: Features, settings: Mapping[str, Any]) -> Measured:
    """Fit the classifier to one episode and try it on the queries."""
    labels, known_labels = episode.labels, episode.known_labels
    support, known, unknown = (x.astype(np.float64) for x in (episode.support, episode.known, episode.unknown))
    fitted = []
    for rate in RATES:
        calibrated: dict[str, Any] = {"temperature": "auto", "unknown_label": -1, "false_rejection_rate": rate}
        model = MahalanobisClassifier(head="mahalanobis", **settings, **calibrated)
        fitted.append(model.fit(support, labels))
        settings = {**settings, "beta": model.beta_}  # chosen once
    model = fitted[0]
    temperature = model.temperature_
    of_known, of_unknown = (outlier_scores(model, temperature, support, labels, x) for x in (known, unknown))
    truth = np.repeat([0, 1], [len(known), len(unknown)])
    log_p = {
        name: log_softmax(model.decision_function(known) / t, axis=1)
        for name, t in {"T = 1": 1.0, "T fitted": temperature}.items()
    }
    return Measured(
        {name: roc_auc_score(truth, np.concatenate([s, of_unknown[name]])) for name, s in of_known.items()},
        {
            f"{rate:g}": (float(np.mean(m.predict(known) == -1)), float(np.mean(m.predict(unknown) == -1)))
            for rate, m in zip(RATES, fitted, strict=True)
        },
        {name: np.exp(p.max(axis=1)) for name, p in log_p.items()},
        log_p["T = 1"].argmax(axis=1) == known_labels,
        {name: -float(p[np.arange(len(p)), known_labels].mean()) for name, p in log_p.items()},
        temperature,
    )


def summarise(measured: Sequence[Measured], seed: int) -> dict[str, Any]:
    """Means over episodes, [mean, half-width of the 95 % interval] in per cent; the loss in nats."""

    def percent(values: Sequence[float], unit: float = 100.0) -> list[float]:
        accuracy = Accuracy.of(np.array(values))
        return [unit * accuracy.mean, unit * accuracy.half_width]

    def pooled(name: str, episodes: Sequence[Measured]) -> float:
        confidence = np.concatenate([m.confidence[name] for m in episodes])
        return 100 * expected_calibration_error(confidence, np.concatenate([m.right for m in episodes]))

    rng = np.random.default_rng(seed)
    resamples = [[measured[i] for i in rng.integers(len(measured), size=len(measured))] for _ in range(RESAMPLES)]
    temperatures = measured[0].confidence
    return {
        "auroc": {name: percent([m.auroc[name] for m in measured]) for name in measured[0].auroc},
        "known rejected": {rate: percent([m.rejected[rate][0] for m in measured]) for rate in measured[0].rejected},
        "unknown rejected": {rate: percent([m.rejected[rate][1] for m in measured]) for rate in measured[0].rejected},
        "calibration error": {
            name: [pooled(name, measured), 1.96 * float(np.std([pooled(name, sample) for sample in resamples]))]
            for name in temperatures
        },
        "loss": {name: percent([m.loss[name] for m in measured], 1.0) for name in temperatures},
        "accuracy": percent([m.right.mean() for m in measured]),
        "temperature": float(np.median([m.temperature for m in measured])),
        "episodes": len(measured),
    }


def tables(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown: for validation and test sets and each network, outlier scores, then promises and probabilities."""
    for split, network in dict.fromkeys((r["split"], r["network"]) for r in records):
        chosen = [r for r in records if (r["split"], r["network"]) == (split, network)]
        title = f"{split.capitalize()} sets, {network}"
        yield f"\n**{title}: AUROC, %**\n"
        yield _table(chosen, {name: lambda r, name=name: r["auroc"][name] for name in chosen[0]["auroc"]})
        columns: dict[str, Callable[[Mapping[str, Any]], list[float]]] = {
            f"{kind}, promised {100 * float(rate):g} %": lambda r, kind=kind, rate=rate: r[kind][rate]
            for rate in chosen[0]["known rejected"]
            for kind in ("known rejected", "unknown rejected")
        }
        yield f"\n**{title}: queries rejected, %**\n"
        yield _table(chosen, columns)
        columns = {
            f"{kind}, {name}": lambda r, kind=kind, name=name: r[kind][name]
            for kind in ("calibration error", "loss")
            for name in chosen[0]["loss"]
        }
        yield f"\n**{title}: expected calibration error, %, and cross-entropy, nats**\n"
        yield _table(chosen, columns)


def _table(
    records: Sequence[Mapping[str, Any]], columns: Mapping[str, Callable[[Mapping[str, Any]], list[float]]]
) -> str:
    def cell(mean: float, half_width: float, name: str) -> str:
        digits = 2 if name.startswith("loss") else 1
        return f"{mean:.{digits}f} ± {half_width:.{digits}f}"

    rows = [[r["source"], r["episodes"], *(cell(*of(r), name) for name, of in columns.items())] for r in records]
    means = []
    for name, of in columns.items():  # sets are independent of one another
        values = np.array([of(r) for r in records])
        means.append(cell(values[:, 0].mean(), np.sqrt((values[:, 1] ** 2).sum()) / len(values), name))
    return markdown_table([*rows, ["average", "", *means]], ["source", "episodes", *columns])


def opened(
    model: SimpleCNAPS, network: str, path: str, dtype: torch.dtype
) -> tuple[ImageSource, Callable[[Episode], Features]]:
    """A set with its source of features: the model, adapted to each episode, or the features of a frozen network."""
    if network == "adapted":
        source = load_source(path, size=model.image_size, lazy=True)
        return source, lambda episode: adapted_features(model, source, episode, dtype)
    source = open_set(path, model.image_size, CLASSES, IMAGES)
    features = features_of(model, source).numpy()

    def frozen(episode: Episode) -> Features:
        (support, known, unknown), labels, known_labels = split_of(episode)
        return Features(features[support], labels, features[known], known_labels, features[unknown])

    return source, frozen


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("data", type=Path, help="folder of the image sets")
    parser.add_argument("--checkpoint", default="default", help="name, folder or Hub repository")
    parser.add_argument("--backbone", nargs="*", default=[], help="frozen networks to try as well")
    parser.add_argument("--episodes", type=int, default=100, help="episodes a set")
    parser.add_argument("--queries", type=int, default=3, help="query images a class, known or unknown")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16", help="of adapted networks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--features", type=Path, help="folder that keeps features: a run that was cut off goes on")
    parser.add_argument("--results", "-o", type=Path, help="JSON file to write")
    arguments = parser.parse_args()

    checkpoint = load_checkpoint(arguments.checkpoint)
    records: list[dict[str, Any]] = []
    for network in ("adapted", *arguments.backbone):
        model = checkpoint if network in ("adapted", "default") else load_backbone(network)
        settings: dict[str, Any] = {"beta": "auto"}
        if network == "adapted":
            settings = {name: model.config[name] for name in ("beta", "scale", "task_covariance")}
        for split, path in [("validation", p) for p in VALIDATION] + [("test", p) for p in TEST]:
            file = arguments.features and arguments.features / f"{network}-{path.replace(':', '-')}.pt"
            features = stored(file)[: arguments.episodes]
            if len(features) < arguments.episodes:
                dtype = getattr(torch, arguments.precision)
                source, of = opened(model, network, f"{arguments.data}/{path}", dtype)
                features = collect(source, arguments.episodes, arguments.queries, arguments.seed, of, file)
            measured = [measure(episode, settings) for episode in tqdm(features, desc=f"{path}, {network}")]
            name = path.replace(".zip:", "/").removesuffix(".zip")
            title = "not adapted" if network == "default" else network
            names = {"split": split, "source": name, "network": title}
            records.append({**names, **summarise(measured, arguments.seed)})
            if arguments.results:
                arguments.results.write_text(json.dumps(records, indent=1) + "\n")
    print("\n".join(tables(records)))


if __name__ == "__main__":
    main()
