"""What both training commands share: where a run stands on disk, and how the device computes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch


class RunFolder:
    """A folder that a training run can be killed in and continued from.

    ``recipe.json`` holds what the run was asked for, ``state.pt`` where it stands (weights, optimiser,
    step), ``log.jsonl`` a line per report. Continuing with another recipe is refused.
    """

    def __init__(self, path: str | Path, recipe: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        recipe = json.loads(json.dumps(recipe))
        file = self.path / "recipe.json"
        if file.exists():
            before = json.loads(file.read_text())
            changed = sorted(k for k in recipe.keys() | before.keys() if recipe.get(k) != before.get(k))
            if changed:
                raise ValueError(
                    f"{self.path} holds a run with another recipe (different: {', '.join(changed)}); "
                    "continue it with the same settings or choose another folder"
                )
        else:
            file.write_text(json.dumps(recipe, indent=2) + "\n")

    def load(self) -> dict[str, Any] | None:
        """The last saved state, or None for a fresh run."""
        file = self.path / "state.pt"
        return torch.load(file, map_location="cpu", weights_only=True) if file.exists() else None

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the state so that a kill at any moment leaves the old one or the new one."""
        temporary = self.path / "state.pt.part"
        torch.save(dict(state), temporary)
        os.replace(temporary, self.path / "state.pt")

    def log(self, **record: Any) -> None:
        """Append one line to ``log.jsonl``."""
        with (self.path / "log.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


#: (share of training, side of its images in pixels), in order.
Phases = Sequence[tuple[float, int]]


def image_size_at(done: float, phases: Phases) -> int:
    """Side of the training images when the share ``done`` (0 to 1) of the training is over."""
    end = 0.0
    for share, size in phases:
        end += share
        if done < end:
            return size
    return phases[-1][1]


def autocast(device: torch.device, enabled: bool = True) -> AbstractContextManager[None]:
    """bfloat16 autocast on ``device``; the head always computes outside it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def choose_device(device: str) -> torch.device:
    """``"auto"`` is CUDA where there is one, else the CPU; anything else is taken at its word."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)
