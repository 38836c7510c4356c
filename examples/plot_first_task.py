"""
A first task
============

Five images of each digit are enough to classify others. ``fit`` adapts the pretrained network to them in one forward
pass, without training.
"""

# %%
# The images are grey, 8 x 8 pixels. Any size and mode works, as paths, PIL images, arrays or tensors.

import numpy as np
from sklearn.datasets import load_digits

from fewshot_mahalanobis import SimpleCNAPSClassifier

digits = load_digits(n_class=5)
images = np.round(digits.images * (255 / 16)).astype(np.uint8)
rng = np.random.default_rng(0)
shuffled = [rng.permutation(np.flatnonzero(digits.target == digit)) for digit in range(5)]
support = np.concatenate([indices[:5] for indices in shuffled])
query = np.concatenate([indices[5:13] for indices in shuffled])

classifier = SimpleCNAPSClassifier().fit(images[support], digits.target[support])
classifier.score(images[query], digits.target[query])

# %%
# Support images are on the left, queries on the right. Each query is in the row of its true label; its title is red if
# the prediction is wrong.

from fewshot_mahalanobis.plotting import plot_task

support_axes, query_axes = plot_task(
    classifier, images[support], digits.target[support], images[query], digits.target[query]
)

# %%
# The confusion matrix is scikit-learn's: this is a classifier like any other.

from sklearn.metrics import ConfusionMatrixDisplay

display = ConfusionMatrixDisplay.from_estimator(classifier, images[query], digits.target[query])
