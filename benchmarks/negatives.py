"""What examples of no class teach the outlier score: docs/unknown_classes.md.

    python -m benchmarks.negatives DATA_DIR --features features --image-size 128

The support set has five classes of five images; the queries are of these and of five other classes of the same set. Of
sets with fewer than ten classes half are known, with ten images each. The examples of no class are other images of the
queries' unknown classes, images of five further ones (of sets that have so many), or images of other sets. They are
compared with a class "none" made of them. Features are kept, so that an interrupted run resumes. The weight of the term
that they add was chosen on validation classes, among them photographs that are for choosing alone: ``--weights``
compares some.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.unknown_classes import SHOT, WAY
from benchmarks.unknown_classes import TEST as NINE
from benchmarks.unknown_classes import VALIDATION as FOUR
from fewshot_mahalanobis import SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.heads import AutoHead
from fewshot_mahalanobis.networks.devices import choose_dtype
from fewshot_mahalanobis.research.data.sources import ImageSource, load_source
from fewshot_mahalanobis.research.episodes.sampling import FixedEpisodes
from fewshot_mahalanobis.research.evaluation.result import Accuracy
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table
from fewshot_mahalanobis.support_set import negatives as of_no_class
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead

VALIDATION = (*FOUR, *(f"photo_{name}.zip" for name in ("vehicles", "waste", "cotton", "food3")))
TEST = (*NINE[:4], "dtd10.zip:test", *NINE[4:])
QUERIES, NUMBERS, RATE = 5, (5, 10, 20), 0.05
#: What examples of no class show, and the way without a term for them.
SAME, FURTHER, ELSEWHERE = "the queries' classes", "further classes", "other sets"
TERM, CLASS = "no class", 'a class "none"'
COLUMNS = ("known rejected", "unknown found", "found at 5 %", "other sets found at 5 %", "known right")

Part = tuple[torch.Tensor, torch.Tensor]


class Task(NamedTuple):
    """Features of one task, adapted and as pretrained."""

    support: Part
    labels: torch.Tensor
    known: Part
    known_labels: torch.Tensor
    unknown: Part
    negatives: dict[str, Part]


def tasks(model: SimpleCNAPS, source: ImageSource, others: Sequence[ImageSource], n: int) -> Iterator[Task]:
    """The first ``n`` tasks of a set."""
    dtype, most, classes = choose_dtype("auto", model.feature_extractor), max(NUMBERS), len(source.class_names)
    small = classes < 2 * WAY
    way, shot = (math.ceil(classes / 2), 2 * SHOT) if small else (WAY, SHOT)
    drawn, images_each = (classes, most) if small else (WAY * min(classes // WAY, 3), SHOT)
    episodes = FixedEpisodes(source, drawn, images_each, QUERIES, seed=0)
    for index in range(n):
        episode, rng = episodes.draw(index), np.random.default_rng((2, index))
        images = episode.support.reshape(drawn, images_each)
        sets = [others[place] for place in rng.permutation(len(others))[:4]]
        each = -(-most // len(sets))
        elsewhere = torch.cat([s.network_input(rng.choice(len(s.labels), each, replace=False)) for s in sets])
        known = episode.query_labels < way
        parts = {
            "known": source.network_input(episode.query[known]),
            "unknown": source.network_input(
                episode.query[(episode.query_labels >= way) & (episode.query_labels < 2 * way)]
            ),
            SAME: source.network_input(images[way : 2 * way].T.ravel()[:most]),
            ELSEWHERE: elsewhere[torch.from_numpy(rng.permutation(len(elsewhere))[:most])],
        }
        if drawn == 3 * WAY:
            parts[FURTHER] = source.network_input(images[2 * way :].T.ravel()[:most])
        support, labels = source.network_input(images[:way, :shot].ravel()), torch.arange(way).repeat_interleave(shot)
        both = [model.adapt(support, labels, adapt=adapt, dtype=dtype) for adapt in (True, False)]
        features = {name: (both[0].features(x), both[1].features(x)) for name, x in parts.items()}
        own = both[0].fitted_head.support.adapted, both[1].fitted_head.support.adapted
        truth = torch.from_numpy(episode.query_labels[known])
        yield Task(own, labels, features.pop("known"), truth, features.pop("unknown"), features)


def collect(file: Path, model: SimpleCNAPS, source: ImageSource, others: Sequence[ImageSource], n: int) -> list[Task]:
    """The first ``n`` tasks of a set, from the file if it has them."""
    if not file.exists():
        torch.save([tuple(task) for task in tasks(model, source, others, n)], file)
    return [Task(*task) for task in torch.load(file)][:n]


class Answers(NamedTuple):
    """What a classifier says of the queries of a task."""

    known: NDArray[np.float64]  # outlier scores less the threshold
    unknown: NDArray[np.float64]
    others: NDArray[np.float64]  # the same of images of other sets
    right: NDArray[np.bool_]  # of known queries: not rejected, and of the right class


def answers(task: Task, way: str, negatives: Features | None) -> Answers:
    """Fit to a task with ``negatives`` of no class, or as a class of their own, and classify its queries."""
    support, labels, rejection = Features(*task.support), task.labels, {}
    if way == CLASS and negatives is not None:
        support = Features.joined([support, negatives])
        labels = torch.cat([labels, labels.new_full((len(negatives.adapted),), int(labels.max()) + 1)])
    else:
        rejection = {"unknown_label": -1, "false_rejection_rate": RATE, "negatives": negatives}
    fitted = FittedHead.fit(AutoHead(), support, labels, **rejection)
    decisions = [fitted.predict(Features(*part)) for part in (task.known, task.unknown, task.negatives[ELSEWHERE])]
    right = (decisions[0].indices == task.known_labels).numpy()
    if fitted.outliers is None:
        scores = [(each.logits[:, -1] - each.logits[:, :-1].amax(dim=1)).numpy() for each in decisions]
    else:
        scores = [(each.outlier_scores - fitted.outliers.threshold).numpy() for each in decisions]
    return Answers(*scores, right)


def row(found: Sequence[Answers]) -> list[float]:
    """``COLUMNS`` of the tasks of a set: per cent."""
    known, unknown, others, right = (np.concatenate(parts) for parts in zip(*found, strict=True))
    threshold = np.quantile(known, 1 - RATE)
    shares = known > 0, unknown > 0, unknown > threshold, others > threshold, right
    return [100 * float(share.mean()) for share in shares]


def table(of_sets: dict[str, list[Task]], numbers: Sequence[int] = NUMBERS, ways: Sequence[str] = (TERM, CLASS)) -> str:
    """Markdown: means over the sets, and what each way gains over no examples on the same sets."""
    rows = []
    for kind in (SAME, FURTHER, ELSEWHERE):
        sets = [tasks for tasks in of_sets.values() if kind in tasks[0].negatives]
        if not sets:
            continue
        without = np.array([row([answers(task, TERM, None) for task in tasks]) for tasks in sets])
        rows.append([kind, 0, "", *(f"{value:.1f}" for value in without.mean(axis=0))])
        for way in ways:
            for number in numbers:
                found = []
                for tasks_of_set in sets:
                    first = [Features(*(part[:number] for part in task.negatives[kind])) for task in tasks_of_set]
                    found.append(row([answers(t, way, n) for t, n in zip(tasks_of_set, first, strict=True)]))
                gains = [Accuracy.of(column) for column in (np.array(found) - without).T]
                cells = [
                    f"{value:.1f} ({gain.mean:+.1f} ± {gain.half_width:.1f})"
                    for value, gain in zip(np.mean(found, axis=0), gains, strict=True)
                ]
                if kind == ELSEWHERE:
                    cells[3] = ""  # the examples themselves are among them
                rows.append([kind, number, way, *cells])
    return markdown_table(rows, ["examples of", "number", "given as", *COLUMNS])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("data", type=Path, help="folder of the image sets")
    parser.add_argument("--checkpoint", default="default", help="name, folder or Hub repository")
    parser.add_argument("--image-size", type=int, help="side of the images; by default the checkpoint's")
    parser.add_argument("--episodes", type=int, default=20, help="tasks of a set")
    parser.add_argument("--weights", type=float, nargs="*", help="compare weights of the term on validation sets alone")
    parser.add_argument("--features", type=Path, required=True, help="folder that keeps features of these settings")
    arguments = parser.parse_args()
    model = load_checkpoint(arguments.checkpoint)
    if arguments.image_size is not None:
        model = model.at_size(arguments.image_size)
    arguments.features.mkdir(parents=True, exist_ok=True)
    for split, paths in [("validation", VALIDATION), ("test", TEST)][: 1 if arguments.weights else 2]:
        opened = {path: load_source(arguments.data / path, size=model.image_size, lazy=True) for path in paths}
        of_sets = {}
        for path, source in opened.items():
            others = [other for name, other in opened.items() if name != path]
            file = arguments.features / f"{split}-{path.replace(':', '-')}.pt"
            of_sets[path] = collect(file, model, source, others, arguments.episodes)
        for weight in arguments.weights or [of_no_class._WEIGHT]:
            of_no_class._WEIGHT = weight
            print(
                f"\n**{split.capitalize()} sets: % of queries, {arguments.episodes} tasks a set, weight {weight:g}**\n"
            )
            print(table(of_sets, *(((10,), (TERM,)) if arguments.weights else ())), flush=True)


if __name__ == "__main__":
    main()
