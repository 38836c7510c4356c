"""``torch.compile`` of the folded network: what it gains, and how many images its compile time costs."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from benchmarks.record import Record, Table
from benchmarks.timing import Times, ratio, show, take_turns
from fewshot_mahalanobis import load_checkpoint

BATCH = 64


def run(record: Record) -> list[Table]:
    rows = []
    for name in ("float32", "bfloat16"):
        found = record.value(name, lambda: _measure(getattr(torch, name), record.repeats))  # noqa: B023
        saved = (median(found["eager"]) - median(found["compiled"])) / BATCH
        worth = f"{found['compile time'] / saved:,.0f} images" if saved > 0 else "never"
        times = [show(found["eager"]), show(found["compiled"]), ratio(found["eager"], found["compiled"])]
        rows.append([name, *times, f"{found['compile time']:.0f} s", worth])
    header = ["precision", f"eager, {BATCH} images", "compiled", "ratio", "compile time", "pays after"]
    return [Table("torch.compile", header, rows)]


@torch.no_grad()
def _measure(dtype: torch.dtype, repeats: int) -> dict[str, Times | Any]:
    network = load_checkpoint("resnet18").feature_extractor.for_inference(dtype=dtype)
    images = torch.rand(BATCH, 3, 84, 84).to(dtype).contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(network)
    start = time.perf_counter()
    compiled(images)
    seconds = time.perf_counter() - start
    calls = {"eager": lambda: network(images), "compiled": lambda: compiled(images)}
    return {"compile time": seconds, **take_turns(calls, repeats)}
