"""With one more term the outlier score still recognises foreign pictures."""

from __future__ import annotations

import numpy as np

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.support_set.unknown import SIMILARITIES


def test_each_term_has_its_mean_and_deviation() -> None:
    rng = np.random.default_rng(0)
    colours = np.repeat([[220, 60, 40], [40, 60, 220]], 6, axis=0)[:, None, None]
    images = (colours + rng.integers(-35, 36, (12, 32, 32, 3))).clip(0, 255).astype(np.uint8)
    classifier = SimpleCNAPSClassifier("resnet18", image_size=32, unknown_label="none", false_rejection_rate=0.1)
    classifier.fit(images, ["red"] * 6 + ["blue"] * 6, groups=range(12))
    outliers = classifier.fitted_head_.outliers
    assert outliers is not None
    assert outliers.units is not None
    assert [*outliers.units] == ["head", *(term.name for term in SIMILARITIES)]
    stripes = np.zeros((1, 32, 32, 3), np.uint8)
    stripes[:, ::2] = 255
    assert classifier.outlier_score(stripes)[0] > classifier.outlier_score(images).max()
