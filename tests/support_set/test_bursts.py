"""Queries of one group share an answer: that of their mean, as sure as so many independent queries would be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fewshot_mahalanobis import MahalanobisClassifier
from fewshot_mahalanobis.gaussians.plda import to_power
from fewshot_mahalanobis.support_set.witnesses import witnesses
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


def worth(classifier: MahalanobisClassifier, queries: NDArray[np.float64]) -> float:
    """How many independent queries these are worth, written out."""
    head = classifier.fitted_head_
    gaussians, power = head.state.gaussians, head.settled.settings.power
    x = to_power(torch.from_numpy(queries), power)
    to_means = gaussians.squared_distance(x)
    centre = x.mean(dim=0, keepdim=True)
    inside = float((to_means.mean(dim=0) - gaussians.squared_distance(centre)[0])[0])
    own = min(inside * len(x) / (len(x) - 1) / float(to_means.mean(dim=0).min()), 1.0)
    return len(x) / (1 + (len(x) - 1) * (1 - own))


def test_a_group_has_the_answer_of_its_mean_logits_and_its_mean_outlier_score() -> None:
    classifier, queries = task()
    logits, scores = classifier.decision_function(queries), classifier.outlier_score(queries)
    labels, shares = classifier.predict(queries, groups=iter(NAMES)), classifier.predict_proba(queries, groups=NAMES)
    log_priors = np.log([0.2, 0.5, 0.3])
    for i, name in enumerate(NAMES):
        mean = logits[members(name)].mean(axis=0)
        if len(members(name)) > 1:
            many = worth(classifier, queries[members(name)])
            assert 1.1 < many <= len(members(name))
            mean = many * (mean - log_priors) + log_priors  # what queries say counts so often, the priors once
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


@pytest.mark.parametrize("common", [0.0, 0.5, 1.0])
def test_queries_are_worth_the_effective_number_by_what_they_share(common: float) -> None:
    """n / (1 + (n - 1) rho) where the class mean is known and this share of the variance is common to all."""
    rng, n = np.random.default_rng(0), 10
    shared, own = rng.normal(size=(300, 1, 50)), rng.normal(size=(300, n, 50))
    x = torch.from_numpy(np.sqrt(common) * shared + np.sqrt(1 - common) * own).reshape(-1, 50)
    found = witnesses(x, torch.arange(300).repeat_interleave(n), torch.zeros(1, 50, dtype=x.dtype))
    assert float(found.median()) == pytest.approx(n / (1 + (n - 1) * common), rel=0.05)


def test_a_share_of_zero_stays_zero_and_one_class_stays_sure() -> None:
    classifier, queries = task(priors=[0.5, 0.5, 0.0])
    shares = classifier.predict_proba(queries, groups=NAMES)
    assert (shares[:, 2] == 0).all()
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    one = MahalanobisClassifier(unknown_label=-1, false_rejection_rate=0.3).fit(queries, [1] * 8)
    assert one.predict_proba(queries, groups=NAMES).tolist() == [[1.0]] * 8


@pytest.mark.parametrize("head", ["mahalanobis", "euclidean", "cosine"])
def test_any_head_is_surer_of_different_queries_of_one_class_than_of_one(head: str) -> None:
    X, y, queries = gaussian_task(np.random.default_rng(4), way=3, d=40, queries=12)
    classifier = MahalanobisClassifier(head=head).fit(X, y)
    logits = classifier.decision_function(queries)
    together = classifier.predict_proba(queries, groups=["one"] * 12)[0]
    ratio = np.log(together[0] / together[1]) / (logits.mean(axis=0)[0] - logits.mean(axis=0)[1])
    assert 1 < ratio <= 12
    np.testing.assert_allclose(np.log(together[1] / together[2]) / np.diff(-logits.mean(axis=0))[1], ratio, rtol=1e-6)


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
    for i, name in enumerate(NAMES):  # without priors the label is that of the mean
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
