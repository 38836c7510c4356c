"""Proposed classes: clusters of rejected queries, by a naive agglomeration and by what a person would say."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fewshot_mahalanobis import MahalanobisClassifier, SimpleCNAPSClassifier
from fewshot_mahalanobis.gaussians.covariance import regularized_covariance
from fewshot_mahalanobis.support_set import new_classes
from fewshot_mahalanobis.support_set.new_classes import LEAST
from tests.tiny import drawn, tiny_model


def task(seed: int = 0, shot: int = 5, d: int = 12) -> tuple[Any, Any, Any, Any]:
    """Five classes, and queries of three of them, of three others (8, 6 and 5 of each) and of nothing that recurs."""
    rng = np.random.default_rng(seed)
    means = 6 * rng.normal(size=(8, d))
    X, y = means[:5].repeat(shot, axis=0) + rng.normal(size=(5 * shot, d)), np.arange(5).repeat(shot)
    truth = np.repeat([0, 1, 2, 5, 6, 7], [4, 4, 4, 8, 6, 5])
    queries = np.concatenate([means[truth] + rng.normal(size=(len(truth), d)), 20 * rng.normal(size=(2, d))])
    truth = np.append(truth, [-1, -2])
    order = rng.permutation(len(truth))
    return X, y, queries[order], truth[order]


@pytest.fixture(scope="module")
def fitted() -> tuple[MahalanobisClassifier, Any, Any]:
    X, y, queries, truth = task()
    return MahalanobisClassifier(unknown_label=-1, false_rejection_rate=0.1).fit(X, y), queries, truth


def test_queries_of_one_new_class_are_proposed_together_and_those_unlike_any_other_are_not(fitted: Any) -> None:
    classifier, queries, truth = fitted
    found = classifier.propose_classes(queries)
    assert found.dtype == np.int64
    assert {*found[truth < 5].tolist()} == {-1}
    assert sorted(found[truth >= 5]) == sorted(np.repeat(np.arange(3), [np.sum(found == k) for k in range(3)]))
    for new in (5, 6, 7):
        assert len({*found[truth == new].tolist()}) == 1
    assert found.max() == 2


def naive_proposal(classifier: MahalanobisClassifier, queries: NDArray[np.float64]) -> NDArray[np.int64]:
    """By dense matrices, and by joining the two clusters of least mean distance again and again."""
    head = classifier.fitted_head_
    settings, x, y = head.settled.settings, head.support.adapted, head.labels

    def distances(rows: Any, of: Any) -> Any:
        codes = y[rows].unique(return_inverse=True)[1]
        means = torch.stack([x[rows][codes == k].mean(dim=0) for k in range(int(codes.max()) + 1)])
        deviations = x[rows] - means[codes]
        within = deviations.T @ deviations / (len(codes) - len(means))
        precision = regularized_covariance(torch.zeros_like(within), within, 0.0, settings.beta).inverse()
        seen = torch.as_tensor(of) - means.mean(dim=0)
        inner = seen @ precision @ seen.T
        return (1 - inner / inner.diagonal().sqrt().outer(inner.diagonal().sqrt())).numpy()

    within, between = [], []
    for pair in combinations(range(len(classifier.classes_)), 2):
        out = torch.isin(y, torch.tensor(pair))
        apart, labels = distances(~out, x[out]), y[out].tolist()
        for i, j in combinations(range(len(labels)), 2):
            (within if labels[i] == labels[j] else between).append(apart[i, j])
    height = np.mean(within) + new_classes._SHARE * (np.mean(between) - np.mean(within))
    rejected = np.flatnonzero(classifier.predict(queries) == -1)
    apart = distances(torch.ones(len(y), dtype=torch.bool), queries[rejected])
    clusters = [[i] for i in range(len(rejected))]
    while len(clusters) > 1:
        best, one, other = min(
            (apart[np.ix_(a, b)].mean(), i, j) for (i, a), (j, b) in combinations(enumerate(clusters), 2)
        )
        if best > height:
            break
        clusters = [c for k, c in enumerate(clusters) if k not in (one, other)] + [clusters[one] + clusters[other]]
    clusters = [c for c in clusters if len(c) >= LEAST]
    clusters.sort(key=lambda c: np.mean([apart[i, j] for i, j in combinations(c, 2)]))
    found = np.full(len(queries), -1)
    for number, cluster in enumerate(clusters):
        found[rejected[cluster]] = number
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_clusters_are_those_of_a_naive_agglomeration(seed: int) -> None:
    rng = np.random.default_rng(seed)
    X, y, _, _ = task(seed)
    queries = (5 * rng.normal(size=(6, 12))).repeat(6, axis=0) + 2 * rng.normal(size=(36, 12))  # overlapping
    classifier = MahalanobisClassifier(unknown_label=-1, false_rejection_rate=0.1).fit(X, y)
    found = classifier.propose_classes(queries)
    assert found.tolist() == naive_proposal(classifier, queries).tolist()
    assert found.max() > 0
    assert found.min() == -1


def test_the_order_of_queries_changes_only_the_order_of_the_answers(fitted: Any) -> None:
    classifier, queries, _ = fitted
    order = np.random.default_rng(1).permutation(len(queries))
    assert classifier.propose_classes(queries[order]).tolist() == classifier.propose_classes(queries)[order].tolist()


def test_copies_and_groups_count_once(fitted: Any) -> None:
    classifier, queries, truth = fitted
    alone, two = np.flatnonzero(truth == -1)[:1], np.flatnonzero(truth == 7)[:2]
    few = np.concatenate([queries[truth < 5], queries[alone].repeat(4, axis=0), queries[two]])
    assert {*classifier.propose_classes(few).tolist()} == {-1}
    near = queries[alone] + 1e-3 * np.random.default_rng(0).normal(size=(4, queries.shape[1]))
    assert sorted({*classifier.propose_classes(near).tolist()}) == [0]  # four that differ are a class
    assert {*classifier.propose_classes(near, groups=["burst"] * 4).tolist()} == {-1}
    copied = np.concatenate([queries, queries[truth == 5]])
    assert classifier.propose_classes(copied)[: len(queries)].tolist() == classifier.propose_classes(queries).tolist()


def test_nothing_is_proposed_where_nothing_is_rejected(fitted: Any) -> None:
    classifier, queries, truth = fitted
    known = queries[truth < 5]
    known = known[classifier.predict(known) != -1]
    assert classifier.propose_classes(known).tolist() == [-1] * len(known)


@pytest.mark.parametrize(("way", "head"), [(1, "auto"), (2, "auto"), (4, "mahalanobis"), (5, "euclidean")])
def test_few_classes_and_other_heads_propose_too(way: int, head: str) -> None:
    X, y, queries, truth = task(2, d=40)
    some = y < way
    classifier = MahalanobisClassifier(head=head, unknown_label=-1, false_rejection_rate=0.2).fit(X[some], y[some])
    found = classifier.propose_classes(queries)
    assert {*found[classifier.predict(queries) != -1].tolist()} <= {-1}
    assert found.max() >= 2
    for number in range(found.max() + 1):
        assert len({*truth[found == number].tolist()}) == 1


def test_more_than_are_clustered_join(fitted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier, queries, _ = fitted
    all_of_them = classifier.propose_classes(queries)
    monkeypatch.setattr(new_classes, "_MOST", int(np.sum(classifier.predict(queries) == -1)) - 4)
    with pytest.warns(UserWarning, match="of no class: .* evenly spread, are clustered"):
        assert classifier.propose_classes(queries).tolist() == all_of_them.tolist()
    monkeypatch.setattr(new_classes, "_MOST", 2)  # two are no class, so there is none to join
    with pytest.warns(UserWarning, match="2 of them, evenly spread, are clustered"):
        assert classifier.propose_classes(queries).tolist() == [-1] * len(queries)


def test_a_classifier_that_rejects_nothing_proposes_nothing() -> None:
    X, y, queries, _ = task()
    with pytest.raises(ValueError, match="this classifier rejects none: set unknown_label and fit"):
        MahalanobisClassifier().fit(X, y).propose_classes(queries)


def test_of_images_copies_count_once_and_features_serve_as_well() -> None:
    classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu", unknown_label="?", false_rejection_rate=0.2)
    classifier.fit(drawn(["red", "green"] * 4, 1), ["red", "green"] * 4)
    blue = drawn(["blue"] * 5, 2)
    queries = np.concatenate([blue, drawn(["red", "green"] * 4, 1)])
    found = classifier.propose_classes(queries)
    assert found.tolist() == [0] * 5 + [-1] * 8
    assert classifier.propose_classes(classifier.features(queries)).tolist() == found.tolist()
    copied = np.concatenate([blue[:2], blue[:2, :, ::-1], blue[:2]])
    assert {*classifier.predict(copied).tolist()} == {"?"}
    assert {*classifier.propose_classes(copied).tolist()} == {-1}
