"""Photographs in Display P3, Adobe RGB and sRGB: whether the same colours get the same answer.

    python -m benchmarks.colours DATA_DIR

Classifiers are fitted to five sRGB images a class of each set; 50 others of each are written in the three spaces, and
classified: as PNG of the same size, and as JPEG from a camera, four times as long and wide, with a sensor's noise.
The colours of a picture are computed in floating point and rounded to the 8 bits of its file.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.pixels import support_and_queries
from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table
from tests.images import icc

SETS = ("photo_vehicles.zip", "photo_waste.zip", "photo_cotton.zip", "photo_food3.zip")
QUERIES = 50
#: Standard deviation of the noise, of 255 levels.
NOISE = 2.0
Floats = NDArray[np.float64]


def to_linear(values: Floats) -> Floats:
    """Decode values of sRGB, and of Display P3, from [0, 1]."""
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def from_linear(values: Floats) -> Floats:
    """Undo :func:`to_linear`."""
    return np.where(values <= 0.0031308, values * 12.92, 1.055 * values ** (1 / 2.4) - 0.055)


def in_space(srgb: Floats, primaries: Any, encode: Callable[[Floats], Floats]) -> Floats:
    """The same colours in the space of other primaries."""
    to_space = np.asarray(icc.PRIMARIES["sRGB"]) @ np.linalg.inv(np.asarray(primaries))
    return encode((to_linear(srgb) @ to_space).clip(0, 1))


SPACES: dict[str, tuple[bytes | None, Callable[[Floats], Floats]]] = {
    "sRGB": (None, lambda look: look),
    "Display P3": (icc.DISPLAY_P3, lambda look: in_space(look, icc.PRIMARIES["Display P3"], from_linear)),
    "Adobe RGB": (
        icc.ADOBE_RGB,
        lambda look: in_space(look, icc.PRIMARIES["Adobe RGB"], lambda x: x ** (1 / icc.ADOBE_GAMMA)),
    ),
}


def as_it_is(image: Image.Image, index: int) -> Floats:
    return np.asarray(image) / 255


def of_camera(image: Image.Image, index: int) -> Floats:
    """Four times as long and wide, with noise that hides the steps of the small picture's 8 bits."""
    size = (4 * image.width, 4 * image.height)
    large = np.stack(
        [np.asarray(band.convert("F").resize(size, Image.Resampling.BICUBIC)) for band in image.split()], axis=-1
    )
    return ((large + np.random.default_rng(index).normal(0, NOISE, large.shape)) / 255).clip(0, 1)


FILES: dict[str, tuple[Callable[[Image.Image, int], Floats], str, dict[str, Any]]] = {
    "PNG of its own size": (as_it_is, ".png", {}),
    "JPEG of a camera": (of_camera, ".jpg", {"quality": 95, "subsampling": 0}),
}


def measure(path: Path, precision: str) -> dict[tuple[str, str], list[Any]]:
    """Labels that differ from sRGB's and the largest difference of a probability, by files and space."""
    images, labels, queries = support_and_queries(path, QUERIES)
    classifier = SimpleCNAPSClassifier(device="cpu", precision=precision).fit(images, labels)
    found: dict[tuple[str, str], list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for files, (look_of, suffix, options) in FILES.items():
            paths: dict[str, list[Path]] = {space: [] for space in SPACES}
            for index, image in enumerate(queries):
                look = look_of(image, index)
                for space, (profile, convert) in SPACES.items():
                    file = Path(folder) / f"{space} {index:03}{suffix}"
                    pixels = np.rint(255 * convert(look)).astype(np.uint8)
                    Image.fromarray(pixels).save(file, icc_profile=profile, **options)
                    paths[space].append(file)
            probabilities = {space: classifier.predict_proba(of_space) for space, of_space in paths.items()}
            for space in list(SPACES)[1:]:
                ours, theirs = probabilities["sRGB"], probabilities[space]
                other = int((ours.argmax(axis=1) != theirs.argmax(axis=1)).sum())
                change = np.abs(ours - theirs).max(axis=1)
                found[files, space] = [len(queries), other, change.mean(), change.max()]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.colours", description=__doc__)
    parser.add_argument("data", type=Path, help="folder with " + ", ".join(SETS))
    parser.add_argument("--precision", default="float32")
    chosen = parser.parse_args()
    rows = []
    for name in SETS:
        for (files, space), (count, other, mean, largest) in measure(chosen.data / name, chosen.precision).items():
            rows.append([name.removesuffix(".zip"), files, space, count, other, f"{mean:.4f}", f"{largest:.4f}"])
            print(*rows[-1], flush=True)
    print(markdown_table(rows, ["set", "files", "space", "pictures", "other labels", "change, mean", "largest"]))


if __name__ == "__main__":
    main()
