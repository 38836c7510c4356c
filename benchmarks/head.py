"""The Mahalanobis head against the plain loop over classes: time, error, memory; and its share of a whole task."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from benchmarks import plain
from benchmarks.record import Record, Table
from benchmarks.tasks import drawn_features, drawn_images
from benchmarks.timing import Times, extra_megabytes, in_own_process, ratio, show, take_turns
from fewshot_mahalanobis import MahalanobisHead, RegularizedCovariance, SimpleCNAPSClassifier
from fewshot_mahalanobis.heads import AutoHead

#: Ways, shots, queries, and the aim: this many times as fast as the plain loop.
TASKS = ((5, 5, 75, 12), (50, 10, 500, 15), (200, 5, 1000, 40), (1000, 5, 1000, 50))
#: Largest share of a whole task, images in and labels out, that the paper's head and the default head may take.
MAX_SHARES = {(5, 5): (0.02, 0.05), (50, 10): (0.02, 0.03)}
#: Ways, shots, and the seconds within which the default head should fit them on two cores.
LARGE = (1000, 5, 3)
#: Ways, shots, queries, and the allowed megabytes.
MEMORY = ((1000, 5, 1000, 200), (10_000, 5, 1000, 2000))

HEADS = {"paper's": MahalanobisHead(), "auto": AutoHead()}


def run(record: Record) -> list[Table]:
    speed, shares, memory = [], [], []
    for ways, shots, queries, aim in TASKS[:1] if record.quick else TASKS:
        name = f"{ways}-way {shots}-shot, {queries} queries"
        found = record.value(name, lambda: _measure(ways, shots, queries, record.repeats))  # noqa: B023
        speed.append(
            [
                name,
                show(found["plain"]),
                show(found["head"]),
                show(found["logits"]),
                ratio(found["plain"], found["head"]),
                str(aim),
                f"{found['error']:.1e}",
                f"{found['plain error']:.1e}",
            ]
        )
    for ways, shots, queries, _ in () if record.quick else TASKS[:2]:
        name = f"{ways}-way {shots}-shot, {queries} queries"
        key = f"whole task, fit of both heads, {name}"
        found = record.value(key, lambda: _whole_task(ways, shots, queries, record.repeats))  # noqa: B023
        for precision in ("float32", "auto"):
            for head, aim in zip(HEADS, MAX_SHARES[ways, shots]):
                share = median(found[f"{head} head"]) / median(found[precision])
                shares.append([name, precision, show(found[precision]), head, f"{share:.1%}", f"{aim:.0%}"])
    choosing = []
    for ways, shots, aim in () if record.quick else (LARGE,):
        times = record.value(f"choosing, {ways} classes of {shots}", lambda: _choosing(ways, shots, record.repeats))  # noqa: B023
        choosing.append([f"{ways:,} classes of {shots}", show(times), f"{aim} s"])
    for ways, shots, queries, most in () if record.quick else MEMORY:
        name = f"{ways:,} classes x {shots} shots, {queries:,} queries"
        found = record.value(name, lambda: in_own_process("head", ways, shots, queries))  # noqa: B023
        memory.append([name, f"{found['megabytes']:.0f} MB", f"{most:,} MB", f"{found['seconds']:.2g} s"])
    header = ["d = 512", "plain loop", "fit + logits", "logits alone", "ratio", "aim", "error", "plain loop's"]
    note = (
        "Errors: largest relative difference of a distance from dense float64. Measured in a process that has adapted "
        "the network to a task before, as one that has features has: from then on the C library keeps freed memory. In "
        "a process that has not, page faults may add half to the time of a 200-way task."
    )
    return [
        Table("Head against the d x d inverse of each class", header, speed, note),
        Table(
            "Share of the head in a whole task",
            ["task", "precision", "fit + predict", "head", "share of fit", "aim"],
            shares,
        ),
        Table('head="auto": settings chosen and fitted, d = 512', ["support set", "time", "aim"], choosing),
        Table("Memory of the head", ["task", "peak beyond the features", "aim", "time"], memory),
    ]


@torch.no_grad()
def _measure(ways: int, shots: int, queries: int, repeats: int) -> dict[str, Times | float]:
    images = drawn_images(32)
    SimpleCNAPSClassifier(device="cpu").fit(images, np.arange(32) % 4).predict(images)
    task = drawn_features(ways, shots, queries)
    head = MahalanobisHead()
    state = head.fit(*task[:2])
    calls = {"plain": lambda: plain.logits(*task), "head": lambda: head(*task)}
    times: dict[str, Times | float] = {**take_turns(calls, repeats)}
    times["logits"] = take_turns({"logits": lambda: head.logits(state, task[2])}, repeats)["logits"]
    few = task[0], task[1], task[2][:20]
    exact = plain.logits(few[0].double(), few[1], few[2].double())
    for name, logits in (("error", head(*few)), ("plain error", plain.logits(*few))):
        times[name] = float(((logits - exact) / exact).abs().max())
    return times


@torch.no_grad()
def _whole_task(ways: int, shots: int, queries: int, repeats: int) -> dict[str, Times]:
    support, query = drawn_images(ways * shots), drawn_images(queries, seed=1)
    labels = np.repeat(np.arange(ways), shots)
    calls: dict[str, Callable[[], object]] = {}
    for precision in ("float32", "auto"):
        classifier = SimpleCNAPSClassifier(device="cpu", precision=precision)
        calls[precision] = lambda c=classifier: c.fit(support, labels).predict(query)
    classifier.fit(support, labels)
    *features, _ = drawn_features(ways, shots, queries, d=classifier.n_features_out_)
    for name, head in HEADS.items():
        calls[f"{name} head"] = lambda head=head: head.fit(*features)
    return take_turns(calls, repeats)


def _choosing(ways: int, shots: int, repeats: int) -> Times:
    support, labels, _ = drawn_features(ways, shots, 1)
    return take_turns({"": lambda: AutoHead().fit(support, labels)}, repeats)[""]


@torch.no_grad()
def _memory(ways: int, shots: int, queries: int) -> dict[str, float]:
    small = drawn_features(5, 2, 5)
    MahalanobisHead()(*small)  # what is loaded once
    task = drawn_features(ways, shots, queries)
    times: Times = []
    megabytes = extra_megabytes(
        lambda: times.extend(take_turns({"": lambda: MahalanobisHead(RegularizedCovariance())(*task)}, 1, False)[""])
    )
    return {"megabytes": megabytes, "seconds": times[0]}


if __name__ == "__main__":
    print(json.dumps(_memory(*map(int, sys.argv[1:]))))
