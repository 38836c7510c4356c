from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fewshot_mahalanobis import SimpleCNAPS
from fewshot_mahalanobis.checkpoints import save_checkpoint


@pytest.fixture(scope="package")
def model() -> SimpleCNAPS:
    """The smallest model: no adaptation, settings other than the defaults."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SimpleCNAPS(adaptation="none", scale=0.5, one_shot_covariance="published", image_size=64).eval()


@pytest.fixture(scope="package")
def saved(model: SimpleCNAPS, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its checkpoint, in float16."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    save_checkpoint(model, folder, dtype=torch.float16)
    return folder
