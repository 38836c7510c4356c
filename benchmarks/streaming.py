"""``predict`` and ``fit`` over image files: time against the bare network, and memory against their number."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.record import Record, Table
from benchmarks.tasks import drawn_images
from benchmarks.timing import Times, extra_megabytes, in_own_process, ratio, show, take_turns
from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.images.decode import ImageBatches

#: Number of different files and their side in pixels; longer lists repeat them.
FILES, SIDE = 1000, 300
TIMED = 960
BATCH = 64
#: Support images whose memory is compared; longer lists name the same files again.
SUPPORT, SUPPORT_FILES, SUPPORT_SIZE = (1_000, 4_000), 200, (640, 480)


def run(record: Record) -> list[Table]:
    speed, memory, fits = [], [], []
    files, timed = (BATCH, BATCH) if record.quick else (FILES, TIMED)
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder), files)
        for precision in ("float32", "auto"):
            t = record.value(precision, lambda: _measure(Path(folder), timed, precision, record.repeats))  # noqa: B023
            rates = [f"{timed / float(np.median(t[key])):.0f}" for key in ("bare", "predict")]
            share = ratio([100 * s for s in t["bare"]], t["predict"])
            speed.append([precision, *rates, share, "80", show([s / timed for s in t["decode"]])])
        for count in () if record.quick else (1_000, 10_000):
            found = record.value(f"{count}", lambda: in_own_process("streaming", folder, "predict", count))  # noqa: B023
            rate = count / found["seconds"]
            memory.append([f"{count:,} paths", f"{found['megabytes']:.0f} MB", f"{rate:.0f}"])
    for precision in () if record.quick else ("float32", "auto"):
        with tempfile.TemporaryDirectory() as folder:
            draw(Path(folder), SUPPORT_FILES, SUPPORT_SIZE)
            few, many = (
                record.value(f"fit {n} {precision}", lambda: in_own_process("streaming", folder, "fit", n, precision))  # noqa: B023
                for n in SUPPORT
            )
        growth = 1e3 * (many["megabytes"] - few["megabytes"]) / (SUPPORT[1] - SUPPORT[0])
        fits.append([precision, *(f"{found['megabytes']:.0f} MB" for found in (few, many)), f"{growth:.0f} kB"])
    header = [
        "precision",
        "bare network, images/s",
        "predict, images/s",
        "per cent",
        "aim",
        "decoding an image, all threads",
    ]
    note = "The paths of 1,000 different files, over and over."
    return [
        Table(f"Image files: JPEG, {SIDE} x {SIDE} pixels", header, speed),
        Table("Memory of predict, precision auto", ["", "peak beyond the classifier", "images/s"], memory, note),
        Table(
            f"Memory of fit, JPEG, {SUPPORT_SIZE[0]} x {SUPPORT_SIZE[1]} pixels, 5 classes",
            ["precision", *(f"{n:,} images" for n in SUPPORT), "an image more"],
            fits,
            "Peak beyond what the process held. 150 kB are the pixels that the network reads of an image.",
        ),
    ]


def draw(folder: Path, count: int, size: tuple[int, int] = (SIDE, SIDE)) -> None:
    """Photograph-like JPEG files, of about 25 kB at the default width and height."""
    small = drawn_images(count, 36)
    noise = np.random.default_rng(0).integers(-12, 13, (size[1], size[0], 3))
    for index, pixels in enumerate(small):
        smooth = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
        noisy = np.clip(np.asarray(smooth).astype(int) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{index:04}.jpg", quality=85)


def _classifier(precision: str) -> SimpleCNAPSClassifier:
    classifier = SimpleCNAPSClassifier(device="cpu", precision=precision, batch_size=BATCH)
    return classifier.fit(drawn_images(25), np.arange(25) % 5)


def _paths(folder: Path, count: int) -> list[str]:
    files = sorted(str(path) for path in folder.glob("*.jpg"))
    return [files[index % len(files)] for index in range(count)]


@torch.no_grad()
def _measure(folder: Path, count: int, precision: str, repeats: int) -> dict[str, Times]:
    classifier, paths = _classifier(precision), _paths(folder, count)
    images = next(iter(ImageBatches(paths[:BATCH], classifier.model_.image_size))).to(classifier.task_.network.dtype)
    network = classifier.task_.network.extractor
    return take_turns(
        {
            "bare": lambda: [network(images) for _ in range(count // BATCH)],
            "predict": lambda: classifier.predict(paths),
            "decode": lambda: [None for _ in ImageBatches(paths, classifier.model_.image_size)],
        },
        repeats,
        warm_up=False,
    )


def _memory(folder: str, method: str, count: str, precision: str = "auto") -> dict[str, float]:
    classifier, paths = _classifier(precision), _paths(Path(folder), int(count))
    labels = np.arange(len(paths)) % 5  # no two files of a name are copies here
    calls = {
        "predict": lambda: classifier.predict(paths),
        "fit": lambda: classifier.fit(paths, labels, groups=range(len(paths))),
    }
    times: Times = []
    megabytes = extra_megabytes(lambda: times.extend(take_turns({"": calls[method]}, 1, warm_up=False)[""]))
    return {"megabytes": megabytes, "seconds": times[0]}


if __name__ == "__main__":
    print(json.dumps(_memory(*sys.argv[1:])))
