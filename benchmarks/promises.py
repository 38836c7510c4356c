"""Whether promises hold: the rate of false rejections in its interval, and the right class in its set.

    python -m benchmarks.promises --data FOLDER

Features are those of the default checkpoint without adaptation, on validation classes and on textures of the training
classes, and kept in ``results/features``. Nothing was chosen by these figures.

- One class of 20 examples: the threshold of its left-out examples at a rate of 10 %, and then that of 20 further ones
  (``calibrate``). How many of the other examples of the class are rejected, and how often that is in the interval of
  90 % for so many queries: the interval of the share, widened by the chance of the draw (a beta-binomial one).
- Five classes, or all of fewer, of 5 and 10 examples: how often the right class is in the set, and how large sets are;
  also where the queries, and not the support examples, are blurred or dark.
- The same with ``unlabelled`` examples, at most 20 of each class, whose classes are as common as those of the queries:
  calibration, and what is rejected, of these classes and of three that have no support example. Unbalanced shares are
  drawn from a flat Dirichlet distribution; foreign examples are half as many, of classes that no query has.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import betabinom
from sklearn.metrics import roc_auc_score
from torchvision.transforms.v2.functional import gaussian_blur

from benchmarks.calibration import expected_calibration_error
from benchmarks.record import RESULTS, machine
from fewshot_mahalanobis import MahalanobisClassifier, load_checkpoint
from fewshot_mahalanobis.networks.task import AdaptedNetwork
from fewshot_mahalanobis.research.data.sources import load_source
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table

SETS = (
    *("photo_vehicles:val", "photo_waste:val", "photo_cotton:val", "photo_food3:val", "omniglot:valid"),
    *("cub200_2010:valid", "mini_imagenet_val:val", "quickdraw345:valid", "dtd10:train"),
)
#: Most classes of a set, and most examples of each.
CLASSES, EXAMPLES = 36, 60
WAYS, TASKS, RATE, ONE_CLASS, FURTHER = 5, 12, 0.1, 20, 20

#: Most unlabelled examples and queries of a class; most hidden classes, half of them foreign and half asked about.
POOL, QUERIES, HIDDEN = 20, 10, 6
KINDS = ("none", "balanced", "unbalanced", "with foreign ones")

#: What is done to images in [-1, 1]: a blur of two hundredths of the side, a fifth of the light.
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "frozen": lambda images: images,
    "blurred": lambda images: gaussian_blur(images, [27, 27], [0.02 * images.shape[-1]] * 2),
    "dark": lambda images: (images + 1) / 5 - 1,
}


def features_of(data: Path, name: str, kept: Path, change: str = "frozen") -> list[NDArray[np.float64]]:
    """Features (n, d) of each class of a set."""
    file = kept / f"{change}-{name.replace(':', '_')}.npz"
    if not file.exists():
        model = load_checkpoint("default")
        network = AdaptedNetwork(model.feature_extractor, None, torch.float32, model.projection)
        archive, split = name.split(":")
        source = load_source(f"{data / archive}.zip:{split}", size=model.image_size, lazy=True)
        classes, rng = source.indices_of_class(), np.random.default_rng(0)
        chosen = [rng.permutation(classes[k])[:EXAMPLES] for k in rng.permutation(len(classes))[:CLASSES]]
        indices = np.concatenate(chosen)
        parts = (source.network_input(indices[start : start + 16]) for start in range(0, len(indices), 16))
        features = torch.cat([network.features(CHANGES[change](images)) for images in parts]).numpy()
        kept.mkdir(parents=True, exist_ok=True)
        np.savez(file, x=features, y=np.repeat(np.arange(len(chosen)), [len(each) for each in chosen]))
    with np.load(file) as stored:
        return [stored["x"][stored["y"] == k].astype(float) for k in np.unique(stored["y"])]


def one_class(x: NDArray[np.float64], rng: np.random.Generator) -> list[tuple[float, bool]]:
    """Share of false rejections, and whether it is in the interval: by left-out examples, then by further ones."""
    x = x[rng.permutation(len(x))]
    support, further, queries = x[:ONE_CLASS], x[ONE_CLASS : ONE_CLASS + FURTHER], x[ONE_CLASS + FURTHER :]
    classifier = MahalanobisClassifier(unknown_label="?", false_rejection_rate=RATE).fit(support, ["good"] * ONE_CLASS)
    found = []
    for calibrated in (False, True):
        if calibrated:
            classifier.calibrate(further)
        rejected = int((classifier.predict(queries) == "?").sum())
        n = FURTHER if calibrated else ONE_CLASS
        low, high = betabinom.ppf([0.05, 0.95], len(queries), (n + 1) * RATE, (n + 1) * (1 - RATE))
        found.append((rejected / len(queries), low <= rejected <= high))
    return found


def sets(
    classes: Sequence[NDArray[np.float64]],
    shots: int,
    coverage: float,
    rng: np.random.Generator,
    changed: Sequence[NDArray[np.float64]] | None = None,
) -> tuple[float, float, float]:
    """Accuracy, share of queries whose set has the right class, and classes of a set; queries may be ``changed``."""
    chosen = [(k, rng.permutation(len(classes[k]))) for k in rng.permutation(len(classes))[:WAYS]]
    support = np.concatenate([classes[k][order[:shots]] for k, order in chosen])
    classifier = MahalanobisClassifier().fit(support, np.arange(len(chosen)).repeat(shots))
    asked = [(classes if changed is None else changed)[k][order[shots : shots + QUERIES]] for k, order in chosen]
    queries, truth = np.concatenate(asked), np.repeat(np.arange(len(chosen)), [len(x) for x in asked])
    found = classifier.predict_set(queries, coverage=coverage)
    hits = [label in labels for label, labels in zip(truth, found, strict=True)]
    return classifier.score(queries, truth), float(np.mean(hits)), float(np.mean([len(labels) for labels in found]))


class WithUnlabelled(NamedTuple):
    """Of one task and kind of unlabelled examples."""

    confidence: NDArray[np.float64]
    right: NDArray[np.bool_]
    rejected: float  # share of the queries of known classes
    found: float  # share of those of hidden classes that are rejected
    auroc: float
    covered: float  # share of the queries whose set of 90 % has the right class
    size: float  # classes of a set


def with_unlabelled(
    classes: Sequence[NDArray[np.float64]], shots: int, rng: np.random.Generator
) -> dict[str, WithUnlabelled]:
    """One task with unlabelled examples of each kind. Queries of known classes come in the shares of the unlabelled."""
    ways = min(WAYS, len(classes) - 2)
    drawn = [classes[k][rng.permutation(len(classes[k]))] for k in rng.permutation(len(classes))[: ways + HIDDEN]]
    known, hidden = drawn[:ways], drawn[ways:]
    support, labels = np.concatenate([x[:shots] for x in known]), np.arange(len(known)).repeat(shots)
    asked = [x[shots : shots + QUERIES] for x in known]
    queries, truth = np.concatenate(asked), np.repeat(np.arange(len(known)), [len(x) for x in asked])
    others = [x[shots + QUERIES :][:POOL] for x in known]
    strange, foreign = np.concatenate([x[:QUERIES] for x in hidden[::2]]), np.concatenate(hidden[1::2])
    every, shares = np.concatenate(others), rng.dirichlet(np.ones(len(known)))
    some = np.concatenate([x[: round(share * len(every) / 2)] for x, share in zip(others, shares)])
    mixed = np.concatenate([every, rng.permutation(foreign)[: len(every) // 2]])
    found = {}
    for kind, pool in zip(KINDS, (None, every, some, mixed), strict=True):
        rows = np.arange(len(queries))
        if kind == "unbalanced":
            weights = shares[truth] / np.bincount(truth)[truth]
            rows = rng.choice(rows, len(rows), p=weights / weights.sum())
        classifier = MahalanobisClassifier(unknown_label=-1).fit(support, labels, unlabelled=pool)
        probabilities = classifier.predict_proba(queries[rows])
        scores, strange_scores = classifier.outlier_score(queries[rows]), classifier.outlier_score(strange)
        within = classifier.predict_set(queries[rows], coverage=0.9)
        found[kind] = WithUnlabelled(
            probabilities.max(axis=1),
            probabilities.argmax(axis=1) == truth[rows],
            float((scores > classifier.threshold_).mean()),
            float((strange_scores > classifier.threshold_).mean()),
            float(roc_auc_score(np.repeat([0, 1], [len(rows), len(strange)]), [*scores, *strange_scores])),
            float(np.mean([label in each for label, each in zip(truth[rows], within, strict=True)])),
            float(np.mean([len(each) for each in within])),
        )
    return found


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval over tasks, per cent."""
    error = 1.96 * np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{100 * np.mean(values):.1f} ± {100 * error:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of image sets")
    parser.add_argument("--features", type=Path, default=RESULTS / "features", help="folder where features are kept")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rejected: dict[bool, list[tuple[float, bool]]] = {False: [], True: []}
    covered: dict[tuple[int, float, str], list[tuple[float, float, float]]] = {}
    taught: dict[tuple[int, str], list[WithUnlabelled]] = {}
    for name in SETS:
        classes, rng = features_of(arguments.data, name, arguments.features), np.random.default_rng(0)
        many = [x for x in classes if len(x) >= ONE_CLASS + FURTHER + 20]
        for k in rng.permutation(len(many))[:TASKS]:
            for calibrated, result in zip((False, True), one_class(many[k], rng), strict=True):
                rejected[calibrated].append(result)
        enough = [k for k, x in enumerate(classes) if len(x) >= 20]
        for change in CHANGES:
            changed = features_of(arguments.data, name, arguments.features, change)
            rng = np.random.default_rng(1)  # the same tasks
            for shots in (5, 10):
                for coverage in (0.8, 0.9):
                    results = covered.setdefault((shots, coverage, change), [])
                    of_sets = [[of[k] for k in enough] for of in (classes, changed)]
                    results += [sets(of_sets[0], shots, coverage, rng, of_sets[1]) for _ in range(TASKS // 2)]
        rng = np.random.default_rng(2)
        enough = [k for k, x in enumerate(classes) if len(x) >= 30]
        if len(enough) >= 4:
            for shots in (5, 10):
                for _ in range(TASKS // 2):
                    for kind, result in with_unlabelled([classes[k] for k in enough], shots, rng).items():
                        taught.setdefault((shots, kind), []).append(result)
    rows = [
        [
            f"{FURTHER} further ones" if calibrated else f"the {ONE_CLASS} of the support set, left out",
            interval([share for share, _ in results]),
            f"{100 * np.mean([inside for _, inside in results]):.0f}",
            str(len(results)),
        ]
        for calibrated, results in rejected.items()
    ]
    print(f"{machine()}.\n")
    print(markdown_table(rows, ["threshold from", "rejected, %", "in the interval of 90 %, %", "classes"]))
    rows = [
        [
            str(shots),
            f"{coverage:.0%}",
            {"frozen": "as they are"}.get(change, change),
            *(interval([result[i] for result in results]) for i in (0, 1)),
            f"{np.mean([result[2] for result in results]):.2f}",
        ]
        for (shots, coverage, change), results in covered.items()
    ]
    print(
        "\n"
        + markdown_table(
            rows, ["shots", "asked", "queries", "labels right, %", "right class in the set, %", "classes of a set"]
        )
    )
    rows = []
    for (shots, kind), tasks in taught.items():
        right, confidence = (
            np.concatenate([getattr(task, name) for task in tasks]) for name in ("right", "confidence")
        )
        error = 100 * expected_calibration_error(confidence, right)
        shares = [
            interval([getattr(task, name) for task in tasks]) for name in ("rejected", "found", "auroc", "covered")
        ]
        size = f"{np.mean([task.size for task in tasks]):.2f}"
        rows.append([str(shots), kind, f"{100 * right.mean():.1f}", f"{error:.1f}", *shares, size])
    header = [
        "shots",
        "unlabelled",
        "labels right, %",
        "calibration error, %",
        "known rejected, %",
        "unknown rejected, %",
    ]
    print("\n" + markdown_table(rows, [*header, "AUROC, %", "right class in the set of 90 %, %", "classes of a set"]))


if __name__ == "__main__":
    main()
