"""The graph that reads pixels against ``predict``, on files of five formats: benchmarks/results/pixels.md.

    python -m benchmarks.pixels DATA_DIR

A classifier is fitted to five images a class of each of three sets. 100 others of each are written as rotated JPEG,
transparent, palette, 16-bit and grey PNG, and classified by ``predict`` and by ONNX Runtime with the lines of
docs/export.md as they stand.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from tqdm.auto import tqdm

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table

SETS = ("photo_vehicles.zip", "photo_waste.zip", "mini_imagenet_test.zip")
SHOTS, CLASSES, FILES = 5, 5, 100
#: Probabilities as near as this are a tie, which rounding may decide.
TIE = 0.02
PAGE = Path(__file__).parents[1] / "docs" / "export.md"


def rotated(image: Image.Image, path: Path) -> None:
    """A photograph as phones store it: rotated, and so large that ``predict`` decodes it at a smaller scale."""
    large = image.resize((4 * image.width, 4 * image.height), Image.Resampling.LANCZOS)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    large.transpose(Image.Transpose.ROTATE_90).save(path.with_suffix(".jpg"), exif=exif, quality=90)


def transparent(image: Image.Image, path: Path) -> None:
    image = image.copy()
    image.putalpha(Image.radial_gradient("L").resize(image.size).point(lambda value: 255 - value // 2))
    image.save(path)


def palette(image: Image.Image, path: Path) -> None:
    image.quantize(64).save(path)


def deep(image: Image.Image, path: Path) -> None:
    grey = np.asarray(image.convert("F").resize((image.width + 1, image.height + 1), Image.Resampling.BILINEAR))
    Image.fromarray((grey * 257).round().clip(0, 65535).astype(np.uint16)).save(path)


def grey(image: Image.Image, path: Path) -> None:
    image.convert("L").save(path)


FORMATS: dict[str, Callable[[Image.Image, Path], None]] = {
    "rotated JPEG": rotated,
    "transparent PNG": transparent,
    "palette PNG": palette,
    "16-bit PNG": deep,
    "grey PNG": grey,
}


class Answers(NamedTuple):
    """Differences for one format of one set."""

    different: int  # other labels, ties left out
    ties: int  # other labels of pictures whose two largest probabilities differ by at most TIE
    rejected: int  # pictures that one side calls unknown and the other does not
    probability: float  # largest difference of a probability


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name in SETS:
        for title, found in measure(arguments.data / name).items():
            row = [name.removesuffix(".zip"), title, *found[:3], f"{found.probability:.4f}"]
            print(*row, flush=True)
            rows.append(row)
    header = ("set", "files", "other labels", "other labels at a tie", "unknown for one side", "largest difference")
    print(markdown_table(rows, header))


def images_of(path: Path) -> dict[str, list[Image.Image]]:
    """Images of the first classes of a set, in a fixed random order."""
    rng = np.random.default_rng(0)
    with zipfile.ZipFile(path) as archive:
        members: dict[str, list[str]] = {}
        for name in sorted(archive.namelist()):
            if not name.endswith("/"):
                members.setdefault(name.split("/")[-2], []).append(name)
        chosen = {label: rng.permutation(members[label])[: SHOTS + FILES] for label in sorted(members)[:CLASSES]}
        return {
            label: [Image.open(io.BytesIO(archive.read(str(name)))).convert("RGB") for name in names]
            for label, names in chosen.items()
        }


def support_and_queries(path: Path, count: int) -> tuple[list[Image.Image], list[str], list[Image.Image]]:
    """Support images of a set, their labels, and ``count`` queries, for which the classes take turns."""
    images = images_of(path)
    support = [(image, label) for label, of_class in images.items() for image in of_class[:SHOTS]]
    left = [of_class[SHOTS:] for of_class in images.values()]
    queries = [of_class[index] for index in range(count) for of_class in left if index < len(of_class)]
    return [image for image, _ in support], [label for _, label in support], queries[:count]


def measure(path: Path) -> dict[str, Answers]:
    images, labels, queries = support_and_queries(path, FILES)
    classifier = SimpleCNAPSClassifier(device="cpu", precision="float32", unknown_label="unknown").fit(images, labels)
    with tempfile.TemporaryDirectory() as folder:
        files: dict[str, list[Path]] = {title: [] for title in FORMATS}
        for index, image in enumerate(queries):
            title = list(FORMATS)[index // CLASSES % len(FORMATS)]
            FORMATS[title](image, Path(folder) / f"{index:03}.png")
            files[title] += Path(folder).glob(f"{index:03}.*")
        classify = lines_of_the_page(classifier, Path(folder))
        return {title: compare(classifier, classify, of_format) for title, of_format in files.items()}


def lines_of_the_page(classifier: SimpleCNAPSClassifier, folder: Path) -> Callable[[Path], Any]:
    """Decode a file and run the graph by the lines of docs/export.md -> label index, probabilities."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "def classify" in block)
    code = code.partition("\nassert")[0].replace("return labels[label]", "return labels[label], probabilities")
    before, names = Path.cwd(), dict[str, Any]()
    classifier.export_onnx(folder / "pets.onnx", pixels=True)
    os.chdir(folder)
    try:
        exec(code, names)
    finally:
        os.chdir(before)
    return names["classify"]  # type: ignore[no-any-return]


def compare(classifier: SimpleCNAPSClassifier, classify: Callable[[Path], Any], files: list[Path]) -> Answers:
    expected = classifier.predict_all(files)
    different = ties = rejected = 0
    largest = 0.0
    for path, label, wanted in zip(tqdm(files, leave=False), expected.labels, expected.probabilities, strict=True):
        found, probabilities = classify(path)
        largest = max(largest, float(np.abs(probabilities - wanted).max()))
        first, second = np.sort(wanted)[[-1, -2]]
        if "unknown" in (found, label):
            rejected += found != label
        elif found != label:
            ties += first - second <= TIE
            different += first - second > TIE
    return Answers(different, ties, rejected, largest)


if __name__ == "__main__":
    main()
