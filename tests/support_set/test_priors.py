"""Priors: Bayes' rule, what it gains, where it must not show, and what is refused."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from fewshot_mahalanobis import MahalanobisClassifier, SimpleCNAPSClassifier
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.support_set.priors import checked_priors
from tests.tiny import LABELS, QUERY_LABELS, SUPPORT_LABELS, adapting_model, drawn, pictures, tiny_classifier

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

SHARES = [0.7, 0.05, 0.25]  # of blue, green and red
SETTINGS: list[dict[str, Any]] = [
    {},
    {"head": "mahalanobis"},
    {"head": "cosine"},
    {"temperature": 2.5},
    {"head": "euclidean", "temperature": "auto"},
    {"unknown_label": "none", "false_rejection_rate": 0.2},
]


def vectors(seed: int, labels: list[str]) -> NDArray[np.float64]:
    """Overlapping classes in four dimensions."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(len(labels), 4)) + np.array([[len(label) % 3] * 4 for label in labels])


X, QUERIES = vectors(1, SUPPORT_LABELS), vectors(2, QUERY_LABELS * 5)


def by_bayes(equal: NDArray[np.float64], shares: Any = SHARES) -> NDArray[np.float64]:
    posterior = equal * np.asarray(shares)
    return posterior / posterior.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_probabilities_are_those_of_equal_priors_by_bayes_rule(settings: dict[str, Any]) -> None:
    equal = MahalanobisClassifier(**settings).fit(X, SUPPORT_LABELS)
    classifier = MahalanobisClassifier(**settings, priors=SHARES).fit(X, SUPPORT_LABELS)
    expected = by_bayes(equal.predict_proba(QUERIES))
    np.testing.assert_allclose(classifier.predict_proba(QUERIES), expected, rtol=1e-9)
    np.testing.assert_allclose(classifier.predict_log_proba(QUERIES), np.log(expected), rtol=1e-9, atol=1e-9)
    logits = torch.from_numpy(classifier.decision_function(QUERIES))
    np.testing.assert_allclose((logits / classifier.temperature_).softmax(dim=1), expected, rtol=1e-9)
    assert not np.array_equal(classifier.predict(QUERIES), equal.predict(QUERIES))
    known = ~classifier.predict_all(QUERIES).unknown
    assert np.array_equal(classifier.predict(QUERIES)[known], classifier.classes_[expected.argmax(axis=1)][known])
    np.testing.assert_allclose(classifier.priors_, SHARES)
    np.testing.assert_allclose(equal.priors_, [1 / 3] * 3)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_image_classifier_does_the_same(settings: dict[str, Any]) -> None:
    support, queries = pictures(8, 1), pictures(20, 2)
    equal = tiny_classifier(**settings)
    classifier = SimpleCNAPSClassifier(equal.checkpoint, device="cpu", **settings, priors=SHARES).fit(support, LABELS)
    expected = by_bayes(equal.predict_proba(queries))
    np.testing.assert_allclose(classifier.predict_proba(queries), expected, rtol=1e-9)
    np.testing.assert_allclose(classifier.predict_all(queries).probabilities, expected, rtol=1e-9)
    assert classifier.outlier_score(queries).tolist() == equal.outlier_score(queries).tolist()


def test_two_classes_have_the_log_odds_of_the_posterior() -> None:
    labels = ["a", "b", "a", "b", "b", "a", "b", "a"]
    equal = MahalanobisClassifier().fit(X, labels).decision_function(QUERIES)
    classifier = MahalanobisClassifier(priors={"b": 0.8, "a": 0.2}).fit(X, labels)
    np.testing.assert_allclose(classifier.decision_function(QUERIES), equal + math.log(4), rtol=1e-12)
    assert np.array_equal(classifier.predict(QUERIES) == "b", classifier.decision_function(QUERIES) > 0)


def test_equal_priors_are_those_without_any() -> None:
    equal = MahalanobisClassifier(priors="equal").fit(X, SUPPORT_LABELS)
    assert equal.priors_.tolist() == [1 / 3] * 3
    without = MahalanobisClassifier().fit(X, SUPPORT_LABELS)
    np.testing.assert_allclose(equal.predict_proba(QUERIES), without.predict_proba(QUERIES), rtol=1e-12)


def test_rejection_calibration_and_summary_do_not_depend_on_priors() -> None:
    settings = {"unknown_label": "none", "false_rejection_rate": 0.2, "temperature": "auto", "head": "euclidean"}
    equal = MahalanobisClassifier(**settings).fit(X, SUPPORT_LABELS)
    classifier = MahalanobisClassifier(**settings, priors=[1, 0, 0]).fit(X, SUPPORT_LABELS)
    far = np.concatenate([QUERIES, QUERIES + 100])
    assert (classifier.threshold_, classifier.temperature_) == (equal.threshold_, equal.temperature_)
    assert classifier.outlier_score(far).tolist() == equal.outlier_score(far).tolist()
    unknown = equal.predict(far) == "none"
    assert unknown.any()
    assert (classifier.predict(far) == "none").tolist() == unknown.tolist()
    assert (classifier.predict(far)[~unknown] == "blue").all()
    summary, of_equal = classifier.summary(), equal.summary()
    assert (summary.right, summary.counted, summary.suspects) == (of_equal.right, of_equal.counted, of_equal.suspects)
    assert summary.priors == {"blue": 1.0, "green": 0.0, "red": 0.0}
    assert "Priors" not in str(of_equal)
    priors = str(summary).partition("Priors")[2].splitlines()[1:4]
    assert priors == ["  blue: 1", "  green: 0", "  red: 0"]


def test_a_class_of_share_zero_is_never_predicted() -> None:
    equal = MahalanobisClassifier().fit(X, SUPPORT_LABELS)
    assert "green" in equal.predict(QUERIES)
    classifier = MahalanobisClassifier(priors={"blue": 0.5, "green": 0, "red": 0.5}).fit(X, SUPPORT_LABELS)
    assert {*classifier.predict(QUERIES).tolist()} == {"blue", "red"}
    assert (classifier.predict_proba(QUERIES)[:, 1] == 0).all()
    np.testing.assert_allclose(classifier.predict_proba(QUERIES).sum(axis=1), 1)


def test_shares_of_90_and_10_gain_what_theory_says() -> None:
    distance, share, n = 2.0, 0.9, 40_000  # two Gaussians of variance 1
    rng = np.random.default_rng(0)
    y = rng.random(n) >= share  # True for the rare class
    x = rng.normal(size=n) + distance * y
    quantiles = np.array([NormalDist().inv_cdf(q) for q in (np.arange(2000) + 0.5) / 2000])
    X, labels = np.concatenate([quantiles, quantiles + distance])[:, None], np.repeat([False, True], 2000)
    # Gaussians of the classes alone, of s = 1/2: logits are logarithms of their densities.
    settings: dict[str, Any] = {"head": "mahalanobis", "beta": 1e-9, "scale": 0.5, "task_covariance": False}
    equal = MahalanobisClassifier(**settings).fit(X, labels)
    classifier = MahalanobisClassifier(**settings, priors=[share, 1 - share]).fit(X, labels)
    phi = NormalDist().cdf
    log_odds = math.log(share / (1 - share))
    border = distance / 2 + log_odds / distance  # where the densities times the shares are equal
    best = share * phi(border) + (1 - share) * phi(distance - border)
    accuracy, of_equal = classifier.score(x[:, None], y), equal.score(x[:, None], y)
    deviation = math.sqrt(best * (1 - best) / n)
    assert abs(accuracy - best) < 3 * deviation
    assert abs((accuracy - of_equal) - (best - phi(distance / 2))) < 4 * deviation
    assert best - phi(distance / 2) > 0.06  # from 84 to 91 %
    theirs = LinearDiscriminantAnalysis(priors=[share, 1 - share]).fit(X, labels)
    assert np.mean(theirs.predict(x[:, None]) == classifier.predict(x[:, None])) > 0.999


# ------------------------------------------------------------------------------------------ what may be given


@pytest.mark.parametrize(
    "priors",
    [
        SHARES,
        tuple(SHARES),
        np.array(SHARES, dtype=np.float32),
        {"red": 0.25, "blue": 0.7, "green": 0.05},
        {np.str_("red"): np.float64(0.25), "blue": 0.7, "green": 0.05},
    ],
    ids=repr,
)
def test_shares_are_an_array_in_the_order_of_the_classes_or_a_mapping(priors: Any) -> None:
    classifier = MahalanobisClassifier(priors=priors).fit(X, SUPPORT_LABELS)
    np.testing.assert_allclose(classifier.priors_, SHARES, rtol=1e-6)
    assert classifier.get_params()["priors"] is priors
    np.testing.assert_allclose(clone(classifier).fit(X, SUPPORT_LABELS).priors_, SHARES, rtol=1e-6)


def test_a_series_of_pandas_is_read_by_its_index() -> None:
    pandas = pytest.importorskip("pandas")
    counted = pandas.Series(["red"] * 5 + ["blue"] * 14 + ["green"]).value_counts(normalize=True)
    assert counted.index.tolist() == ["blue", "red", "green"]
    classifier = MahalanobisClassifier(priors=counted).fit(X, SUPPORT_LABELS)
    np.testing.assert_allclose(classifier.priors_, SHARES)


def test_integer_labels_are_keys_too() -> None:
    labels = [3, 1, 2, 1, 3, 3, 2, 1]
    classifier = MahalanobisClassifier(priors={3: 0.5, 2: 0.2, 1: 0.3}).fit(X, labels)
    assert classifier.priors_.tolist() == [0.3, 0.2, 0.5]


def test_shares_that_do_not_sum_to_one_are_rescaled_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="priors sum to 100, not to 1"):
        classifier = MahalanobisClassifier(priors=[70, 5, 25]).fit(X, SUPPORT_LABELS)
    np.testing.assert_allclose(classifier.priors_, SHARES)


@pytest.mark.parametrize(
    ("priors", "message"),
    [
        ([0.5, 0.5], r"shape \(2,\).*3 classes.*\['blue', 'green', 'red'\] in this order"),
        ([[0.5, 0.5, 0.0]], r"shape \(1, 3\)"),
        (0.5, r"shape \(\)"),
        ([0.9, -0.1, 0.2], "share of 'green' is -0.1"),
        ([0.9, float("nan"), 0.1], "share of 'green' is nan"),
        ([0.9, "0.1", 0.0], "share of 'green' is '0.1'"),
        ([0, 0, 0], "every class .* has the share 0"),
        ({"blue": 0.5, "green": 0.2, "gold": 0.3}, "'gold' is none of the classes"),
        ({"blue": 0.5, "green": 0.5}, r"class 'red' has no share.*set_params\(priors="),
        ({"blue": 0.5, "green": 0.5, "red": math.inf}, "share of 'red' is inf"),
    ],
    ids=str,
)
@pytest.mark.parametrize("of_images", [False, True])
def test_shares_that_fit_no_classes_are_refused_by_name(priors: Any, message: str, of_images: bool) -> None:
    classifier: Any = tiny_classifier() if of_images else MahalanobisClassifier().fit(X, SUPPORT_LABELS)
    before = classifier._fitted
    with pytest.raises(ValueError, match=message):
        classifier.set_params(priors=priors).fit(pictures(8, 1) if of_images else X, LABELS)
    assert classifier._fitted is before


def test_new_classes_need_shares_and_the_error_says_how() -> None:
    for priors in (SHARES, {"blue": 0.7, "green": 0.05, "red": 0.25}):
        classifier = MahalanobisClassifier(priors=priors).fit(X, SUPPORT_LABELS)
        before = classifier._fitted
        with pytest.raises(ValueError, match=r"set_params\(priors=.* \['blue', 'green', 'new', 'red'\]"):
            classifier.partial_fit(X[:1], ["new"])
        assert classifier._fitted is before
        four = {"blue": 0.4, "green": 0.2, "red": 0.2, "new": 0.2}
        classifier.set_params(priors=four).partial_fit(X[:1] + 1, ["new"])
        assert classifier.priors_.tolist() == [0.4, 0.2, 0.2, 0.2]


@pytest.mark.parametrize("of_images", [False, True])
def test_a_stream_names_shares_of_classes_that_are_to_come(of_images: bool) -> None:
    examples = pictures(8, 1) if of_images else X
    shares = {"blue": 0.6, "green": 0.2, "red": 0.2}
    classifier: Any = tiny_classifier() if of_images else MahalanobisClassifier()
    classifier = clone(classifier).set_params(priors=shares)
    order = np.argsort(LABELS, kind="stable")
    labels = np.array(LABELS)[order]
    classifier.partial_fit(examples[order][:5], labels[:5], classes=["blue", "green", "red"])
    assert classifier.classes_.tolist() == ["blue", "green"]
    np.testing.assert_allclose(classifier.priors_, [0.75, 0.25])
    classifier.partial_fit(examples[order][5:], labels[5:])
    np.testing.assert_allclose(classifier.priors_, [0.6, 0.2, 0.2])


def test_checked_priors_of_nothing_are_nothing() -> None:
    assert checked_priors(None, np.array(["a", "b"])) is None


# ------------------------------------------------------------------------------------------ kept and exported


@pytest.mark.parametrize("priors", [None, SHARES, {"red": 0.25, "blue": 0.7, "green": 0.05}], ids=str)
def test_files_and_pickles_keep_the_priors(priors: Any, tmp_path: Path) -> None:
    classifier = SimpleCNAPSClassifier(adapting_model(), device="cpu", priors=priors)
    classifier.fit(drawn(SUPPORT_LABELS, 1), SUPPORT_LABELS).save(tmp_path / "a")
    loaded = SimpleCNAPSClassifier.load(tmp_path / "a", device="cpu")
    queries = drawn(QUERY_LABELS, 2)
    for again in (loaded, pickle.loads(pickle.dumps(classifier))):
        assert (again.predict_proba(queries) == classifier.predict_proba(queries)).all()
        assert (again.priors_ == classifier.priors_).all()
    assert loaded.priors == (None if priors is None else SHARES)  # in the order of classes_
    loaded.save(tmp_path / "b")  # no warning: they are in force
    loaded.partial_fit(drawn(["red"], 3), ["red"])


def test_priors_that_were_set_after_fit_are_named_when_a_file_is_written(tmp_path: Path) -> None:
    classifier = SimpleCNAPSClassifier(adapting_model(), device="cpu", priors=SHARES)
    classifier.fit(drawn(SUPPORT_LABELS, 1), SUPPORT_LABELS)
    classifier.set_params(priors=[0.2, 0.4, 0.4])
    with pytest.warns(UserWarning, match=r"priors=\[0.2, 0.4, 0.4\] was set after fit .* has priors=\[0.7, 0.05, 0.25"):
        classifier.save(tmp_path / "a")
    assert SimpleCNAPSClassifier.load(tmp_path / "a").priors == pytest.approx(SHARES)
    classifier.set_params(priors=[0.5, 0.5])  # which no fit to three classes would take
    with pytest.warns(UserWarning, match=r"priors=\[0.5, 0.5\] was set after fit and is not in force"):
        classifier.save(tmp_path / "a")
    assert SimpleCNAPSClassifier.load(tmp_path / "a").priors == pytest.approx(SHARES)


@pytest.mark.slow
def test_logits_of_an_exported_graph_have_the_priors(tmp_path: Path) -> None:
    """Their probabilities: tests/checkpoints/test_feature_classifier_file.py and tests/export/test_pixels.py."""
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    arguments = {"device": "cpu", "precision": "float32", "temperature": 2.0}
    classifier = SimpleCNAPSClassifier(adapting_model(), priors=[0.98, 0.0, 0.02], **arguments)
    classifier.fit(pictures(8, 1), LABELS)
    queries = pictures(6, 2)
    classifier.export_onnx(tmp_path / "logits.onnx")
    session = runtime.InferenceSession(tmp_path / "logits.onnx")
    (logits,) = session.run(None, {"images": next(iter(ImageBatches(queries, 32))).numpy()})
    np.testing.assert_allclose(logits, classifier.decision_function(queries), rtol=1e-3, atol=1e-3)
    output = session.get_modelmeta().custom_metadata_map["output"]
    assert "the softmax of logits / 2 gives probabilities" in output


def test_influence_is_on_the_probability_with_priors() -> None:
    from fewshot_mahalanobis.support_set.summary import support_influence

    priors = {"blue": 0.9, "green": 0.05, "red": 0.05}
    classifier = MahalanobisClassifier("auto", priors=priors).fit(X, SUPPORT_LABELS)
    influence = support_influence(classifier.fitted_head_, torch.from_numpy(QUERIES)).numpy()
    without = MahalanobisClassifier("auto", priors=priors).fit(np.delete(X, 3, 0), np.delete(SUPPORT_LABELS, 3))
    predicted = classifier.predict_proba(QUERIES).argmax(axis=1)
    expected = (classifier.predict_log_proba(QUERIES) - without.predict_log_proba(QUERIES))[
        np.arange(len(QUERIES)), predicted
    ]
    np.testing.assert_allclose(influence[:, 3], expected, rtol=1e-6, atol=1e-9)
