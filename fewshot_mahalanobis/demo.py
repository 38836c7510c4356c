"""The demo: 10-way 5-shot on scikit-learn's handwritten digits, beside plain baselines on the same tasks."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.episodes.sampling import Episode, draw_episode, episode_rng
from fewshot_mahalanobis.episodes.sources import ImageSource
from fewshot_mahalanobis.evaluation import Accuracy, Variant, evaluate_source
from fewshot_mahalanobis.evaluation.evaluate import markdown_table
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

    Parameters
    ----------
    picture : path
        PNG to write.
    checkpoint : str
    tasks : int
        Random 10-way 5-shot tasks of 100 queries.
    say : callable
        Receives each line of the report.

    Returns
    -------
    dict of str to Accuracy
        Of every method over the tasks.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError('the demo draws with matplotlib: pip install "fewshot-mahalanobis[demo]"')
    images, targets = digits()
    classes = [np.flatnonzero(targets == k) for k in range(WAY)]
    say(f"Real images: {len(images)} handwritten digits of 8 x 8 pixels that scikit-learn ships.")

    episode = draw_episode(classes, [SHOT] * WAY, QUERIES, episode_rng(0, 0))
    start = time.perf_counter()
    classifier = SimpleCNAPSClassifier(checkpoint).fit(images[episode.support], targets[episode.support])
    fitted = time.perf_counter()
    probabilities = classifier.predict_proba(images[episode.query])
    done = time.perf_counter()
    right = classifier.classes_[probabilities.argmax(1)] == targets[episode.query]
    say(
        f"One task: fit on {len(episode.support)} images, {SHOT} of each digit, in {fitted - start:.1f} s "
        f"(loading the checkpoint included);\n"
        f"          predicted {len(right)} others in {done - fitted:.1f} s: {right.sum()} are right."
    )
    draw_task(images, targets, episode, probabilities, classifier.classes_, picture)
    say(f"Picture: {picture}")

    say(f"Accuracy over {tasks} random {WAY}-way {SHOT}-shot tasks, mean and 95 % interval:")
    start = time.perf_counter()
    accuracies = compare(classifier.model_, images, targets, tasks)
    rows = [[name, str(accuracy)] for name, accuracy in accuracies.items()]
    say(markdown_table(rows, ["method", "accuracy, %"]))
    say(f"({time.perf_counter() - start:.0f} s)")
    return accuracies


def compare(
    model: SimpleCNAPS, images: NDArray[np.uint8], targets: NDArray[np.int64], tasks: int
) -> dict[str, Accuracy]:
    """Simple CNAPS, the same network without adaptation, and class means of raw pixels, on the same tasks."""
    squares = np.stack([to_square_array(Image.fromarray(image), model.image_size) for image in images])
    source = ImageSource("digits", squares, targets, tuple(map(str, range(WAY))))
    adapted, plain = Variant(True, model.config["head"]), Variant(False, model.config["head"])
    found = evaluate_source(
        model, source, (adapted, plain), way=WAY, shot=SHOT, queries=QUERIES, episodes=tasks, progress=True
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


def draw_task(
    images: NDArray[np.uint8],
    targets: NDArray[np.int64],
    episode: Episode,
    probabilities: NDArray[np.float64],
    classes: NDArray[np.int64],
    picture: str | Path,
) -> None:
    """Support images on the left; queries on the right with prediction and probability, wrong ones in red."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8.6))
    FigureCanvasAgg(figure)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(SHOT + 0.6, QUERIES))[0]
    left.suptitle(f"Support: {SHOT} images a class")
    right.suptitle("Queries: predicted digit and its probability (wrong ones red, with the true digit)")
    support_axes = left.subplots(WAY, SHOT)
    query_axes = right.subplots(WAY, QUERIES)
    left.subplots_adjust(left=0.08, right=0.97, top=0.91, bottom=0.02, hspace=0.35)
    right.subplots_adjust(left=0.02, right=0.98, top=0.91, bottom=0.02, hspace=0.35)
    labels = targets[episode.support]
    ways = [int(episode.support_labels[labels == digit][0]) for digit in classes]
    for row, way in enumerate(ways):
        for axis, index in zip(support_axes[row], episode.support[episode.support_labels == way], strict=True):
            axis.imshow(images[index], cmap="gray")
        support_axes[row, 0].set_ylabel(str(classes[row]), fontsize=13, rotation=0, labelpad=12, va="center")
        for axis, position in zip(query_axes[row], np.flatnonzero(episode.query_labels == way), strict=True):
            axis.imshow(images[episode.query[position]], cmap="gray")
            best = probabilities[position].argmax()
            truth = targets[episode.query[position]]
            wrong = classes[best] != truth
            axis.set_title(
                f"{classes[best]}  {100 * probabilities[position, best]:.0f} %" + (f" ({truth})" if wrong else ""),
                fontsize=7.5,
                pad=2,
                color="crimson" if wrong else "black",
            )
    for axis in [*support_axes.flat, *query_axes.flat]:
        axis.set_xticks([])
        axis.set_yticks([])
    figure.savefig(picture, dpi=110)
