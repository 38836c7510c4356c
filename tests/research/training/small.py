"""What the tests of training train on: six classes of one colour each, and recipes of a few small steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fewshot_mahalanobis.research.training.recipes import MetaTrainRecipe

PRETRAIN: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 8,
    "peak_lr": 0.05,
    "phases": ((0.5, 32), (0.5, 40)),
    "image_size": 40,
    "precision": "float32",
}


def draw_colours(root: Path) -> str:
    """Six classes, each of one colour with noise: 8 images each."""
    rng = np.random.default_rng(0)
    for k in range(6):
        (root / f"c{k}").mkdir(parents=True)
        colour = rng.integers(0, 256, 3)
        for i in range(8):
            pixels = np.clip(colour + rng.normal(0, 30, (40, 40, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / f"c{k}" / f"{i}.png")
    return str(root)


def meta_recipe(folder: str, backbone: Path, **settings: Any) -> MetaTrainRecipe:
    """Two steps of two 5-way 1-shot tasks, one validation."""
    small: dict[str, Any] = {
        "sources": (folder,),
        "tasks": 4,
        "tasks_per_step": 2,
        "episodes": "fixed",
        "shot": 1,
        "queries": 2,
        "validation_episodes": 2,
        "model": {"image_size": 32},
        "precision": "float32",
    }
    return MetaTrainRecipe(backbone=str(backbone / "backbone.safetensors"), **{**small, **settings})
