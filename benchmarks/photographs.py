"""``predict`` over photographs of 12 megapixels: against reading alone, the network alone, and reading at full size."""

from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from benchmarks.record import Record, Table
from benchmarks.timing import Times, extra_megabytes, in_own_process, ratio, show, take_turns
from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.images.decode import ImageBatches, decoding_threads

#: Files, and their width and height.
FILES, SIZE = 100, (4000, 3000)


def run(record: Record) -> list[Table]:
    files = 4 if record.quick else FILES
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw(folder, files, SIZE)
        t = record.value("seconds", lambda: _seconds(folder, record.repeats))
        peak = record.value("memory", lambda: in_own_process("photographs", folder))
    rows = [[title, show([s / files for s in t[key]]), ratio(t[key], t["predict"])] for key, title in TITLES.items()]
    return [
        Table(
            f"{files} JPEG files of {SIZE[0]} x {SIZE[1]} pixels",
            ["", "an image", "times predict"],
            rows,
            f"Peak memory of predict beyond the classifier: {peak['megabytes']:.0f} MB.",
        )
    ]


TITLES = {
    "predict": "`predict`",
    "decode": "reading alone, all threads",
    "network": "network alone",
    "full": "reading alone at full size, all threads",
}


def draw(folder: Path, count: int, size: tuple[int, int]) -> None:
    """Cut pieces out of scikit-learn's photographs, enlarge them, add noise: files of about 2 MB."""
    rng = np.random.default_rng(0)
    width, height = size
    noise = rng.normal(0, 9, (height, width, 3)).astype(np.float32)
    photographs = load_sample_images().images
    for index in range(count):
        picture = Image.fromarray(photographs[index % 2])
        share, (left, top) = rng.uniform(0.5, 1), rng.uniform(0, 0.5, 2)
        corner = left * (1 - share) * picture.width, top * (1 - share) * picture.height
        box = (*corner, corner[0] + share * picture.width, corner[1] + share * picture.height)
        large = np.asarray(picture.resize(size, Image.Resampling.BICUBIC, box=box), np.float32)
        noisy = large + np.roll(noise, int(rng.integers(width)), axis=1)
        Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(folder / f"{index:04}.jpg", quality=85)


def _classifier() -> SimpleCNAPSClassifier:
    pictures = load_sample_images().images
    support = [picture[:, left : left + 200] for left in (0, 200, 400) for picture in pictures]
    return SimpleCNAPSClassifier(device="cpu", precision="float32").fit(support, [0, 1] * 3)


def _seconds(folder: Path, repeats: int) -> dict[str, Times]:
    classifier, paths = _classifier(), sorted(folder.glob("*.jpg"))
    size = classifier.model_.image_size
    images = torch.cat(list(ImageBatches(paths, size)))

    def full(path: Path) -> None:
        with Image.open(path) as image:
            image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)

    def read_at_full_size() -> None:
        with ThreadPoolExecutor(decoding_threads(None)) as pool:
            list(pool.map(full, paths))

    return take_turns(
        {
            "predict": lambda: classifier.predict(paths),
            "decode": lambda: [None for _ in ImageBatches(paths, size)],
            "network": lambda: classifier.task_.network.features(images),
            "full": read_at_full_size,
        },
        repeats,
        warm_up=False,
    )


def _memory(folder: str) -> dict[str, float]:
    classifier, paths = _classifier(), sorted(Path(folder).glob("*.jpg"))
    return {"megabytes": extra_megabytes(lambda: classifier.predict(paths))}


if __name__ == "__main__":
    print(json.dumps(_memory(*sys.argv[1:])))
