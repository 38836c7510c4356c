"""Wall-clock times of calls that take turns in one process, and peak memory in a process of its own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Times = list[float]


def take_turns(calls: Mapping[str, Callable[[], object]], repeats: int, warm_up: bool = True) -> dict[str, Times]:
    """Seconds of each call in each round. What slows the machine for a while slows all of them."""
    if warm_up:
        for call in calls.values():
            call()
    times: dict[str, Times] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


def show(seconds: Times) -> str:
    """Median and range, in a unit that suits."""
    middle = median(seconds)
    unit, factor = ("s", 1) if middle >= 1 else ("ms", 1e3) if middle >= 1e-3 else ("µs", 1e6)
    return f"{middle * factor:.3g} {unit}{_range([s * factor for s in seconds])}"


def ratio(slow: Times, fast: Times) -> str:
    """How many times as long ``slow`` takes as ``fast``: median of the rounds, and range."""
    ratios = [a / b for a, b in zip(slow, fast)]
    return f"{median(ratios):.3g}{_range(ratios)}"


def _range(values: Sequence[float]) -> str:
    return f" ({min(values):.3g} to {max(values):.3g})" if len(values) > 1 else ""


def in_own_process(module: str, *arguments: object) -> dict[str, Any]:
    """Run ``python -m benchmarks.<module> <arguments>`` and parse the JSON that it prints."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
    root = Path(__file__).parents[1]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout)


def extra_megabytes(call: Callable[[], object]) -> float:
    """Peak memory of this process during ``call`` beyond what it held before, in units of 1e6 bytes (Linux)."""
    held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    call()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (peak - held) / 1e6
