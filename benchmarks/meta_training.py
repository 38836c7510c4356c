"""Meta-training: tasks a second and peak memory beside a plain eager loop, and what a training task costs.

The loops compute the same loss of the same task. The plain one is in float32, BatchNorm and FiLM as separate
operations, with a d x d inverse for each class; ours is what `meta-train` runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import plain
from benchmarks.record import Record, Table
from benchmarks.timing import Times, extra_megabytes, in_own_process, ratio, take_turns
from fewshot_mahalanobis import SimpleCNAPS
from fewshot_mahalanobis.networks.devices import device_of
from fewshot_mahalanobis.networks.resnet import FilmResNet18
from fewshot_mahalanobis.research.episodes.meta_dataset import TRAINING, draw_shots, queries_per_class
from fewshot_mahalanobis.research.training.learner import CNAPSLearner
from fewshot_mahalanobis.research.training.run import autocast

#: Ways, shots, queries a class, side of the images in pixels.
EPISODE = (20, 5, 10, 84)
QUICK = (3, 2, 2, 32)
LITE = 40
LOOPS = {
    "plain eager loop": "plain",
    "`meta-train --precision bfloat16`": "bfloat16",
    "`meta-train --precision float32`": "float32",
    f"`meta-train --precision bfloat16 --set lite={LITE}`": "lite",
}
#: Classes and typical images a class of the training splits of Meta-Dataset's eight training sets, about.
TRAINING_SETS = {
    "ILSVRC-2012": (712, 1285),
    "Omniglot (an alphabet)": (30, 20),
    "Aircraft": (70, 100),
    "Birds": (140, 59),
    "DTD": (33, 120),
    "QuickDraw": (241, 144_300),
    "Fungi": (994, 65),
    "VGG Flower": (71, 80),
}

Episode = list[Tensor]


def run(record: Record) -> list[Table]:
    ways, shots, queries, size = QUICK if record.quick else EPISODE
    times = record.value("times", lambda: _times(record.quick, record.repeats))
    rows = []
    for title, loop in LOOPS.items():
        row = [title, f"{1 / min(times[loop]):.2f}", ratio(times["plain"], times[loop])]
        if not record.quick:
            memory = record.value(f"memory of {loop}", lambda: in_own_process("meta_training", loop))  # noqa: B023
            row.append(f"{memory['megabytes']:.0f} MB")
        rows.append(row)
    note = (
        "A step of one task of random images, with the penalty and Adam. Tasks a second of the best round; memory "
        "beyond the loaded model and task."
    )
    title = f"Meta-training, {ways}-way {shots}-shot, {queries} queries a class, {size} x {size} pixels"
    header = ["", "tasks / s", "times as fast", "peak memory of a step"][: len(rows[0])]
    throughput = Table(title, header, rows, note)
    return [throughput, *_costs(record, size)]


def _times(quick: bool, repeats: int) -> dict[str, Times]:
    return take_turns({loop: _step(loop, quick) for loop in LOOPS.values()}, repeats)


def _step(loop: str, quick: bool) -> Callable[[], object]:
    """One step of training: gradients of a task's loss and of the penalty, then Adam."""
    model = _model()
    assert model.film_generator is not None
    generator, logits = model.film_generator, _logits(loop, model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-4)
    support, labels, query, truth = _episode(loop != "plain", QUICK if quick else EPISODE)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(logits(support, labels, query), truth)
        (loss + 0.001 * generator.penalty()).backward()
        optimizer.step()

    return step


def _model() -> SimpleCNAPS:
    torch.manual_seed(0)
    return SimpleCNAPS().train()


def _logits(loop: str, model: SimpleCNAPS) -> Callable[..., Tensor]:
    if loop == "plain":
        return lambda *episode: _plain_logits(model, *episode)
    network = CNAPSLearner(model.to(memory_format=torch.channels_last), LITE if loop == "lite" else None)

    def logits(*episode: Tensor) -> Tensor:
        with autocast(device_of(model), torch.float32 if loop == "float32" else torch.bfloat16):
            return network(*episode)

    return logits


def _plain_logits(model: SimpleCNAPS, support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
    """``plain.task`` with gradients."""
    extractor, generator = model.feature_extractor, model.film_generator
    assert isinstance(extractor, FilmResNet18)
    assert generator is not None
    film = generator(plain.task_representation(model, support), [support], extractor)
    return plain.logits(plain.features(extractor, support, film), labels, plain.features(extractor, query, film))


def _episode(channels_last: bool, episode: tuple[int, int, int, int]) -> Episode:
    """Support images and labels, in the random order that LITE needs, query images and labels."""
    ways, shots, queries, size = episode
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(ways).repeat_interleave(shots)[torch.randperm(ways * shots, generator=random)]
    support, query = (torch.rand(ways * n, 3, size, size, generator=random) * 2 - 1 for n in (shots, queries))
    if channels_last:
        support, query = (images.contiguous(memory_format=torch.channels_last) for images in (support, query))
    return [support, labels, query, torch.arange(ways).repeat_interleave(queries)]


def _costs(record: Record, size: int) -> list[Table]:
    """What a further image costs, and how many images a training episode of Meta-Dataset has."""
    base, *more = (record.value(f"cost of {s}+{q}", lambda: _cost(s, q, size)) for s, q in ((2, 2), (4, 2), (2, 4)))  # noqa: B023
    rows = []
    for title, found in zip(("support", "query"), more):
        flops, held = ((a - b) / 2 for a, b in zip(found, base))
        rows.append([title, f"{flops / 1e9:.2f}", f"{held / 1e6:.1f} MB"])
    header = ["a further image", "GFLOP, forward and backward", "held for the gradient, bfloat16"]
    rows_of_sets = record.value("episodes", lambda: _episodes(200 if record.quick else 5000))
    return [
        Table(f"What an image of a training task costs, {size} x {size} pixels", header, rows),
        Table("Training episodes of Meta-Dataset, means", ["", "ways", "support images", "query images"], rows_of_sets),
    ]


def _cost(support: int, query: int, size: int) -> tuple[float, float]:
    """Floating-point operations of a task's forward and backward pass; bytes that wait for the backward pass."""
    model = _model().to(memory_format=torch.channels_last)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    images = torch.rand(support + query, 3, size, size).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(support) % 2
    with FlopCounterMode(display=False) as counter:
        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            autocast(device_of(model), torch.bfloat16),
        ):
            logits = model(images[:support], labels, images[support:])
        F.cross_entropy(logits, labels.new_zeros(query)).backward()
    return counter.get_total_flops(), sum(held.values())


def _episodes(draws: int) -> list[list[str]]:
    rng, means, rows = np.random.default_rng(0), [], []
    for name, (classes, images) in TRAINING_SETS.items():
        drawn = []
        for _ in range(draws):
            sizes = np.full(int(rng.integers(TRAINING.min_way, min(TRAINING.max_way, classes) + 1)), images)
            queries = queries_per_class(sizes, TRAINING)
            drawn.append((len(sizes), draw_shots(sizes, queries, TRAINING, rng).sum(), len(sizes) * queries))
        means.append(np.mean(drawn, axis=0))
        rows.append([name, *(f"{value:.0f}" for value in means[-1])])
    return [*rows, ["all eight", *(f"{value:.0f}" for value in np.mean(means, axis=0))]]


if __name__ == "__main__":  # the memory of one loop, in a process of its own
    print(json.dumps({"megabytes": extra_megabytes(_step(sys.argv[1], quick=False))}))
