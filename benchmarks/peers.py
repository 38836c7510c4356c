"""Other ways to classify from a few examples: their accuracy on every image set, and their time.

easyfsl's PrototypicalNetworks gets the images and the same pretrained backbone, not adapted, as a user of that library
would write it. The heads against scikit-learn's classifiers on the same features: ``feature_peers``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.feature_peers import feature_tables
from benchmarks.feature_tasks import test_sets
from benchmarks.record import Record, Table
from benchmarks.tasks import drawn_images
from benchmarks.timing import Times, show, take_turns
from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.checkpoints.catalogue import DEFAULT
from fewshot_mahalanobis.images.decode import to_network_range
from fewshot_mahalanobis.networks.task import AdaptedNetwork
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.episodes.sampling import draw_episode, episode_rng
from fewshot_mahalanobis.research.evaluation import Accuracy

SHOTS = (1, 5, 20)
WAY, QUERIES, EPISODES = 5, 10, 30
OURS, EASYFSL = "adapted, its own head", "easyfsl PrototypicalNetworks"


def run(record: Record) -> list[Table]:
    checkpoint = DEFAULT if record.checkpoint == "default" else record.checkpoint
    model = load_checkpoint(checkpoint)
    times = record.value(f"{checkpoint}, times", lambda: _times(model, record.repeats))
    accuracies: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, source in ({} if record.data is None else test_sets(record, model.image_size)).items():
        episodes = 1 if record.quick else EPISODES
        accuracies[name] = record.value(f"{checkpoint}, {name}", lambda: _accuracies(model, source, episodes))  # noqa: B023
    rows = []
    for method in (OURS, EASYFSL):
        row = [method]
        for shots in map(str, SHOTS):
            found = [of[shots][method] for of in accuracies.values() if shots in of]
            row.append(f"{100 * np.mean([np.mean(values) for values in found]):.1f}" if found else "—")
        rows.append([*row, *(show(times[str(s)][method]) for s in SHOTS)])
    header = ["", *(f"accuracy, {s}-shot" for s in SHOTS), *(f"time, {s}-shot" for s in SHOTS)]
    note = (
        f"5-way, {QUERIES} queries a class. Accuracy: mean over the image sets below, the convolutions in bfloat16. "
        "Time: images in and labels out, float32."
    )
    tables = [Table(f"easyfsl on the network of {checkpoint}, 5-way tasks", header, rows, note)]
    if accuracies:
        tables.append(_by_set(accuracies))
    return tables + feature_tables(record)


def _by_set(accuracies: dict[str, dict[str, dict[str, list[float]]]]) -> Table:
    rows = []
    for name, of in accuracies.items():
        cells = [
            [str(Accuracy.of(np.array(of[shots][method]))) if shots in of else "—" for method in (OURS, EASYFSL)]
            for shots in map(str, SHOTS)
        ]
        rows.append([name, *(" / ".join(pair) for pair in cells)])
    note = f"Ours / easyfsl, per cent over {EPISODES} episodes, the same for both, with 95 % intervals."
    return Table("easyfsl, set by set", ["set", *(f"{s}-shot" for s in SHOTS)], rows, note)


def easyfsl(backbone: torch.nn.Module, support: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    from easyfsl.methods import PrototypicalNetworks

    method = PrototypicalNetworks(backbone).eval()
    with torch.no_grad():
        method.process_support_set(support, labels)
        return method(queries).argmax(dim=1)


def _times(model: SimpleCNAPS, repeats: int) -> dict[str, dict[str, Times]]:
    found = {}
    classifier = SimpleCNAPSClassifier(model, device="cpu", precision="float32")
    others = drawn_images(WAY * QUERIES, model.image_size, seed=1)
    for shots in SHOTS:
        pictures, labels = drawn_images(WAY * shots, model.image_size), np.repeat(np.arange(WAY), shots)
        support, query = (to_network_range(torch.from_numpy(x).permute(0, 3, 1, 2)) for x in (pictures, others))
        calls: dict[str, Callable[[], Any]] = {
            OURS: lambda x=pictures, y=labels: classifier.fit(x, y).predict(others),
            EASYFSL: lambda x=support, y=labels, q=query: easyfsl(model.feature_extractor, x, torch.from_numpy(y), q),
        }
        found[str(shots)] = take_turns(calls, repeats)
    return found


def _accuracies(model: SimpleCNAPS, source: ImageSource, episodes: int) -> dict[str, dict[str, list[float]]]:
    """Accuracies by number of shots and method; in an episode, the support sets of more shots contain the others."""
    plain = AdaptedNetwork(model.feature_extractor, dtype=torch.bfloat16)
    classes = source.indices_of_class()
    most = sorted(map(len, classes))[-min(WAY, len(classes))]
    usable = [shots for shots in SHOTS if shots + QUERIES <= most]
    found: dict[str, dict[str, list[float]]] = {str(shots): {OURS: [], EASYFSL: []} for shots in usable}
    for index in range(episodes):
        ways = min(WAY, len(classes))
        episode = draw_episode(classes, [max(usable)] * ways, QUERIES, episode_rng("peers", source.name, index))
        query, support = source.network_input(episode.query), source.network_input(episode.support)
        plain_support, plain_query = plain.features(support), plain.features(query)
        for shots in usable:
            chosen = np.flatnonzero(np.arange(len(episode.support)) % max(usable) < shots)
            codes = torch.from_numpy(episode.support_labels[chosen])
            task = model.adapt(support[chosen], codes, dtype=torch.bfloat16)
            predicted = {
                OURS: task.logits(query).argmax(dim=1),
                EASYFSL: easyfsl(torch.nn.Identity(), plain_support[chosen], codes, plain_query),
            }
            for name, labels in predicted.items():
                right = (labels.numpy() == episode.query_labels).mean()
                found[str(shots)][name].append(float(right))
    return found
