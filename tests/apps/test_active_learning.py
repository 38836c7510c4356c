"""The picture to label next."""

from __future__ import annotations

import numpy as np
import pytest

from fewshot_mahalanobis.apps.active_learning import density, doubt, most_useful, typicality


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.sqrt((one @ one) * (other @ other)))


def test_doubt_is_one_minus_the_margin_of_the_two_best_classes() -> None:
    probabilities = np.array([[1, 0, 0], [0.5, 0.5, 0], [0.2, 0.2, 0.6], [0.1, 0.7, 0.2]])
    np.testing.assert_allclose(doubt(probabilities), [0, 1, 0.6, 0.5])
    np.testing.assert_allclose(doubt(np.ones((2, 1))), [0, 0])


@pytest.mark.parametrize("m", [2, 4, 7, 1500])
def test_density_is_what_a_plain_loop_computes(m: int) -> None:
    features = np.random.default_rng(m).normal(size=(m, 4)) + 1
    for i in range(min(m, 5)):
        others = sorted((cosine(features[i], features[j]) for j in range(m) if j != i), reverse=True)[:5]
        assert density(features)[i] == pytest.approx(np.mean(others), abs=1e-6)


def test_a_single_picture_and_features_of_zero_have_a_density() -> None:
    assert density(np.ones((1, 3))).tolist() == [0]
    assert density(np.zeros((3, 3))).tolist() == [0, 0, 0]


def test_typicality_is_what_a_plain_loop_computes() -> None:
    rng = np.random.default_rng(0)
    features, known = rng.normal(size=(6, 3)), rng.normal(size=(4, 3))
    densities = density(features)
    expected = [densities[i] - max(cosine(features[i], other) for other in known) for i in range(6)]
    np.testing.assert_allclose(typicality(features, densities, known), expected, atol=1e-6)


def test_pictures_like_many_go_before_an_odd_one_and_before_those_like_a_labelled_one() -> None:
    crowd = np.array([[0, 1.0], [0.05, 1], [0.1, 1]])
    odd, labelled = np.array([[1.0, -1.0]]), np.array([[1.0, 0.1]])
    features = np.concatenate([crowd, odd, labelled * 1.01, labelled * 2])
    order = (-typicality(features, density(features), labelled)).argsort()
    assert set(order[:3]) == {0, 1, 2}


def test_the_most_typical_of_those_in_doubt_is_the_most_useful() -> None:
    margins = np.array([0.2, 0.59, 0.61, 0.8, 1.0])  # 0.8 is the largest doubt
    probabilities = np.stack([(1 + margins) / 2, (1 - margins) / 2], axis=1)
    assert most_useful(probabilities, np.array([0.1, 0.5, 0.6, 0.9, 1.0])) == 1
    assert most_useful(probabilities[:1], np.array([-3.0])) == 0
    assert most_useful(np.full((4, 2), 0.5), np.array([0.1, 0.2, 0.4, 0.3])) == 2
