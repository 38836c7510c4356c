"""How well pictures of another kind are told from known classes: docs/unknown_classes.md.

    python -m benchmarks.far_classes DATA_DIR --features features

As benchmarks/unknown_classes.py, with queries from the other sets too (far) beside those of other classes of the same
set (near). Compared are scores in adapted features, in features of the network without FiLM (frozen), and sums of them.
In a sum each score is divided by its standard deviation over left-out support images, after subtracting their mean.
"Or" rejects what either score rejects.
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

from benchmarks.unknown_classes import SHOT, TEST, VALIDATION, WAY, split_of
from fewshot_mahalanobis import CosineHead, SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.data.sources import ImageSource, load_source
from fewshot_mahalanobis.episodes.sampling import FixedEpisodes
from fewshot_mahalanobis.evaluation.result import Accuracy
from fewshot_mahalanobis.evaluation.tables import markdown_table
from fewshot_mahalanobis.heads import Head
from fewshot_mahalanobis.rejection import outlier_score, rejection_threshold

QUERIES = 3
#: Far queries from each other set, and the rate of false rejections.
FAR, RATE = 4, 0.05
#: Scores that are added up.
SUMS = (("head", "cosine"), ("head", "frozen cosine"), ("head", "cosine", "frozen cosine"))

Scores = tuple[NDArray[np.float64], NDArray[np.float64]]  # of queries, and of left-out support images


def features(
    model: SimpleCNAPS, source: ImageSource, others: Sequence[ImageSource], n: int
) -> Iterator[dict[str, Any]]:
    """Labels and features of ``n`` episodes: support, then known, near and far queries."""
    episodes, rng = FixedEpisodes(source, 2 * WAY, SHOT, QUERIES, seed=0), np.random.default_rng(1)
    for index in tqdm(range(n), desc=source.name):
        (support, known, near), labels, known_labels = split_of(episodes.draw(index))
        far = [other.network_input(np.sort(rng.choice(len(other.labels), FAR, replace=False))) for other in others]
        queries = torch.cat([source.network_input(known), source.network_input(near), *far])
        found: dict[str, Any] = {"y": labels, "ky": known_labels, "n_near": len(near)}
        for name, adapt in (("adapted", True), ("frozen", False)):
            images, targets = source.network_input(support), torch.from_numpy(labels)
            task = model.adapt(images, targets, adapt=adapt, dtype=torch.bfloat16)
            found[name] = task.support_features.float().numpy(), task.features(queries).float().numpy()
        yield found


def scores(head: Head, support: NDArray[np.float32], labels: NDArray[np.int64], queries: NDArray[np.float32]) -> Scores:
    x, y = torch.from_numpy(support), torch.from_numpy(labels)
    left_out = head.leave_one_out_logits(x, y).double()
    if head.is_squared_distance:  # as in calibration.py
        shrink = (1 - 1 / y.bincount()[y].double().square())[:, None]
        left_out = left_out.scatter(1, y[:, None], shrink * left_out.gather(1, y[:, None]))
    return outlier_score(head(x, y, torch.from_numpy(queries))).numpy(), outlier_score(left_out).numpy()


def compared(model: SimpleCNAPS, episode: dict[str, Any]) -> dict[str, Scores]:
    """Every score of one episode."""
    labels = episode["y"]
    found = {
        "head": scores(model.head, episode["adapted"][0], labels, episode["adapted"][1]),
        "cosine": scores(CosineHead(), episode["adapted"][0], labels, episode["adapted"][1]),
        "frozen head": scores(model.head, episode["frozen"][0], labels, episode["frozen"][1]),
        "frozen cosine": scores(CosineHead(), episode["frozen"][0], labels, episode["frozen"][1]),
    }
    for names in SUMS:
        units = [(found[name][1].mean(), found[name][1].std()) for name in names]
        of_both = [
            sum((found[name][which] - mean) / std for name, (mean, std) in zip(names, units, strict=True))
            for which in (0, 1)
        ]
        found[" + ".join(names)] = of_both[0], of_both[1]
    # Two classifiers, each with its own threshold: above 0 if either rejects.
    over = [
        found[name][0] - rejection_threshold(torch.from_numpy(found[name][1]), RATE)
        for name in ("head", "frozen cosine")
    ]
    found["head or frozen cosine"] = np.maximum(*over), np.zeros(len(labels))
    return found


def measure(episode: dict[str, Any], of: Scores) -> list[float]:
    """AUROC near and far, and the shares of known, near and far queries that are rejected."""
    known, near = len(episode["ky"]), len(episode["ky"]) + episode["n_near"]
    groups = of[0][:known], of[0][known:near], of[0][near:]
    threshold = rejection_threshold(torch.from_numpy(of[1]), RATE)
    aurocs = [
        float(roc_auc_score(np.repeat([0, 1], [len(groups[0]), len(other)]), np.concatenate([groups[0], other])))
        for other in groups[1:]
    ]
    return [*aurocs, *(float((group > threshold).mean()) for group in groups)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("data", type=Path, help="folder of the image sets")
    parser.add_argument("--checkpoint", default="default", help="name, folder or Hub repository")
    parser.add_argument("--episodes", type=int, default=60, help="episodes a set")
    parser.add_argument("--features", type=Path, required=True, help="folder that keeps features")
    arguments = parser.parse_args()
    model = load_checkpoint(arguments.checkpoint)
    arguments.features.mkdir(parents=True, exist_ok=True)
    for split, paths in (("val", (*VALIDATION, "dtd10.zip:test")), ("test", TEST)):
        measured: list[dict[str, NDArray[np.float64]]] = []
        for path in paths:
            file = arguments.features / f"{split}-{path.replace(':', '-')}.pt"
            if path == "dtd10.zip:test":  # too few classes for episodes: far queries alone
                continue
            if not file.exists():
                opened = {p: load_source(arguments.data / p, size=model.image_size, lazy=True) for p in paths}
                others = [opened[p] for p in paths if p != path]
                torch.save(list(features(model, opened[path], others, arguments.episodes)), file)
            rows: dict[str, list[list[float]]] = {}
            for episode in torch.load(file, weights_only=False):
                for name, of in compared(model, episode).items():
                    rows.setdefault(name, []).append(measure(episode, of))
            measured.append({name: 100 * np.array(values) for name, values in rows.items()})
        print(f"\n**{split}: averages over {len(measured)} sets, %**\n")
        print(table(measured))


def table(measured: Sequence[dict[str, NDArray[np.float64]]]) -> str:
    """Markdown: a row a score, averages over sets with 95 % intervals, and the range of false rejections over sets."""
    rows = []
    for name in measured[0]:
        cells = []
        for column in range(5):
            of_sets = [Accuracy.of(found[name][:, column]) for found in measured]
            half_width = np.sqrt(sum(a.half_width**2 for a in of_sets)) / len(of_sets)
            cells.append(f"{np.mean([a.mean for a in of_sets]):.1f} ± {half_width:.1f}")
        known = [found[name][:, 2].mean() for found in measured]
        rows.append([name, *cells, f"{min(known):.1f} to {max(known):.1f}"])
    return markdown_table(
        rows, ["score", "AUROC near", "AUROC far", "known rejected", "near rejected", "far rejected", "known, by set"]
    )


if __name__ == "__main__":
    main()
