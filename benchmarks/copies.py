"""What copies in the support set do to rejection and accuracy.

    python -m benchmarks.copies DATA_DIR
    python -m benchmarks.copies DATA_DIR --found --sets photo_waste.zip folder_of_classes ...

Support sets of 5 classes (3 for DTD) and 5 images each, 8 queries a class, under the default classifier with
``unknown_label`` at a false rejection rate of 5 %. Each support set is measured unchanged, and with copies of its
images added. How copies are recognised was chosen on validation classes; these are test classes.

``--found`` counts what is recognised in support sets of up to 8 classes and 12 images each: pairs in the support set as
it is, and the share of copies of each image, by pixels and by features alone (closer than half the usual in a class).
"""

from __future__ import annotations

import argparse
import io
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tqdm.auto import tqdm

from benchmarks.suspects import SETS
from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.images.same_picture import same_pictures, small_pictures
from fewshot_mahalanobis.research.data.sources import ImageSource, load_source
from fewshot_mahalanobis.research.episodes.sampling import FixedEpisodes
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table

SHOT, QUERIES, RATE, UNKNOWN = 5, 8, 0.05, -1
QUALITIES = (60, 75, 90)

Images = list[NDArray[np.uint8]]


def compressed(image: NDArray[np.uint8], quality: int) -> NDArray[np.uint8]:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality)
    return np.asarray(Image.open(buffer))


def cropped(image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """The image without 5 to 10 % of its height and of its width."""
    h, w = image.shape[:2]
    dy, dx = (round(rng.uniform(0.05, 0.1) * side) for side in (h, w))
    y, x = rng.integers(0, dy + 1), rng.integers(0, dx + 1)
    return image[y : h - dy + y, x : w - dx + x]


Copies = Callable[[Images, NDArray[np.int64], np.random.Generator], tuple[Images, NDArray[np.int64]]]


def of_each(copy: Callable[[NDArray[np.uint8], np.random.Generator], Images]) -> Copies:
    """Copies of every image."""

    def copies(images: Images, labels: NDArray[np.int64], rng: np.random.Generator) -> tuple[Images, NDArray[np.int64]]:
        made = [copy(image, rng) for image in images]
        return [image for of_image in made for image in of_image], np.repeat(
            labels, [len(of_image) for of_image in made]
        )

    return copies


def of_one_class(
    images: Images, labels: NDArray[np.int64], rng: np.random.Generator
) -> tuple[Images, NDArray[np.int64]]:
    chosen = [image for image, label in zip(images, labels, strict=True) if label == labels[0]]
    return 3 * chosen, np.repeat(labels[:1], 3 * len(chosen))


#: What is added to a support set.
ADDED: dict[str, Copies] = {
    "nothing": lambda images, labels, rng: ([], labels[:0]),
    "each again": of_each(lambda image, rng: [image]),
    "each as three JPEGs": of_each(lambda image, rng: [compressed(image, quality) for quality in QUALITIES]),
    "each again by partial_fit": of_each(lambda image, rng: [image]),
    "each mirrored": of_each(lambda image, rng: [np.ascontiguousarray(image[:, ::-1])]),
    "each cropped by 5 to 10 %": of_each(lambda image, rng: [cropped(image, rng)]),
    "one class three times more": of_one_class,
}


def measure(model: SimpleCNAPS, source: ImageSource, index: int) -> list[tuple[float, float, float]]:
    """For each of ``ADDED``: shares of known queries that are rejected, and classified correctly; copies found."""
    way = min(5, len(source.class_names))
    episode = FixedEpisodes(source, way, SHOT, QUERIES, seed=0).draw(index)
    images, queries = (list(source.images[rows]) for rows in (episode.support, episode.query))
    found = []
    for name, copies in ADDED.items():
        added, labels = copies(images, episode.support_labels, np.random.default_rng((0, index)))
        classifier = SimpleCNAPSClassifier(model, unknown_label=UNKNOWN, false_rejection_rate=RATE)
        if "partial_fit" in name:
            classifier.fit(images, episode.support_labels).partial_fit(added, labels)
        else:
            classifier.fit(images + added, np.concatenate([episode.support_labels, labels]))
        says = classifier.predict_all(queries)
        right = says.probabilities.argmax(axis=1) == episode.query_labels
        share = classifier.summary().copies / len(added) if added else classifier.summary().copies
        found.append((float(says.unknown.mean()), float(right.mean()), share))
    return found


def by_features_alone(features: torch.Tensor, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pairs (p, 2) of a class whose features (n, d) are closer, by angle, than half the median in it.

    That median is at least 0.4 of the median distance between classes.
    """
    x = torch.nn.functional.normalize(features.double(), dim=1)
    distance, same = torch.cdist(x, x), torch.from_numpy(labels[:, None] == labels)
    usual = torch.empty_like(distance)
    for label in np.unique(labels):
        rows = torch.from_numpy(labels == label)
        within = distance[rows][:, rows]
        usual[rows] = max(within[within > 0].median(), 0.4 * distance[~same].median())
    return ((distance < 0.5 * usual) & same).triu(diagonal=1).nonzero().numpy()


def recognised(model: SimpleCNAPS, source: ImageSource) -> list[str]:
    """Pairs that are recognised by pixels and by features alone, and per cent of the copies of each image."""
    way = min(8, len(source.class_names))
    episode = FixedEpisodes(source, way, 12, 1, seed=0).draw(0)
    images, labels = list(source.images[episode.support]), episode.support_labels
    n, rng = len(images), np.random.default_rng(0)
    classifier = SimpleCNAPSClassifier(model).fit(images, labels, groups=range(n))
    cells = []
    copies: list[Images] = [
        [],
        [compressed(image, QUALITIES[0]) for image in images],
        [np.ascontiguousarray(image[:, ::-1]) for image in images],
        [cropped(image, rng) for image in images],
    ]
    for added in copies:
        every = images + added
        features = torch.from_numpy(classifier.transform(every))
        small = torch.cat([small_pictures(batch) for batch in classifier.image_batches(every, model.image_size)])
        pairs = [same_pictures(small, features), by_features_alone(features, np.resize(labels, len(every)))]
        if added:
            shares = (100 * (rule[:, 1] - rule[:, 0] == n).sum() / n for rule in pairs)
            cells.append(" / ".join(f"{share:.0f}" for share in shares))
        else:
            cells.append(" / ".join(str(len(rule)) for rule in pairs))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--found", action="store_true", help="what is recognised, by pixels and by features alone")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)  # that there are copies, and few examples
    model = load_checkpoint("default")
    if arguments.found:
        sources = (load_source(arguments.data / name, size=model.image_size, lazy=True) for name in arguments.sets)
        of_sets = [[source.name, *recognised(model, source)] for source in sources]
        print(markdown_table(of_sets, ["by pixels / by features alone", "pairs", "% JPEG", "% mirrored", "% cropped"]))
        return
    rows, values = [], []
    for name in arguments.sets:
        source = load_source(arguments.data / name, size=model.image_size, lazy=True)
        found = 100 * np.mean([measure(model, source, index) for index in tqdm(range(arguments.tasks), name)], axis=0)
        values.append(found)
        rows.append(
            [name.partition(".")[0], *(f"{rejected:.0f} / {right:.0f} / {of:.0f}" for rejected, right, of in found)]
        )
        print(rows[-1], flush=True)
    mean = np.mean(values, axis=0)
    rows.append(["mean", *(f"{rejected:.1f} / {right:.1f} / {of:.0f}" for rejected, right, of in mean)])
    print(markdown_table(rows, ["% rejected / right / copies found", *ADDED]))


if __name__ == "__main__":
    main()
