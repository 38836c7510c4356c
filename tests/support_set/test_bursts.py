"""Queries of one group share an answer: that of their mean, whatever their number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fewshot_mahalanobis import MahalanobisClassifier
from tests.support_set.test_unknown import gaussian_task
from tests.tiny import LABELS, pictures, tiny_classifier

NAMES = ["b", "a", "b", 3, "a", "b", 3, "c"]


def task(**settings: Any) -> tuple[MahalanobisClassifier, NDArray[np.float64]]:
    X, y, queries = gaussian_task(np.random.default_rng(4), way=3, d=4, queries=8)
    queries[1::2] *= 2.0
    settings = {"unknown_label": -1, "false_rejection_rate": 0.2, "priors": [0.2, 0.5, 0.3], **settings}
    return MahalanobisClassifier(**settings).fit(X, y), queries


def members(name: Any) -> list[int]:
    return [i for i, other in enumerate(NAMES) if other == name]


def test_a_group_has_the_answer_of_its_mean_logits_and_its_mean_outlier_score() -> None:
    classifier, queries = task()
    logits, scores = classifier.decision_function(queries), classifier.outlier_score(queries)
    labels, shares = classifier.predict(queries, groups=iter(NAMES)), classifier.predict_proba(queries, groups=NAMES)
    for i, name in enumerate(NAMES):
        mean = logits[members(name)].mean(axis=0)
        expected = np.exp(mean - mean.max()) / np.exp(mean - mean.max()).sum()
        np.testing.assert_allclose(shares[i], expected, rtol=1e-9, atol=1e-12)
        unknown = scores[members(name)].mean() > classifier.threshold_
        assert labels[i] == (-1 if unknown else mean.argmax())
    assert -1 in labels
    everything = classifier.predict_all(queries, groups=NAMES)
    assert everything.labels.tolist() == labels.tolist()
    np.testing.assert_allclose(everything.probabilities, shares, rtol=1e-9)
    assert everything.outlier_scores[0] == pytest.approx(scores[members("b")].mean())
    assert len({everything.doubts[i] for i in members("b")}) == 1


def test_a_group_of_equal_frames_is_as_sure_as_one_of_them() -> None:
    classifier, queries = task()
    frames = np.repeat(queries, 10, axis=0)
    shares = classifier.predict_proba(frames, groups=np.arange(80) // 10)
    np.testing.assert_allclose(shares[::10], classifier.predict_proba(queries), rtol=1e-9)
    alone = classifier.predict_proba(queries, groups=range(8))
    np.testing.assert_allclose(alone, classifier.predict_proba(queries), rtol=1e-12)


def test_unlabelled_queries_of_one_group_count_once() -> None:
    classifier, queries = task(unknown_label=None, priors=None)
    frames, groups = np.repeat(queries, 5, axis=0), np.arange(40) // 5
    found = classifier.predict_proba(frames, transductive=True, groups=groups)
    np.testing.assert_allclose(found[::5], classifier.predict_proba(queries, transductive=True), rtol=1e-6)


def test_images_of_one_group_share_a_label() -> None:
    classifier = tiny_classifier(unknown_label="none", false_rejection_rate=0.4, batch_size=3)
    queries = pictures(8, 5)
    logits, scores = classifier.decision_function(queries), classifier.outlier_score(queries)
    found = classifier.predict(queries, groups=NAMES)
    for i, name in enumerate(NAMES):
        best = classifier.classes_[logits[members(name)].mean(axis=0).argmax()]
        assert found[i] == ("none" if scores[members(name)].mean() > classifier.threshold_ else best)
    assert {*LABELS, "none"} >= {*found}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["burst"], "8 examples but 1 groups: give each example a group"),
        ("burst 1", "groups must be a sequence of strings or numbers"),
        ([*"abcdefg", None], "group 7 is None: name groups by strings or numbers"),
        ([*"abcdefg", float("nan")], "group 7 is nan"),
    ],
)
@pytest.mark.parametrize("method", ["predict", "predict_proba", "predict_all"])
def test_groups_that_do_not_fit_are_refused(groups: Any, message: str, method: str) -> None:
    classifier, queries = task()
    with pytest.raises(ValueError, match=message):
        getattr(classifier, method)(queries, groups=groups)
