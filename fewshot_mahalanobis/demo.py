"""The demo: 10-way 5-shot on scikit-learn's handwritten digits, beside plain baselines on the same tasks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier, predict_all
from fewshot_mahalanobis.data.sources import ImageSource
from fewshot_mahalanobis.episodes.sampling import draw_episode, episode_rng
from fewshot_mahalanobis.evaluation import Accuracy, Variant, evaluate_source
from fewshot_mahalanobis.evaluation.tables import markdown_table
from fewshot_mahalanobis.images import to_square_array
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS

WAY, SHOT, QUERIES = 10, 5, 10


def digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """1,797 handwritten digits (n, 8, 8), white on black, and what they are (n,)."""
    data = load_digits()
    return np.round(data.images * (255 / 16)).astype(np.uint8), data.target.astype(np.int64)


def run_demo(
    picture: str | Path, *, checkpoint: str = "default", tasks: int = 40, say: Callable[[str], None] = print
) -> dict[str, Accuracy]:
    """Fit and predict one task, compare with baselines over ``tasks`` random ones, draw one picture.

    The tasks are 10-way 5-shot with 100 queries; ``picture`` is the PNG to write, ``say`` receives each line of the
    report. Returns the accuracy of every method over the tasks.
    """
    from fewshot_mahalanobis.plotting import Figure, draw_task  # needs matplotlib, which the rest does not

    images, targets = digits()
    classes = [np.flatnonzero(targets == k) for k in range(WAY)]
    say(f"Real images: {len(images)} handwritten digits of 8 x 8 pixels that scikit-learn ships.")

    episode = draw_episode(classes, [SHOT] * WAY, QUERIES, episode_rng(0, 0))
    start = time.perf_counter()
    classifier = SimpleCNAPSClassifier(checkpoint).fit(images[episode.support], targets[episode.support])
    fitted = time.perf_counter()
    said = predict_all(classifier, images[episode.query])
    done = time.perf_counter()
    right = said.labels == targets[episode.query]
    say(
        f"One task: fit on {len(episode.support)} images, {SHOT} of each digit, in {fitted - start:.1f} s "
        f"(loading the checkpoint included);\n"
        f"          predicted {len(right)} others in {done - fitted:.1f} s: {right.sum()} are right."
    )
    figure = Figure()  # not pyplot's: no window, whatever the backend
    support, query = ((images[i], targets[i]) for i in (episode.support, episode.query))
    draw_task(classifier.classes_.tolist(), support, query, said.labels, said.probabilities.max(axis=1), figure)
    figure.savefig(picture, dpi=110)
    say(f"Picture: {picture}")

    say(f"Accuracy over {tasks} random {WAY}-way {SHOT}-shot tasks, mean and 95 % interval:")
    start = time.perf_counter()
    accuracies = compare(classifier.model_, images, targets, tasks, classifier.task_.dtype)
    rows = [[name, str(accuracy)] for name, accuracy in accuracies.items()]
    say(markdown_table(rows, ["method", "accuracy, %"]))
    say(f"({time.perf_counter() - start:.0f} s)")
    return accuracies


def compare(
    model: SimpleCNAPS, images: NDArray[np.uint8], targets: NDArray[np.int64], tasks: int, dtype: torch.dtype
) -> dict[str, Accuracy]:
    """Simple CNAPS, the same network without adaptation, and class means of raw pixels, on the same tasks."""
    squares = np.stack([to_square_array(Image.fromarray(image), model.image_size) for image in images])
    source = ImageSource("digits", squares, targets, tuple(map(str, range(WAY))))
    adapted, plain = Variant(True, model.config["head"]), Variant(False, model.config["head"])
    found = evaluate_source(
        model, source, (adapted, plain), way=WAY, shot=SHOT, queries=QUERIES, episodes=tasks, dtype=dtype, progress=True
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
        "Simple CNAPS, adapted": Accuracy.of(found[adapted]),
        "the same network without adaptation": Accuracy.of(found[plain]),
        "nearest class mean of raw pixels": Accuracy.of(np.array(raw)),
    }
