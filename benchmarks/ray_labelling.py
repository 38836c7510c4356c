"""Images per second of ``fewshot_mahalanobis.apps.ray`` with one and two workers, beside ``predict`` in one process.

Every worker, and the plain process, has one thread. Time is counted from the end of the first block, so that starting
processes and loading the classifier are left out; these seconds are reported separately. Needs the extra ``ray``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from benchmarks.record import Record, Table
from benchmarks.timing import in_own_process
from fewshot_mahalanobis import SimpleCNAPSClassifier

BLOCK = 64
IMAGES, REPEATS = 1024, 3
PLAIN = "predict, one thread"

Found = dict[str, list[tuple[float, float]]]  # images per second, and seconds before the first block was done


def run(record: Record) -> list[Table]:
    images, repeats = (3 * BLOCK, 1) if record.quick else (IMAGES, REPEATS)
    found: Found = record.value("rates", lambda: in_own_process("ray_labelling", images, repeats))
    rows = []
    base = statistics.median(rate for rate, _ in found[PLAIN])
    for kind, values in found.items():
        rates = [rate for rate, _ in values]
        rate, wait = statistics.median(rates), statistics.median(wait for _, wait in values)
        spread = f"{rate:.0f} ({min(rates):.0f} to {max(rates):.0f})"
        rows.append([kind, spread, f"{rate / base:.2f}", f"{wait:.1f} s"])
    note = f"{images:,} JPEG files of 300 x 300 pixels, precision auto, one thread each. Median and range of {repeats}."
    header = ["", "images/s", "of predict", "first block after"]
    return [Table("Ray workers on this machine", header, rows, note)]


def photographs(folder: Path, n: int) -> list[str]:
    """Cuts of scikit-learn's two photographs, as JPEG."""
    rng = np.random.default_rng(0)
    pictures = load_sample_images().images
    paths = []
    for index in range(n):
        picture = pictures[index % 2]
        top, left = (rng.integers(0, side - 300) for side in picture.shape[:2])
        paths.append(str(folder / f"{index}.jpg"))
        Image.fromarray(picture[top : top + 300, left : left + 300]).save(paths[-1], quality=90)
    return paths


def plain(classifier: SimpleCNAPSClassifier, paths: list[str]) -> tuple[float, float]:
    start = time.perf_counter()
    classifier.predict(paths[:BLOCK])
    first = time.perf_counter()
    classifier.predict(paths[BLOCK:])
    return (len(paths) - BLOCK) / (time.perf_counter() - first), first - start


def on_ray(file: Path, paths: list[str], workers: int) -> tuple[float, float]:
    from fewshot_mahalanobis.apps.ray import label_images

    start = time.perf_counter()
    first, rows_at_first, rows = 0.0, 0, 0
    for table in label_images(file, paths, workers=workers, images_per_block=BLOCK).iter_batches(
        batch_size=None, batch_format="pyarrow", prefetch_batches=0
    ):
        rows += len(table)
        if not first:
            first, rows_at_first = time.perf_counter(), rows
    assert rows == len(paths)
    return (rows - rows_at_first) / (time.perf_counter() - first), first - start


def _measure(images: int, repeats: int) -> Found:
    torch.set_num_threads(1)
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DATA_DISABLE_PROGRESS_BARS="1", RAY_worker_niceness="0")
    import ray  # reads them when it is imported

    with tempfile.TemporaryDirectory() as name:
        paths = photographs(Path(name), images)
        classifier = SimpleCNAPSClassifier(device="cpu", n_jobs=1)
        classifier.fit(paths[:25], [f"class {index % 5}" for index in range(25)])
        file = Path(name) / "classifier.safetensors"
        classifier.save(file)
        ray.init(
            address="local", num_cpus=2, object_store_memory=200 * 2**20, include_dashboard=False, log_to_driver=False
        )
        kinds = {
            PLAIN: lambda: plain(classifier, paths),
            "Ray, 1 worker": lambda: on_ray(file, paths, 1),
            "Ray, 2 workers": lambda: on_ray(file, paths, 2),
        }
        found: Found = {kind: [] for kind in kinds}
        for _ in range(repeats):  # in turn, so that other work of the machine slows all alike
            for kind, measure in kinds.items():
                found[kind].append(measure())
        ray.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(_measure(*map(int, sys.argv[1:]))))
