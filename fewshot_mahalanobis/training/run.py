"""What both training commands share: the processes they run in, where a run stands on disk, how the device computes."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fewshot_mahalanobis.data.datasets import open_source
from fewshot_mahalanobis.data.sources import ImageSource

if TYPE_CHECKING:
    from accelerate import Accelerator

#: The name that stands for the source which the project draws itself.
GLYPHS = "glyphs"


def start_processes(device: str) -> Accelerator:
    """What Accelerate knows of this process: its device, its number among those that ``accelerate launch`` started.

    Parameters
    ----------
    device : {"auto", "cpu"}
        "auto": a GPU where there is one.

    Raises
    ------
    ImportError
        Accelerate is not installed.
    ValueError
        Another device.
    """
    if device not in ("auto", "cpu"):
        raise ValueError(
            f'training computes on "auto" or "cpu", not {device!r}: choose GPUs by CUDA_VISIBLE_DEVICES, '
            "several by `accelerate launch`"
        )
    try:
        with warnings.catch_warnings():  # the first import adds a filter, which would stay
            from accelerate import Accelerator
    except ImportError as error:
        raise ImportError(f'training needs {error.name}: pip install "fewshot-mahalanobis[training]"') from error
    # The precision is the recipe's, whatever the launcher's settings.
    return Accelerator(cpu=device == "cpu", mixed_precision="no")


def shared_out(total: int, name: str, accelerator: Accelerator) -> int:
    """What one process does of ``total`` in a step; ValueError if that is no whole number."""
    share, rest = divmod(total, accelerator.num_processes)
    if rest:
        raise ValueError(f"{name} = {total} cannot be divided between {accelerator.num_processes} processes")
    return share


def open_training_source(source: str, *, root: str | None, size: int, lazy: bool) -> ImageSource:
    """A source by path or name, or "glyphs"; in memory unless ``lazy``."""
    if source != GLYPHS:
        opened = open_source(source, root=root, size=size, workers=1 if lazy else 2)
        return opened if lazy else opened.in_memory()
    try:
        from fewshot_mahalanobis.data.glyphs import draw_glyphs
    except ImportError as error:
        raise ImportError(f'drawing glyphs needs {error.name}: pip install "fewshot-mahalanobis[training]"') from error
    return draw_glyphs(size=size)


class RunFolder:
    """A folder that a training run can be killed in and continued from.

    ``recipe.json`` holds what the run was asked for, ``state.pt`` where it stands (weights, optimiser, step),
    ``log.jsonl`` a line per report, ``tensorboard/`` the same for TensorBoard. Continuing with another recipe is
    refused.

    Parameters
    ----------
    path : path
    recipe : mapping
    main : bool
        Only one of several processes, the main one, writes.
    tensorboard : bool
        Write for TensorBoard too.

    Raises
    ------
    ValueError
        The folder holds a run with another recipe.
    ImportError
        TensorBoard is asked for and not installed.
    """

    def __init__(
        self, path: str | Path, recipe: Mapping[str, Any], *, main: bool = True, tensorboard: bool = False
    ) -> None:
        self.path = Path(path)
        self._main = main
        self._writer_class = _tensorboard_writer() if tensorboard and main else None
        self._writer: Any = None
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
        elif main:
            self.path.mkdir(parents=True, exist_ok=True)
            _replace(file, (json.dumps(recipe, indent=2) + "\n").encode())

    def resume(self) -> dict[str, Any] | None:
        """The last saved state, or None for a fresh run. What was logged after it is forgotten: it will come again."""
        file = self.path / "state.pt"
        state = torch.load(file, map_location="cpu", weights_only=True) if file.exists() else None
        if self._main:
            step, log = state["step"] if state is not None else 0, self.path / "log.jsonl"
            if log.exists():
                lines = log.read_text().splitlines(keepends=True)
                # A kill can leave the last line unfinished.
                kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
                _replace(log, "".join(kept).encode())
            if self._writer_class is not None:
                self._writer = self._writer_class(str(self.path / "tensorboard"), purge_step=step + 1)
        return state

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the state so that a kill at any moment leaves the old one or the new one."""
        temporary = self.path / "state.pt.part"
        torch.save(dict(state), temporary)
        os.replace(temporary, self.path / "state.pt")

    def log(self, step: int, **record: Any) -> None:
        """Report numbers, or dicts of numbers, after ``step`` steps; in the main process."""
        if not self._main:
            return
        with (self.path / "log.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **record}) + "\n")
        if self._writer is not None:
            for name, value in record.items():
                for part, number in value.items() if isinstance(value, dict) else [("", value)]:
                    self._writer.add_scalar(f"{name}/{part}" if part else name, number, step)
            self._writer.flush()


def _tensorboard_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f'logs for TensorBoard need {error.name}: pip install "fewshot-mahalanobis[tensorboard]"'
        ) from error
    return SummaryWriter


def _replace(file: Path, content: bytes) -> None:
    temporary = file.with_name(file.name + ".part")
    temporary.write_bytes(content)
    os.replace(temporary, file)


def image_size_at(done: float, phases: Sequence[tuple[float, int]]) -> int:
    """Side of the training images when the share ``done`` (0 to 1) of the training is over."""
    end = 0.0
    for share, size in phases:
        end += share
        if done < end:
            return size
    return phases[-1][1]


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """The precision of a recipe on ``device``: bfloat16 autocast, or none; the head always computes outside it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def choose_device(device: str) -> torch.device:
    """``"auto"`` is CUDA where there is one, else the CPU; anything else is taken at its word."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)
