"""Which picture to label next: benchmarks/results/which_next.md.

    python -m benchmarks.which_next DATA_DIR

Validation classes, whose pictures are seen once by the frozen network of the default checkpoint. In a task, one or five
pictures of each of 8 or 10 classes are the support set. The pool has about 250 other pictures where a set has as many:
the classes' shares fall as 1 / rank ** 0.7, and 15 % are of none of the classes. A rule chooses a picture of the pool,
the true label is given (a picture of no class teaches nothing, but counts as an answer), and the default head is fitted
anew: to the labelled pictures alone, and with ``--unlabelled`` to the rest of the pool too, as ``review`` does. The
accuracy is that on other pictures, as many of each class. Every rule has the same tasks, and differences are taken
within a task.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm.auto import tqdm

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.apps.active_learning import density, doubt, typicality
from fewshot_mahalanobis.heads import AutoHead
from fewshot_mahalanobis.research.data.sources import load_source
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead

#: Name -> its image sets, whose classes are taken together, the classes of a task, and the test pictures of each.
SETS = {
    "photographs": (("photo_vehicles", "photo_waste", "photo_cotton", "photo_food3"), "val", 8, 6),
    "mini-ImageNet": (("mini_imagenet_val",), "val", 8, 15),
    "birds": (("cub200_2010",), "valid", 10, 6),
    "drawings": (("quickdraw345",), "valid", 10, 6),
}
POOL, STRANGERS, EXPONENT = 250, 0.15, 0.7
SHOTS, ANSWERS = (1, 5), (5, 10, 20)

Rows = NDArray[np.int64]


class Task(NamedTuple):
    """Rows of features, and the class of every row of the set, -1 for none of the task's."""

    support: Rows
    pool: Rows
    test: Rows
    labels: Rows


class Moment(NamedTuple):
    """What a rule may look at: a score of each row of the pool without a label is asked of it."""

    typicality: NDArray[np.float32]
    probabilities: Callable[[], NDArray[np.float64]]  # (m, k), by the head as it is
    by_labels: Callable[[], NDArray[np.float64]]  # (m, k), by the head without unlabelled pictures
    rng: np.random.Generator


def in_the_doubtful_half(moment: Moment) -> NDArray[np.floating]:
    unsure = doubt(moment.probabilities())
    return np.where(unsure >= np.median(unsure), moment.typicality, -np.inf)


def where_half_as_doubtful_as_the_most(moment: Moment) -> NDArray[np.floating]:
    unsure = doubt(moment.probabilities())
    return np.where(unsure >= unsure.max() / 2, moment.typicality, -np.inf)


def doubtful_by_labels_alone(moment: Moment) -> NDArray[np.floating]:
    unsure = doubt(moment.by_labels())
    return np.where(unsure >= unsure.max() / 2, moment.typicality, -np.inf)


RULES: dict[str, Callable[[Moment], NDArray[np.floating]]] = {
    "random": lambda moment: moment.rng.random(len(moment.typicality)),
    "doubt": lambda moment: doubt(moment.probabilities()),
    "typicality": lambda moment: moment.typicality,
    "typicality in the half most in doubt": in_the_doubtful_half,
    "typicality from half the largest doubt on": where_half_as_doubtful_as_the_most,
    "the same, doubt by labels alone": doubtful_by_labels_alone,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--tasks", type=int, default=48)
    parser.add_argument("--unlabelled", action="store_true", help="the rest of the pool teaches too")
    parser.add_argument("--kept", type=Path, default=Path("which_next.jsonl"), help="of a run that was interrupted")
    arguments = parser.parse_args()
    features = {name: seen(arguments.data, *of[:2]) for name, of in SETS.items()}
    rows = [json.loads(line) for line in arguments.kept.open()] if arguments.kept.exists() else []
    done = {(row["set"], row["shot"], row["task"]) for row in rows}
    for task in tqdm(range(arguments.tasks)):
        for shot in SHOTS:
            for name, (_, _, way, tests) in SETS.items():
                if (name, shot, task) in done:
                    continue
                rng = np.random.default_rng((task, shot))
                drawn = draw(features[name][1], rng, way, shot, tests)
                accuracies = {
                    rule: curve(features[name][0], drawn, rule, (task, shot), arguments.unlabelled) for rule in RULES
                }
                row = {"set": name, "shot": shot, "task": task, "accuracies": accuracies}
                with arguments.kept.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    measured = [json.loads(line) for line in arguments.kept.open()]
    print(table([row for row in measured if row["task"] < arguments.tasks]))


def seen(data: Path, names: Sequence[str], split: str) -> tuple[NDArray[np.float32], Rows]:
    """Features (n, d) of all pictures of some sets by the frozen network, and their labels (n,)."""
    classifier = SimpleCNAPSClassifier(adapt=False, device="cpu")
    classifier.fit(np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8), [0, 1, 0, 1])
    parts, labels = list[NDArray[np.float32]](), list[Rows]()
    for name in names:
        source = load_source(str(data / f"{name}.zip:{split}"), size=classifier.model_.image_size, lazy=True)
        rows = range(0, len(source.labels), 64)
        parts += [classifier.transform(source.images[start : start + 64]) for start in rows]
        labels.append(np.asarray(source.labels) + sum(len(np.unique(other)) for other in labels))
    return np.concatenate(parts), np.concatenate(labels)


def draw(labels: Rows, rng: np.random.Generator, way: int, shot: int, tests: int) -> Task:
    classes = rng.permutation(np.unique(labels))
    rows = [rng.permutation(np.flatnonzero(labels == label)) for label in classes[:way]]
    shares = 1 / np.arange(1, way + 1) ** EXPONENT
    wanted = np.maximum(1, (shares / shares.sum() * POOL * (1 - STRANGERS)).astype(int))
    pool = [own[shot + tests :][:count] for own, count in zip(rows, wanted, strict=True)]
    strangers = round(sum(map(len, pool)) * STRANGERS / (1 - STRANGERS))
    others = rng.permutation(np.flatnonzero(np.isin(labels, classes[way:])))[:strangers]
    known = np.full(labels.max() + 1, -1)
    known[classes[:way]] = np.arange(way)
    return Task(
        np.concatenate([own[:shot] for own in rows]),
        np.concatenate([*pool, others]),
        np.concatenate([own[shot : shot + tests] for own in rows]),
        known[labels],
    )


def curve(
    features: NDArray[np.float32], task: Task, rule: str, seed: tuple[int, int], unlabelled: bool
) -> dict[int, float]:
    """Accuracy after some numbers of answers, 0 among them."""
    rng, accuracies = np.random.default_rng((*seed, 1)), dict[int, float]()
    free, labelled = [*task.pool], [*task.support]
    dense = dict(zip(task.pool, density(features[task.pool]), strict=True))
    for number in range(max(ANSWERS) + 1):
        teaching = [*free] if unlabelled else []
        if number in (0, *ANSWERS):
            predicted = probabilities(features, labelled, teaching, task.labels, task.test).argmax(axis=1)
            accuracies[number] = float((predicted == task.labels[task.test]).mean())
        typical = typicality(features[free], np.array([dense[row] for row in free]), features[labelled])
        by_pool, by_labels = (
            partial(probabilities, features, [*labelled], some, task.labels, [*free]) for some in (teaching, [])
        )
        moment = Moment(typical, by_pool, by_labels, rng)
        labelled.append(free.pop(int(RULES[rule](moment).argmax())))
    return accuracies


def probabilities(
    features: NDArray[np.float32],
    labelled: Sequence[int],
    unlabelled: Sequence[int],
    labels: Rows,
    queries: Sequence[int] | Rows,
) -> NDArray[np.float64]:
    """Of each query's classes (m, k), by the default head fitted to what is of a class, and to ``unlabelled``."""
    support = np.array([row for row in labelled if labels[row] >= 0])
    head = FittedHead.fit(
        AutoHead(),
        Features(torch.from_numpy(features[support])),
        torch.from_numpy(labels[support]),
    )
    if unlabelled:
        head = head.with_unlabelled(torch.from_numpy(features[[*unlabelled]]))
    return head.log_probabilities(head.logits(torch.from_numpy(features[queries]))).exp().numpy()


def table(measured: Sequence[dict[str, Any]]) -> str:
    """Points over random labelling, mean over the sets with its 95 % interval over tasks; the accuracy of random."""
    rows = []
    for shot in SHOTS:
        for rule in RULES:
            for number in ANSWERS:
                gains = [
                    np.array([gain(row, rule, number) for row in measured if (row["set"], row["shot"]) == (name, shot)])
                    for name in SETS
                ]
                mean = np.mean([part.mean() for part in gains])
                half = 1.96 * np.sqrt(sum(part.var(ddof=1) / len(part) for part in gains)) / len(gains)
                shown = f"{mean:.1f}" if rule == "random" else f"{mean:+.1f} ± {half:.1f}"
                rows.append([str(shot), rule, str(number), shown, *(f"{part.mean():.1f}" for part in gains)])
    return markdown_table(rows, ["pictures a class", "rule", "answers", "all sets", *SETS])


def gain(row: dict[str, Any], rule: str, number: int) -> float:
    """Points of a rule over random labelling in one task; of random labelling its accuracy, in %."""
    curves = row["accuracies"]
    before = 0 if rule == "random" else curves["random"][str(number)]
    return 100 * float(curves[rule][str(number)] - before)


if __name__ == "__main__":
    main()
