"""The two layers serve the classifier as any other network does."""

from __future__ import annotations

import numpy as np
from two_layers import two_layers

from fewshot_mahalanobis import SimpleCNAPSClassifier


def test_the_classifier_has_their_features() -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 40, 40, 3), np.uint8)
    classifier = SimpleCNAPSClassifier(two_layers()).fit(images, ["cat", "dog"] * 3)
    assert classifier.transform(images).shape == (6, 32)
    assert set(classifier.predict(images)) <= {"cat", "dog"}
