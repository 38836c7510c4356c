"""What augmented copies in the support set do to rejection, accuracy and calibration: docs/unknown_classes.md.

    python -m benchmarks.augmented DATA_DIR --features features

Support sets of five classes and five images each, of sets with fewer than ten classes half of them, and one altered
copy of each image, as annotation services export them, added as ``partial_fit`` does. As many other classes are
unknown. The sets are for choosing
alone. Features are kept, so that an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter
from sklearn.metrics import roc_auc_score

from benchmarks.calibration import expected_calibration_error
from fewshot_mahalanobis import SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.heads import AutoHead
from fewshot_mahalanobis.images.decode import to_network_range
from fewshot_mahalanobis.images.same_picture import same_pictures, small_pictures
from fewshot_mahalanobis.networks.devices import choose_dtype
from fewshot_mahalanobis.research.data.sources import ImageSource, load_source
from fewshot_mahalanobis.research.episodes.sampling import FixedEpisodes
from fewshot_mahalanobis.research.evaluation.result import Accuracy
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table
from fewshot_mahalanobis.support_set.copies import near_twins
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead

SETS = (
    "mini_imagenet_val.zip",
    "omniglot.zip:valid",
    "cub200_2010.zip:valid",
    "quickdraw345.zip:valid",
    *(f"photo_{name}.zip" for name in ("vehicles", "waste", "cotton", "food3")),
    "dtd10.zip:train",
    "tiny_imagenet_train.zip",
)
WAY, SHOT, QUERIES, RATE = 5, 5, 4, 0.05

Picture = Image.Image
Change = Callable[[Picture, np.random.Generator], Picture]


def turned(least: float, most: float) -> Change:
    return lambda image, rng: image.rotate(
        rng.choice([-1, 1]) * rng.uniform(least, most), resample=Image.Resampling.BICUBIC
    )


def cropped(least: float, most: float) -> Change:
    """A window with such a share of the area."""

    def change(image: Picture, rng: np.random.Generator) -> Picture:
        side = image.width * rng.uniform(least, most) ** 0.5
        x, y = rng.uniform(0, image.width - side, 2)
        return image.resize(image.size, Image.Resampling.BICUBIC, (x, y, x + side, y + side))

    return change


def brightened(image: Picture, rng: np.random.Generator) -> Picture:
    factor = rng.uniform(1.25, 1.6)
    return ImageEnhance.Brightness(image).enhance(rng.choice([factor, 1 / factor]))


def recoloured(image: Picture, rng: np.random.Generator) -> Picture:
    """Another hue, by 20 to 90 degrees of the circle, and saturation; grey pictures get a tint."""
    h, s, v = (np.asarray(band, float) for band in image.convert("HSV").split())
    h = (h + rng.choice([-1, 1]) * rng.uniform(20, 90) / 360 * 256) % 256
    bands = h, np.clip(s * rng.uniform(0.5, 1.5) + 30, 0, 255), v
    return Image.merge("HSV", [Image.fromarray(band.astype(np.uint8)) for band in bands]).convert("RGB")


def sheared(image: Picture, rng: np.random.Generator) -> Picture:
    x, y = rng.choice([-1, 1], 2) * rng.uniform(0.1, 0.27, 2)
    half = image.width / 2
    return image.transform(
        image.size, Image.Transform.AFFINE, (1, x, -x * half, y, 1, -y * half), Image.Resampling.BICUBIC
    )


def noisy(image: Picture, rng: np.random.Generator) -> Picture:
    blurred = np.asarray(image.filter(ImageFilter.GaussianBlur(1.2)), float)
    return Image.fromarray((blurred + rng.normal(0, 12, blurred.shape)).clip(0, 255).astype(np.uint8))


def all_at_once(image: Picture, rng: np.random.Generator) -> Picture:
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for change in (turned(0, 30), cropped(0.5, 0.9), brightened, recoloured):
        image = change(image, rng)
    return image


#: How the copy of an image is altered.
KINDS: dict[str, Change | None] = {
    "nothing": None,
    "turned by up to 15 degrees": turned(2, 15),
    "turned by 15 to 45 degrees": turned(15, 45),
    "quarter turns": lambda image, rng: image.rotate(rng.choice([90, 180, 270])),
    "brighter or darker": brightened,
    "other colours": recoloured,
    "grey": lambda image, rng: image.convert("L").convert("RGB"),
    "cropped to 40 to 70 %": cropped(0.4, 0.7),
    "sheared": sheared,
    "blurred, noisy": noisy,
    "all at once": all_at_once,
}

Part = tuple[torch.Tensor, torch.Tensor]


class Task(NamedTuple):
    """Features of one task, adapted and as pretrained."""

    support: Part
    labels: torch.Tensor
    copies: NDArray[np.int64]  # pairs of support images that are the same picture
    known: Part
    known_labels: torch.Tensor
    unknown: Part


def collect(folder: Path, model: SimpleCNAPS, source: ImageSource, index: int) -> dict[str, Task]:
    """One task of a set with each kind of copies, from the folder as far as it has them."""
    file = folder / f"{source.name.replace('/', '-')} {index}.pt"
    if file.exists():
        return {kind: Task(*task) for kind, task in torch.load(file, weights_only=False).items()}
    dtype, way = choose_dtype("auto", model.feature_extractor), min(WAY, -(-len(source.class_names) // 2))
    episode = FixedEpisodes(source, min(2 * way, len(source.class_names)), SHOT, QUERIES, seed=0).draw(index)
    known = episode.query_labels < way
    pictures = source.images[episode.support[episode.support_labels < way]]
    queries = [source.network_input(episode.query[of]) for of in (known, ~known)]
    labels, truth = (torch.from_numpy(y[y < way]) for y in (episode.support_labels, episode.query_labels))
    images = to_network_range(torch.from_numpy(pictures).permute(0, 3, 1, 2))
    tasks = [model.adapt(images, labels, adapt=adapt, dtype=dtype) for adapt in (True, False)]

    def features(x: torch.Tensor) -> Part:
        return tasks[0].features(x), tasks[1].features(x)

    (of_known, of_unknown), own, found = [features(x) for x in queries], features(images), {}
    for kind, change in KINDS.items():
        support, y, pairs = own, labels, np.empty((0, 2), np.int64)
        if change is not None:
            rng = np.random.default_rng((0, index))
            altered = np.stack([np.asarray(change(Image.fromarray(picture), rng)) for picture in pictures])
            copies = to_network_range(torch.from_numpy(altered).permute(0, 3, 1, 2))
            added = features(copies)
            support, y = (torch.cat([own[0], added[0]]), torch.cat([own[1], added[1]])), labels.repeat(2)
            pairs = same_pictures(small_pictures(torch.cat([images, copies])), support[0])
        found[kind] = Task(support, y, pairs, of_known, truth, of_unknown)
    torch.save({kind: tuple(task) for kind, task in found.items()}, file)
    return found


#: Figures of a task: per cent of known queries rejected, unknown ones rejected, AUROC, known queries classified right.
FIGURES = ("known rejected", "unknown found", "AUROC", "right")


class Measured(NamedTuple):
    figures: list[float]  # as FIGURES
    confidence: NDArray[np.float64]  # of known queries
    right: NDArray[np.bool_]


def measure(task: Task, twins: bool) -> Measured:
    """Fit to a task, with near twins left out together or not, and classify its queries."""
    pairs = near_twins(task.support[0], task.labels) if twins else None
    fitted = FittedHead.fit(
        AutoHead(),
        Features(*task.support),
        task.labels,
        unknown_label=-1,
        false_rejection_rate=RATE,
        copies=task.copies,
        twins=pairs,
    )
    known, unknown = (fitted.predict(Features(*part)) for part in (task.known, task.unknown))
    assert fitted.outliers is not None
    scores = [(part.outlier_scores - fitted.outliers.threshold).numpy() for part in (known, unknown)]
    truth = np.repeat([0, 1], [len(part) for part in scores])
    right = (known.logits.argmax(dim=1) == task.known_labels).numpy()
    shares = (scores[0] > 0).mean(), (scores[1] > 0).mean(), roc_auc_score(truth, np.concatenate(scores)), right.mean()
    confidence = fitted.log_probabilities(known.logits).exp().amax(dim=1).numpy()
    return Measured([100 * float(share) for share in shares], confidence, right)


def table(of_sets: Sequence[Sequence[tuple[dict[str, Measured], dict[str, Measured]]]]) -> str:
    """Markdown: without twins and with them, of each kind, means over sets; the gain has an interval over sets."""
    rows = []
    for kind in of_sets[0][0][0]:
        found = np.array([[[each[kind].figures for each in task] for task in tasks] for tasks in of_sets]).mean(axis=1)
        of_kind = [[task[way][kind] for tasks in of_sets for task in tasks] for way in (0, 1)]
        errors = [
            100
            * expected_calibration_error(
                np.concatenate([each.confidence for each in way]), np.concatenate([each.right for each in way])
            )
            for way in of_kind
        ]
        cells = []
        for before, after in found.transpose(2, 1, 0):
            gain = Accuracy.of(after - before)
            cells.append(f"{before.mean():.1f} → {after.mean():.1f} ({gain.mean:+.1f} ± {gain.half_width:.1f})")
        rows.append([kind, *cells, "{:.1f} → {:.1f}".format(*errors)])
    return markdown_table(rows, ["copies", *FIGURES, "calibration error"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("data", type=Path, help="folder of the image sets")
    parser.add_argument("--features", type=Path, required=True, help="folder that keeps the features")
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--tasks", type=int, default=1, help="tasks of a set")
    arguments = parser.parse_args()
    arguments.features.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore", UserWarning)  # that there are few examples
    model, of_sets = load_checkpoint("default").at_size(arguments.image_size), []
    for name in SETS:
        source = load_source(arguments.data / name, size=model.image_size, lazy=True)
        found = []
        for index in range(arguments.tasks):
            tasks = collect(arguments.features, model, source, index)
            found.append(tuple({kind: measure(task, twins) for kind, task in tasks.items()} for twins in (False, True)))
        of_sets.append(found)
    print(table(of_sets))


if __name__ == "__main__":
    main()
