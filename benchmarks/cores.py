"""Time of an image on one core and on all: network, files and a whole task, beside ONNX Runtime in the same run."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_sample_images

from benchmarks.photographs import draw
from benchmarks.record import Record, Table
from benchmarks.tasks import drawn_images
from benchmarks.timing import Times, ratio, show, take_turns
from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.images.decode import ImageBatches

#: Number of images, and of files of a size.
IMAGES, FILES = 64, {(400, 300): 100, (4000, 3000): 24}
#: Support files of a task; its queries are the other files of 400 x 300.
CLASSES, SHOTS = 5, 5
RUNTIME, NETWORK, TASK = (
    "ONNX Runtime, the same network",
    "network",
    "task of 25 + 75 files of 400 x 300, fit and predict",
)


def run(record: Record) -> list[Table]:
    found = record.value("seconds", lambda: _measure(record.repeats, record.quick))
    names = [*dict.fromkeys(key.rsplit(", ", 2)[0] for key in found)]
    settings = [*dict.fromkeys(", ".join(key.rsplit(", ", 2)[1:]) for key in found)]
    rows = [
        [name, *(show(found[f"{name}, {s}"]) if f"{name}, {s}" in found else "" for s in settings)] for name in names
    ]
    shares = [
        [s, ratio(found[f"{RUNTIME}, {s}"], found[f"{NETWORK}, {s}"]), "0.85"]
        for s in settings
        if f"{RUNTIME}, {s}" in found
    ]
    return [
        Table("Time of an image by cores, 224 px", ["", *settings], rows),
        Table("The network's speed as a share of ONNX Runtime's", ["", "share", "aim"], shares),
    ]


def _measure(repeats: int, quick: bool) -> dict[str, Times]:
    with tempfile.TemporaryDirectory() as name:
        folder, files = Path(name), {}
        for size, count in FILES.items():
            place = folder / str(size[0])
            place.mkdir()
            draw(place, 30 if quick and size[0] == 400 else 2 if quick else count, size)
            files[size] = sorted(place.glob("*.jpg"))
        calls, counts = _calls(folder, files, 4 if quick else IMAGES)
        with warnings.catch_warnings():  # the files are pieces of two photographs
            warnings.filterwarnings("ignore", message=".*copies")
            times = take_turns(calls, repeats)
    return {key: [seconds / counts[key] for seconds in rounds] for key, rounds in times.items()}


def _calls(
    folder: Path, files: dict[tuple[int, int], list[Path]], count: int
) -> tuple[dict[str, Callable[[], Any]], dict[str, int]]:
    """Calls by name, precision and cores; the images of each."""
    calls: dict[str, Callable[[], Any]] = {}
    counts: dict[str, int] = {}
    pictures = load_sample_images().images
    support = [picture[:, left : left + 200] for left in (0, 200, 400) for picture in pictures]
    auto = SimpleCNAPSClassifier(device="cpu").fit(support, [0, 1] * 3)
    arrays = drawn_images(count, auto.model_.image_size)
    images = torch.cat([*ImageBatches(arrays, auto.model_.image_size)])
    small, labels = files[(400, 300)], np.repeat(np.arange(CLASSES), SHOTS)
    own = str(auto.task_.network.dtype).removeprefix("torch.")
    for precision in dict.fromkeys(("float32", own)):
        for cores in dict.fromkeys((1, torch.get_num_threads())):
            classifier = SimpleCNAPSClassifier(device="cpu", precision=precision, n_jobs=cores)
            classifier.fit(support, [0, 1] * 3)
            fresh = SimpleCNAPSClassifier(classifier.model_, device="cpu", precision=precision, n_jobs=cores)
            of_setting: dict[str, tuple[int, Callable[[], Any]]] = {
                NETWORK: (count, lambda c=classifier: c.task_.network.features(images)),
                "`predict`, arrays": (count, lambda c=classifier: c.predict(arrays)),
                TASK: (len(small), lambda c=fresh: c.fit(small[: len(labels)], labels).predict(small[len(labels) :])),
            }
            for (width, height), paths in files.items():
                name = f"`predict`, files of {width:,} x {height:,}"
                of_setting[name] = len(paths), lambda c=classifier, p=paths: c.predict(p)
            if precision == "float32":
                of_setting[RUNTIME] = count, _in_runtime(classifier, folder / f"{cores}.onnx", images, cores)
            for name, (number, call) in of_setting.items():
                key = f"{name}, {precision}, {cores} core{'s' if cores > 1 else ''}"
                calls[key], counts[key] = _on(cores, call), number
    return calls, counts


def _on(cores: int, call: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(cores)
        try:
            call()
        finally:
            torch.set_num_threads(before)

    return run


def _in_runtime(classifier: SimpleCNAPSClassifier, path: Path, images: torch.Tensor, cores: int) -> Callable[[], Any]:
    import onnxruntime

    classifier.export_onnx(path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cores
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    batches = [batch.numpy() for batch in images.contiguous().split(4)]
    return lambda: [session.run(None, {"images": batch}) for batch in batches]
