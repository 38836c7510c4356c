"""The default against the frozen network and LogisticRegression, as an experienced user would write it.

    python -m benchmarks.by_hand DATA_DIR

5-way tasks of 1, 5 and 20 shots with 3 queries a class, on nine sets. All methods see the same episodes, and intervals
are those of differences within episodes.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from tqdm.auto import tqdm

from fewshot_mahalanobis import SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.heads import AutoHead
from fewshot_mahalanobis.networks.devices import choose_dtype
from fewshot_mahalanobis.research.data.sources import ImageSource, load_source
from fewshot_mahalanobis.research.episodes.sampling import Episode, draw_episode, episode_rng
from fewshot_mahalanobis.research.evaluation.result import Accuracy
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table

SETS = (
    "mini_imagenet_test.zip", "omniglot.zip:test", "cub200_2010.zip:test", "quickdraw345.zip:test", "gtsrb.zip",
    "mnist.zip:test", "cifar10.zip:test", "cifar100_test.zip", "fashion_mnist.zip:test",
)  # fmt: skip
WAY, SHOTS, QUERIES = 5, (1, 5, 20), 3
OURS, FROZEN = "adapted, default head", "frozen, default head"
LOGISTIC, LOGISTIC_CV = "frozen, LogisticRegression", "frozen, LogisticRegression, C by cross-validation"
METHODS = (OURS, FROZEN, LOGISTIC, LOGISTIC_CV)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--checkpoint", default="default")
    arguments = parser.parse_args()
    model = load_checkpoint(arguments.checkpoint)
    found: dict[int, list[dict[str, list[float]]]] = {shots: [] for shots in SHOTS}
    for name in SETS:
        source = load_source(f"{arguments.data / name}", size=model.image_size, lazy=True)
        for shots in SHOTS:
            classes = [rows for rows in source.indices_of_class() if len(rows) >= shots + QUERIES]
            if len(classes) < WAY:
                continue
            accuracies: dict[str, list[float]] = {method: [] for method in METHODS}
            for index in tqdm(range(arguments.episodes), desc=f"{source.name}, {shots} shots", leave=False):
                rng = episode_rng("by hand", source.name, shots, index)
                for method, right in _measure(
                    model, source, draw_episode(classes, [shots] * WAY, QUERIES, rng)
                ).items():
                    accuracies[method].append(right)
            found[shots].append(accuracies)
            print(source.name, shots, {method: round(100 * float(np.mean(a)), 1) for method, a in accuracies.items()})
    header = ["", *(f"{shots}-shot ({len(sets)} sets)" for shots, sets in found.items())]
    rows = [
        [method, *(f"{100 * np.mean([s[method] for s in sets]):.1f}" for sets in found.values())] for method in METHODS
    ]
    for peer in METHODS[2:]:
        rows.append([f"gain over {peer}", *(str(_gain(sets, peer)) for sets in found.values())])
    print(markdown_table(rows, header))


def _measure(model: SimpleCNAPS, source: ImageSource, episode: Episode) -> dict[str, float]:
    labels, dtype = torch.from_numpy(episode.support_labels), choose_dtype("auto", model.feature_extractor)
    support, queries = source.network_input(episode.support), source.network_input(episode.query)
    predicted = {}
    for method, adapt in ((OURS, True), (FROZEN, False)):
        task = model.adapt(support, labels, head=AutoHead(), adapt=adapt, dtype=dtype)
        predicted[method] = task.logits(queries).argmax(dim=1).cpu().numpy()
    x, q = task.fitted_head.support.adapted.cpu().numpy(), task.features(queries).cpu().numpy()
    plain = LogisticRegression(max_iter=1000)
    predicted[LOGISTIC] = predicted[LOGISTIC_CV] = plain.fit(x, episode.support_labels).predict(q)
    if len(x) > WAY:
        # A fit under an L2 penalty sees the span of the support set alone.
        span = np.linalg.svd(x, full_matrices=False)[2].T
        search = GridSearchCV(plain, {"C": [0.01, 0.1, 1.0, 10.0, 100.0]}, cv=StratifiedKFold(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an optimiser that stops early
            predicted[LOGISTIC_CV] = search.fit(x @ span, episode.support_labels).predict(q @ span)
    return {method: float((labels == episode.query_labels).mean()) for method, labels in predicted.items()}


def _gain(sets: list[dict[str, list[float]]], peer: str) -> Accuracy:
    """Mean over the sets of the differences within episodes."""
    return Accuracy.averaged([Accuracy.of(np.subtract(found[OURS], found[peer])) for found in sets])


if __name__ == "__main__":
    main()
