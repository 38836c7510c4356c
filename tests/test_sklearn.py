"""The image classifier among scikit-learn's tools."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import StackingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import ConfusionMatrixDisplay, accuracy_score
from sklearn.model_selection import cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.svm import SVC

from fewshot_mahalanobis import MahalanobisClassifier, SimpleCNAPS, SimpleCNAPSClassifier

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

COLOURS = {"blue": (40, 60, 220), "green": (50, 190, 60), "red": (210, 50, 50)}
LABELS = ["red", "green", "blue"] * 4
QUERY_LABELS = ["blue", "red", "green", "red", "blue"]


def drawn(labels: list[str], seed: int) -> NDArray[np.uint8]:
    """Noisy patches of the colour that the label names, (n, 24, 24, 3)."""
    rng = np.random.default_rng(seed)
    colours = np.array([COLOURS[label] for label in labels])[:, None, None, :]
    return (colours + rng.integers(-35, 36, size=(len(labels), 24, 24, 3))).clip(0, 255).astype(np.uint8)


IMAGES, QUERIES = drawn(LABELS, 1), drawn(QUERY_LABELS, 2)


@pytest.fixture(scope="module")
def model() -> SimpleCNAPS:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SimpleCNAPS(image_size=32).eval()


def halved(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return images[:, ::2, ::2]


def test_the_html_diagram_shows_parameters_and_state(model: SimpleCNAPS) -> None:
    classifier = SimpleCNAPSClassifier(model, batch_size=7)
    before = classifier._repr_html_()
    after = classifier.fit(IMAGES, LABELS)._repr_html_()
    assert "SimpleCNAPSClassifier" in before
    assert "batch_size" in before
    assert "Not fitted" in before
    assert "Not fitted" not in after


def test_set_output_gives_features_as_a_named_data_frame(model: SimpleCNAPS) -> None:
    pandas = pytest.importorskip("pandas")
    classifier = SimpleCNAPSClassifier(model).fit(IMAGES, LABELS)
    plain = classifier.transform(QUERIES)
    frame = clone(classifier).set_output(transform="pandas").fit(IMAGES, LABELS).transform(QUERIES)
    assert isinstance(plain, np.ndarray)
    assert isinstance(frame, pandas.DataFrame)
    assert np.array_equal(frame.to_numpy(), plain)
    assert frame.columns.tolist() == classifier.get_feature_names_out().tolist()
    assert len(set(frame.columns)) == classifier.n_features_out_


def test_it_classifies_at_the_end_of_a_pipeline_and_gives_features_within_one(model: SimpleCNAPS) -> None:
    last = make_pipeline(FunctionTransformer(halved), SimpleCNAPSClassifier(model)).fit(IMAGES, LABELS)
    alone = SimpleCNAPSClassifier(model).fit(halved(IMAGES), LABELS)
    assert np.array_equal(last.predict_proba(QUERIES), alone.predict_proba(halved(QUERIES)))

    first = make_pipeline(SimpleCNAPSClassifier(model), SVC()).fit(IMAGES, LABELS)
    whole = SimpleCNAPSClassifier(model).fit(IMAGES, LABELS)
    svc = SVC().fit(whole.transform(IMAGES), LABELS)
    assert first.predict(QUERIES).tolist() == svc.predict(whole.transform(QUERIES)).tolist()


def test_calibration_on_left_out_folds_gives_probabilities_of_the_same_classes(model: SimpleCNAPS) -> None:
    calibrated = CalibratedClassifierCV(SimpleCNAPSClassifier(model), cv=2, ensemble=False).fit(IMAGES, LABELS)
    probabilities = calibrated.predict_proba(QUERIES)
    assert calibrated.classes_.tolist() == ["blue", "green", "red"]
    assert probabilities.shape == (5, 3)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    assert accuracy_score(QUERY_LABELS, calibrated.predict(QUERIES)) == 1.0


def test_classifiers_are_stacked_on_its_features_and_with_it(model: SimpleCNAPS) -> None:
    heads = [("gaussians", MahalanobisClassifier()), ("svc", SVC())]
    stack = StackingClassifier(heads, LogisticRegression(), cv=2)
    on_features = make_pipeline(SimpleCNAPSClassifier(model), stack).fit(IMAGES, LABELS)
    assert on_features.score(QUERIES, QUERY_LABELS) == 1.0

    pixels = make_pipeline(FunctionTransformer(lambda images: images.mean((1, 2))), MahalanobisClassifier())
    stack = StackingClassifier([("network", SimpleCNAPSClassifier(model)), ("pixels", pixels)], cv=2)
    stack.fit(IMAGES, LABELS)
    assert stack.transform(QUERIES).shape == (5, 6)
    np.testing.assert_allclose(
        stack.transform(QUERIES)[:, :3], stack.named_estimators_["network"].predict_proba(QUERIES), atol=1e-12
    )
    assert stack.score(QUERIES, QUERY_LABELS) == 1.0


def test_sample_weights_are_routed_to_score(model: SimpleCNAPS) -> None:
    wrong = list(LABELS)
    wrong[0] = "blue"
    weights = np.where(np.array(wrong) == np.array(LABELS), 1.0, 0.0)
    with sklearn.config_context(enable_metadata_routing=True):
        classifier = SimpleCNAPSClassifier(model).set_score_request(sample_weight=True)
        request = classifier.get_metadata_routing()
        assert request.score.requests == {"sample_weight": True}
        folds = [(np.arange(3, 12), np.arange(3))]
        scored = cross_validate(classifier, IMAGES, wrong, cv=folds, params={"sample_weight": weights})
        unweighted = cross_validate(classifier, IMAGES, wrong, cv=folds, params={"sample_weight": np.ones(12)})
    assert scored["test_score"].tolist() == [1.0]
    assert unweighted["test_score"] == pytest.approx([2 / 3])


def test_scikit_learn_draws_its_confusion_matrix(model: SimpleCNAPS) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    classifier = SimpleCNAPSClassifier(model).fit(IMAGES, LABELS)
    display = ConfusionMatrixDisplay.from_estimator(classifier, QUERIES, QUERY_LABELS, ax=figure.subplots())
    assert display.confusion_matrix.tolist() == [[2, 0, 0], [0, 1, 0], [0, 0, 2]]
