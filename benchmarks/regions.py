"""Boxes in photographs of 12 megapixels, as regions and cropped by hand, one thread: time, memory, the same bits."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from benchmarks.photographs import SIZE, draw
from benchmarks.record import Record, Table
from benchmarks.timing import extra_megabytes, in_own_process
from fewshot_mahalanobis import Region
from fewshot_mahalanobis.images.decode import ImageBatches

#: Files, boxes in each, and the side of the squares in pixels.
FILES, BOXES, SQUARE = 100, 10, 224
WAYS = {
    "by_hand": "each file opened once, its crops kept in a list",
    "regions": "regions, file by file",
    "mixed": "regions in random order",
}


def run(record: Record) -> list[Table]:
    files = 2 if record.quick else FILES
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder), files, SIZE)
        found = {
            way: record.value(way, lambda: in_own_process("regions", folder, way))  # noqa: B023
            for way in WAYS
        }
    assert len({each["digest"] for each in found.values()}) == 1, "a region is not what cropping by hand gives"
    rows = [
        [title, f"{found[way]['seconds']:.1f} s", f"{found[way]['megabytes']:.0f} MB"] for way, title in WAYS.items()
    ]
    return [
        Table(
            f"{files * BOXES:,} boxes in {files} JPEG files of {SIZE[0]} x {SIZE[1]} pixels, one thread",
            ["", "time", "peak memory"],
            rows,
            f"The same squares of {SQUARE} pixels to the bit. They themselves take {files * BOXES * 0.15:.0f} MB.",
        )
    ]


def _squares(images: list[Any]) -> np.ndarray[Any, Any]:
    return np.concatenate([batch.pixels for batch in ImageBatches(images, SQUARE, n_jobs=1, ahead=False).decoded()])


def _cropped(regions: list[Region]) -> list[Image.Image]:
    crops, opened = list[Image.Image](), None
    for region in regions:
        if region.image != opened:
            opened = region.image
            with Image.open(opened) as image:
                whole = ImageOps.exif_transpose(image)
        crops.append(whole.crop(region.edges(*whole.size)))
    return crops


def _measure(folder: str, way: str) -> dict[str, Any]:
    rng, regions = np.random.default_rng(0), list[Region]()
    for path in sorted(Path(folder).glob("*.jpg")):
        for width, height in rng.integers(200, 900, (BOXES, 2)):
            x, y = int(rng.integers(SIZE[0] - width)), int(rng.integers(SIZE[1] - height))
            regions.append(Region(path, (x, y, int(width), int(height))))
    order = rng.permutation(len(regions)) if way == "mixed" else np.arange(len(regions))
    given, squares = [regions[index] for index in order], list[Any]()
    start = time.perf_counter()
    megabytes = extra_megabytes(lambda: squares.append(_squares(_cropped(given) if way == "by_hand" else given)))
    seconds = time.perf_counter() - start
    digest = hashlib.sha256(squares[0][order.argsort()].tobytes()).hexdigest()
    return {"seconds": seconds, "megabytes": megabytes, "digest": digest}


if __name__ == "__main__":
    print(json.dumps(_measure(*sys.argv[1:])))
