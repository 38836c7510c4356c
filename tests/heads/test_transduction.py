"""Classes refined by the queries: against a plain loop, and what the classifiers make of it."""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch

from fewshot_mahalanobis import MahalanobisClassifier, RegularizedCovariance, SimpleCNAPSClassifier
from fewshot_mahalanobis.heads import AutoHead, EuclideanHead, MahalanobisHead
from fewshot_mahalanobis.heads.transduction import weighted_distance
from tests.tiny import LABELS, adapting_model


def task(seed: int, shots: list[int], width: int, queries: int = 20):
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(shots)), shots)
    centres = 2 * generator.standard_normal((len(shots), width))
    x = centres[labels] + generator.standard_normal((len(labels), width))
    truth = generator.integers(0, len(shots), queries)
    q = centres[truth] + generator.standard_normal((queries, width))
    return (torch.from_numpy(a) for a in (x, labels, q))


def softmax(row):
    e = np.exp(row - row.max())
    return e / e.sum()


def naive_weights(logits, counts, temperature):
    """0.3 times the probabilities, a class's sum cut to three times its support images."""
    w = 0.3 * np.array([softmax(row / temperature) for row in logits])
    for k, count in enumerate(counts):
        if w[:, k].sum() > 3 * count:
            w[:, k] *= 3 * count / w[:, k].sum()
    return w


def naive_mahalanobis(x, y, q, w):
    """Logits by weighted means and covariances, class by class."""
    points, identity = np.concatenate([x, q]), np.eye(x.shape[1])
    columns = []
    for k in range(y.max() + 1):
        weight = np.concatenate([(y == k).astype(float), w[:, k]])
        mean = np.average(points, axis=0, weights=weight)
        own = np.cov(points.T, aweights=weight, ddof=0).reshape(identity.shape)
        n = weight.sum()
        cov = n / (n + 1) * own + 1 / (n + 1) * np.cov(points.T).reshape(identity.shape) + identity
        columns.append([-(p - mean) @ np.linalg.inv(cov) @ (p - mean) for p in q])
    return np.array(columns).T


def naive_auto(x, y, q, w, settings):
    """The uncertain means' logits with weighted means and counts, P from the support set alone."""
    x, q = (np.sign(f) * np.abs(f) ** settings.power for f in (x, q))
    k = y.max() + 1
    if settings.shared == "task":
        s = np.cov(x.T)
    else:
        s = sum((p - x[y == c].mean(0))[:, None] * (p - x[y == c].mean(0)) for p, c in zip(x, y)) / (len(x) - k)
    inverse = np.linalg.inv(s + settings.beta * np.eye(x.shape[1]))
    n = np.array([(y == c).sum() + w[:, c].sum() for c in range(k)])
    means = np.array([(x[y == c].sum(0) + w[:, c] @ q) / n[c] for c in range(k)])
    centre, b = means.mean(0), settings.spread
    logits = np.zeros((len(q), k))
    for c in range(k):
        away = q - (centre + n[c] * b / (n[c] * b + 1) * (means[c] - centre))
        r = 1 + 1 / (n[c] + 1 / b)
        logits[:, c] = -settings.scale * (
            np.einsum("id,de,ie->i", away, inverse, away) / r + settings.freedom * np.log(r)
        )
    return logits


def naive(step, start, y, temperature):
    logits, counts = start, np.bincount(y)
    for number in range(1, 11):
        before, logits = logits.argmax(1), step(naive_weights(logits, counts, temperature))
        if number >= 2 and (logits.argmax(1) == before).all():
            break
    return logits


@pytest.mark.parametrize("width", [3, 60])  # more and fewer than the points
@pytest.mark.parametrize("shots", [[1, 1], [1, 1, 1], [5, 5, 5], [1, 2, 7]])
@pytest.mark.parametrize("name", ["auto", "square roots", "mahalanobis"])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("queries", [20, 1])
def test_logits_equal_a_plain_loop(queries, temperature, name, shots, width):
    x, y, q = task(0, shots, width, queries)
    head = MahalanobisHead() if name == "mahalanobis" else AutoHead()
    if name == "square roots":
        x, q = x.relu(), q.relu()
        head = AutoHead(dataclasses.replace(AutoHead().fit(x, y).settings, power=0.5))
    state = head.fit(x, y)
    found = head.transductive_logits(state, x, y, q, temperature).numpy()
    start = head.logits(state, q).numpy()
    x, y, q = x.numpy(), y.numpy(), q.numpy()
    if name != "mahalanobis":
        expected = naive(lambda w: naive_auto(x, y, q, w, state.settings), start, y, temperature)
    else:
        expected = naive(lambda w: naive_mahalanobis(x, y, q, w), start, y, temperature)
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-7)
    assert not np.allclose(found, start)


@pytest.mark.parametrize("settings", [{"shared": "within", "prior_shots": math.inf}, {"task_covariance": False}])
def test_other_covariances_of_the_family_with_weights(settings):
    x, y, q = task(1, [4, 6], 3)
    w = torch.nn.functional.one_hot(y).double() * torch.linspace(0.5, 1, len(x), dtype=torch.float64)[:, None]
    found = weighted_distance(x, w, q, RegularizedCovariance(2.0, **settings).settings)
    x, w, q = x.numpy(), w.numpy(), q.numpy()
    own = [np.cov(x.T, aweights=w[:, k], ddof=0) for k in range(2)]
    pooled = (own[0] * w[:, 0].sum() + own[1] * w[:, 1].sum()) / (w.sum() - 2)
    for k in range(2):
        inverse = np.linalg.inv((own[k] if "task_covariance" in settings else pooled) + 2 * np.eye(3))
        away = q - np.average(x, axis=0, weights=w[:, k])
        np.testing.assert_allclose(found[:, k], np.einsum("id,de,ie->i", away, inverse, away))


def test_weighted_distances_of_two_examples():
    x, w, q = torch.tensor([[0.0, 1.0], [4.0, 3.0]]), torch.tensor([[0.9, 0.3], [0.1, 0.7]]), torch.eye(2)
    found = weighted_distance(x, w, q, RegularizedCovariance(0.5).settings).numpy()
    x, w, q = x.numpy(), w.numpy(), q.numpy()
    for k in range(2):
        own, n = np.cov(x.T, aweights=w[:, k], ddof=0), w[:, k].sum()
        inverse = np.linalg.inv(n / (n + 1) * own + 1 / (n + 1) * np.cov(x.T) + 0.5 * np.eye(2))
        away = q - np.average(x, axis=0, weights=w[:, k])
        np.testing.assert_allclose(found[:, k], np.einsum("id,de,ie->i", away, inverse, away), rtol=1e-5)


def test_order_of_the_queries_does_not_matter():
    x, y, q = task(2, [1, 2, 3], 5)
    head = AutoHead()
    state, order = head.fit(x, y), torch.randperm(len(q), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        head.transductive_logits(state, x, y, q[order]), head.transductive_logits(state, x, y, q)[order]
    )


def test_no_queries_have_no_logits():
    x, y, q = task(3, [1, 2], 4)
    head = AutoHead()
    assert head.transductive_logits(head.fit(x, y), x, y, q[:0]).shape == (0, 2)


@pytest.mark.parametrize("head", [AutoHead(), MahalanobisHead()])
def test_queries_of_another_width_are_refused(head):
    x, y, q = task(3, [2, 2], 4)
    with pytest.raises(ValueError, match="query features"):
        head.transductive_logits(head.fit(x, y), x, y, q[:, :3])


def test_other_heads_are_refused():
    x, y, q = task(4, [1, 2], 4)
    head = EuclideanHead()
    with pytest.raises(ValueError, match='"auto" and "mahalanobis", not EuclideanHead'):
        head.transductive_logits(head.fit(x, y), x, y, q)


@pytest.mark.parametrize("head", ["auto", "mahalanobis"])
def test_feature_classifier_finds_what_one_example_of_a_class_hides(head):
    generator = np.random.default_rng(0)
    centres = np.array([[-2.0, 0.0], [2.0, 0.0]])
    queries = np.repeat(centres, 40, axis=0) + 0.5 * generator.standard_normal((80, 2))
    truth = np.repeat(["left", "right"], 40)
    support = np.array([[-3.5, 4.0], [2.0, -2.0]])  # far from their classes' centres
    classifier = MahalanobisClassifier(head=head).fit(support, ["left", "right"])
    before = dict(vars(classifier))
    alone, together = classifier.predict(queries), classifier.predict(queries, transductive=True)
    assert (together == truth).mean() > (alone == truth).mean()
    probabilities = classifier.predict_proba(queries, transductive=True)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    np.testing.assert_array_equal(classifier.classes_[probabilities.argmax(axis=1)], together)
    np.testing.assert_allclose(np.log(probabilities), classifier.predict_log_proba(queries, transductive=True))
    np.testing.assert_array_equal(classifier.predict(queries), alone)
    assert all(value is vars(classifier)[name] for name, value in before.items())
    assert before.keys() == vars(classifier).keys()


def test_unknown_queries_are_those_that_are_unknown_without():
    x, y, q = (a.numpy() for a in task(5, [5, 5], 4))
    q[0] += 1000
    classifier = MahalanobisClassifier(unknown_label=-1, false_rejection_rate=0.1).fit(x, y)
    together = classifier.predict(q, transductive=True)
    assert together[0] == -1
    np.testing.assert_array_equal(together == -1, classifier.predict(q) == -1)


@pytest.mark.parametrize("head", ["auto", "mahalanobis"])
def test_image_classifier_is_unchanged_and_comes_back_from_a_file_and_a_pickle(head, tmp_path):
    generator = np.random.default_rng(0)
    images = generator.uniform(size=(8, 32, 32, 3))
    queries = generator.uniform(size=(12, 32, 32, 3))
    classifier = SimpleCNAPSClassifier(adapting_model(), head=head, batch_size=5).fit(images, LABELS)
    alone = classifier.predict_proba(queries)
    together = classifier.predict_proba(queries, transductive=True)
    assert not np.allclose(alone, together)
    np.testing.assert_array_equal(
        classifier.predict(queries, transductive=True), classifier.classes_[together.argmax(axis=1)]
    )
    np.testing.assert_array_equal(classifier.predict_proba(queries), alone)
    classifier.save(tmp_path / "fitted")
    for again in (pickle.loads(pickle.dumps(classifier)), SimpleCNAPSClassifier.load(tmp_path / "fitted")):
        np.testing.assert_allclose(again.predict_proba(queries, transductive=True), together, rtol=1e-5)
