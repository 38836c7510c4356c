"""The demo: photographs and handwritten digits that scikit-learn ships, and plain baselines on the digits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

from fewshot_mahalanobis.apps.example import photographs
from fewshot_mahalanobis.checkpoints.files import atomic_replace
from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.images.picture import to_square_array
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.episodes.sampling import draw_episode, episode_rng
from fewshot_mahalanobis.research.evaluation import Accuracy, Variant, evaluate_source
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table

WAY, SHOT, QUERIES = 10, 5, 5


def digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """1,797 handwritten digits (n, 8, 8), white on black, and what they are (n,)."""
    data = load_digits()
    return np.round(data.images * (255 / 16)).astype(np.uint8), data.target.astype(np.int64)


def run_demo(
    picture: str | Path, *, checkpoint: str = "default", tasks: int = 10, say: Callable[[str], None] = print
) -> dict[str, Accuracy]:
    """Classify pieces of photographs and draw them, then compare with baselines over ``tasks`` tasks of digits.

    The tasks are 10-way 5-shot with 50 queries; ``picture`` is the PNG to write, ``say`` receives each line of the
    report. Returns the accuracy of every method over the tasks.
    """
    from fewshot_mahalanobis.plotting import Figure, plot_task  # needs matplotlib, which the rest does not

    example = photographs()
    say(f"Photographs: {len(example.support)} pieces of the two that scikit-learn ships, 5 of each of 3 classes.")
    start = time.perf_counter()
    classifier = SimpleCNAPSClassifier(checkpoint).fit(example.support, example.labels)
    fitted = time.perf_counter()
    predictions = classifier.predict_all(example.queries)
    done = time.perf_counter()
    right = int((predictions.labels == example.truth).sum())
    say(f"  fitted in {fitted - start:.1f} s (loading the network included)")
    say(f"  {right} of {len(example.truth)} other pieces classified correctly, in {done - fitted:.1f} s:")
    for truth, label, row in zip(example.truth, predictions.labels, predictions.probabilities, strict=True):
        say(f"    {label} ({row.max():.0%})" + ("" if label == truth else f", which is wrong: {truth}"))
    figure = Figure()  # not pyplot's: no window, whatever the backend
    plot_task(classifier, example.support, example.labels, example.queries, example.truth, figure=figure)
    with atomic_replace(picture) as temporary:
        figure.savefig(temporary, dpi=110, format=temporary.suffix[1:] or "png")  # it would add an ending
    say(f"  drawn in {picture}")

    images, targets = digits()
    say(f"\nDigits: {len(images):,} handwritten ones of 8 x 8 pixels, {SHOT} of each digit to learn from.")
    start = time.perf_counter()
    accuracies = compare(classifier.model_, images, targets, tasks)
    say(f"Accuracy over {tasks} random tasks with 95 % interval, in {time.perf_counter() - start:.0f} s:")
    rows = [[name, str(accuracy)] for name, accuracy in accuracies.items()]
    say(markdown_table(rows, ["method", "accuracy, %"]))
    say("\nNow with pictures of your own: fewshot-mahalanobis fit FOLDER -o model.safetensors")
    return accuracies


def compare(
    model: SimpleCNAPS, images: NDArray[np.uint8], targets: NDArray[np.int64], tasks: int
) -> dict[str, Accuracy]:
    """Simple CNAPS, the same network without adaptation, and class means of raw pixels, on the same tasks."""
    squares = np.stack([to_square_array(Image.fromarray(image), model.image_size) for image in images])
    source = ImageSource("digits", squares, targets, tuple(map(str, range(WAY))))
    adapted, plain = Variant(True, model.config["head"]), Variant(False, model.config["head"])
    by_variant = evaluate_source(
        model,
        source,
        (adapted, plain),
        way=WAY,
        shot=SHOT,
        queries=QUERIES,
        episodes=tasks,
        progress=sys.stderr.isatty(),
    )
    pixels = torch.from_numpy(images.reshape(len(images), -1)).double()
    classes = source.indices_of_class()
    raw = []
    for index in range(tasks):
        episode = draw_episode(classes, [SHOT] * WAY, QUERIES, episode_rng(0, index))
        means = pixels[episode.support].reshape(WAY, SHOT, -1).mean(1)
        nearest = torch.cdist(pixels[episode.query], means).argmin(1)
        raw.append(float((nearest == torch.from_numpy(episode.query_labels)).double().mean()))
    return {
        "Simple CNAPS, adapted": Accuracy.of(by_variant[adapted]),
        "the same network without adaptation": Accuracy.of(by_variant[plain]),
        "nearest class mean of raw pixels": Accuracy.of(np.array(raw)),
    }
