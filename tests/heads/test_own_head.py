"""A head written as one class, as in a notebook, works everywhere without a change to the package.

Its graph: tests/checkpoints/test_feature_classifier_file.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fewshot_mahalanobis import MahalanobisClassifier, SimpleCNAPSClassifier
from fewshot_mahalanobis.heads import Head
from fewshot_mahalanobis.images.picture import to_square_array
from fewshot_mahalanobis.plotting import support_influence
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.evaluation.accuracy import Variant, evaluate_source
from tests.tiny import QUERY_LABELS, SUPPORT_LABELS, adapting_model, drawn

pytestmark = pytest.mark.usefixtures("narrow_resnet18")


class MedianHead(Head[Tensor]):
    """Minus the mean absolute difference to the median of each class."""

    def fit(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        classes = range(int(support_labels.max()) + 1)
        return torch.stack([support_features[support_labels == k].median(dim=0).values for k in classes])

    def logits(self, state: Tensor, query_features: Tensor) -> Tensor:
        return -(query_features[:, None] - state).abs().mean(dim=2)


@pytest.fixture(scope="module")
def classifier() -> SimpleCNAPSClassifier:
    settings = {"unknown_label": "none", "temperature": "auto", "false_rejection_rate": 0.2, "precision": "float32"}
    model = SimpleCNAPSClassifier(adapting_model(), head=MedianHead(), device="cpu", **settings)  # type: ignore[arg-type]
    return model.fit(drawn(SUPPORT_LABELS, 1), SUPPORT_LABELS)


def test_it_classifies_and_adds_images(classifier: SimpleCNAPSClassifier) -> None:
    queries = drawn(QUERY_LABELS, 2)
    logits = classifier.decision_function(queries)
    features = torch.from_numpy(classifier.transform(queries))
    state = MedianHead().fit(classifier.fitted_head_.support.adapted, classifier.fitted_head_.labels)
    np.testing.assert_allclose(logits, MedianHead().logits(state, features), rtol=1e-6)
    assert (classifier.classes_[logits.argmax(axis=1)] == QUERY_LABELS).all()
    more = SimpleCNAPSClassifier(classifier.model_, head=MedianHead()).fit(drawn(SUPPORT_LABELS, 1), SUPPORT_LABELS)
    assert more.partial_fit(drawn(["red"], 5), ["red"]).class_counts_.sum() == len(SUPPORT_LABELS) + 1


def test_leaving_out_one_image_at_a_time_is_exact(classifier: SimpleCNAPSClassifier) -> None:
    fitted = classifier.fitted_head_
    features, labels = fitted.support.adapted, fitted.labels
    logits = fitted.settled.leave_one_out_logits(features, labels)
    for i in range(len(labels)):
        rest = torch.arange(len(labels)) != i
        expected = MedianHead()(features[rest], labels[rest], features[i : i + 1])[0]
        torch.testing.assert_close(logits[i], expected)


def test_it_rejects_and_tells_what_the_support_set_is_like(classifier: SimpleCNAPSClassifier) -> None:
    assert "none" in classifier.predict(255 - drawn(QUERY_LABELS, 3)).tolist()
    assert classifier.summary().counted == len(SUPPORT_LABELS)
    features = torch.from_numpy(classifier.transform(drawn(["red"], 4)))
    assert support_influence(classifier.fitted_head_, features).shape == (1, len(SUPPORT_LABELS))


def test_it_is_evaluated_beside_the_others(classifier: SimpleCNAPSClassifier) -> None:
    names = ["blue", "green", "red"]
    labels = np.arange(3).repeat(6)
    pictures = [to_square_array(Image.fromarray(image), 32) for image in drawn([names[i] for i in labels], 7)]
    source = ImageSource("colours", np.stack(pictures), labels, tuple(names))
    variants = [Variant(True, MedianHead()), Variant(True, "euclidean")]
    accuracies = evaluate_source(classifier.model_, source, variants, way=3, shot=2, queries=2, episodes=2)
    assert [variant.title for variant in accuracies] == ["adapted, MedianHead", "adapted, Euclidean"]
    assert min(float(of_variant.mean()) for of_variant in accuracies.values()) > 0.5


def test_feature_vectors_take_it_too() -> None:
    X, y = np.eye(6).repeat(3, axis=0) + 0.01 * np.arange(6), np.arange(6).repeat(3)
    assert MahalanobisClassifier(head=MedianHead()).fit(X, y).score(X, y) == 1.0


def test_a_file_cannot_hold_its_code(classifier: SimpleCNAPSClassifier, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a MedianHead as head cannot be written to a file, .*pickle"):
        classifier.save(tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []
