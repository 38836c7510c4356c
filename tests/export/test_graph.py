"""A fitted classifier as a torch.export program, and as a graph that has the weights of both networks once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.exceptions import NotFittedError

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.export.graph import write_page_onnx
from fewshot_mahalanobis.images.decode import ImageBatches
from tests.tiny import LABELS, SUPPORT_LABELS, drawn, pictures

pytestmark = pytest.mark.usefixtures("narrow_resnet18")


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


@pytest.mark.slow
def test_a_graph_that_has_the_weights_of_both_networks_once_and_as_float16_answers_as_the_classifier(
    tmp_path: Path,
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = load_checkpoint("default").at_size(64)
    weights = sum(tensor.numel() for tensor in model.feature_extractor.network.state_dict().values())
    classifier = SimpleCNAPSClassifier(
        model, device="cpu", precision="float32", unknown_label="none", temperature="auto", false_rejection_rate=0.3
    ).fit(drawn(SUPPORT_LABELS, 0), SUPPORT_LABELS)
    queries = [  # of the network's size: resizing has its own test
        np.asarray(Image.fromarray(one).resize((64, 64)))
        for one in [*drawn(["red", "green", "blue", "red"], 3), *pictures(2, 1)]
    ]
    expected = classifier.predict_all(queries)
    assert {"none", "blue"} <= set(expected.labels.tolist())
    write_page_onnx(classifier.model_, classifier.task_, tmp_path / "both.onnx", distances=False)
    assert (tmp_path / "both.onnx").stat().st_size < 1.1 * 2 * weights
    session = onnxruntime.InferenceSession(tmp_path / "both.onnx")
    for index, query in enumerate(queries):
        images = (query.astype(np.float32) / 127.5 - 1).transpose(2, 0, 1)[None]
        probabilities, label, _ = session.run(None, {"images": images})
        assert np.abs(probabilities - expected.probabilities[index]).max() < 0.01
        assert classifier.fitted_head_.output_labels[label] == expected.labels[index]
