"""How long the package and its command take to start, by ``python -X importtime``: best of ten."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from collections import Counter
from typing import Any

from benchmarks.record import Record, Table

RUNS, SHOWN = 10, 3
CALLS = {
    "`import fewshot_mahalanobis`": ("-c", "import fewshot_mahalanobis"),
    "`fewshot-mahalanobis --help`": ("-m", "fewshot_mahalanobis", "--help"),
    "`fewshot-mahalanobis fit --help`": ("-m", "fewshot_mahalanobis", "fit", "--help"),
    "`from fewshot_mahalanobis import load_folder`": ("-c", "from fewshot_mahalanobis import load_folder"),
    "`from fewshot_mahalanobis import SimpleCNAPSClassifier`": (
        "-c",
        "from fewshot_mahalanobis import SimpleCNAPSClassifier",
    ),
    "`import torch`, to compare": ("-c", "import torch"),
}
_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+([\w.]+)")


def run(record: Record) -> list[Table]:
    rows = []
    for title, call in CALLS.items():
        found = record.value(title, lambda call=call: best(call, 1 if record.quick else RUNS))
        largest = found["packages"].items()
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in largest if seconds >= 0.01)
        rows.append([title, f"{found['imports']:.2f} s", f"{found['cpu']:.2f} s", parts])
    note = (
        f"Best of {RUNS} processes. Import time is the sum that `python -X importtime` reports; processor time is that "
        "of the whole process, user and system, without that option."
    )
    return [Table("Start", ["", "imports", "processor time", "most of the imports"], rows, note)]


def best(call: tuple[str, ...], runs: int) -> dict[str, Any]:
    """Seconds of all imports, of those by package in the same process, and of the processor: the least of ``runs``."""
    timed = [imports(call) for _ in range(runs)]
    fastest = min(timed, key=lambda packages: sum(packages.values()))
    return {
        "imports": sum(fastest.values()),
        "packages": dict(Counter(fastest).most_common(SHOWN)),
        "cpu": min(processor_seconds(call) for _ in range(runs)),
    }


def imports(call: tuple[str, ...]) -> dict[str, float]:
    """Seconds that importing takes in one process, by top-level package."""
    command = [sys.executable, "-X", "importtime", *call]
    done = subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    seconds = Counter[str]()
    for microseconds, name in _LINE.findall(done.stderr):
        seconds[name.partition(".")[0]] += int(microseconds) / 1e6
    return dict(seconds)


def processor_seconds(call: tuple[str, ...]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *call], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
