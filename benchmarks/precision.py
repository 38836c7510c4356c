"""What bfloat16 does to predictions: the same episodes in float32 and in bfloat16, on every image set of a folder."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.record import Record, Table
from benchmarks.tasks import image_sets
from fewshot_mahalanobis import load_checkpoint
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.episodes.sampling import draw_episode, episode_rng
from fewshot_mahalanobis.research.evaluation import Accuracy

WAY, SHOT, QUERIES, EPISODES = 5, 5, 10, 20


def run(record: Record) -> list[Table]:
    if record.data is None:
        return []
    rows, agreement, gain = [], [], []
    for name, source in image_sets(record.data).items():
        found = record.value(name, lambda: measure(source, 1 if record.quick else EPISODES))  # noqa: B023
        same, exact, rounded = (np.array(found[key]) for key in ("same", "float32", "bfloat16"))
        rows.append([name, *(str(Accuracy.of(x)) for x in (same, exact, rounded)), _difference(rounded - exact)])
        agreement.append(same)
        gain.append(rounded - exact)
    every = np.concatenate(agreement)
    rows.append(["all", str(Accuracy.of(every)), "", "", _difference(np.concatenate(gain))])
    header = ["set", "same label", "accuracy, float32", "accuracy, bfloat16", "difference"]
    note = f"Per cent over {EPISODES} episodes a set of {WAY} ways (or all classes), {SHOT} shots, {QUERIES} queries a "
    return [Table("bfloat16 against float32", header, rows, note + "class, with 95 % intervals.")]


def _difference(values: np.ndarray[Any, Any]) -> str:
    found = Accuracy.of(values)
    return f"{100 * found.mean:+.2f} ± {100 * found.half_width:.2f}"


def measure(source: ImageSource, episodes: int) -> dict[str, list[float]]:
    model = load_checkpoint("resnet18")
    classes = source.indices_of_class()
    found: dict[str, list[float]] = {"same": [], "float32": [], "bfloat16": []}
    for index in range(episodes):
        shots = [SHOT] * min(WAY, len(classes))
        episode = draw_episode(classes, shots, QUERIES, episode_rng("precision", source.name, index))
        labels, truth = torch.from_numpy(episode.support_labels), torch.from_numpy(episode.query_labels)
        support, query = source.network_input(episode.support), source.network_input(episode.query)
        predicted = {}
        for name in ("float32", "bfloat16"):
            task = model.adapt(support, labels, dtype=getattr(torch, name))
            predicted[name] = task.logits(query).argmax(dim=1)
            found[name].append(float((predicted[name] == truth).double().mean()))
        found["same"].append(float((predicted["float32"] == predicted["bfloat16"]).double().mean()))
    return found
