"""What one round of correct labels does to a classifier of two classes against anything else.

    python -m benchmarks.rounds DATA_DIR --features features

Two classes of five images each are known (one class of sets that have few). The pool has 15 more of each and 45 images
of up to six other classes of the set, or 9 of those and 36 of the other sets. A round labels fifteen of the pool as
``partial_fit`` does. *Ten and five* are the ten images of the classes and the five of none that have the least
probability; *accepted* are the fifteen least probable of those that were not rejected; the last are drawn. The figures
are shares of the whole pool that are right before and after the round, as in ``docs/label_correct_repeat.md``. The sets
are for choosing alone. Features are kept, so that an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.augmented import RATE, SETS, Part
from fewshot_mahalanobis import SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.heads import AutoHead
from fewshot_mahalanobis.networks.devices import choose_dtype
from fewshot_mahalanobis.research.data.sources import ImageSource, load_source
from fewshot_mahalanobis.research.evaluation.result import Accuracy
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead

SHOT, MORE, OTHERS, OTHER_CLASSES, OF_EACH_SET, LABELS, NONE = 5, 15, 45, 6, 4, 15, -1
ROUNDS = ("ten and five", "accepted", "drawn")


class Task(NamedTuple):
    """Features of one task, adapted and as pretrained."""

    support: Part
    labels: torch.Tensor
    pool: Part
    truth: torch.Tensor  # class of each image of the pool, or NONE
    far: Part  # images of other sets

    def with_far(self) -> Task:
        """The same task with every fifth of the other classes' images, and those of other sets."""
        none = self.truth == NONE
        kept = torch.cat([(~none).nonzero()[:, 0], none.nonzero()[::5, 0]])
        pool = tuple(torch.cat([own[kept], far]) for own, far in zip(self.pool, self.far, strict=True))
        truth = torch.cat([self.truth[kept], self.truth.new_full((len(self.far[0]),), NONE)])
        return self._replace(pool=pool, truth=truth)


def collect(file: Path, model: SimpleCNAPS, source: ImageSource, others: Sequence[ImageSource], index: int) -> Task:
    """One task of a set, from the file if it is there."""
    if file.exists():
        return Task(*torch.load(file))
    rng, rows = np.random.default_rng((65, index)), source.indices_of_class()
    enough = [label for label, of_class in enumerate(rows) if len(of_class) >= SHOT + MORE]
    known = rng.choice(enough, 2 if len(rows) > 2 else 1, replace=False)
    other = [label for label in rng.permutation(len(rows)) if label not in known][:OTHER_CLASSES]
    drawn = np.stack([rng.permutation(rows[label])[: SHOT + MORE] for label in known])
    of_none = np.concatenate([rng.permutation(rows[label])[: -(-OTHERS // len(other))] for label in other])[:OTHERS]
    support, labels = source.network_input(drawn[:, :SHOT].ravel()), torch.arange(len(known)).repeat_interleave(SHOT)
    pool = source.network_input(np.concatenate([drawn[:, SHOT:].ravel(), of_none]))
    rng = np.random.default_rng((66, index))
    far = torch.cat([s.network_input(rng.choice(len(s.labels), OF_EACH_SET, replace=False)) for s in others])
    dtype = choose_dtype("auto", model.feature_extractor)
    both = [model.adapt(support, labels, adapt=adapt, dtype=dtype) for adapt in (True, False)]
    own, of_pool, of_far = ((both[0].features(x), both[1].features(x)) for x in (support, pool, far))
    truth = torch.cat([torch.arange(len(known)).repeat_interleave(MORE), torch.full((len(of_none),), NONE)])
    task = Task(own, labels, of_pool, truth, of_far)
    torch.save(tuple(task), file)
    return task


class Answers(NamedTuple):
    labels: NDArray[np.int64]  # of the pool, NONE where rejected
    probabilities: NDArray[np.float64]

    @classmethod
    def of(cls, task: Task, asked: NDArray[np.int64]) -> Answers:
        """Fit to the support set and to ``asked`` images of the pool, and answer all of it."""
        truth, of_pool = task.truth[asked], Features(*(part[asked] for part in task.pool))
        known = truth != NONE
        fitted = FittedHead.fit(
            AutoHead(),
            Features.joined([Features(*task.support), of_pool.rows_where(known.numpy())]),
            torch.cat([task.labels, truth[known]]),
            unknown_label=NONE,
            false_rejection_rate=RATE,
            negatives=None if known.all() else of_pool.rows_where(~known.numpy()),
        )
        decisions = fitted.predict(Features(*task.pool))
        labels = decisions.indices.masked_fill(decisions.indices == len(fitted.classes), NONE)
        return cls(labels.numpy(), fitted.log_probabilities(decisions.logits).exp().amax(dim=1).numpy())


def asked(how: str, task: Task, answers: Answers) -> NDArray[np.int64]:
    """Images of the pool that a round labels."""
    none, order = task.truth.numpy() == NONE, answers.probabilities.argsort(kind="stable")
    if how == "drawn":
        return np.random.default_rng(0).permutation(len(none))[:LABELS]
    if how == "accepted":
        return np.concatenate([order[answers.labels[order] != NONE], order[answers.labels[order] == NONE]])[:LABELS]
    return np.concatenate([order[none[order]][: LABELS // 3], order[~none[order]][: LABELS - LABELS // 3]])


def right(task: Task, answers: Answers) -> float:
    """Per cent of the pool."""
    return 100 * float((answers.labels == task.truth.numpy()).mean())


def row(tasks: Sequence[Task]) -> list[NDArray[np.float64]]:
    """Right before (n,), and the gain of each round, (n,) each."""
    nothing = np.empty(0, np.int64)
    found = []
    for task in tasks:
        first = Answers.of(task, nothing)
        after = [right(task, Answers.of(task, asked(how, task, first))) for how in ROUNDS]
        found.append([right(task, first), *(share - right(task, first) for share in after)])
    return [*np.array(found).T]


def table(of_sets: dict[str, Sequence[Task]]) -> str:
    """Markdown: each set, with intervals over its tasks, and all, over sets."""
    found = {name: row(tasks) for name, tasks in of_sets.items()}
    found["all"] = [np.array([columns[place].mean() for columns in found.values()]) for place in range(4)]

    def cell(column: NDArray[np.float64]) -> str:
        gain = Accuracy.of(column)
        return f"{gain.mean:+.1f} ± {gain.half_width:.1f}"

    rows = [[name, f"{before.mean():.1f}", *map(cell, gains)] for name, (before, *gains) in found.items()]
    return markdown_table(rows, ["set", "right before", *ROUNDS])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("data", type=Path, help="folder of the image sets")
    parser.add_argument("--features", type=Path, required=True, help="folder that keeps the features")
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--tasks", type=int, default=3, help="tasks of a set")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)  # that there are few examples
    arguments.features.mkdir(parents=True, exist_ok=True)
    model = load_checkpoint("default").at_size(arguments.image_size)
    opened = {name: load_source(arguments.data / name, size=model.image_size, lazy=True) for name in SETS}
    of_sets = {}
    for name, source in opened.items():
        others = [other for other in opened.values() if other is not source]
        files = [arguments.features / f"rounds {name.replace(':', '-')} {i}.pt" for i in range(arguments.tasks)]
        of_sets[name] = [collect(file, model, source, others, index) for index, file in enumerate(files)]
    print(f"**Others of the set**\n\n{table(of_sets)}\n")
    print(f"**Mostly of other sets**\n\n{table({name: [t.with_far() for t in ts] for name, ts in of_sets.items()})}")


if __name__ == "__main__":
    main()
