"""Wall-clock times of calls that take turns in one process, and peak memory in a separate process."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Times = list[float]


#: Calls that take less are repeated for this many seconds within a round, as ``timeit`` does.
ROUND = 0.2


def take_turns(calls: Mapping[str, Callable[[], object]], repeats: int, warm_up: bool = True) -> dict[str, Times]:
    """Seconds of each call in each round. Calls take turns, so that other work of the machine slows all alike.

    After a warm-up, which times them, short calls are repeated within the round; their time is the mean.
    """
    loops = dict.fromkeys(calls, 1)
    if warm_up:
        for name, call in calls.items():
            call()
            loops[name] = math.ceil(ROUND / _seconds(call, 1))
    times: dict[str, Times] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(_seconds(call, loops[name]))
    return times


def _seconds(call: Callable[[], object], loops: int) -> float:
    start = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - start) / loops


def show(seconds: Times) -> str:
    """Median and range, in a unit that suits."""
    middle = median(seconds)
    unit, factor = ("s", 1) if middle >= 1 else ("ms", 1e3) if middle >= 1e-3 else ("µs", 1e6)
    return f"{middle * factor:.3g} {unit}{_range([s * factor for s in seconds])}"


def ratio(slow: Times, fast: Times) -> str:
    """Ratio of the time of ``slow`` to that of ``fast``: median of the rounds, and range."""
    ratios = [a / b for a, b in zip(slow, fast)]
    return f"{median(ratios):.3g}{_range(ratios)}"


def _range(values: Sequence[float]) -> str:
    return f" ({min(values):.3g} to {max(values):.3g})" if len(values) > 1 else ""


def in_own_process(module: str, *arguments: object) -> dict[str, Any]:
    """Run ``python -m benchmarks.<module> <arguments>`` and parse the JSON on the last line that it prints."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
    root = Path(__file__).parents[1]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=root).stdout
    return json.loads(output.splitlines()[-1])


def extra_megabytes(call: Callable[[], object]) -> float:
    """Peak memory of this process during ``call`` beyond what it held before, in units of 1e6 bytes (Linux).

    Not ``ru_maxrss``, which counts from the birth of the process and begins at what its parent held then.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    held = _status("VmRSS")
    call()
    return (_status("VmHWM") - held) / 1e6


def _status(name: str) -> int:
    """A size that the kernel keeps of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
