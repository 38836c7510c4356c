"""Accuracy of refine="auto" against none on the same episodes: docs/guide.md.

    python -m benchmarks.refine DATA_DIR

Five ways (three for DTD) with the default checkpoint and the auto head. Each episode is recorded when it is done, in
benchmarks/results/refine.json, and a run that was cut off goes on after it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from benchmarks.record import RESULTS, Record, Table
from benchmarks.suspects import SETS
from fewshot_mahalanobis import SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.data.sources import ImageSource, load_source
from fewshot_mahalanobis.episodes.sampling import draw_episode, episode_rng
from fewshot_mahalanobis.evaluation.tables import markdown_table
from fewshot_mahalanobis.heads import AutoHead
from fewshot_mahalanobis.refine import refined

#: Sets that no checkpoint of ours was meta-trained on.
OUTSIDE = ("cifar10", "cifar100_test", "fashion_mnist", "gtsrb", "mnist")
SHOTS, WAYS, QUERIES = (1, 5, 20, 50), 5, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--episodes", type=int, default=100, help="of each set and number of shots")
    parser.add_argument("--shots", type=int, nargs="+", default=SHOTS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")
    arguments = parser.parse_args()
    model = load_checkpoint("default")
    record = Record("refine", arguments.results).read()
    sources = [load_source(str(arguments.data / name), size=model.image_size, lazy=True) for name in SETS]
    names = [name.partition(".")[0] for name in SETS]
    bar = tqdm(total=arguments.episodes * len(sources) * len(arguments.shots))
    for index in range(arguments.episodes):  # all sets grow together
        for name, source in zip(names, sources):
            for shots in arguments.shots:
                record.value(f"{name}, {shots} shots, {index}", lambda: measure(model, source, shots, index))  # noqa: B023
                bar.update()
    record.tables = [table(record, names, shots) for shots in arguments.shots]
    record.write()
    for made in record.tables:
        print(f"\n{made.title}\n\n{markdown_table(made.rows, made.header)}")


def measure(model: SimpleCNAPS, source: ImageSource, shots: int, index: int) -> list[float] | None:
    """Accuracy without and with, whether "auto" accepted, and seconds of both fits; None where a set lacks images."""
    classes = source.indices_of_class()
    enough = [indices for indices in classes if len(indices) >= shots + QUERIES // 2]
    ways = min(WAYS, len(classes))
    if len(enough) < ways:
        return None
    episode = draw_episode(enough, [shots] * ways, QUERIES, episode_rng("refine", source.name, shots, index))
    images, labels = source.network_input(episode.support), torch.from_numpy(episode.support_labels)
    start = time.perf_counter()
    task = model.adapt(images, labels, head=AutoHead())
    adapted = time.perf_counter()
    better = refined(model, task, images, steps="auto")
    end = time.perf_counter()
    queries, wanted = source.network_input(episode.query), episode.query_labels
    right = [float((t.logits(queries).argmax(dim=1).numpy() == wanted).mean()) for t in (task, better)]
    if better is task:
        right[1] = right[0]
    return [*right, float(better is not task), adapted - start, end - start]


def table(record: Record, names: list[str], shots: int) -> Table:
    """A row for each set, the mean of all and that of the sets outside the training domains."""
    found = {}
    for name in names:
        cells = [value for key, value in record.values.items() if key.startswith(f"{name}, {shots} shots,") and value]
        if cells:
            found[name] = np.array(cells)
    header = ["set", "none, %", "auto less none, points", "refined, % of tasks", "time, auto / none"]
    rows = [[name, *_row([values])] for name, values in found.items()]
    rows += [["mean", *_row(list(found.values()))]] if found else []
    outside = [values for name, values in found.items() if name in OUTSIDE]
    rows += [["mean outside the training domains", *_row(outside)]] if outside else []
    return Table(f"5-way {shots}-shot", header, rows)


def _row(sets: list[np.ndarray]) -> list[str]:
    none, auto, share, before, after = np.mean([values.mean(axis=0) for values in sets], axis=0)
    gains = [values[:, 1] - values[:, 0] for values in sets]
    error = 1.96 * np.sqrt(sum(gain.var(ddof=1) / len(gain) for gain in gains if len(gain) > 1)) / len(gains)
    gain = f"{100 * (auto - none):+.1f} ± {100 * error:.1f}"
    return [f"{100 * none:.1f}", gain, f"{100 * share:.0f}", f"{after / before:.1f}"]


if __name__ == "__main__":
    main()
