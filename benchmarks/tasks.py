"""Data of the benchmarks: drawn features and images, and the image sets of a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewshot_mahalanobis.research.data.sources import ImageSource, load_source


def drawn_features(ways: int, shots: int, queries: int, d: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    """Support features (n, d), labels and query features (m, d): not negative, as after a ReLU, in float32."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(ways).repeat_interleave(shots)
    centres = torch.randn(ways, d, generator=rng)
    support = torch.relu(centres[labels] + torch.randn(len(labels), d, generator=rng))
    of = torch.randint(ways, (queries,), generator=rng)
    return support, labels, torch.relu(centres[of] + torch.randn(queries, d, generator=rng))


def drawn_images(n: int, size: int = 84, seed: int = 0) -> NDArray[np.uint8]:
    """Smooth colour patterns with noise, (n, size, size, 3)."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (n, 6, 6, 3))
    smooth = coarse.repeat(-(-size // 6), axis=1).repeat(-(-size // 6), axis=2)[:, :size, :size]
    return np.clip(smooth + rng.integers(-12, 13, (n, size, size, 3)), 0, 255).astype(np.uint8)


def image_sets(folder: Path, size: int = 84) -> dict[str, ImageSource]:
    """The image sets of a folder, one zip each; of sets with splits, the test classes."""
    sources = {}
    for path in sorted(folder.glob("*.zip")):
        for split in (":test", ":train", ""):
            try:
                source = load_source(f"{path}{split}", size=size, lazy=True)
            except ValueError:  # no such split
                continue
            sources[source.name] = source
            break
    return sources
