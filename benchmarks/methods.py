"""Which method when: accuracy and seconds against the number of shots, every method on the same episodes.

    python -m benchmarks.methods SOURCE... [--shots 1,5,20] [--episodes 20] [--output FILE]

A method is a ``SimpleCNAPSClassifier``, images in and labels out; its seconds are those of ``fit`` and ``predict`` with
the model loaded, and the methods take turns in every episode. A source takes part at every number of shots that its
classes allow. What the file of ``--output`` holds is not measured again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from benchmarks.record import Record, machine
from fewshot_mahalanobis import SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.baselines import METHODS
from fewshot_mahalanobis.data.sources import ImageSource, load_source
from fewshot_mahalanobis.episodes.sampling import FixedEpisodes
from fewshot_mahalanobis.evaluation.result import Accuracy
from fewshot_mahalanobis.evaluation.tables import markdown_table

WAYS, QUERIES = 5, 10
#: Arguments of the classifier by the method's name in the tables.
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "head chosen by itself": {},
    "Simple CNAPS": {"head": "mahalanobis"},
    "not adapted": {"adapt": False},
    **{
        f"{method.title}, not adapted": {"head": method(), "adapt": False}
        for method in METHODS.values()
        if not method.needs_training
    },
}


def measure(source: ImageSource, shots: int, episodes: int, checkpoint: str) -> dict[str, list[tuple[float, float]]]:
    """Share of right queries and seconds of every method in every episode."""
    drawn = FixedEpisodes(source, min(WAYS, len(source.class_names)), shots, QUERIES)
    model = load_checkpoint(checkpoint)
    classifiers = {name: SimpleCNAPSClassifier(model, **settings) for name, settings in CLASSIFIERS.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in classifiers}
    for index in tqdm(range(episodes), desc=f"{source.name}, {shots} shots"):
        episode = drawn.draw(index)
        support, queries = source.images[episode.support], source.images[episode.query]
        for name, classifier in classifiers.items():
            start = time.perf_counter()
            predicted = classifier.fit(support, episode.support_labels).predict(queries)
            seconds = time.perf_counter() - start
            found[name].append((float(np.mean(predicted == episode.query_labels)), seconds))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods", description=__doc__)
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument("--shots", default="1,2,5,10,20,50,100")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--checkpoint", default="default")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(arguments)
    record = Record(chosen.output.stem if chosen.output else "", chosen.output and chosen.output.parent).read()
    size = load_checkpoint(chosen.checkpoint).image_size
    sources = [load_source(path, size=size, lazy=True) for path in chosen.sources]
    accuracy: list[list[str]] = [[name] for name in CLASSIFIERS]
    seconds: list[list[str]] = [[name] for name in CLASSIFIERS]
    shots = [int(text) for text in chosen.shots.split(",")]
    for shot in shots:
        results = []
        for source in sources:
            if np.sort(np.bincount(source.labels))[-min(WAYS, len(source.class_names))] > shot:
                key = f"{chosen.checkpoint}, {source.name}, {shot} shots, {chosen.episodes} episodes"
                results.append(record.value(key, lambda: measure(source, shot, chosen.episodes, chosen.checkpoint)))  # noqa: B023
        for name, accuracies, times in zip(CLASSIFIERS, accuracy, seconds, strict=True):
            of = [np.array(result[name]) for result in results if name in result]
            averaged = Accuracy.averaged([Accuracy.of(values[:, 0]) for values in of]) if of else ""
            accuracies.append(f"{averaged}")
            times.append(f"{median(np.concatenate(of)[:, 1]):.2f}" if of else "")
    header = [f"{shot} shots" for shot in shots]
    print(f"{machine()}\n\n{markdown_table(accuracy, ['accuracy, %', *header])}\n")
    print(markdown_table(seconds, ["seconds", *header]))


if __name__ == "__main__":
    main()
