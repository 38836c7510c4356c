"""
A first task
============

Five images of each digit are enough to read others. Fitting adapts the pretrained network to these images in one
forward pass; there is no training.
"""

# %%
# The images are 8 x 8 pixels, grey, from 0 to 16. Any size and mode will do: paths, PIL images, arrays or tensors.

import numpy as np
from sklearn.datasets import load_digits

from fewshot_mahalanobis import SimpleCNAPSClassifier

digits = load_digits(n_class=5)
images = np.round(digits.images * (255 / 16)).astype(np.uint8)
rng = np.random.default_rng(0)
drawn = [rng.permutation(np.flatnonzero(digits.target == digit)) for digit in range(5)]
support = np.concatenate([of_digit[:5] for of_digit in drawn])
query = np.concatenate([of_digit[5:13] for of_digit in drawn])

classifier = SimpleCNAPSClassifier().fit(images[support], digits.target[support])
classifier.score(images[query], digits.target[query])

# %%
# Support images on the left, queries on the right: a query stands in the row of its true label, and its title is red
# where the prediction differs.

from fewshot_mahalanobis.plotting import plot_task

support_axes, query_axes = plot_task(
    classifier, images[support], digits.target[support], images[query], digits.target[query]
)

# %%
# The confusion matrix is scikit-learn's own: an image classifier is a classifier like any other.

from sklearn.metrics import ConfusionMatrixDisplay

display = ConfusionMatrixDisplay.from_estimator(classifier, images[query], digits.target[query])
