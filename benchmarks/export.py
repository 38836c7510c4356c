"""The exported graphs against the classifier: labels, logits and time on 1,000 images."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.record import Record, Table
from benchmarks.tasks import drawn_images, image_sets
from benchmarks.timing import show, take_turns
from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.research.episodes.sampling import draw_episode, episode_rng


def run(record: Record) -> list[Table]:
    count = 50 if record.quick else 1000
    found = record.value("export", lambda: _measure(record.data, count))
    rows = [
        [name, f"{result['labels']} of {count}", f"{result['logits']:.1e}", show(result["times"])]
        for name, result in found.items()
    ]
    header = ["against precision float32", "other labels", "largest difference of logits, relative", f"{count} images"]
    return [Table("Exported graphs, 5-way 5-shot", header, rows)]


def _measure(data: Path | None, count: int) -> dict[str, Any]:
    import onnxruntime

    labels = np.repeat(np.arange(5), 5)
    if data is None:
        support, queries = drawn_images(25), drawn_images(count, seed=1)
    else:
        source = image_sets(data)["mini_imagenet_test/test"]
        episode = draw_episode(source.indices_of_class(), [5] * 5, count // 5, episode_rng("export", 0, 0))
        support, queries = source.images[episode.support], source.images[episode.query]
    classifier = SimpleCNAPSClassifier(device="cpu", precision="float32").fit(support, labels)
    batches = [batch.contiguous() for batch in ImageBatches(queries, classifier.model_.image_size)]
    rounded = SimpleCNAPSClassifier(device="cpu", precision="bfloat16").fit(support, labels)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        classifier.export_onnx(Path(folder) / "a.onnx")
        classifier.export_program(Path(folder) / "a.pt2")
        session = onnxruntime.InferenceSession(Path(folder) / "a.onnx", providers=["CPUExecutionProvider"])
        program = torch.export.load(Path(folder) / "a.pt2").module()
        ways = {
            "the classifier": lambda: classifier.decision_function(queries),
            "ONNX Runtime": lambda: np.concatenate([session.run(None, {"images": b.numpy()})[0] for b in batches]),
            "torch.export": lambda: torch.cat([program(batch) for batch in batches]).numpy(),
            "the classifier, bfloat16": lambda: rounded.decision_function(queries),
        }
        expected = ways["the classifier"]()
        found = {}
        for name, logits_of in ways.items():
            logits: list[Any] = []
            times = take_turns({name: lambda: logits.append(logits_of())}, 1, warm_up=False)[name]  # noqa: B023
            found[name] = {
                "labels": int((logits[0].argmax(axis=1) != expected.argmax(axis=1)).sum()),
                "logits": float((np.abs(logits[0] - expected) / np.abs(expected)).max()),
                "times": times,
            }
    return found
