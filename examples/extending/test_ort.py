"""The file in ONNX Runtime's own format answers as the classifier does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.export.ort import write_ort


def test_it_gives_the_probabilities_of_predict_proba(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 40, 40, 3), np.uint8)
    classifier = SimpleCNAPSClassifier("resnet18", image_size=32, precision="float32").fit(images, ["cat", "dog"] * 3)
    write_ort(classifier.model_, classifier.task_, tmp_path / "pets.ort", pixels=True)
    session = onnxruntime.InferenceSession(tmp_path / "pets.ort", providers=["CPUExecutionProvider"])
    probabilities, *_ = session.run(None, {"pixels": images[0]})
    np.testing.assert_allclose(probabilities, classifier.predict_proba(images[:1])[0], atol=0.01)
