"""How right and how sure the shared answer of a group of queries is.

    python -m benchmarks.groups_of_queries --data FOLDER

Groups of 1, 3 and 10 queries are of one of two kinds: different pictures of one class, or a burst, a picture and copies
of it that were cropped, shifted, brightened and blurred a little. The answer of ``predict_proba(groups=)`` is compared
with a majority vote, with the product of the probabilities, which takes queries for independent ones, and with the mean
of the logits, which takes them for one. Features are those of the default checkpoint
without adaptation, and kept in ``results/features``.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.transforms.v2.functional import gaussian_blur, resized_crop

from benchmarks.calibration import expected_calibration_error
from benchmarks.promises import interval
from benchmarks.record import RESULTS, machine
from fewshot_mahalanobis import MahalanobisClassifier, load_checkpoint
from fewshot_mahalanobis.networks.task import AdaptedNetwork
from fewshot_mahalanobis.research.data.sources import load_source
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table

VALIDATION = (
    *("photo_vehicles:val", "photo_waste:val", "photo_cotton:val", "photo_food3:val", "omniglot:valid"),
    *("cub200_2010:valid", "mini_imagenet_val:val", "quickdraw345:valid"),
)
TEST = (
    *("cifar10:test", "cifar100_test:test", "cub200_2010:test", "dtd10:test", "fashion_mnist:test", "gtsrb:test"),
    *("mini_imagenet_test:test", "mnist:test", "omniglot:test", "quickdraw345:test"),
)
#: Most classes of a set, pictures of each, and how many of these begin a burst of so many frames.
CLASSES, PICTURES, BURSTS, FRAMES = 15, 30, 3, 10
WAYS, SHOTS, SIZES, TASKS = 5, (1, 5), (1, 3, 10), 40
KINDS = ("different pictures", "burst")


def burst(image: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """A picture (3, s, s) in [-1, 1] and near copies of it (FRAMES, 3, s, s)."""
    frames, side = [image], image.shape[-1]
    for _ in range(FRAMES - 1):
        size = round(side * rng.uniform(0.9, 1.0))
        top, left = rng.integers(0, side - size + 1, 2)
        frame = resized_crop(image, int(top), int(left), size, size, [side, side], antialias=True)
        frame = gaussian_blur(frame[None], [9, 9], [side * rng.uniform(0.001, 0.006)] * 2)[0]
        frames.append(((frame + 1) * rng.uniform(0.8, 1.2) - 1).clamp(-1, 1))
    return torch.stack(frames)


class Class(NamedTuple):
    """Features of one class."""

    pictures: NDArray[np.float64]  # (n, d)
    bursts: NDArray[np.float64]  # (BURSTS, FRAMES, d), of other pictures


def classes_of(data: Path, name: str, kept: Path) -> list[Class]:
    """The classes of a set."""
    file = kept / f"groups-{name.replace(':', '_')}.npz"
    if not file.exists():
        model = load_checkpoint("default")
        network = AdaptedNetwork(model.feature_extractor, None, torch.float32, model.projection)
        archive, split = name.split(":")
        source = load_source(f"{data / archive}.zip:{split}", size=model.image_size, lazy=True)
        rng, found = np.random.default_rng(0), dict[str, NDArray[np.float32]]()
        enough = [rows for rows in source.indices_of_class() if len(rows) >= BURSTS + SHOTS[-1] + SIZES[-1]]
        for number, k in enumerate(rng.permutation(len(enough))[:CLASSES]):
            rows = rng.permutation(enough[k])[: PICTURES + BURSTS]
            images = source.network_input(rows)
            every = torch.cat([images[BURSTS:], *(burst(image, rng) for image in images[:BURSTS])])
            found[f"c{number}"] = torch.cat([network.features(some) for some in every.split(16)]).numpy()
        kept.mkdir(parents=True, exist_ok=True)
        np.savez(file, **found)  # type: ignore[arg-type]
    with np.load(file) as stored:
        features = [stored[key].astype(float) for key in stored.files]
    frames = BURSTS * FRAMES
    return [Class(x[:-frames], x[-frames:].reshape(BURSTS, FRAMES, -1)) for x in features]


class Answers(NamedTuple):
    """Of the groups of one task, kind and size, by one rule."""

    right: NDArray[np.bool_]
    sure: NDArray[np.float64]


def shared(classifier: MahalanobisClassifier, members: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities (g, k) of groups of queries (g, n, d), by ``predict_proba(groups=)``."""
    g, n, d = members.shape
    return classifier.predict_proba(members.reshape(-1, d), groups=np.repeat(np.arange(g), n))[::n]


def votes(alone: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of the votes (g, k) of each class, by the probabilities of the queries (g, n, k); ties to the surer one."""
    counts = np.eye(alone.shape[2])[alone.argmax(axis=2)].mean(axis=1)
    return counts + 1e-9 * alone.mean(axis=1)


def joint(alone: NDArray[np.float64], worth: int) -> NDArray[np.float64]:
    """Probabilities (g, k) if the queries of a group (g, n, k) were ``worth`` so many independent ones."""
    logs = worth * np.log(alone.clip(min=1e-300)).mean(axis=1)
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


#: What else the answer of a group may be made of, the probabilities of its queries.
NAIVE: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "majority vote": votes,
    "product of probabilities": lambda alone: joint(alone, alone.shape[1]),
    "mean of logits": lambda alone: joint(alone, 1),
}
SHARED = "`groups=`"


def task(
    classes: Sequence[Class], shot: int, rng: np.random.Generator
) -> Iterator[tuple[tuple[str, int, str], Answers]]:
    """One task's answers by kind, size and rule."""
    chosen = [classes[k] for k in rng.permutation(len(classes))[:WAYS]]
    drawn = [x.pictures[rng.permutation(len(x.pictures))[: shot + SIZES[-1]]] for x in chosen]
    labels = np.arange(len(chosen))
    classifier = MahalanobisClassifier().fit(np.concatenate([x[:shot] for x in drawn]), labels.repeat(shot))
    queries = {KINDS[0]: np.stack([x[None, shot:] for x in drawn]), KINDS[1]: np.stack([x.bursts for x in chosen])}
    for kind, of_kind in queries.items():  # (k, b, 10, d)
        for size in SIZES:
            # Different pictures make as many groups as they are enough for; of a burst the first frames are one.
            groups = of_kind.shape[2] // size if kind == KINDS[0] else 1
            members = of_kind[:, :, : groups * size].reshape(-1, size, of_kind.shape[-1])
            truth = labels.repeat(len(members) // len(labels))
            alone = classifier.predict_proba(members.reshape(-1, members.shape[-1])).reshape(*members.shape[:2], -1)
            rules = {SHARED: shared(classifier, members)} | {name: rule(alone) for name, rule in NAIVE.items()}
            for rule, found in rules.items():
                yield (kind, size, rule), Answers(found.argmax(axis=1) == truth, found.max(axis=1))


def table(found: dict[tuple[int, str, int, str], dict[str, list[Answers]]]) -> str:
    """Markdown: a row for each number of shots, kind, size and rule, means of the sets."""
    rows = []
    for (shot, kind, size, rule), sets in found.items():
        if size == 1 and rule != SHARED:
            continue  # all rules are one
        tasks = [answers for of_set in sets.values() for answers in of_set]
        errors = [
            expected_calibration_error(
                *(np.concatenate([getattr(a, name) for a in of_set]) for name in ("sure", "right"))
            )
            for of_set in sets.values()
        ]
        rows.append(
            [
                *(str(shot), kind, str(size), "" if size == 1 else rule),
                interval([answers.right.mean() for answers in tasks]),
                interval([answers.sure.mean() for answers in tasks]),
                f"{100 * np.mean(errors):.1f}",
            ]
        )
    header = ["shots", "group", "queries", "answer by", "right, %", "how sure, %", "calibration error, %"]
    return markdown_table(rows, header)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of image sets")
    parser.add_argument("--features", type=Path, default=RESULTS / "features", help="folder where features are kept")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{machine()}.")
    for title, sets in {"Validation sets and photographs": VALIDATION, "Test sets": TEST}.items():
        found: dict[tuple[int, str, int, str], dict[str, list[Answers]]] = {}
        for shot in SHOTS:
            for name in sets:
                classes, rng = classes_of(arguments.data, name, arguments.features), np.random.default_rng(0)
                for _ in range(TASKS):
                    for key, answers in task(classes, shot, rng):
                        found.setdefault((shot, *key), {}).setdefault(name, []).append(answers)
        print(f"\n## {title}\n\n{table(found)}")


if __name__ == "__main__":
    main()
