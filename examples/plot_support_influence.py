"""
Which support images a prediction relies on
===========================================

A prediction depends on few images, so each can be left out and the head fitted again. The influence of an image is the
change of the log-probability of the predicted label. It is exact, not an approximation.
"""

# %%
# In this task one support image is mislabelled on purpose: a 3 has the label 8.

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
# Top: the support images that support the predicted label of a query. Bottom: those that speak against it. The title of
# each is its label and its influence in nats.

from fewshot_mahalanobis.plotting import plot_support_influence

axes = plot_support_influence(classifier, images[support], images[of[3][8]])

# %%
# Averaged over many queries: which support image speaks most against the labels of other 3s?

import torch

from fewshot_mahalanobis.plotting import support_influence

influence = support_influence(classifier.fitted_head_, torch.from_numpy(classifier.transform(images[of[3][8:28]])))
print(
    "image", int(influence.mean(0).argmin()), "of the support set, whose label is", labels[influence.mean(0).argmin()]
)
