"""The Chebyshev head has the properties that heads have, and its name works wherever heads are named."""

from __future__ import annotations

import hypothesis
import numpy as np

from fewshot_mahalanobis import MahalanobisClassifier
from fewshot_mahalanobis.heads.chebyshev import ChebyshevHead
from fewshot_mahalanobis.testing import check_head


def test_it_has_the_properties_of_heads() -> None:
    few = hypothesis.settings(max_examples=10, derandomize=True, deadline=None)
    check_head(lambda width: ChebyshevHead(), without=["rotation_changes_nothing"], settings=few)


def test_the_largest_difference_decides() -> None:
    classifier = MahalanobisClassifier(head="chebyshev").fit(np.array([[0.0, 0.0], [4.0, 1.0]]), ["near", "far"])
    np.testing.assert_array_equal(classifier.decision_function([[1.0, 3.0]]), [3.0 - 3.0])
    assert classifier.predict([[0.5, 1.0]]) == ["near"]
