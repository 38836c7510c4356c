"""What a GPU takes for a task, for a picture and for a training task, and how its answers differ from the CPU's.

    python -m benchmarks.gpu

Times are medians of rounds in turns (:mod:`benchmarks.timing`), with the range. ``--device cpu`` measures the same
there, ``--quick`` a little of it once.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from benchmarks.__main__ import markdown
from benchmarks.meta_training import EPISODE, QUICK
from benchmarks.photographs import draw
from benchmarks.record import Table, machine
from benchmarks.tasks import drawn_images
from benchmarks.timing import show, take_turns
from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier
from fewshot_mahalanobis.research.training.learner import CNAPSLearner
from fewshot_mahalanobis.research.training.run import autocast

#: Checkpoint and side of its images.
CHECKPOINTS = {"efficientnet-lite0": 224, "resnet18": 96}
PRECISIONS = ("float32", "bfloat16")
REPEATS = 3
WAYS, SHOTS, QUERIES = 5, 5, 75
BATCHES = (16, 64, 256)
#: Support and query images, and their side: the mean and the largest episode of Meta-Dataset's training
#: (benchmarks.meta_training).
EPISODES = {"mean": (21, 295, 215, 84), "largest": (40, 400, 400, 84)}


def _classifier(checkpoint: str, precision: str, device: str, pictures: NDArray[Any]) -> SimpleCNAPSClassifier:
    return SimpleCNAPSClassifier(checkpoint, precision=precision, device=device).fit(pictures, _labels())


def _labels() -> NDArray[Any]:
    return np.repeat(np.arange(WAYS), SHOTS)


def tasks(device: str, quick: bool) -> Table:
    """A whole task of arrays, and its parts."""
    repeats = 1 if quick else REPEATS
    calls: dict[str, Callable[[], object]] = {}
    for checkpoint, size in CHECKPOINTS.items():
        support, queries = drawn_images(WAYS * SHOTS, size), drawn_images(QUERIES, size, seed=1)
        for precision in PRECISIONS:
            one = SimpleCNAPSClassifier(checkpoint, precision=precision, device=device)
            calls[f"{checkpoint} {precision} fit"] = lambda c=one, s=support: c.fit(s, _labels())  # type: ignore[misc]
            calls[f"{checkpoint} {precision} predict"] = lambda c=one, q=queries: c.predict(q)  # type: ignore[misc]
    first = {name: take_turns({name: call}, 1, warm_up=False)[name] for name, call in calls.items()}
    times = take_turns(calls, repeats)
    rows = []
    for checkpoint, size in CHECKPOINTS.items():
        for precision in PRECISIONS:
            row = [checkpoint, str(size), precision]
            for part in ("fit", "predict"):
                name = f"{checkpoint} {precision} {part}"
                row += [show(times[name]), show(first[name])]
            rows.append(row)
    title = f"A task of {WAYS} classes with {SHOTS} images each, {QUERIES} queries"
    header = ["checkpoint", "pixels", "precision", "fit", "the first time", "predict", "the first time"]
    return Table(title, header, rows)


def pictures(device: str, quick: bool) -> Table:
    """``predict`` on many arrays, by batch size, and on files."""
    repeats, count = (1, 8) if quick else (REPEATS, 1024)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        draw(Path(name), count // 4, (640, 480))
        files = sorted(Path(name).iterdir())
        for checkpoint, size in CHECKPOINTS.items():
            support, arrays = drawn_images(WAYS * SHOTS, size), drawn_images(count, size, seed=1)
            for precision in PRECISIONS:
                fitted = _classifier(checkpoint, precision, device, support)
                calls: dict[str, Callable[[], object]] = {}
                for batch in BATCHES:
                    few = arrays[: min(count, 16 * batch)]
                    sized = SimpleCNAPSClassifier(checkpoint, precision=precision, device=device, batch_size=batch)
                    sized.fit(support, _labels())
                    calls[str(len(few)) + f" {batch}"] = lambda c=sized, x=few: c.predict(x)  # type: ignore[misc]
                calls[f"{len(files)} files"] = lambda c=fitted: c.predict(files)  # type: ignore[misc]
                times = take_turns(calls, repeats)
                each = [show([t / int(key.split()[0]) for t in times[key]]) for key in calls]
                rows.append([checkpoint, precision, *each])
    header = ["checkpoint", "precision", *(f"arrays, batch_size={batch}" for batch in BATCHES), "JPEG files"]
    note = f"JPEG files have 640 x 480 pixels, and are read by the threads of {os.cpu_count()} cores, 64 a batch."
    return Table("An image of `predict`", header, rows, note)


def training(device: str, quick: bool) -> Table:
    """A step of meta-training of one task, and the memory that it takes."""
    repeats = 1 if quick else REPEATS
    episodes = {"quick": (QUICK[0], QUICK[0] * QUICK[1], QUICK[0] * QUICK[2], QUICK[3])} if quick else EPISODES
    if not quick:
        ways, shots, queries, size = EPISODE
        episodes = {f"{ways}-way {shots}-shot": (ways, ways * shots, ways * queries, size), **episodes}
    rows = []
    for title, episode in episodes.items():
        for precision, lite in (("float32", None), ("bfloat16", None), ("bfloat16", 40)):
            step = _step(device, precision, lite, episode)
            times = take_turns({"step": step}, repeats)["step"]
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                step()
                memory = f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB"
            else:
                memory = ""
            name = f"{title}: {episode[1]} support, {episode[2]} query images"
            rows.append([name, precision, str(lite or ""), show(times), memory])
    header = ["task of 84 pixels", "precision", "lite", "a step", "memory"]
    return Table("Meta-training of `resnet18`'s adaptation", header, rows)


def _step(device: str, precision: str, lite: int | None, episode: tuple[int, int, int, int]) -> Callable[[], object]:
    ways, supports, queries, size = episode
    torch.manual_seed(0)
    learner = CNAPSLearner(SimpleCNAPS().train().to(device).to(memory_format=torch.channels_last), lite)
    optimizer = torch.optim.Adam([p for p in learner.parameters() if p.requires_grad], lr=5e-4)
    images = torch.rand(supports + queries, 3, size, size) * 2 - 1
    images = images.to(device).contiguous(memory_format=torch.channels_last)
    labels, truth = (torch.arange(n, device=device) % ways for n in (supports, queries))

    def step() -> float:
        optimizer.zero_grad()
        with autocast(torch.device(device), getattr(torch, precision)):
            logits = learner(images[:supports], labels, images[supports:])
        (F.cross_entropy(logits, truth) + 0.001 * learner.penalty()).backward()
        optimizer.step()
        return float(logits.detach().sum())  # waits for the GPU

    return step


def agreement(device: str, quick: bool) -> Table:
    """Answers beside those of the CPU in float32: labels, probabilities, features."""
    count = 8 if quick else 200
    rows = []
    for checkpoint, size in CHECKPOINTS.items():
        support, queries = drawn_images(WAYS * SHOTS, size), drawn_images(count, size, seed=1)
        expected, of_classes, of_features = _answers(checkpoint, "float32", "cpu", support, queries)
        for precision, tf32 in (("float32", False), ("float32", True), ("bfloat16", True)):
            before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, tf32
            labels, probabilities, features = _answers(checkpoint, precision, device, support, queries)
            torch.backends.cudnn.allow_tf32 = before
            name = f"{precision}, TF32 {'allowed' if tf32 else 'not allowed'}" if precision == "float32" else precision
            difference = np.linalg.norm(features - of_features) / np.linalg.norm(of_features)
            largest = abs(probabilities - of_classes).max()
            others = f"{(labels != expected).sum()} of {count}"
            rows.append([checkpoint, name, f"{difference:.1e}", f"{largest:.1e}", others])
    header = ["checkpoint", "on the GPU", "difference of features", "largest of probabilities", "other labels"]
    return Table("The answers of a CPU in float32 and of a GPU", header, rows)


def _answers(
    checkpoint: str, precision: str, device: str, support: NDArray[Any], queries: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Labels, probabilities and features of the queries."""
    fitted = _classifier(checkpoint, precision, device, support)
    probabilities = fitted.predict_proba(queries)
    return fitted.classes_[probabilities.argmax(1)], probabilities, fitted.transform(queries)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; all if none is given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    name = torch.cuda.get_device_name() if chosen.device == "cuda" else "no GPU"
    print(f"{name}; {machine()}\n")
    for table in chosen.tables or TABLES:
        print(markdown([TABLES[table](chosen.device, chosen.quick)]) + "\n", flush=True)


TABLES = {"tasks": tasks, "pictures": pictures, "agreement": agreement, "training": training}


if __name__ == "__main__":
    main()
