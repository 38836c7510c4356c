"""Sets of classes with a promise: what they hold, how often they are right, and what cannot be promised."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from fewshot_mahalanobis import MahalanobisClassifier
from fewshot_mahalanobis.gaussians.support import group_weights
from fewshot_mahalanobis.heads import MahalanobisHead
from fewshot_mahalanobis.support_set.prediction_sets import largest_surprise
from tests.support_set.test_unknown import gaussian_task


@pytest.mark.parametrize("priors", [None, [0.2, 0.5, 0.3]])
@pytest.mark.parametrize("grouped", [False, True])
def test_the_limit_is_the_order_statistic_of_the_surprises_of_refits(grouped: bool, priors: Any) -> None:
    """Of a head whose logits are no distances, nothing is allowed for: the surprises are those of refits."""
    X, y, _ = gaussian_task(np.random.default_rng(1), way=3, shot=6, d=4)
    groups = np.arange(18) // 2 if grouped else np.arange(18)
    classifier = MahalanobisClassifier(head="dot_product", temperature=3.0, priors=priors).fit(X, y, groups=groups)
    surprises = []
    for row in range(18):
        rest = groups != groups[row]
        refit = MahalanobisClassifier(head="dot_product", temperature=3.0, priors=priors).fit(X[rest], y[rest])
        surprises.append(-refit.predict_log_proba(X[row : row + 1])[0, y[row]])
    weights = group_weights(torch.from_numpy(groups)).numpy()
    order = np.argsort(surprises)
    rank = (weights.sum() + 1) * 0.8
    expected = np.interp(rank, weights[order].cumsum(), np.array(surprises)[order])
    assert largest_surprise(classifier.fitted_head_, 0.8) == pytest.approx(expected, rel=1e-6)


def test_a_set_has_the_classes_within_the_limit_the_most_probable_first() -> None:
    X, y, queries = gaussian_task(np.random.default_rng(2), way=4, d=3)
    names = np.array(["ant", "bee", "cat", "dog"])
    classifier = MahalanobisClassifier().fit(X, names[y])
    limit, shares = largest_surprise(classifier.fitted_head_, 0.9), classifier.predict_proba(queries)
    sizes = set()
    for found, row in zip(classifier.predict_set(queries, coverage=0.9), shares, strict=True):
        ranked = sorted(range(4), key=lambda k: -row[k])
        inside = [k for k in ranked if -math.log(row[k]) <= limit] or ranked[:1]
        assert found.tolist() == names[inside].tolist()
        sizes.add(len(found))
    assert len(sizes) > 1
    assert all(one[0] == label for one, label in zip(classifier.predict_set(queries), classifier.predict(queries)))


@pytest.mark.parametrize("unlabelled", [False, True])
def test_the_right_class_is_in_the_set_as_often_as_is_promised(unlabelled: bool) -> None:
    hits = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        means = 0.5 * rng.normal(size=(4, 8))  # hard: no set has more than it needs
        X, y = means.repeat(6, axis=0) + rng.normal(size=(24, 8)), np.arange(4).repeat(6)
        truth = np.arange(200) % 4
        queries = means[truth] + rng.normal(size=(200, 8))
        pool = means.repeat(10, axis=0) + rng.normal(size=(40, 8)) if unlabelled else None
        classifier = MahalanobisClassifier().fit(X, y, unlabelled=pool)
        sets = classifier.predict_set(queries, coverage=0.8)
        hits.append(np.mean([label in found for label, found in zip(truth, sets, strict=True)]))
    error = np.std(hits, ddof=1) / math.sqrt(len(hits))
    assert np.mean(hits) == pytest.approx(0.8, abs=3 * error + 0.02)


@pytest.mark.parametrize(
    ("coverage", "message"),
    [
        (1.0, "coverage must lie between 0 and 1, got 1.0"),
        (0, "coverage must lie between 0 and 1, got 0"),
        (0.95, "9 left-out examples can promise a coverage of at most 0.9, not 0.95: add examples, or ask for less"),
    ],
)
def test_a_promise_that_cannot_be_kept_is_refused(coverage: float, message: str) -> None:
    X, y, queries = gaussian_task(np.random.default_rng(0), way=3, shot=3)
    classifier = MahalanobisClassifier().fit(X, y)
    with pytest.raises(ValueError, match=re.escape(message)):
        classifier.predict_set(queries, coverage=coverage)
    assert len(classifier.predict_set(queries, coverage=0.9)) == len(queries)


def test_classes_of_one_example_promise_nothing() -> None:
    X, y, queries = gaussian_task(np.random.default_rng(0), way=3, shot=1)
    with pytest.raises(ValueError, match="sets of classes need a class of at least two examples"):
        MahalanobisClassifier(head=MahalanobisHead()).fit(X, y).predict_set(queries)
