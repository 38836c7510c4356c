"""
Accuracy against shots and ways
===============================

More images of each class help; more classes make a task harder. These are figures 5 and 6 of the paper, on handwritten
digits. Here the network is not adapted, so the features of each image are computed only once. ``fewshot-mahalanobis
evaluate --plots FOLDER`` draws the same curves for the adapted network.
"""

# %%
# Twenty images of each digit, and 60 random tasks for each number of shots and ways.

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from fewshot_mahalanobis import load_checkpoint
from fewshot_mahalanobis.images.picture import to_square_array
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.evaluation import Accuracy, Variant, evaluate_source
from fewshot_mahalanobis.research.evaluation.accuracy import UnadaptedFeatures
from fewshot_mahalanobis.research.evaluation.result import Result

digits = load_digits()
chosen = np.concatenate([np.flatnonzero(digits.target == digit)[:20] for digit in range(10)])
pixels = np.round(digits.images[chosen] * (255 / 16)).astype(np.uint8)

model = load_checkpoint("default")
squares = np.stack([to_square_array(Image.fromarray(image), model.image_size) for image in pixels])
source = ImageSource("digits", squares, digits.target[chosen].astype(np.int64), tuple("0123456789"))
features = UnadaptedFeatures(model, source)
variants = {"Mahalanobis": Variant(False, "mahalanobis"), "Euclidean": Variant(False, "euclidean")}


def measure(way: int, shot: int) -> Result:
    """Accuracy of both heads on the same tasks."""
    accuracies = evaluate_source(
        model, source, variants.values(), way=way, shot=shot, episodes=60, queries=8, plain_features=features
    )
    scores = {name: Accuracy.of(accuracies[variant]) for name, variant in variants.items()}
    return Result(source=source.name, way=way, shot=shot, scores=scores)


# %%
# Accuracy against shots, in 5-way tasks. A class needs more than one example to have a covariance: with one shot, the
# Mahalanobis head uses only the covariance of the task.

from fewshot_mahalanobis.plotting import plot_accuracy

ax = plot_accuracy([measure(5, shot) for shot in (1, 2, 5, 10)])

# %%
# Accuracy against ways, with 5 shots.

ax = plot_accuracy([measure(way, 5) for way in (2, 3, 5, 10)], against="way")
