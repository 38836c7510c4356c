"""
Why a covariance: Euclidean and Mahalanobis regions
===================================================

The Euclidean head treats every class as a ball around its mean. The Mahalanobis head takes into account how each class
varies. These are figures 1 and 3 of the paper, first in two dimensions, then for features of real images.
"""

# %%
# Three classes in the plane: one round, two elongated. With ``beta`` well below the variance of the features, the
# ellipses follow the classes. Equation 3 shrinks each of them towards the covariance of all examples.

import numpy as np

from fewshot_mahalanobis import RegularizedCovariance
from fewshot_mahalanobis.plotting import plot_class_gaussians, plot_decision_regions

rng = np.random.default_rng(3)
roots = [np.diag([3.0, 0.5]), np.array([[0.6, 0.0], [1.5, 2.0]]), 0.7 * np.eye(2)]
means = [(0.0, 3.0), (-3.0, -2.0), (4.0, -1.0)]
features = np.concatenate([rng.normal(size=(12, 2)) @ root.T + mean for root, mean in zip(roots, means, strict=True)])
labels = np.repeat(["wide", "slanted", "round"], 12)

axes = plot_decision_regions(
    features, labels, queries=[[2.5, 2.4], [-3.2, 0.6]], covariance=RegularizedCovariance(beta=0.1)
)

# %%
# Image features have hundreds of dimensions. The picture shows the plane of their first two principal components. Each
# ellipse is the exact marginal of a class's Gaussian on that plane.

from sklearn.datasets import load_digits

from fewshot_mahalanobis import SimpleCNAPSClassifier

digits = load_digits(n_class=4)
images, targets = np.round(digits.images * (255 / 16)).astype(np.uint8), digits.target
classifier = SimpleCNAPSClassifier().fit(images[:40], targets[:40])
adapted = classifier.transform(images[:40])
ax = plot_class_gaussians(adapted, targets[:40])

# %%
# The decision regions of the two heads, fitted in that plane, with some queries.

axes = plot_decision_regions(adapted, targets[:40], classifier.transform(images[40:60]))
