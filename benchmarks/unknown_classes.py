"""How well unknown classes are told from known ones, and how honest probabilities are: docs/unknown_classes.md.

    python benchmarks/unknown_classes.py DATA_DIR --checkpoint default --episodes 100 -o results.json

An episode has as many unknown classes as known ones. The support set is of the known classes, the queries are of both,
and unknown classes differ from episode to episode. Features come from the checkpoint, adapted to the support set and
not adapted; everything else is :class:`fewshot_mahalanobis.MahalanobisClassifier` on them. On adapted features it has
the checkpoint's settings and so is the classifier of images; on the others its own, as for features of any network.
The validation sets are those that choices were made on.
"""

from __future__ import annotations

import argparse
import json
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

from fewshot_mahalanobis import MahalanobisClassifier, RegularizedCovariance, SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.episodes.sampling import FixedEpisodes
from fewshot_mahalanobis.episodes.sources import ImageSource, load_source
from fewshot_mahalanobis.evaluation.evaluate import Accuracy, markdown_table
from fewshot_mahalanobis.networks.simple_cnaps import AdaptedTask

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
NETWORKS = ("adapted", "not adapted")
RATES = (0.05, 0.1)
BINS = 15
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


def collect(
    model: SimpleCNAPS,
    source: ImageSource,
    episodes: Sequence[int],
    *,
    way: int,
    shot: int,
    queries: int,
    seed: int,
    dtype: torch.dtype,
) -> dict[str, list[Features]]:
    """Features of the episodes of these numbers, by the adapted and by the unadapted network."""
    plain = AdaptedTask(model, None, model.head, dtype)
    drawn = FixedEpisodes(source, 2 * way, shot, queries, seed=seed)
    found: dict[str, list[Features]] = {network: [] for network in NETWORKS}
    known_images: dict[int, torch.Tensor] = {}  # what the unadapted network gives for an image never changes
    for index in tqdm(episodes, desc=source.name):
        episode = drawn.draw(index)
        kept, known = episode.support_labels < way, episode.query_labels < way
        support, labels = episode.support[kept], episode.support_labels[kept]
        images = np.concatenate([support, episode.query[known], episode.query[~known]])
        task = model.adapt(source.network_input(support), torch.from_numpy(labels).to(model.device), dtype=dtype)
        new = np.array([image for image in images if int(image) not in known_images])
        if len(new):
            known_images |= zip(new.tolist(), plain.features(source.network_input(new), 128).cpu())
        adapted = torch.cat([task.support_features, task.features(source.network_input(images[len(support) :]), 128)])
        unadapted = torch.stack([known_images[int(image)] for image in images])
        cuts = [len(support), len(support) + int(known.sum())]
        for network, features in zip(NETWORKS, (adapted.cpu(), unadapted), strict=True):
            a, b, c = np.split(features.double().numpy(), cuts)
            found[network].append(Features(a, labels, b, episode.query_labels[known], c))
    return found


def outlier_scores(model: MahalanobisClassifier, temperature: float, support: Array, x: Array) -> dict[str, Array]:
    """Every score that is compared, of the rows of ``x``; larger is more foreign."""
    logits = model.decision_function(x)
    background = RegularizedCovariance(model.beta_, task_covariance=False)(
        torch.from_numpy(support), torch.zeros(len(support), dtype=torch.int64)
    )
    to_background = model.scale * background.squared_distance(torch.from_numpy(x))[:, 0].numpy()
    neighbours = NearestNeighbors(n_neighbors=3).fit(support).kneighbors(x)[0]
    return {
        "nearest class": model.outlier_score(x),
        "relative": model.outlier_score(x) - to_background,
        "half relative": model.outlier_score(x) - to_background / 2,
        "energy": -temperature * logsumexp(logits / temperature, axis=1),
        "max softmax": -np.exp(log_softmax(logits, axis=1).max(axis=1)),
        "max softmax, T fitted": -np.exp(log_softmax(logits / temperature, axis=1).max(axis=1)),
        "nearest neighbour": neighbours[:, 0],
        "third neighbour": neighbours[:, 2],
    }


class Measured(NamedTuple):
    """What one episode tells."""

    auroc: dict[str, float]
    rejected: dict[str, tuple[float, float]]  # promised rate -> shares of known and of unknown queries rejected
    confidence: dict[str, Array]  # temperature -> largest probability of each known query
    right: NDArray[np.bool_]
    loss: dict[str, float]  # temperature -> cross-entropy in nats a query
    temperature: float


def measure(episode: Features, settings: Mapping[str, Any]) -> Measured:
    """Fit the classifier to one episode and try it on the queries."""
    support, labels, known, known_labels, unknown = episode
    fitted = [
        MahalanobisClassifier(**settings, temperature="auto", unknown_label=-1, false_rejection_rate=rate)
        for rate in RATES
    ]
    fitted = [model.fit(support, labels) for model in fitted]
    model = fitted[0]
    temperature = model.temperature_
    of_known, of_unknown = (outlier_scores(model, temperature, support, x) for x in (known, unknown))
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


def expected_calibration_error(confidence: Array, right: NDArray[np.bool_]) -> float:
    """Mean distance of confidence and accuracy over equal-width bins, weighted by their queries (Guo et al., 2017)."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, confidence - right, minlength=BINS)
    return float(np.abs(gaps).sum() / len(confidence))


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
    }


def tables(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown: for validation and test sets and each network, outlier scores, then promises and probabilities."""
    for split in dict.fromkeys(r["split"] for r in records):
        for network in dict.fromkeys(r["network"] for r in records):
            chosen = [r for r in records if (r["split"], r["network"]) == (split, network)]
            if not chosen:
                continue
            yield f"\n{split} sets, {network}: AUROC, %\n"
            yield _table(chosen, {name: lambda r, name=name: r["auroc"][name] for name in chosen[0]["auroc"]})
            columns: dict[str, Callable[[Mapping[str, Any]], list[float]]] = {
                f"{kind}, promised {100 * float(rate):g} %": lambda r, kind=kind, rate=rate: r[kind][rate]
                for rate in chosen[0]["known rejected"]
                for kind in ("known rejected", "unknown rejected")
            }
            yield f"\n{split} sets, {network}: queries rejected, %\n"
            yield _table(chosen, columns)
            columns = {
                f"{kind}, {name}": lambda r, kind=kind, name=name: r[kind][name]
                for kind in ("calibration error", "loss")
                for name in chosen[0]["loss"]
            }
            yield f"\n{split} sets, {network}: expected calibration error, %, and cross-entropy, nats\n"
            yield _table(chosen, columns)


def _table(
    records: Sequence[Mapping[str, Any]], columns: Mapping[str, Callable[[Mapping[str, Any]], list[float]]]
) -> str:
    def cell(mean: float, half_width: float | None, name: str) -> str:
        digits = 2 if name.startswith("loss") else 1
        return f"{mean:.{digits}f}" + ("" if half_width is None else f" ± {half_width:.{digits}f}")

    rows = [[r["source"], *(cell(*of(r), name) for name, of in columns.items())] for r in records]
    means = [cell(float(np.mean([of(r)[0] for r in records])), None, name) for name, of in columns.items()]
    return markdown_table([*rows, ["average", *means]], ["source", *columns])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("data", type=Path, help="folder of the image sets")
    parser.add_argument("--checkpoint", default="default", help="name, folder or Hub repository")
    parser.add_argument("--episodes", type=int, default=100, help="episodes a set")
    parser.add_argument("--way", type=int, default=5, help="known classes, and as many unknown ones")
    parser.add_argument("--shot", type=int, default=5, help="support images a class")
    parser.add_argument("--queries", type=int, default=3, help="query images a class, known or unknown")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="of the convolutions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--features", type=Path, help="folder that keeps features, so that scores can be redone alone")
    parser.add_argument("--results", "-o", type=Path, help="JSON file to write")
    arguments = parser.parse_args()

    model = load_checkpoint(arguments.checkpoint)
    of_checkpoint = {name: model.config[name] for name in ("beta", "scale", "task_covariance")}
    records = []
    for split, path in [("validation", p) for p in VALIDATION] + [("test", p) for p in TEST]:
        kept = arguments.features and arguments.features / f"{path.replace(':', '-')}.pt"
        if kept and kept.exists():
            stored = torch.load(kept, weights_only=False)
            features = {network: [Features(*episode) for episode in stored[network]] for network in NETWORKS}
        else:
            features = collect(
                model,
                load_source(f"{arguments.data}/{path}", size=model.image_size),
                range(arguments.episodes),
                dtype=getattr(torch, arguments.precision),
                **{name: getattr(arguments, name) for name in ("way", "shot", "queries", "seed")},
            )
            if kept:
                kept.parent.mkdir(parents=True, exist_ok=True)
                torch.save({network: [tuple(e) for e in features[network]] for network in NETWORKS}, kept)
        for network, settings in ("adapted", of_checkpoint), ("not adapted", {}):
            measured = [measure(episode, settings) for episode in features[network][: arguments.episodes]]
            source = path.replace(".zip:", "/").removesuffix(".zip")
            names = {"split": split, "source": source, "network": network}
            records.append({**names, **summarise(measured, arguments.seed)})
        if arguments.results:
            arguments.results.write_text(json.dumps(records, indent=1) + "\n")
    print("\n".join(tables(records)))


if __name__ == "__main__":
    main()
