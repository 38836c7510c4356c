"""The whole task, images in and labels out, on both embedded checkpoints in both precisions.

They take turns in one process, each with images of its own size. ``python -m benchmarks --again checkpoints``
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.record import Record, Table
from benchmarks.tasks import drawn_images
from benchmarks.timing import Times, ratio, show, take_turns
from fewshot_mahalanobis import SimpleCNAPSClassifier, load_checkpoint

NAMES = ("resnet18", "efficientnet-lite0")
PRECISIONS = ("float32", "bfloat16")
WAYS, SHOTS, QUERIES = 5, 5, 75
#: Share of the ResNet18's time that is aimed at, in float32; in bfloat16 the EfficientNet must not be slower.
AIMS = {"float32": "0.7", "bfloat16": "1"}
#: Rounds for each of a benchmark's usual ones.
ROUNDS = 3


def run(record: Record) -> list[Table]:
    t = record.value("times", lambda: _measure(ROUNDS * record.repeats))
    sizes = record.value("sizes", lambda: {name: load_checkpoint(name).image_size for name in NAMES})
    rows = []
    for precision in PRECISIONS:
        first, second = (t[f"{name} {precision}"] for name in NAMES)
        fits = [t[f"{name} {precision}, fit"] for name in reversed(NAMES)]
        rows.append([precision, show(first), show(second), ratio(second, first), AIMS[precision], ratio(*fits)])
    header = ["precision", *(f"{name}, {sizes[name]} px" for name in NAMES), "ratio", "aim", "ratio of fit alone"]
    title = f"Both checkpoints, {WAYS}-way {SHOTS}-shot, {QUERIES} queries"
    return [Table(title, header, rows, "Images in and labels out; a ratio below 1 is in favour of the second.")]


def _measure(repeats: int) -> dict[str, Times]:
    labels = np.repeat(np.arange(WAYS), SHOTS)
    calls: dict[str, Callable[[], Any]] = {}
    for name in NAMES:
        model = load_checkpoint(name)
        support, queries = (drawn_images(n, model.image_size, seed=n) for n in (WAYS * SHOTS, QUERIES))
        for precision in PRECISIONS:
            classifier = SimpleCNAPSClassifier(model, device="cpu", precision=precision)
            calls[f"{name} {precision}"] = lambda c=classifier, s=support, q=queries: c.fit(s, labels).predict(q)
            calls[f"{name} {precision}, fit"] = lambda c=classifier, s=support: c.fit(s, labels)
    return take_turns(calls, repeats)
