"""
Which support images a prediction leans on
==========================================

A prediction follows from few images, so each of them can be left out and the head fitted again: the change in the
log-probability of the predicted label tells what that image did. It is exact, not an approximation.
"""

# %%
# A task in which one support image is mislabelled on purpose: a 3 that is called an 8.

import numpy as np
from sklearn.datasets import load_digits

from fewshot_mahalanobis import SimpleCNAPSClassifier

digits = load_digits()
images = np.round(digits.images * (255 / 16)).astype(np.uint8)
of = {digit: np.flatnonzero(digits.target == digit) for digit in (3, 5, 8)}
support = np.concatenate([of[3][:6], of[5][:5], of[8][:5]])
labels = np.array([3] * 5 + [8] + [5] * 5 + [8] * 5)

classifier = SimpleCNAPSClassifier().fit(images[support], labels)

# %%
# Above, the support images that speak for the predicted label of a query; below, those that speak against it. Over each
# stands its label and its influence in nats.

from fewshot_mahalanobis.plotting import plot_support_influence

axes = plot_support_influence(classifier, images[support], images[of[3][8]])

# %%
# The same as numbers, for many queries. On average over other 3s, which support image speaks most against the label
# that they get?

import torch

from fewshot_mahalanobis.plotting import support_influence

influence = support_influence(classifier.task_, torch.from_numpy(classifier.transform(images[of[3][8:28]])))
print(
    "image", int(influence.mean(0).argmin()), "of the support set, whose label is", labels[influence.mean(0).argmin()]
)
