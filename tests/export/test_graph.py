"""The torch.export program of a fitted classifier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier
from fewshot_mahalanobis.images.decode import ImageBatches
from tests.tiny import LABELS, pictures


@pytest.mark.parametrize("arguments", [{}, {"head": "cosine", "adapt": False}], ids=str)
def test_the_program_gives_the_same_logits_and_names_the_classes(arguments: dict[str, Any], tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SimpleCNAPS(image_size=32).eval()
    classifier = SimpleCNAPSClassifier(model, device="cpu", precision="float32", **arguments)
    classifier.fit(pictures(8, 1), LABELS)
    classifier.export_program(tmp_path / "a.pt2")
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt2"]
    properties = {"classes": ""}
    program = torch.export.load(tmp_path / "a.pt2", extra_files=properties).module()
    assert json.loads(properties["classes"]) == classifier.classes_.tolist()
    for count in (1, 5):
        queries = pictures(count, 2)
        logits = program(next(iter(ImageBatches(queries, 32)))).detach().numpy()
        expected = classifier.decision_function(queries)
        np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())
        assert (classifier.classes_[logits.argmax(axis=1)] == classifier.predict(queries)).all()


def test_an_unfitted_classifier_has_no_program(tmp_path: Path) -> None:
    with pytest.raises(NotFittedError):
        SimpleCNAPSClassifier().export_program(tmp_path / "a.pt2")
