"""Images per second of ``fewshot_mahalanobis.ray`` with one and two workers, beside ``predict`` in one process.

    python benchmarks/ray_labelling.py [--images 2000] [--repeats 5]

Every worker, and the plain process, has one thread. What is counted begins when the first block is done, so that
starting processes and loading the classifier, some seconds that a large collection does not feel, are left out; they
are reported beside. JPEG files of 300 x 300 pixels, the embedded checkpoint in float32, 5 classes. Needs the extra
``ray``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import ray
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.ray import label_images

BLOCK = 64


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
    """Images per second, and seconds before the first block was done."""
    start = time.perf_counter()
    classifier.predict(paths[:BLOCK])
    first = time.perf_counter()
    classifier.predict(paths[BLOCK:])
    return (len(paths) - BLOCK) / (time.perf_counter() - first), first - start


def on_ray(file: Path, paths: list[str], workers: int) -> tuple[float, float]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DATA_DISABLE_PROGRESS_BARS="1", RAY_worker_niceness="0")
    with tempfile.TemporaryDirectory() as name:
        paths = photographs(Path(name), arguments.images)
        classifier = SimpleCNAPSClassifier(device="cpu", n_jobs=1)
        classifier.fit(paths[:25], [f"class {index % 5}" for index in range(25)])
        file = Path(name) / "classifier.safetensors"
        classifier.save(file)
        ray.init(
            address="local", num_cpus=2, object_store_memory=200 * 2**20, include_dashboard=False, log_to_driver=False
        )
        kinds = {
            "predict, one thread": lambda: plain(classifier, paths),
            "Ray, 1 worker": lambda: on_ray(file, paths, 1),
            "Ray, 2 workers": lambda: on_ray(file, paths, 2),
        }
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _ in range(arguments.repeats):  # in turn, so that what else the machine does falls on all
            for kind, measure in kinds.items():
                found[kind].append(measure())
        ray.shutdown()
    print(f"{arguments.images} images, median of {arguments.repeats} (lowest to highest); {os.cpu_count()} cores\n")
    print("| | images/s | of predict | first block after |\n|---|---|---|---|")
    base = statistics.median(rate for rate, _ in found["predict, one thread"])
    for kind, values in found.items():
        rates = [rate for rate, _ in values]
        rate, wait = statistics.median(rates), statistics.median(wait for _, wait in values)
        print(f"| {kind} | {rate:.0f} ({min(rates):.0f} to {max(rates):.0f}) | {rate / base:.2f} | {wait:.1f} s |")


if __name__ == "__main__":
    main()
