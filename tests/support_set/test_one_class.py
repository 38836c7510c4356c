"""Examples of one class alone: a query belongs to it, or is unknown."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fewshot_mahalanobis import MahalanobisClassifier, SimpleCNAPSClassifier
from fewshot_mahalanobis.checkpoints.card import model_card
from fewshot_mahalanobis.support_set.summary import SupportSummary
from tests.tiny import adapting_model, drawn

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

RATE = 0.1
HEADS = ("auto", "mahalanobis", "euclidean", "cosine")


@pytest.fixture(scope="module")
def classifier() -> SimpleCNAPSClassifier:
    classifier = SimpleCNAPSClassifier(
        adapting_model(), device="cpu", precision="float32", unknown_label="defect", false_rejection_rate=RATE
    )
    return classifier.fit(drawn(["green"] * 20, 1), ["good"] * 20)


@pytest.mark.parametrize("head", HEADS)
def test_the_promised_share_of_the_class_is_rejected_and_others_are_found(head: str) -> None:
    rng = np.random.default_rng(0)
    centre = 3 * rng.normal(size=24)
    rejected, found = [], []
    for _ in range(40):
        examples, others = centre + rng.normal(size=(20, 24)), rng.normal(size=(50, 24)) - centre
        classifier = MahalanobisClassifier(head=head, unknown_label=-1, false_rejection_rate=RATE)
        classifier.fit(examples, np.zeros(20, int))
        rejected.append((classifier.predict(centre + rng.normal(size=(50, 24))) == -1).mean())
        found.append((classifier.predict(others) == -1).mean())
    # Of one task the share has a standard deviation of 0.065 by the order statistic, and 0.04 by 50 queries.
    assert np.mean(rejected) == pytest.approx(RATE, abs=4 * math.hypot(0.065, 0.042) / math.sqrt(40))
    assert np.mean(found) > 0.99


def test_an_image_is_of_the_class_or_unknown(classifier: SimpleCNAPSClassifier) -> None:
    assert (classifier.predict(drawn(["green"] * 30, 2)) == "good").mean() > 0.6
    assert classifier.predict(drawn(["red", "blue"] * 5, 3)).tolist() == ["defect"] * 10
    queries = drawn(["green", "red"], 4)
    assert classifier.classes_.tolist() == ["good"]
    np.testing.assert_array_equal(classifier.predict_proba(queries), np.ones((2, 1)))
    assert classifier.decision_function(queries).shape == (2, 1)
    below, above = classifier.outlier_score(queries)
    assert below < above
    assert classifier.threshold_ is not None


def test_without_an_unknown_label_one_class_is_refused_with_the_remedy(classifier: SimpleCNAPSClassifier) -> None:
    one = SimpleCNAPSClassifier(classifier.model_, device="cpu")
    with pytest.raises(ValueError, match=r"every label is 'good'.* everything else, set unknown_label"):
        one.fit(drawn(["green"] * 4, 1), ["good"] * 4)
    with pytest.raises(ValueError, match="every label is unknown_label='good'"):
        one.set_params(unknown_label="good").fit(drawn(["green"] * 4, 1), ["good"] * 4)
    with pytest.raises(ValueError, match="needs a class of at least two examples"):
        one.set_params(unknown_label="defect").fit(drawn(["green"], 1), ["good"])


def test_probabilities_of_one_class_need_no_temperature() -> None:
    X = np.random.default_rng(0).normal(size=(9, 5))
    classifier = MahalanobisClassifier(temperature="auto", unknown_label="?", false_rejection_rate=RATE)
    assert classifier.fit(X, ["a"] * 9).temperature_ == 1.0


def test_a_summary_measures_no_accuracy_of_one_class(classifier: SimpleCNAPSClassifier) -> None:
    summary = classifier.summary()
    assert isinstance(summary, SupportSummary)
    assert math.isnan(summary.accuracy)
    assert summary.curve is None
    assert summary.counts == {"good": 20}
    assert "20 support images of 1 class\n" in str(summary)
    assert "not measured, as there is one class" in str(summary)


def test_a_summary_of_one_class_names_the_example_that_is_unlike_the_others() -> None:
    rng = np.random.default_rng(0)
    X = np.concatenate([5 + rng.normal(size=(20, 30)), rng.normal(size=(1, 30)) - 5])
    classifier = MahalanobisClassifier(unknown_label="?").fit(X, ["good"] * 21)
    first = classifier.summary().suspects[0]
    assert (first.index, first.kind) == (20, "outlier")


def test_a_file_gives_the_same_answers(classifier: SimpleCNAPSClassifier, tmp_path: Path) -> None:
    classifier.save(tmp_path / "good.safetensors")
    restored = SimpleCNAPSClassifier.load(tmp_path / "good.safetensors", device="cpu")
    queries = drawn(["green", "red", "blue", "green"], 5)
    assert restored.predict(queries).tolist() == classifier.predict(queries).tolist()
    np.testing.assert_allclose(restored.outlier_score(queries), classifier.outlier_score(queries), rtol=1e-5)


def test_a_second_class_may_come_later(classifier: SimpleCNAPSClassifier) -> None:
    classifier = SimpleCNAPSClassifier(**classifier.get_params(deep=False))
    classifier.fit(drawn(["green"] * 20, 1), ["good"] * 20)
    classifier.partial_fit(drawn(["red"] * 3, 7), ["scratch"] * 3)
    assert classifier.classes_.tolist() == ["good", "scratch"]
    labels = classifier.predict(drawn(["red"] * 10, 8)).tolist()
    assert "good" not in labels
    assert labels.count("scratch") > 5  # the others may be rejected by mistake
    assert classifier.summary().counted == 23


def test_of_features_a_second_class_later_is_a_fit_on_both() -> None:
    X = np.random.default_rng(0).normal(size=(12, 6)) + np.repeat([[0.0], [4.0]], [8, 4], axis=0)
    y = np.repeat(["a", "b"], [8, 4])
    settings: dict[str, Any] = {"unknown_label": "?", "false_rejection_rate": 0.2}
    stream = MahalanobisClassifier(**settings).fit(X[:8], y[:8]).partial_fit(X[8:], y[8:])
    whole = MahalanobisClassifier(**settings).fit(X, y)
    np.testing.assert_allclose(stream.predict_proba(X), whole.predict_proba(X))
    assert stream.threshold_ == whole.threshold_


def test_defects_may_be_examples_of_no_class_beside_one_class() -> None:
    rng = np.random.default_rng(0)
    good, defects = rng.normal(size=(20, 10)), rng.normal(size=(6, 10)) + 2
    classifier = MahalanobisClassifier(unknown_label="defect", false_rejection_rate=RATE)
    classifier.fit(np.concatenate([good, defects]), ["good"] * 20 + ["defect"] * 6)
    assert classifier.classes_.tolist() == ["good"]
    assert (classifier.predict(rng.normal(size=(50, 10)) + 2) == "defect").mean() > 0.9
    assert classifier.summary().curve is None


def test_a_model_card_says_why_no_accuracy_of_one_class_is_measured(classifier: SimpleCNAPSClassifier) -> None:
    card = model_card("user/good", classifier._state(), classifier.summary())
    assert "Not measured: there is one class" in card
