"""Accuracy by the size of the pictures themselves and by the size that they are resized to.

    python -m benchmarks.picture_sizes DATA_DIR

The same 5-way tasks at every size, with 1 and 5 shots, on sets that chose the checkpoint. Pictures are shrunk first.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm.auto import tqdm

from benchmarks.colours import SETS as PHOTOGRAPHS
from fewshot_mahalanobis import SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.images.decode import to_network_range
from fewshot_mahalanobis.images.picture import to_square_array
from fewshot_mahalanobis.networks.devices import choose_dtype
from fewshot_mahalanobis.research.data.sources import load_source
from fewshot_mahalanobis.research.episodes.sampling import Episode, FixedEpisodes
from fewshot_mahalanobis.research.evaluation.tables import markdown_table

SETS = (*PHOTOGRAPHS, "mini_imagenet_val.zip:val")
PICTURES = (28, 40, 56, 84, 112, 160)
#: The first is the one that the others are compared with.
RESIZED = (224, 160, 128)
SHOTS, QUERIES = (1, 5), 6


def accuracy(model: SimpleCNAPS, pictures: Sequence[Image.Image], episode: Episode) -> float:
    """Percentage of the queries that are right, of ``pictures`` (support, then queries) at the model's size."""
    squares = np.stack([to_square_array(picture, model.image_size) for picture in pictures])
    images = to_network_range(torch.from_numpy(squares).permute(0, 3, 1, 2))
    support, queries = images.split([len(episode.support), len(episode.query)])
    task = model.adapt(support, torch.from_numpy(episode.support_labels), dtype=choose_dtype("auto", model))
    right = task.logits(queries).argmax(dim=1).cpu().numpy() == episode.query_labels
    return 100 * float(right.mean())


def measured(source_path: str, pictures: int, tasks: int) -> Tensor:
    """Percentages (shots, tasks, sizes) of one set."""
    source = load_source(source_path, size=pictures, lazy=True)
    models = [load_checkpoint("default").at_size(size).eval() for size in RESIZED]
    results = torch.empty(len(SHOTS), tasks, len(RESIZED))
    for row, shot in enumerate(SHOTS):
        episodes = FixedEpisodes(source, min(5, len(source.class_names)), shot, QUERIES, seed=0)
        for index in tqdm(range(tasks), f"{source.name}, {pictures} pixels, {shot} shots"):
            episode = episodes.draw(index)
            chosen = np.concatenate([episode.support, episode.query])
            small = [Image.fromarray(pixels) for pixels in source.images[chosen]]
            results[row, index] = torch.tensor([accuracy(model, small, episode) for model in models])
    return results


def show(values: Tensor) -> str:
    """Mean over sets and tasks (sets, tasks) with its 95 % interval, the sets being given."""
    spread = 1.96 * math.sqrt(float(values.var(dim=1).sum()) / values.shape[1]) / len(values)
    return f"{values.mean():+.1f} ± {spread:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture_sizes", description=__doc__)
    parser.add_argument("data", type=Path, help="folder with " + ", ".join(SETS))
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--pictures", type=int, nargs="+", default=PICTURES)
    chosen = parser.parse_args()
    rows = []
    for pictures in chosen.pictures:
        results = torch.stack([measured(str(chosen.data / name), pictures, chosen.tasks) for name in SETS])
        first = " / ".join(f"{results[:, shot, :, 0].mean():.1f}" for shot in range(len(SHOTS)))
        gains = results - results[..., :1]
        others = [
            " / ".join(show(gains[:, shot, :, size]) for shot in range(len(SHOTS))) for size in range(1, len(RESIZED))
        ]
        rows.append([str(pictures), first, *others])
        print(pictures, first, *others, flush=True)
    heading = ["picture", f"{RESIZED[0]} pixels, %", *(f"{size} pixels, points" for size in RESIZED[1:])]
    print(markdown_table(rows, heading))


if __name__ == "__main__":
    main()
