"""Cost of the head against ways, shots, queries and feature width, on log axes with fitted exponents."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import plain
from benchmarks.record import Record, Table
from benchmarks.tasks import drawn_features
from benchmarks.timing import take_turns
from fewshot_mahalanobis import MahalanobisHead

PICTURE = Path(__file__).parents[1] / "docs" / "scaling.png"
#: Defaults.
BASE = {"ways": 20, "shots": 5, "queries": 200, "d": 512}
POINTS = {
    "ways": (5, 20, 80, 320, 1280),
    "shots": (1, 4, 16, 64, 256),
    "queries": (20, 100, 500, 2500, 12500),
    "d": (64, 128, 256, 512, 1024, 2048),
}
#: The plain loop is measured up to this many classes.
MOST_PLAIN_WAYS = 80


def run(record: Record) -> list[Table]:
    rows = []
    seconds: dict[str, dict[str, dict[str, float]]] = {}
    for axis, points in POINTS.items():
        points = points[:2] if record.quick else points
        seconds[axis] = {}
        for point in points:
            key = f"{axis} {point}"
            seconds[axis][str(point)] = record.value(key, lambda: _measure(BASE | {axis: point}, record.repeats))  # noqa: B023
        exponents = [exponent(seconds[axis], way) for way in ("head", "plain")]
        rows.append([axis, f"{points[0]:,} to {points[-1]:,}", *(f"{e:.2f}" for e in exponents)])
    picture = ""
    if record.folder is not None:
        draw(seconds, PICTURE)
        picture = f"\n\n![Time of fit + logits against ways, shots, queries and d]({PICTURE.name})"
    note = (
        "Time grows as the power of the quantity: exponent fitted to the upper half of the points, the others "
        f"held at {BASE['ways']} ways, {BASE['shots']} shots, {BASE['queries']} queries, d = {BASE['d']}.{picture}"
    )
    return [Table("Growth of fit + logits", ["quantity", "range", "here", "plain loop"], rows, note)]


@torch.no_grad()
def _measure(task: dict[str, int], repeats: int) -> dict[str, float]:
    features = drawn_features(**task)
    calls: dict[str, Any] = {"head": lambda: MahalanobisHead()(*features)}
    if task["ways"] <= MOST_PLAIN_WAYS:
        calls["plain"] = lambda: plain.logits(*features)
    return {name: median(times) for name, times in take_turns(calls, repeats).items()}


def exponent(seconds: dict[str, dict[str, float]], way: str) -> float:
    """Slope of log time over log quantity, by least squares over the upper half of the points."""
    x, y = np.log([(float(point), times[way]) for point, times in seconds.items() if way in times]).T
    half = len(x) // 2
    return float(np.polyfit(x[half - 1 :], y[half - 1 :], 1)[0])


def draw(seconds: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    for axes, (axis, by_point) in zip(figure.subplots(2, 2, sharey=True).flat, seconds.items()):
        for way, name, style in (("plain", "plain loop", "o--"), ("head", "here", "o-")):
            points = [(float(point), times[way]) for point, times in by_point.items() if way in times]
            axes.loglog(*zip(*points), style, label=f"{name}, exponent {exponent(by_point, way):.2f}", markersize=4)
        axes.set_xlabel(axis)
        axes.set_ylabel("seconds")
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=80)
