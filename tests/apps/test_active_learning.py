"""The queries to label next."""

from __future__ import annotations

import numpy as np
import pytest

from fewshot_mahalanobis.apps.active_learning import doubt, most_useful


def test_doubt_is_one_minus_the_margin_of_the_two_best_classes() -> None:
    probabilities = np.array([[1, 0, 0], [0.5, 0.5, 0], [0.2, 0.2, 0.6], [0.1, 0.7, 0.2]])
    np.testing.assert_allclose(doubt(probabilities), [0, 1, 0.6, 0.5])


def test_the_first_is_most_in_doubt_and_the_next_is_another_kind() -> None:
    # Two kinds of picture, at 0 and at 10: the three at 0 are most in doubt.
    features = np.array([[0.0], [0.1], [0.2], [10.0], [10.1]])
    margin = np.array([0.0, 0.01, 0.02, 0.3, 0.9])
    probabilities = np.stack([(1 + margin) / 2, (1 - margin) / 2], axis=1)
    assert most_useful(probabilities, features, 2).tolist() == [0, 3]
    assert most_useful(probabilities, features[:1].repeat(5, axis=0), 1).tolist() == [0]


def test_each_query_comes_once_and_order_does_not_depend_on_how_many_are_asked_for() -> None:
    rng = np.random.default_rng(0)
    probabilities, features = rng.dirichlet(np.ones(4), 30), rng.normal(size=(30, 5))
    every = most_useful(probabilities, features, 100)
    assert sorted(every) == list(range(30))
    for n in (0, 1, 7):
        assert most_useful(probabilities, features, n).tolist() == every[:n].tolist()
    order = rng.permutation(30)
    assert order[most_useful(probabilities[order], features[order], 30)].tolist() == every.tolist()


def test_copies_of_one_picture_are_all_given_in_the_end() -> None:
    assert sorted(most_useful(np.full((4, 2), 0.5), np.zeros((4, 3)), 4)) == [0, 1, 2, 3]


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows of probabilities but 2 of features"):
        most_useful(np.full((3, 2), 0.5), np.zeros((2, 3)), 1)
    with pytest.raises(ValueError, match="negative"):
        most_useful(np.full((3, 2), 0.5), np.zeros((3, 3)), -1)
