"""Unlabelled examples: memberships, shares, means and covariances against plain loops over dense matrices."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fewshot_mahalanobis import RegularizedCovariance
from fewshot_mahalanobis.gaussians.pool import Pool, PooledGaussians
from fewshot_mahalanobis.gaussians.temperature import temperature_of_confidence
from fewshot_mahalanobis.gaussians.unlabelled import memberships
from fewshot_mahalanobis.heads import AutoHead, MahalanobisHead
from tests.drawn_tasks import make_task


def memberships_by(head, x, y, u):
    """Memberships of unlabelled examples as this head finds them."""
    return memberships(head.unlabelled_settings(x, y, None), x, y, None, u)


def softmax(row):
    e = np.exp(row - row.max())
    return e / e.sum()


def naive_weights(r, counts):
    """What each unlabelled example counts in each class, in labelled ones."""
    w = np.zeros_like(r)
    for k, n in enumerate(counts):
        each = min(0.3, n * min(0.15, 3 * len(counts) / max(r.sum(), 1e-9)))
        w[:, k] = each * r[:, k]
        if w[:, k].sum() > 1.5 * n:
            w[:, k] *= 1.5 * n / w[:, k].sum()
    return w


def naive_means(x, y, u, r, counts):
    w = naive_weights(r, counts)
    totals = counts + w.sum(axis=0)
    return np.array([(n * x[y == k].mean(0) + w[:, k] @ u) / totals[k] for k, n in enumerate(counts)]), totals


def naive_shared(x, y, u, r, means, settings):
    """S, or S' where every class has one example."""
    k = y.max() + 1
    if settings.shared == "within":
        away = np.array([p - x[y == c].mean(0) for p, c in zip(x, y)])
        return away.T @ away / (len(x) - k)
    shared = np.cov(x.T)
    if len(x) > k or r.sum() == 0:
        return shared
    scatter = sum(r[i, c] * np.outer(u[i] - means[c], u[i] - means[c]) for i in range(len(u)) for c in range(k))
    return ((len(x) - 1) * shared + 0.02 * scatter) / (len(x) - 1 + 0.02 * r.sum())


def naive_distance(q, means, totals, precision, settings):
    centre, b = means.mean(0), settings.spread
    d = np.zeros((len(q), len(means)))
    for k, n in enumerate(totals):
        away = q - (centre + n * b / (n * b + 1) * (means[k] - centre))
        ratio = 1 + 1 / (n + 1 / b)
        d[:, k] = np.einsum("id,de,ie->i", away, precision, away) / ratio + settings.freedom * np.log(ratio)
    return d


def naive_memberships(settings, x, y, u, priors=None):
    counts = np.bincount(y).astype(float)
    r = np.zeros((len(u), len(counts)))
    for step in range(9):
        means, totals = naive_means(x, y, u, r, counts)
        if step % 3 == 0:
            shared = naive_shared(x, y, u, r, means, settings)
            precision = np.linalg.inv(shared + settings.beta * np.eye(x.shape[1]))
        distance = naive_distance(u, means, totals, precision, settings)
        shares = (
            np.full(len(counts), 1 / len(counts)) if not r.any() else (r.sum(0) / r.sum() + 0.7 / len(counts)) / 1.7
        )
        logits = -settings.scale * distance + np.log(shares if priors is None else priors)
        nearest = distance.min(axis=1)
        near = np.minimum(1, 1.2 * np.sort(nearest)[(len(u) - 1) // 2] / nearest) ** 8
        r = near[:, None] * np.array([softmax(row) for row in logits])
    return np.where(r >= 1e-3, r, 0)


def powered(features, power):
    return (np.sign(f) * np.abs(f) ** power for f in (f.double().numpy() for f in features))


@pytest.mark.parametrize("width", [3, 60])  # more and fewer than the examples
@pytest.mark.parametrize("shots", [[1, 1, 1], [5, 5, 5], [1, 2, 7]])
@pytest.mark.parametrize(("power", "priors"), [(1.0, None), (0.5, [0.6, 0.3, 0.1])])
def test_memberships_and_logits_equal_a_plain_loop(power, priors, shots, width):
    x, y, u = make_task(0, shots, width, 30)
    x, u = (x.abs(), u.abs()) if power < 1 else (x, u)
    settings = dataclasses.replace(AutoHead().fit(x, y).settings, power=power)
    known = None if priors is None else torch.tensor(priors, dtype=torch.float64).log()
    found = memberships(settings, x, y, None, u, known)
    (px, pu), labels = powered((x, u), power), y.numpy()
    expected = naive_memberships(settings, px, labels, pu, priors)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert found.sum(dim=1).max() <= 1 + 1e-6

    counts = np.bincount(labels).astype(float)
    means, totals = naive_means(px, labels, pu, expected, counts)
    precision = np.linalg.inv(
        naive_shared(px, labels, pu, expected, means, settings) + settings.beta * np.eye(px.shape[1])
    )
    logits = AutoHead(settings).logits(AutoHead(settings).fit_pool(x, y, None, Pool(u, found)), u)
    np.testing.assert_allclose(
        logits, -settings.scale * naive_distance(pu, means, totals, precision, settings), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("shots", [[1, 1, 1], [4, 6, 1]])
@pytest.mark.parametrize("width", [4, 50])
def test_class_covariances_stay_while_their_means_move(width, shots):
    x, y, u = (t.double() if t.is_floating_point() else t for t in make_task(1, shots, width, 12))
    r = torch.rand(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(dim=1)
    r[:, 0] = 0  # a class that gets none
    head = MahalanobisHead(RegularizedCovariance(2.0))
    state = head.fit_pool(x, y, None, Pool(u, r))
    found, covariance = head.logits(state, u).numpy(), state.covariance().numpy()
    x, y, u, r = x.numpy(), y.numpy(), u.numpy(), r.numpy()
    counts = np.bincount(y).astype(float)
    means, _ = naive_means(x, y, u, r, counts)
    shared = np.cov(x.T)
    if max(shots) == 1:
        scatter = sum(r[i, c] * np.outer(u[i] - means[c], u[i] - means[c]) for i in range(12) for c in range(3))
        shared = (2 * shared + 0.02 * scatter) / (2 + 0.02 * r.sum())
    for k, n in enumerate(counts):
        own = np.cov(x[y == k].T) if n > 1 else np.zeros_like(shared)
        expected = n / (n + 1) * own + 1 / (n + 1) * shared + 2 * np.eye(width)
        np.testing.assert_allclose(covariance[k], expected, rtol=1e-8, atol=1e-8)
        difference = u - means[k]
        distance = np.einsum("id,de,ie->i", difference, np.linalg.inv(expected), difference)
        np.testing.assert_allclose(found[:, k], -distance, rtol=1e-6)


def test_pool_without_memberships_changes_nothing():
    x, y, u = make_task(2, [3, 1, 2], 20)
    nothing = Pool(u, torch.zeros(len(u), 3))
    for head in (AutoHead(), MahalanobisHead()):
        alone = head.logits(head.fit(x, y), u)
        torch.testing.assert_close(head.logits(head.fit_pool(x, y, None, nothing), u), alone, rtol=1e-6, atol=1e-6)
    assert nothing.shares().tolist() == pytest.approx([1 / 3] * 3)


def test_shares_follow_the_examples_but_no_class_vanishes():
    one_hot = torch.eye(4)[torch.tensor([0] * 30 + [1] * 10)]
    shares = Pool(torch.zeros(40, 2), one_hot).shares()
    assert shares.tolist() == pytest.approx([(0.75 + 0.175) / 1.7, (0.25 + 0.175) / 1.7, 0.175 / 1.7, 0.175 / 1.7])


def test_memberships_do_not_depend_on_the_order_of_the_examples():
    x, y, u = make_task(3, [1, 2, 3], 30)
    order = torch.randperm(len(u), generator=torch.Generator().manual_seed(0))
    head = AutoHead()
    torch.testing.assert_close(memberships_by(head, x, y, u[order]), memberships_by(head, x, y, u)[order])


def test_copies_of_a_labelled_example_count_once_beside_unlabelled_ones():
    x, y, u = make_task(4, [2, 2], 20)
    groups = torch.tensor([0, 1, 2, 3, 0, 0])
    doubled, labels = torch.cat([x, x[:1], x[:1]]), torch.cat([y, y[:1], y[:1]])
    settings = AutoHead().fit(x, y).settings
    pool = Pool(u, torch.nn.functional.one_hot(torch.arange(20) % 2).float())
    state = AutoHead(settings).fit_pool(doubled, labels, groups, pool)
    effective = torch.tensor([2.0, 2.0], dtype=torch.float64)
    effective[y[0]] = 16 / 10  # (3 + 1)^2 / (3^2 + 1^2)
    expected = effective + pool.weights(effective).sum(dim=0)
    torch.testing.assert_close(state.counts, expected)


def test_an_example_far_from_every_class_hardly_counts():
    x, y, u = make_task(5, [5, 5], 20)
    u = torch.cat([u, 50 + u[:1]])
    found = memberships_by(AutoHead(), x, y, u)
    assert found[-1].sum() < 1e-3
    assert found[:-1].sum(dim=1).median() == pytest.approx(1.0)


def test_unlabelled_features_of_another_width_or_with_nan_are_refused():
    x, y, u = make_task(6, [2, 2], 4)
    with pytest.raises(ValueError, match="unlabelled features have 3 columns, but the support features had 4"):
        memberships_by(AutoHead(), x, y, u[:, :3])
    u[7, 1] = torch.nan
    with pytest.raises(ValueError, match="row 7 of unlabelled features holds NaN"):
        memberships_by(MahalanobisHead(), x, y, u)


def test_exported_head_of_pooled_gaussians_has_the_same_logits():
    for shots, width in (([1, 1, 1], 200), ([4, 4], 10)):
        x, y, u = make_task(7, shots, width, 40)
        for head in (AutoHead(), MahalanobisHead()):
            settled = head.settled(x, y)
            state = settled.fit_pool(x, y, None, Pool(u, memberships_by(settled, x, y, u)))
            found, expected = settled.export(state)(u), settled.logits(state, u)
            torch.testing.assert_close(found, expected.float(), rtol=1e-3, atol=1e-3)


def test_pooled_gaussians_have_the_covariances_that_their_distances_use():
    x, y, u = (t.double() if t.is_floating_point() else t for t in make_task(8, [2, 3], 6, 15))
    pool = Pool(u, memberships_by(AutoHead(), x, y, u))
    gaussians = PooledGaussians(x, y, RegularizedCovariance(1.0).settings, pool, torch.tensor([2.0, 3.0]).double())
    away = u[:, None] - gaussians.means
    distance = torch.einsum("ikd,kde,ike->ik", away, gaussians.precision(), away)
    torch.testing.assert_close(gaussians.squared_distance(u), distance)


def test_temperature_gives_the_wanted_confidence_and_never_sharpens():
    logits = 9 * torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    temperature = temperature_of_confidence(logits, 0.6)
    assert temperature > 1
    assert float((logits / temperature).softmax(dim=1).amax(dim=1).mean()) == pytest.approx(0.6, abs=1e-6)
    assert temperature_of_confidence(logits, 0.9999) == 1
    assert temperature_of_confidence(logits, 0.25) == 1  # which no temperature reaches
    assert temperature_of_confidence(torch.zeros(3, 2), 0.6) == 1
