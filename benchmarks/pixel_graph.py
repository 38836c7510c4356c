"""The graph that reads pixels against ``predict`` on one decoded picture of three sizes: time, and peak memory."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from benchmarks.record import Record, Table
from benchmarks.timing import Times, extra_megabytes, in_own_process, ratio, show, take_turns
from fewshot_mahalanobis import SimpleCNAPSClassifier

#: Width and height of the pictures.
SIZES = ((640, 480), (1920, 1080), (4000, 3000))


def run(record: Record) -> list[Table]:
    sizes = SIZES[:1] if record.quick else SIZES
    t = record.value("seconds", lambda: _measure(sizes, record.repeats))
    rows = []
    for width, height in sizes:
        name = f"{width:,} x {height:,}"
        memory = record.value(f"memory {name}", lambda: in_own_process("pixel_graph", width, height))  # noqa: B023
        seconds = t[name]["graph"], t[name]["predict"]
        shown = f"{memory['megabytes'] / (3e-6 * width * height):.2g}"
        rows.append([name, *map(show, seconds), ratio(*seconds), "1.5", shown, "2"])
    header = ["pixels", "ONNX Runtime", "`predict`", "ratio", "aim", "peak memory, in pictures", "aim"]
    note = "One RGB picture, one core, float32. Memory is beyond what a picture of 224 pixels has needed before."
    return [Table("A graph that reads pixels", header, rows, note)]


def _measure(sizes: tuple[tuple[int, int], ...], repeats: int) -> dict[str, dict[str, Times]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        classifier, graph = _both()
        found = {}
        for width, height in sizes:
            pixels = _picture(width, height)
            calls = {"graph": lambda p=pixels: graph(p), "predict": lambda p=pixels: classifier.predict([p])}
            found[f"{width:,} x {height:,}"] = take_turns(calls, repeats)
    finally:
        torch.set_num_threads(before)
    return found


def _both() -> tuple[SimpleCNAPSClassifier, Callable[[np.ndarray], Any]]:
    """A fitted classifier, and its graph in a session with one thread."""
    import onnxruntime

    pictures = load_sample_images().images
    support = [picture[:, left : left + 200] for left in (0, 200, 400) for picture in pictures]
    classifier = SimpleCNAPSClassifier(device="cpu", precision="float32", n_jobs=1).fit(support, [0, 1] * 3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.onnx"
        classifier.export_onnx(path, pixels=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return classifier, lambda pixels: session.run(None, {"pixels": pixels})


def _picture(width: int, height: int) -> np.ndarray:
    return np.asarray(Image.fromarray(load_sample_images().images[0]).resize((width, height)))


def _memory(width: int, height: int) -> dict[str, float]:
    _, graph = _both()
    graph(_picture(224, 224))
    pixels = _picture(width, height)
    return {"megabytes": extra_megabytes(lambda: graph(pixels))}


if __name__ == "__main__":
    print(json.dumps(_memory(*map(int, sys.argv[1:]))))
