"""MahalanobisClassifier as a scikit-learn estimator."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris
from sklearn.exceptions import NotFittedError, SkipTestWarning
from sklearn.neighbors import NearestCentroid
from sklearn.utils.estimator_checks import check_estimator

from fewshot_mahalanobis.feature_classifier import MahalanobisClassifier
from fewshot_mahalanobis.heads import AutoHead, EuclideanHead
from tests import reference


@pytest.fixture
def digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    X, y = load_digits(return_X_y=True)
    return X[:150] / 16.0, y[:150]


def check_statuses(estimator: object) -> dict[str, set[str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkipTestWarning)
        results = check_estimator(estimator, on_fail=None)
    statuses: dict[str, set[str]] = {}
    for result in results:
        statuses.setdefault(result["status"], set()).add(result["check_name"])
    return statuses


def test_scikit_learns_whole_suite_passes() -> None:
    ours, theirs = check_statuses(MahalanobisClassifier()), check_statuses(NearestCentroid())
    assert set(ours) <= {"passed", "skipped"}
    assert ours.get("skipped", set()) <= theirs.get("skipped", set())


def test_probabilities_follow_from_the_dense_formula(digits: tuple[NDArray[np.float64], NDArray[np.int64]]) -> None:
    X, y = digits
    classifier = MahalanobisClassifier(head="mahalanobis", beta=0.5, scale=0.5).fit(X[:60], y[:60])
    distances = reference.squared_mahalanobis(*map(torch.tensor, (X[:60], y[:60], X[60:])), beta=0.5)
    np.testing.assert_allclose(classifier.predict_proba(X[60:]), (-0.5 * distances).softmax(dim=1), rtol=1e-9)
    np.testing.assert_allclose(classifier.decision_function(X[60:]), -0.5 * distances, rtol=1e-9)
    assert np.array_equal(classifier.predict(X[60:]), distances.argmin(dim=1).numpy())
    assert np.array_equal(classifier.class_counts_, np.bincount(y[:60]))
    np.testing.assert_allclose(classifier.means_[3], X[:60][y[:60] == 3].mean(axis=0))


def test_leaving_out_the_task_covariance_changes_the_distances_as_the_formula_says(
    digits: tuple[NDArray[np.float64], NDArray[np.int64]],
) -> None:
    X, y = digits
    classifier = MahalanobisClassifier(head="mahalanobis", task_covariance=False).fit(X[:60], y[:60])
    distances = reference.squared_mahalanobis(*map(torch.tensor, (X[:60], y[:60], X[60:])), task_covariance=False)
    np.testing.assert_allclose(classifier.decision_function(X[60:]), -distances, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:self.within_class_std_dev_:UserWarning")  # NearestCentroid on blank pixels
def test_it_beats_the_nearest_centroid_on_digits() -> None:
    X, y = load_digits(return_X_y=True)
    X = X / 16.0
    ours = MahalanobisClassifier(head="mahalanobis", beta=0.1).fit(X[:200], y[:200]).score(X[200:], y[200:])
    assert ours > NearestCentroid().fit(X[:200], y[:200]).score(X[200:], y[200:])


def test_string_labels_come_back_and_two_classes_have_one_decision_value() -> None:
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor"])[y[:100]]
    classifier = MahalanobisClassifier().fit(X[:100], names)
    decision = classifier.decision_function(X[:100])
    assert decision.shape == (100,)
    assert classifier.classes_.tolist() == ["setosa", "versicolor"]
    assert np.array_equal(classifier.predict(X[:100]), np.where(decision > 0, "versicolor", "setosa"))
    np.testing.assert_allclose(classifier.predict_log_proba(X[:100]), np.log(classifier.predict_proba(X[:100])))


def test_partial_fit_equals_a_fit_on_the_union(digits: tuple[NDArray[np.float64], NDArray[np.int64]]) -> None:
    X, y = digits
    order = np.argsort(y, kind="stable")  # later calls bring new classes
    X, y = X[order], y[order]
    classifier = MahalanobisClassifier()
    for part in np.array_split(np.arange(len(y)), 4):
        classifier.partial_fit(X[part], y[part])
    whole = MahalanobisClassifier().fit(X, y)
    assert np.array_equal(classifier.classes_, whole.classes_)
    assert np.array_equal(classifier.class_counts_, whole.class_counts_)
    assert np.array_equal(classifier.decision_function(X), whole.decision_function(X))
    assert len(classifier.fit(X[:10], y[:10]).classes_) == len(np.unique(y[:10]))  # fit starts anew


def test_partial_fit_keeps_to_the_classes_it_was_told() -> None:
    classifier = MahalanobisClassifier().partial_fit([[0.0], [1.0]], ["a", "b"], classes=["a", "b", "c"])
    assert classifier.classes_.tolist() == ["a", "b"]
    before = classifier.decision_function([[0.3]])
    with pytest.raises(ValueError, match="label 'd' is not among"):
        classifier.partial_fit([[2.0]], ["d"])
    with pytest.raises(ValueError, match="classes are"):
        classifier.partial_fit([[2.0]], ["a"], classes=["a", "d"])
    assert np.array_equal(classifier.decision_function([[0.3]]), before)
    assert classifier.partial_fit([[2.0]], ["c"]).classes_.tolist() == ["a", "b", "c"]


def test_partial_fit_refuses_to_mix_strings_with_numbers() -> None:
    classifier = MahalanobisClassifier().fit([[0.0], [1.0]], ["a", "b"])
    with pytest.raises(ValueError, match="Mix of label input types"):
        classifier.partial_fit([[2.0]], [3])


def test_changing_the_callers_arrays_afterwards_changes_nothing() -> None:
    X, y = np.array([[0.0], [1.0], [5.0]]), np.array([0, 0, 1])
    classifier = MahalanobisClassifier().fit(X, y)
    X[:], y[:] = 9.0, 7
    classifier.partial_fit([[6.0]], [1])
    expected = MahalanobisClassifier().fit([[0.0], [1.0], [5.0], [6.0]], [0, 0, 1, 1])
    assert np.array_equal(classifier.means_, expected.means_)
    assert np.array_equal(classifier.classes_, expected.classes_)


@pytest.mark.parametrize(
    ("parameters", "X", "message"),
    [
        ({"beta": -1.0, "head": "mahalanobis"}, [[0.0], [1.0]], "beta must be"),
        ({"scale": 0.0, "head": "mahalanobis"}, [[0.0], [1.0]], "scale must be"),
        ({"beta": 0.5, "head": "cosine"}, [[0.0], [1.0]], "beta: settings of head=\"mahalanobis\", not of 'cosine'"),
        ({"head": "linear"}, [[0.0], [1.0]], "no trained linear head"),
        ({}, [[0.0], [np.nan]], "NaN"),
        ({}, [[0.0], [1.0], [2.0]], "inconsistent numbers of samples"),
    ],
)
def test_a_failed_fit_leaves_nothing_half_fitted(
    parameters: dict[str, Any], X: list[list[float]], message: str
) -> None:
    classifier = MahalanobisClassifier(**parameters)
    with pytest.raises(ValueError, match=message):
        classifier.fit(X, [0, 1])
    assert vars(classifier) == vars(clone(classifier))
    with pytest.raises(NotFittedError):
        classifier.predict([[0.0]])


def test_a_failed_refit_leaves_the_fit_before_it() -> None:
    classifier = MahalanobisClassifier().fit([[0.0], [1.0]], [0, 1])
    with pytest.raises(ValueError, match="Unknown label type"):
        classifier.fit([[0.0, 1.0], [1.0, 0.0]], [0.5, 1.5])
    assert classifier.n_features_in_ == 1
    assert classifier.predict([[0.1]]).tolist() == [0]


def test_it_survives_pickling(digits: tuple[NDArray[np.float64], NDArray[np.int64]]) -> None:
    X, y = digits
    classifier = MahalanobisClassifier().fit(X, y)
    restored = pickle.loads(pickle.dumps(classifier))
    assert np.array_equal(restored.decision_function(X), classifier.decision_function(X))


def test_the_auto_head_chooses_once_for_the_fit_and_for_the_examples_left_out() -> None:
    X, y = load_iris(return_X_y=True)
    classifier = MahalanobisClassifier(temperature="auto", unknown_label=-1).fit(X[::3], y[::3])
    expected = AutoHead()(torch.from_numpy(X[::3]), torch.from_numpy(y[::3]), torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(classifier.decision_function(X), expected, rtol=1e-9)
    assert classifier.beta_ == AutoHead().fit(torch.from_numpy(X[::3]), torch.from_numpy(y[::3])).settings.beta
    predicted = classifier.predict(X)
    assert (predicted == -1).mean() < 0.15  # a twentieth is promised of queries unseen
    assert (predicted == y)[predicted != -1].mean() > 0.9
    with pytest.raises(ValueError, match=r"head must be one of .* got 'euclid'"):
        MahalanobisClassifier(head="euclid").fit(X, y)


@pytest.mark.parametrize("given", [{"beta": 2}, {"task_covariance": False}, {"scale": 0.5}])
def test_a_setting_of_the_papers_head_selects_it(given: dict[str, Any]) -> None:
    X, y = load_iris(return_X_y=True)
    classifier = MahalanobisClassifier(**given).fit(X[::3], y[::3])
    expected = MahalanobisClassifier(head="mahalanobis", **given).fit(X[::3], y[::3])
    assert np.array_equal(classifier.decision_function(X), expected.decision_function(X))
    assert classifier.get_params()["head"] == "auto"


def test_every_other_head_serves_feature_vectors_too() -> None:
    X, y = load_iris(return_X_y=True)
    head = EuclideanHead()
    for given in ("euclidean", head):
        classifier = MahalanobisClassifier(head=given).fit(X[::3], y[::3])
        assert classifier.score(X, y) > 0.9
        assert classifier.beta_ is None
    assert classifier.head is head
