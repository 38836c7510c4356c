"""
Which support images a prediction relies on
===========================================

A prediction rests on few images, so each can be left out and the head fitted again. The change of the predicted label's
log-probability is that image's influence. It is exact, not an approximation.
"""

# %%
# A task with one support image mislabelled on purpose: a 3 that is called an 8.

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
# Top: the support images that speak for the predicted label of a query. Bottom: those that speak against it. The title
# of each is its label and its influence in nats.

from fewshot_mahalanobis.plotting import plot_support_influence

axes = plot_support_influence(classifier, images[support], images[of[3][8]])

# %%
# The same as numbers, averaged over many queries. Other 3s: which support image speaks most against their labels?

import torch

from fewshot_mahalanobis.plotting import support_influence

influence = support_influence(classifier.fitted_head_, torch.from_numpy(classifier.transform(images[of[3][8:28]])))
print(
    "image", int(influence.mean(0).argmin()), "of the support set, whose label is", labels[influence.mean(0).argmin()]
)
