"""The digits are evaluated as any other source is."""

from __future__ import annotations

import numpy as np
from digits_source import digits_source

from fewshot_mahalanobis import load_checkpoint
from fewshot_mahalanobis.research.evaluation import evaluate_source


def test_episodes_are_drawn_from_it() -> None:
    source = digits_source(48)
    assert source.images.shape == (1797, 48, 48, 3)
    assert (np.diff(source.labels) >= 0).all()
    model = load_checkpoint("resnet18").at_size(48)
    for accuracies in evaluate_source(model, source, way=3, shot=1, queries=2, episodes=2).values():
        assert accuracies.shape == (2,)
