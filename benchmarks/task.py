"""The whole task, images in and labels out, against the published way and the bare network; and its parts."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks import plain
from benchmarks.record import Record, Table
from benchmarks.tasks import drawn_images
from benchmarks.timing import Times, extra_megabytes, in_own_process, ratio, show, take_turns
from fewshot_mahalanobis import SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.images.decode import to_network_range

#: Ways, shots, queries.
TASKS = ((5, 5, 75), (50, 10, 100))
#: Aim for the last task: this many times as fast as the published way.
AIMS = {"float32": "2", "auto": "4"}
BATCH = 64
#: Rounds in which only the whole task and the bare network take turns, for each of the other rounds: their difference
#: is as small as the machine's changes from minute to minute.
ROUNDS = 2


def run(record: Record) -> list[Table]:
    whole, parts, memory = [], [], []
    for ways, shots, queries in TASKS[:1] if record.quick else TASKS:
        name = f"{ways}-way {shots}-shot, {queries} queries"
        t = record.value(name, lambda: _measure(ways, shots, queries, record.repeats))  # noqa: B023
        for precision in ("float32", "auto"):
            whole.append(
                [
                    name,
                    precision,
                    show(t["published"]),
                    show(t[precision]),
                    show(t[f"bare {precision}"]),
                    ratio(t["published"], t[precision]),
                    AIMS[precision] if (ways, shots, queries) == TASKS[-1] else "",
                    ratio(t[f"{precision} beside bare"], t[f"bare {precision} beside it"]),
                    "1.25" if (ways, shots, queries) == TASKS[-1] else "",
                ]
            )
            encoder = [show(t[key]) for key in ("plain encoder", f"encoder {precision}")]
            parts.append(
                [name, precision, "set encoder", *encoder, ratio(t["plain encoder"], t[f"encoder {precision}"])]
            )
            network = [show(t[key]) for key in ("plain network", f"bare {precision}")]
            parts.append([name, precision, "network", *network, ratio(t["plain network"], t[f"bare {precision}"])])
    for precision in () if record.quick else ("float32", "auto"):
        found = record.value(f"memory {precision}", lambda: in_own_process("task", precision))  # noqa: B023
        memory.append(["500 support images", precision, f"{found['megabytes']:.0f} MB"])
    header = ["task", "precision", "published way", "fit + predict", "bare network", "faster than published", "aim"]
    return [
        Table(
            "Whole task, images in and labels out",
            [*header, "of the bare network's time", "aim"],
            whole,
            "Fit + predict counts the set encoder in; its own time is in the next table. For its share of the bare "
            "network's time the two alone took turns for more rounds.",
        ),
        Table("Its parts", ["task", "precision", "part", "published way", "here", "ratio"], parts),
        Table("Memory of adapting to a support set", ["task", "precision", "peak beyond the images"], memory),
    ]


@torch.no_grad()
def _measure(ways: int, shots: int, queries: int, repeats: int) -> dict[str, Times]:
    model = load_checkpoint("resnet18")
    size = model.image_size
    pictures, others = drawn_images(ways * shots, size), drawn_images(queries, size, seed=1)
    labels = np.repeat(np.arange(ways), shots)
    support, query = (
        to_network_range(torch.from_numpy(x).permute(0, 3, 1, 2)).contiguous() for x in (pictures, others)
    )
    everything = torch.cat([support, query])
    batches = everything.contiguous(memory_format=torch.channels_last).split(BATCH)
    encoder, codes = model.set_encoder, torch.from_numpy(labels)
    assert encoder is not None

    calls: dict[str, Callable[[], Any]] = {
        "published": lambda: plain.task(model, support, codes, query).argmax(dim=1),
        "plain encoder": lambda: plain.task_representation(model, support),
        "plain network": lambda: [plain.features(model.feature_extractor, x, None) for x in (support, query)],
    }
    for precision in ("float32", "auto"):
        classifier = SimpleCNAPSClassifier(model, device="cpu", precision=precision, batch_size=BATCH)
        calls[precision] = lambda c=classifier: c.fit(pictures, labels).predict(others)
        dtype = classifier.fit(pictures[:: max(shots, 1)], labels[:: max(shots, 1)]).task_.network.dtype
        network = model.feature_extractor.for_inference(dtype=dtype)
        calls[f"bare {precision}"] = lambda n=network, d=dtype: [n(batch.to(d)) for batch in batches]

        def encode(dtype: torch.dtype = dtype) -> None:
            with torch.autocast("cpu", torch.bfloat16) if dtype == torch.bfloat16 else contextlib.nullcontext():
                encoder(support.contiguous(memory_format=torch.channels_last), BATCH)

        calls[f"encoder {precision}"] = encode
    warm_up = ways * shots < 100  # a few milliseconds of half a minute do not matter
    times = take_turns(calls, repeats, warm_up)
    for precision in ("float32", "auto"):
        pair = {f"{precision} beside bare": calls[precision], f"bare {precision} beside it": calls[f"bare {precision}"]}
        times |= take_turns(pair, ROUNDS * repeats, warm_up)
    return times


def _memory(precision: str) -> dict[str, float]:
    model = load_checkpoint("resnet18")
    pictures = drawn_images(500, model.image_size)
    classifier = SimpleCNAPSClassifier(model, device="cpu", precision=precision)
    classifier.fit(pictures[:10], np.arange(10) % 5)  # what is loaded once
    return {"megabytes": extra_megabytes(lambda: classifier.fit(pictures, np.arange(500) % 50))}


if __name__ == "__main__":
    print(json.dumps(_memory(sys.argv[1])))
