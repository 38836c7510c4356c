"""The threshold from further examples of known classes, and what it promises."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

from fewshot_mahalanobis import MahalanobisClassifier
from fewshot_mahalanobis.support_set.unknown import LeftOutScores, rejection_threshold
from tests.support_set.test_unknown import gaussian_task
from tests.tiny import LABELS, pictures, tiny_classifier


def fitted(**settings: Any) -> MahalanobisClassifier:
    X, y, _ = gaussian_task(np.random.default_rng(8), way=3)
    return MahalanobisClassifier(**{"unknown_label": -1, "false_rejection_rate": 0.1, **settings}).fit(X, y)


def further(n: int = 200) -> Any:
    return gaussian_task(np.random.default_rng(8), way=3, queries=n)[2]


@pytest.mark.parametrize(("n", "j"), [(20, 18), (20, 20), (60, 57)])
def test_the_interval_is_that_of_order_statistics(n: int, j: int) -> None:
    """The share above the j-th of n scores is below r if at least j of n uniform ones are below 1 - r... and so on."""
    scores = torch.from_numpy(np.random.default_rng(0).normal(size=n))
    low, high = LeftOutScores(scores).rate_interval(float(scores.sort().values[j - 1]))
    # The share above exceeds r exactly if at least j of the n lie among the 1 - r lowest.
    assert binom.sf(j - 1, n, 1 - low) == pytest.approx(0.95, abs=1e-9)
    assert binom.sf(j - 1, n, 1 - high) == pytest.approx(0.05, abs=1e-9)


def test_nothing_below_the_threshold_leaves_nothing_certain() -> None:
    low, high = LeftOutScores(torch.arange(4.0).double()).rate_interval(-1.0)
    assert low == pytest.approx(1 - 0.1 ** (1 / 5))
    assert high == 1


def test_calibration_changes_the_threshold_alone_and_is_kept(tmp_path: Path) -> None:
    classifier, queries = fitted(), further(60)
    logits, scores = classifier.decision_function(queries), classifier.outlier_score(queries)
    before = classifier.threshold_
    assert classifier.calibrate(queries) is classifier
    expected = rejection_threshold(torch.from_numpy(scores), 0.1)
    assert classifier.threshold_ == expected != before
    assert (classifier.decision_function(queries) == logits).all()
    assert classifier.false_rejection_interval_ == LeftOutScores(torch.from_numpy(scores)).rate_interval(expected)
    classifier.save(tmp_path / "model")
    for same in (MahalanobisClassifier.load(tmp_path / "model"), pickle.loads(pickle.dumps(classifier)), classifier):
        assert same.threshold_ == expected
        assert same.set_params(false_rejection_rate=0.3).threshold_ == rejection_threshold(
            torch.from_numpy(scores), 0.3
        )
        assert "% will be rejected (with probability 0.9; the threshold comes from 60 further" in str(same.summary())


def test_pictures_of_one_group_count_once() -> None:
    queries, groups = further(40), np.arange(40) // 2
    scores = fitted().outlier_score(queries).reshape(20, 2).mean(axis=1)
    classifier = fitted().calibrate(queries, groups=groups)
    assert classifier.threshold_ == pytest.approx(rejection_threshold(torch.from_numpy(scores), 0.1))


def test_images_calibrate_too_and_more_support_begins_anew() -> None:
    classifier = tiny_classifier(unknown_label="none", false_rejection_rate=0.2)
    scores = torch.from_numpy(classifier.outlier_score(pictures(12, 9)))
    assert classifier.calibrate(pictures(12, 9)).threshold_ == pytest.approx(rejection_threshold(scores, 0.2), rel=1e-6)
    with pytest.warns(UserWarning, match=r"the threshold of calibrate\(\) is no longer in force"):
        classifier.partial_fit(pictures(3, 10), LABELS[:3])
    assert classifier.fitted_head_.calibration is None


def test_what_cannot_be_calibrated_is_refused() -> None:
    with pytest.raises(ValueError, match="no example is rejected: set unknown_label and fit"):
        fitted(unknown_label=None).calibrate(further(20))
    classifier = fitted()
    before = classifier.threshold_
    with pytest.raises(ValueError, match="20 examples but 2 groups"):
        classifier.calibrate(further(20), groups=[1, 2])
    assert classifier.threshold_ == before
    with pytest.warns(UserWarning, match="cannot guarantee false_rejection_rate=0.1"):
        classifier.calibrate(further(5))
