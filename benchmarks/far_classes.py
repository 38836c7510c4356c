"""How well foreign pictures, near and far, are separated from known classes: docs/unknown_classes.md.

    python -m benchmarks.far_classes DATA_DIR --features features

The support set has five classes of five images. Queries are of these classes (known), of other classes of the same set
(near) and of the other sets (far). The scores of the checkpoint's own head and of the default head alone are compared
with the ``outlier_score`` of a classifier with ``unknown_label``; thresholds promise a false rejection rate of 5 %.
Features are kept, so that an interrupted run resumes. The terms of the score were chosen on validation classes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from tqdm.auto import tqdm

from benchmarks.calibration import expected_calibration_error
from benchmarks.unknown_classes import SHOT, TEST, VALIDATION, WAY, split_of
from fewshot_mahalanobis import SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.heads import AutoHead, Head
from fewshot_mahalanobis.networks.devices import choose_dtype
from fewshot_mahalanobis.research.data.sources import ImageSource, load_source
from fewshot_mahalanobis.research.episodes.sampling import FixedEpisodes
from fewshot_mahalanobis.research.evaluation.result import Accuracy
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.unknown import SIMILARITIES

QUERIES = 3
#: Far queries from each other set, and the rate of false rejections.
FAR, RATE = 4, 0.05
#: Sets whose pictures are far and none of whose classes is used.
ONLY_FAR = "dtd10.zip:test"
PHOTOGRAPHS = ("mini_imagenet_test.zip", "cifar10.zip:test")
DRAWINGS = ("omniglot.zip:test", "quickdraw345.zip:test", "mnist.zip:test")
OURS = "outlier_score"
COLUMNS = ("AUROC near", "AUROC far", "known rejected", "near rejected", "far rejected")

Array = NDArray[np.float64]


def features(
    model: SimpleCNAPS, source: ImageSource, others: Sequence[ImageSource], n: int, first: int = 0
) -> Iterator[dict[str, Any]]:
    """Labels and features of episodes ``first`` to ``n``: support, then known, near and far queries."""
    dtype = choose_dtype("auto", model.feature_extractor)
    episodes = FixedEpisodes(source, 2 * WAY, SHOT, QUERIES, seed=0)
    for index in tqdm(range(first, n), desc=source.name):
        rng = np.random.default_rng((1, index))
        (support, known, near), labels, known_labels = split_of(episodes.draw(index))
        far = [other.network_input(np.sort(rng.choice(len(other.labels), FAR, replace=False))) for other in others]
        queries = torch.cat([source.network_input(known), source.network_input(near), *far])
        found: dict[str, Any] = {"y": labels, "ky": known_labels, "n_near": len(near)}
        for name, adapt in (("adapted", True), ("frozen", False)):
            images, targets = source.network_input(support), torch.from_numpy(labels)
            task = model.adapt(images, targets, adapt=adapt, dtype=dtype)
            found[name] = task.fitted_head.support.adapted.float().numpy(), task.features(queries).float().numpy()
        yield found


def collect(
    file: Path, model: SimpleCNAPS, data: Path, path: str, paths: Sequence[str], n: int
) -> list[dict[str, Any]]:
    """Features of ``n`` episodes of a set. Those in ``file`` are not computed again; new ones are added in fives."""
    found = torch.load(file, weights_only=False) if file.exists() else []
    if len(found) < n:
        opened = {p: load_source(data / p, size=model.image_size, lazy=True) for p in paths}
        others = [opened[p] for p in paths if p != path]
        for episode in features(model, opened[path], others, n, len(found)):
            found.append(episode)
            if len(found) % 5 == 0 or len(found) == n:
                torch.save(found, file.with_suffix(".part"))
                file.with_suffix(".part").replace(file)
    return found[:n]


def excess(head: Head, episode: dict[str, Any], alone: bool) -> Array:
    """Outlier scores of an episode's queries, by the head alone or by all terms, less the threshold."""
    labels = torch.from_numpy(episode["y"])
    support, queries = (
        Features(*(torch.from_numpy(episode[name][part]) for name in ("adapted", "frozen"))) for part in (0, 1)
    )
    settings = {"unknown_label": -1, "false_rejection_rate": RATE, "similarities": () if alone else SIMILARITIES}
    fitted = FittedHead.fit(head, support, labels, **settings)
    assert fitted.outliers is not None
    return fitted.outlier_score(queries).numpy() - fitted.outliers.threshold


def probabilities(episode: dict[str, Any]) -> tuple[Array, NDArray[np.bool_]]:
    """Largest probability of each known query by the default head, and whether the query's class has it."""
    support, queries = (torch.from_numpy(x) for x in episode["adapted"])
    known = queries[: len(episode["ky"])]
    p = AutoHead()(support, torch.from_numpy(episode["y"]), known).double().softmax(dim=1).numpy()
    return p.max(axis=1), p.argmax(axis=1) == episode["ky"]


def measure(episode: dict[str, Any], scores: Array) -> list[float]:
    """AUROC near and far, and the shares of known, near and far queries that are rejected."""
    known, near = len(episode["ky"]), len(episode["ky"]) + episode["n_near"]
    groups = scores[:known], scores[known:near], scores[near:]
    aurocs = [
        float(roc_auc_score(np.repeat([0, 1], [len(groups[0]), len(other)]), np.concatenate([groups[0], other])))
        for other in groups[1:]
    ]
    return [*aurocs, *(float((group > 0).mean()) for group in groups)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("data", type=Path, help="folder of the image sets")
    parser.add_argument("--checkpoint", default="default", help="name, folder or Hub repository")
    parser.add_argument("--episodes", type=int, default=60, help="episodes a set")
    parser.add_argument("--features", type=Path, required=True, help="folder that keeps features of this checkpoint")
    arguments = parser.parse_args()
    model = load_checkpoint(arguments.checkpoint)
    scores = {"checkpoint's head": (model.head, True), "default head": (AutoHead(), True), OURS: (AutoHead(), False)}
    arguments.features.mkdir(parents=True, exist_ok=True)
    for split, paths in (("val", (*VALIDATION, ONLY_FAR)), ("test", TEST)):
        measured: dict[str, dict[str, Array]] = {}
        drawings: dict[str, Array] = {}
        calibration: list[float] = []
        for path in paths:
            if path == ONLY_FAR:
                continue
            file = arguments.features / f"{split}-{path.replace(':', '-')}.pt"
            episodes = collect(file, model, arguments.data, path, paths, arguments.episodes)
            of = {name: [excess(head, e, alone) for e in episodes] for name, (head, alone) in scores.items()}
            measured[path] = {
                name: 100 * np.array([measure(e, s) for e, s in zip(episodes, found, strict=True)])
                for name, found in of.items()
            }
            confidences, right = [np.concatenate(found) for found in zip(*map(probabilities, episodes), strict=True)]
            calibration.append(100 * expected_calibration_error(confidences, right.astype(bool)))
            if path in PHOTOGRAPHS:
                drawn = np.isin([p for p in paths if p != path], DRAWINGS).repeat(FAR)
                drawings[path] = np.array([100 * (s[-len(drawn) :][drawn] > 0).mean() for s in of[OURS]])
        print(f"\n**{split}: % with 95 % intervals, {arguments.episodes} episodes a set**\n")
        print(table(measured))
        print(f"\nCalibration error of the default head at temperature 1, %: {np.mean(calibration):.1f}")
        for path, shares in drawings.items():
            share = Accuracy.of(shares)
            print(f"\nDrawings called unknown, classes of {path}: {share.mean:.1f} ± {share.half_width:.1f} %")


def table(measured: dict[str, dict[str, Array]]) -> str:
    """Markdown: a row for each score, for each set and on average."""
    rows, averages = [], []
    for name in next(iter(measured.values())):
        of_sets = [[Accuracy.of(column) for column in of[name].T] for of in measured.values()]
        for path, found in zip(measured, of_sets, strict=True):
            rows.append([path, name, *(f"{a.mean:.1f} ± {a.half_width:.1f}" for a in found)])
        averages.append(["average", name])
        for column in zip(*of_sets, strict=True):
            half_width = np.sqrt(sum(a.half_width**2 for a in column)) / len(column)
            averages[-1].append(f"{np.mean([a.mean for a in column]):.1f} ± {half_width:.1f}")
    return markdown_table(
        [*sorted(rows, key=lambda row: list(measured).index(row[0])), *averages], ["set", "by", *COLUMNS]
    )


if __name__ == "__main__":
    main()
