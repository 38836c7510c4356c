"""The whole task, images in and labels out, on both embedded checkpoints in both precisions.

They take turns in one process, each with images of its size. ``python -m benchmarks --again checkpoints``
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.record import Record, Table
from benchmarks.tasks import drawn_images
from benchmarks.timing import Times, ratio, show, take_turns
from fewshot_mahalanobis import SimpleCNAPSClassifier, load_checkpoint

#: Checkpoints and sizes of images. The last is the default.
CHECKPOINTS = (("resnet18", 96), ("efficientnet-lite0", 160), ("efficientnet-lite0", 224))
PRECISIONS = ("float32", "bfloat16")
WAYS, SHOTS, QUERIES = 5, 5, 75
#: Aim: the EfficientNet at 160 pixels takes this share of the ResNet18's time.
AIMS = {"float32": "0.7", "bfloat16": "1"}
#: Rounds, as a multiple of a benchmark's usual number.
ROUNDS = 3


def run(record: Record) -> list[Table]:
    t = record.value("times", lambda: _measure(ROUNDS * record.repeats))
    titles = [f"{name}, {size} px" for name, size in CHECKPOINTS]
    rows = []
    for precision in PRECISIONS:
        times = [t[f"{title}, {precision}"] for title in titles]
        first, second, third = times
        rows.append([precision, *map(show, times), ratio(second, first), AIMS[precision], ratio(third, second)])
    header = ["precision", *titles, "second to first", "aim", "third to second"]
    title = f"Both checkpoints, {WAYS}-way {SHOTS}-shot, {QUERIES} queries"
    return [Table(title, header, rows, "Images in and labels out.")]


def _measure(repeats: int) -> dict[str, Times]:
    labels = np.repeat(np.arange(WAYS), SHOTS)
    calls: dict[str, Callable[[], Any]] = {}
    for name, size in CHECKPOINTS:
        model = load_checkpoint(name).at_size(size)
        support, queries = (drawn_images(n, size, seed=n) for n in (WAYS * SHOTS, QUERIES))
        for precision in PRECISIONS:
            classifier = SimpleCNAPSClassifier(model, device="cpu", precision=precision)
            calls[f"{name}, {size} px, {precision}"] = lambda c=classifier, s=support, q=queries: c.fit(
                s, labels
            ).predict(q)
    return take_turns(calls, repeats)
