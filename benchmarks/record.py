"""Measured values of a benchmark, kept on disk so that an interrupted run resumes. The pages have the tables.

The values of every round and episode are not in git.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass
class Record:
    """Values by key, each computed once; the tables that a benchmark makes of them.

    ``folder`` None keeps nothing (a quick run, whose figures mean nothing). ``episodes`` and ``checkpoint`` are for
    benchmarks of accuracy.
    """

    name: str
    folder: Path | None = RESULTS
    quick: bool = False
    data: Path | None = None
    episodes: int = 100
    checkpoint: str = "default"
    values: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    machine: str = field(default_factory=lambda: machine())

    def value(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return the value recorded under ``key``, or record ``compute()``, which must fit into JSON."""
        if key not in self.values:
            self.values[key] = compute()
            self.write()
        return self.values[key]

    @property
    def repeats(self) -> int:
        return 1 if self.quick else 5

    @property
    def path(self) -> Path:
        assert self.folder is not None
        return self.folder / "values" / f"{self.name}.json"

    def write(self) -> None:
        if self.folder is not None:
            _write(self.path, {"machine": self.machine, "values": self.values})

    def read(self) -> Record:
        """Read the values of an earlier run, if there are any."""
        if self.folder is not None and self.path.exists():
            stored = json.loads(self.path.read_text())
            self.machine, self.values = stored["machine"], stored["values"]
        return self


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def machine() -> str:
    """The processor, the cores that may be used, and the versions that matter."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        name = next((line.split(":")[1].strip() for line in cpuinfo.open() if line.startswith("model name")), name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    return f"{name}, {_count(cores, 'core')}, {_count(threads, 'thread')}, torch {torch.__version__}"


def _count(number: int | None, of: str) -> str:
    return f"{number} {of}{'' if number == 1 else 's'}"
