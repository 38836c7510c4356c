"""What can be shipped of a fitted classifier: size, time to start, time of a picture, memory of the process."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from benchmarks.timing import in_own_process, show, take_turns

if TYPE_CHECKING:
    from benchmarks.record import Record, Table

# Nothing here imports PyTorch before it is needed, so that the memory of a process is that of what it ships.

#: Width and height of the picture.
SIZE, PICTURE = (640, 480), "picture.npy"


def run(record: Record) -> list[Table]:
    from benchmarks.record import Table

    found = record.value("shipping", lambda: _measure_each(record.repeats))
    rows = []
    for name, t in found.items():
        shown = [show([t["start"]]), show(t["times"]), f"{t['memory']:.0f} MB"]
        rows.append([TITLES[name], f"{t['size']:.1f} MB", *shown])
    header = ["", "size", "start", "a picture", "peak memory of the process"]
    note = (
        f"The default checkpoint, two classes, float32, one core; a decoded picture of {SIZE[0]} x {SIZE[1]} pixels. "
        "Start is importing what runs the file, and loading it."
    )
    return [Table("What is shipped", header, rows, note)]


TITLES = {
    "pets.safetensors": "saved file, in Python",
    "pets.onnx": "ONNX, from the resized square",
    "pixels.onnx": "ONNX, from pixels",
    "pets.pt2": "PyTorch program, from pixels",
}


def _measure_each(repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        sizes = _write(Path(folder))
        return {
            name: {"size": size, **in_own_process("shipping", folder, name, repeats)} for name, size in sizes.items()
        }


def _write(folder: Path) -> dict[str, float]:
    """Write every file; return their megabytes."""
    from sklearn.datasets import load_sample_images

    from fewshot_mahalanobis import SimpleCNAPSClassifier

    pictures = load_sample_images().images
    support = [picture[:, left : left + 200] for left in (0, 200, 400) for picture in pictures]
    classifier = SimpleCNAPSClassifier(device="cpu", precision="float32").fit(support, ["temple", "flower"] * 3)
    classifier.save(folder / "pets.safetensors")
    classifier.export_onnx(folder / "pets.onnx")
    classifier.export_onnx(folder / "pixels.onnx", pixels=True)
    classifier.export_program(folder / "pets.pt2", pixels=True)
    np.save(folder / PICTURE, np.asarray(Image.fromarray(pictures[0]).resize(SIZE)))
    return {name: (folder / name).stat().st_size / 1e6 for name in TITLES}


def _measure(folder: str, name: str, repeats: str) -> dict[str, Any]:
    file, pixels = Path(folder) / name, np.load(Path(folder) / PICTURE)
    began = time.perf_counter()
    classify = _opened(file)
    start = time.perf_counter() - began
    times = take_turns({name: lambda: classify(pixels)}, int(repeats))[name]
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return {"start": start, "times": times, "memory": peak * 1024 / 1e6}


def _opened(file: Path) -> Callable[[np.ndarray], Any]:
    """Load the file with one thread; return what classifies decoded pixels."""
    if file.suffix == ".onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        (given,) = session.get_inputs()
        if given.name == "pixels":
            return lambda pixels: session.run(None, {"pixels": pixels})
        side = given.shape[-1]

        def from_square(pixels: np.ndarray) -> Any:
            square = np.asarray(Image.fromarray(pixels).resize((side, side)), np.float32) / 127.5 - 1
            return session.run(None, {"images": square.transpose(2, 0, 1)[None]})

        return from_square
    import torch

    torch.set_num_threads(1)
    if file.suffix == ".pt2":
        program = torch.export.load(file).module()
        return lambda pixels: program(torch.from_numpy(pixels.copy()))
    from fewshot_mahalanobis import SimpleCNAPSClassifier

    classifier = SimpleCNAPSClassifier.load(file, device="cpu")
    return lambda pixels: classifier.predict([pixels])


if __name__ == "__main__":
    print(json.dumps(_measure(*sys.argv[1:])))
