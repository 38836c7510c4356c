"""PyTorch and ONNX Runtime as the engine of the network, in turns in one process, float32 on AVX2 alone.

    python -m benchmarks.engines

The rows are those of docs/speed.md: tasks of five classes, five images each and 75 queries, and ``predict`` on files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from benchmarks.ordinary_machine import HIDDEN
from benchmarks.photographs import draw
from benchmarks.timing import ratio, show, take_turns
from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.networks import task
from fewshot_mahalanobis.networks.engine import ONNX_RUNTIME, PYTORCH
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table

#: Checkpoint, side of the images in pixels, and cores.
TASKS = (
    ("default", 224, 2),
    ("default", 160, 2),
    *(("default", side, 1) for side in (128, 160, 224, 288)),
    ("resnet18", 96, 2),
)
FILES, SIZE, ROUNDS = 200, (400, 300), 5


def rows() -> list[list[str]]:
    """Measure every row in this process."""
    found, labels = [], np.repeat(np.arange(5), 5)
    for checkpoint, side, cores in TASKS:
        torch.set_num_threads(cores)
        images = np.random.default_rng(0).integers(0, 256, (100, side, side, 3), dtype=np.uint8)

        def whole_task(classifier: SimpleCNAPSClassifier, images: np.ndarray = images) -> None:
            classifier.fit(images[:25], labels).predict(images[25:])

        title = f"task: `{checkpoint}`, {side} px, {cores} core{'s' * (cores > 1)}"
        found.append(_row(title, whole_task, lambda: SimpleCNAPSClassifier(checkpoint, image_size=side, device="cpu")))  # noqa: B023
    with tempfile.TemporaryDirectory() as name:
        draw(Path(name), 25 + FILES, SIZE)
        files = sorted(Path(name).glob("*.jpg"))
        for checkpoint in ("default", "resnet18"):
            found.append(
                _row(
                    f"`predict`, {FILES} files: `{checkpoint}`, 2 cores",
                    lambda classifier: classifier.predict(files[25:]),
                    lambda: SimpleCNAPSClassifier(checkpoint, device="cpu").fit(files[:25], labels),  # noqa: B023
                )
            )
    return found


def _row(
    title: str, call: Callable[[SimpleCNAPSClassifier], object], make: Callable[[], SimpleCNAPSClassifier]
) -> list[str]:
    """Times of a call with a classifier that each engine has made."""

    def with_engine(engine: str) -> Callable[[], object]:
        with _chosen(engine):
            classifier = make()

        def run() -> None:
            with _chosen(engine):
                call(classifier)
            if classifier.engine_ != engine:
                raise RuntimeError(f"{classifier.engine_} ran in place of {engine}: pip install '.[fast]'")

        return run

    times = take_turns({engine: with_engine(engine) for engine in (PYTORCH, ONNX_RUNTIME)}, ROUNDS)
    return [title, show(times[PYTORCH]), show(times[ONNX_RUNTIME]), ratio(times[PYTORCH], times[ONNX_RUNTIME])]


def _chosen(engine: str) -> AbstractContextManager[object]:
    """The engine of the networks that are made meanwhile."""
    own = task.choose_engine
    return mock.patch.object(task, "choose_engine", own if engine == ONNX_RUNTIME else lambda *_: PYTORCH)


def main() -> None:
    warnings.filterwarnings("ignore", message=".*copies")  # the files are pieces of two photographs
    if "--measure" in sys.argv:
        print(markdown_table(rows(), ["", PYTORCH, ONNX_RUNTIME, "times as fast"]))
        return
    command = [sys.executable, "-m", "benchmarks.engines", "--measure"]
    subprocess.run(command, env=os.environ | HIDDEN, check=True)


if __name__ == "__main__":
    main()
