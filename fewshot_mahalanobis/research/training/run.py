"""Shared by both trainings: processes, loading, run folder, precision."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from ctypes import c_bool
from functools import partial
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from pickle import UnpicklingError
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from fewshot_mahalanobis.checkpoints.files import atomic_replace
from fewshot_mahalanobis.extras import install_command
from fewshot_mahalanobis.networks.devices import choose_device

if TYPE_CHECKING:
    from accelerate import Accelerator

#: Seconds between saved states.
SAVE_EVERY = 300.0


def start_processes(device: str) -> Accelerator:
    """Return Accelerate's description of this process: its device, and its rank among those that a launcher started.

    ``device`` is "auto" (a GPU where there is one) or "cpu", else ValueError. ImportError if Accelerate is not
    installed.
    """
    if device not in ("auto", "cpu"):
        raise ValueError(
            f'device must be "auto" or "cpu" for training, not {device!r}: choose GPUs by CUDA_VISIBLE_DEVICES, '
            "several by `accelerate launch`"
        )
    try:
        with warnings.catch_warnings():  # the first import adds a warning filter for good
            from accelerate import Accelerator
    except ImportError as error:
        raise ImportError(f"training needs {error.name}: {install_command('training')}") from error
    # Without ``cpu`` each process would train alone. The recipe sets the precision, not the launcher.
    return Accelerator(cpu=choose_device(device).type == "cpu", mixed_precision="no")


def shared_out(total: int, name: str, accelerator: Accelerator) -> int:
    """Return the share of ``total`` that each process does in a step; ValueError if it cannot be divided evenly."""
    share, rest = divmod(total, accelerator.num_processes)
    if rest:
        raise ValueError(f"{name} = {total} cannot be divided between {accelerator.num_processes} processes")
    return share


@contextmanager
def stopped_between_steps(accelerator: Accelerator) -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C and SIGTERM wait for the end of a step, also if they are repeated. They count when the block ends.

    Yields the function that tells whether to stop. Every process calls it after each step: all stop if one has got a
    signal.
    """
    signals = list[int]()
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # which gets all signals
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {n: handler for n in numbers if (handler := signal.getsignal(n)) not in (signal.SIG_IGN, None)}

    def wait(number: int, frame: FrameType | None) -> None:
        if not signals and accelerator.is_main_process:
            os.write(2, b"\nstopping after this step, which is saved\n")  # print may be at work below
        signals.append(number)

    def stop() -> bool:
        if accelerator.num_processes == 1:
            return bool(signals)
        return bool(accelerator.reduce(torch.tensor(float(bool(signals)), device=accelerator.device), "sum"))

    for number in before:
        signal.signal(number, wait)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if signals:
            signal.raise_signal(signals[0])


@contextmanager
def remaining(
    items: Dataset[Any], first: int, end: int, accelerator: Accelerator, *, workers: int, batch_size: int | None = None
) -> Iterator[Iterator[Any]]:
    """Load the items from ``first`` to ``end`` that are this process's, one by one or in batches, within the block."""
    ended = RawValue(c_bool, False)
    loader = DataLoader(
        items,
        batch_size=batch_size,
        sampler=range(first, end)[accelerator.process_index :: accelerator.num_processes],
        num_workers=workers,
        worker_init_fn=partial(_ignore_stop_signals, ended),
        pin_memory=accelerator.device.type == "cuda",
        generator=torch.Generator(),  # else workers would be seeded by the global generator
    )
    try:
        yield iter(loader)
    finally:
        ended.value = True


def _ignore_stop_signals(ended: c_bool, worker: int) -> None:
    """Ignore Ctrl-C and SIGTERM, which go to every process, in one that loads data: the step still needs it.

    Once the loading has ``ended``, perhaps by an error, SIGTERM comes from the parent, which waits for it at exit.
    """

    def stop(*_: object) -> None:
        if ended.value:
            os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)


class RunFolder:
    """Folder of a training run, from which a killed run continues.

    ``recipe.json`` holds the settings, ``state.pt`` the last saved state (weights, optimizer, step), ``log.jsonl`` one
    line per report, ``tensorboard/`` the same for TensorBoard. A run cannot continue with another recipe.

    Parameters
    ----------
    path : path
    recipe : mapping
    main : bool
        Whether this is the main process; only that one writes.
    tensorboard : bool
        Also write logs for TensorBoard.

    Raises
    ------
    ValueError
        The folder holds a run with another recipe.
    ImportError
        TensorBoard is not installed.
    """

    def __init__(
        self, path: str | Path, recipe: Mapping[str, Any], *, main: bool = True, tensorboard: bool = False
    ) -> None:
        self.path = Path(path)
        self._main = main
        self._saved = -math.inf  # the first step is saved: it may have come late
        self._writer_class = _tensorboard_writer() if tensorboard and main else None
        self._writer: Any = None
        recipe = json.loads(json.dumps(recipe))
        file = self.path / "recipe.json"
        if (self.path / "log.jsonl").exists():  # a command that failed before its first step does not block the folder
            before = json.loads(file.read_text())
            changed = sorted(k for k in recipe.keys() | before.keys() if recipe.get(k) != before.get(k))
            if changed:
                raise ValueError(
                    f"{self.path} holds a run with another recipe (different: {', '.join(changed)}); "
                    "continue it with the same settings or choose another folder"
                )
        elif main:
            self.path.mkdir(parents=True, exist_ok=True)
            with atomic_replace(file) as temporary:
                temporary.write_text(json.dumps(recipe, indent=2) + "\n")

    def resume(self) -> dict[str, Any] | None:
        """Load the last saved state, None for a fresh run, and drop later log lines: they will be logged again."""
        file = self.path / "state.pt"
        try:
            state = torch.load(file, map_location="cpu", weights_only=True) if file.exists() else None
        except (EOFError, RuntimeError, UnpicklingError) as error:
            raise ValueError(f"{file} is damaged: delete it to begin the run again") from error
        if self._main:
            step, log = state["step"] if state is not None else 0, self.path / "log.jsonl"
            if log.exists():
                lines = log.read_text().splitlines(keepends=True)
                # A killed process can leave the last line incomplete.
                kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
                with atomic_replace(log) as temporary:
                    temporary.write_text("".join(kept))
            if self._writer_class is not None:
                self._writer = self._writer_class(str(self.path / "tensorboard"), purge_step=step + 1)
        return state

    def save(self, state: Callable[[], Mapping[str, Any]], *, now: bool) -> None:
        """Save the state now, or if the last one is ``SAVE_EVERY`` seconds old.

        A process killed meanwhile leaves the previous one.
        """
        if not self._main or not (now or time.monotonic() - self._saved > SAVE_EVERY):
            return
        with atomic_replace(self.path / "state.pt") as temporary:
            torch.save(dict(state()), temporary)
        self._saved = time.monotonic()

    def log(self, step: int, **record: Any) -> None:
        """Log numbers, or dicts of numbers, after ``step`` steps."""
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
        raise ImportError(f"logs for TensorBoard need {error.name}: {install_command('tensorboard')}") from error
    return SummaryWriter


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Run convolutions in ``dtype``, float32 or bfloat16; the head always computes outside autocast."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)
