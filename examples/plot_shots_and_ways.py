"""
Accuracy against shots and ways
===============================

More images a class help, more classes make a task harder: figures 5 and 6 of the paper, on handwritten digits. Here the
network is not adapted, so that the features of every image are computed once; ``fewshot-mahalanobis evaluate`` measures
the adapted network too, and writes the results that such pictures are drawn from.
"""

# %%
# Twenty images of each digit, and 60 random tasks for each number of shots and of ways.

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from fewshot_mahalanobis import load_checkpoint
from fewshot_mahalanobis.data.sources import ImageSource
from fewshot_mahalanobis.evaluation import Accuracy, Variant, evaluate_source
from fewshot_mahalanobis.evaluation.accuracy import UnadaptedFeatures
from fewshot_mahalanobis.evaluation.result import Row
from fewshot_mahalanobis.images import to_square_array

digits = load_digits()
chosen = np.concatenate([np.flatnonzero(digits.target == digit)[:20] for digit in range(10)])
pixels = np.round(digits.images[chosen] * (255 / 16)).astype(np.uint8)
squares = np.stack([to_square_array(Image.fromarray(image), 84) for image in pixels])
source = ImageSource("digits", squares, digits.target[chosen].astype(np.int64), tuple("0123456789"))

model = load_checkpoint("default")
features = UnadaptedFeatures(model, source)
variants = {"Mahalanobis": Variant(False, "mahalanobis"), "Euclidean": Variant(False, "euclidean")}


def row(way: int, shot: int) -> Row:
    """One evaluation: a point of the picture."""
    found = evaluate_source(
        model, source, variants.values(), way=way, shot=shot, episodes=60, queries=8, plain_features=features
    )
    accuracy = {name: Accuracy.of(found[variant]) for name, variant in variants.items()}
    return Row(name=source.name, way=way, shot=shot, accuracy=accuracy)


# %%
# Against shots, in 5-way tasks. A covariance needs more than one example to say something of a class: with one shot
# the Mahalanobis head has the covariance of the task alone.

from fewshot_mahalanobis.plotting import plot_accuracy

ax = plot_accuracy([row(5, shot) for shot in (1, 2, 5, 10)])

# %%
# Against ways, with 5 shots.

ax = plot_accuracy([row(way, 5) for way in (2, 3, 5, 10)], against="way")
