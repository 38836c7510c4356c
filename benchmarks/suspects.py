"""How well ``summary`` finds support images that are wrong: benchmarks/results/suspects.md.

    python -m benchmarks.suspects DATA_DIR

Support sets of 5 classes (3 for DTD) and 10 images each, under the default head. Each has four versions: unchanged;
with the label of every tenth image changed; with JPEG copies of three images added; with two images of other sets in
it. Wrong labels are counted among as many suspects as labels were changed.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tqdm.auto import tqdm

from fewshot_mahalanobis import SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.heads import AutoHead
from fewshot_mahalanobis.images.decode import to_network_range
from fewshot_mahalanobis.networks.devices import choose_dtype
from fewshot_mahalanobis.research.data.sources import ImageSource, load_source
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.summary import Suspect, summarise

SETS = (
    "cifar10.zip:test", "cifar100_test.zip", "cub200_2010.zip:test", "dtd10.zip:test", "fashion_mnist.zip:test",
    "gtsrb.zip", "mini_imagenet_test.zip", "mnist.zip:test", "omniglot.zip:test", "quickdraw345.zip:test",
)  # fmt: skip
WAY, SHOT, COPIES, FOREIGN, QUALITY = 5, 10, 3, 2, 60
COLUMNS = (
    "set",
    "wrong labels found, %",
    "copies found, %",
    "foreign images found, %",
    "labels suspected in a right set",
    "copies suspected",
    "outliers suspected",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--checkpoint", default="default")
    arguments = parser.parse_args()
    model = load_checkpoint(arguments.checkpoint)
    sources = {
        name.partition(".")[0]: load_source(f"{arguments.data / name}", size=model.image_size, lazy=True)
        for name in SETS
    }
    rows = []
    for name, source in sources.items():
        others = [other for other in sources.values() if other is not source]
        rng = np.random.default_rng(0)
        found = [measure(model, source, others, rng) for _ in tqdm(range(arguments.tasks), name)]
        rows.append((name, np.mean(found, axis=0)))
    rows.append(("mean", np.mean([row for _, row in rows], axis=0)))
    cells = [[name, *(f"{100 * v:.0f}" for v in row[:3]), *(f"{v:.1f}" for v in row[3:])] for name, row in rows]
    print(markdown_table(cells, COLUMNS))


def measure(
    model: SimpleCNAPS, source: ImageSource, others: list[ImageSource], rng: np.random.Generator
) -> list[float]:
    """One support set: shares found of wrong labels, copies and foreign images; suspects in the unchanged set."""
    classes = [indices for indices in source.indices_of_class() if len(indices) >= SHOT]
    chosen = rng.permutation(len(classes))[:WAY]
    images = source.images[np.concatenate([rng.choice(classes[c], SHOT, replace=False) for c in chosen])]
    n, labels = len(images), np.repeat(np.arange(len(chosen)), SHOT)

    right = adapted(model, images, labels)
    changed = rng.choice(n, n // 10, replace=False)
    wrong = labels.copy()
    wrong[changed] = (wrong[changed] + rng.integers(1, len(chosen), len(changed))) % len(chosen)
    mislabelled = FittedHead.fit(AutoHead(), right.support, torch.from_numpy(wrong))  # adaptation does not see labels

    copied = rng.choice(n, COPIES, replace=False)
    copies = np.stack([compressed(images[i]) for i in copied])
    doubled = adapted(model, np.concatenate([images, copies]), np.concatenate([labels, labels[copied]]))

    replaced = rng.choice(n, FOREIGN, replace=False)
    mixed = images.copy()
    for i in replaced:
        other = others[rng.integers(len(others))]
        mixed[i] = other.images[int(rng.integers(len(other.labels)))]
    foreign = adapted(model, mixed, labels)

    suspected = [suspect.index for suspect in suspects(mislabelled, "wrong label")][: len(changed)]
    pairs = {(suspect.index, suspect.twin) for suspect in suspects(doubled, "near-duplicate")}
    odd = {suspect.index for kind in ("outlier", "wrong label") for suspect in suspects(foreign, kind)}
    return [
        len({*suspected} & {*changed.tolist()}) / len(changed),
        len(pairs & {(int(i), n + place) for place, i in enumerate(copied)}) / COPIES,
        len(odd & {*replaced.tolist()}) / FOREIGN,
        *(len(suspects(right, kind)) for kind in ("wrong label", "near-duplicate", "outlier")),
    ]


def adapted(model: SimpleCNAPS, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> FittedHead:
    batch = to_network_range(torch.from_numpy(images).permute(0, 3, 1, 2))
    dtype = choose_dtype("auto", model.feature_extractor)
    return model.adapt(batch, torch.from_numpy(labels), head=AutoHead(), dtype=dtype).fitted_head


def suspects(fitted: FittedHead, kind: str) -> list[Suspect]:
    return [suspect for suspect in summarise(fitted).suspects if suspect.kind == kind]


def compressed(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=QUALITY)
    return np.asarray(Image.open(buffer))


if __name__ == "__main__":
    main()
