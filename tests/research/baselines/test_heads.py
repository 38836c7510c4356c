"""Each method on features against a plain loop or an example worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.research.baselines import METHODS, tpn
from tests.drawn_tasks import make_task

UNTRAINED = {name for name, method in METHODS.items() if not method.needs_training}


@pytest.fixture
def task() -> tuple[Tensor, Tensor, Tensor]:
    """Support features (11, 16) of four classes, labels, and queries (6, 16)."""
    return make_task(0, [1, 5, 2, 3], 16, queries=6)


def make(name: str, in_features: int | None = 16) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return METHODS[name]() if in_features is None else METHODS[name].for_model({}, in_features)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_the_interface_and_the_checks_of_a_head(name: str, task: tuple[Tensor, Tensor, Tensor]) -> None:
    features, labels, queries = task
    method = make(name, None if name in UNTRAINED else 16)
    logits = method(features, labels, queries)
    assert logits.shape == (6, 4)
    torch.testing.assert_close(method.logits(method.fit(features, labels), queries), logits)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(method(features, labels, queries), logits)
    with pytest.raises(ValueError, match="class 1 has no support example"):
        method.fit(features, labels.where(labels != 1, 3))
    with pytest.raises(ValueError, match="query features have 15 columns"):
        method.logits(method.fit(features, labels), queries[:, 1:])
    renamed = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(method(features, renamed[labels], queries)[:, renamed], logits, rtol=1e-4, atol=1e-5)


def test_the_nearest_neighbour_is_that_of_the_largest_cosine(task: tuple[Tensor, Tensor, Tensor]) -> None:
    features, labels, queries = task
    for query, row in zip(queries, make("knn")(*task), strict=True):
        nearest = max(range(len(labels)), key=lambda i: float(F.cosine_similarity(features[i], query, dim=0)))
        assert row.exp().tolist() == F.one_hot(labels[nearest], 4).tolist()


def test_protonet_takes_the_squared_distance_to_the_mean() -> None:
    features = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 4.0]])
    logits = make("protonet")(features, torch.tensor([0, 0, 1]), torch.tensor([[1.0, 1.0]]))
    assert logits.tolist() == [[-1.0, -10.0]]


def test_matchingnet_adds_up_the_attention_to_each_class(task: tuple[Tensor, Tensor, Tensor]) -> None:
    features, labels, queries = task
    for query, row in zip(queries, make("matchingnet")(*task), strict=True):
        attention = [math.exp(float(query @ (x / x.norm()))) for x in features]
        for k, logit in enumerate(row.tolist()):
            of_class = sum(a for a, label in zip(attention, labels.tolist(), strict=True) if label == k)
            assert logit == pytest.approx(math.log(of_class / sum(attention)), abs=1e-5)


def test_finetune_takes_the_steps_of_adam(task: tuple[Tensor, Tensor, Tensor]) -> None:
    features, labels, queries = task
    features, queries = features.double(), queries.double()
    parameters = torch.zeros(4, 17, dtype=torch.float64)  # W and b, the gradient of the mean cross-entropy by hand
    mean, square = torch.zeros_like(parameters), torch.zeros_like(parameters)
    inputs = torch.cat([features, torch.ones(len(features), 1)], dim=1)
    for step in range(1, 201):
        error = (inputs @ parameters.T).softmax(1) - F.one_hot(labels, 4)
        gradient = error.T @ inputs / len(labels)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        parameters -= 0.01 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
    expected = queries @ parameters[:, :16].T + parameters[:, 16]
    torch.testing.assert_close(make("finetune")(features, labels, queries), expected)


def test_tpn_spreads_labels_to_a_fixed_point(task: tuple[Tensor, Tensor, Tensor]) -> None:
    features, labels, queries = task
    method = make("tpn")
    method.neighbours = 3
    points = torch.cat([features, queries]).double()
    n = len(points)
    squared = [[float((a - b).square().sum()) for b in points] for a in points]
    nearest = sum(min(row[j] for j in range(n) if j != i) for i, row in enumerate(squared)) / n
    weights = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        others = sorted((j for j in range(n) if j != i), key=lambda j: squared[i][j])
        for j in others[:3]:
            weights[i, j] = weights[j, i] = math.exp(-squared[i][j] / (2 * tpn.LENGTH_SCALE**2 * nearest))
    spread = weights / weights.sum(1).outer(weights.sum(1)).sqrt()
    start = torch.cat([F.one_hot(labels), torch.zeros(len(queries), 4)]).double()
    found = start.clone()
    for _ in range(5000):
        found = 0.99 * spread @ found + start
    torch.testing.assert_close(method(*task).double(), found[len(labels) :], rtol=1e-3, atol=1e-6)


def test_gaussian_protonet_weighs_images_and_directions(task: tuple[Tensor, Tensor, Tensor]) -> None:
    features, labels, queries = task
    method = make("gaussian_protonet").requires_grad_(False)
    sureness = [1 + torch.log1p(torch.exp(method.raw.weight @ x + method.raw.bias)) for x in features]
    for query, row in zip(queries, method(*task), strict=True):
        for k, logit in enumerate(row.tolist()):
            mine = [i for i, label in enumerate(labels.tolist()) if label == k]
            total = sum(sureness[i] for i in mine)
            centre = sum(sureness[i] * features[i] for i in mine) / total
            assert logit == pytest.approx(-float((total / len(mine) * (query - centre) ** 2).sum()), rel=1e-4)


def test_relationnet_scores_the_pair_of_class_and_query(task: tuple[Tensor, Tensor, Tensor]) -> None:
    features, labels, queries = task
    method = make("relationnet").eval()
    scores = method(*task)
    for i, query in enumerate(queries):
        for k in range(4):
            pair = torch.cat([features[labels == k].mean(dim=0), query])
            torch.testing.assert_close(scores[i, k], method.relation(pair[None])[0, 0])
    right, scores = [3, 0, 1, 1, 2, 0], scores.detach()
    error = sum((float(scores[i, k]) - (k == right[i])) ** 2 for i in range(6) for k in range(4)) / 24
    assert method.loss(scores, torch.tensor(right)).item() == pytest.approx(error)


def test_relationnet_learns_to_compare_features_that_are_never_negative() -> None:
    method = make("relationnet", 128)
    optimizer, right = torch.optim.Adam(method.parameters(), lr=1e-3), []
    for seed in range(150):
        features, labels, _ = make_task(seed, [4] * 5, 128)
        order = labels.argsort(stable=True)
        features, query = features[order].relu(), torch.arange(20) % 4 == 0
        labels = labels[order]
        logits = method(features[~query], labels[~query], features[query])
        optimizer.zero_grad()
        method.loss(logits, labels[query]).backward()
        optimizer.step()
        right.append(float((logits.argmax(1) == labels[query]).float().mean()))
    assert sum(right[-30:]) / 30 > 0.5, "chance is 0.2"


def test_tadam_scales_the_logits_of_protonet(task: tuple[Tensor, Tensor, Tensor]) -> None:
    method = make("tadam")
    torch.testing.assert_close(method(*task), make("protonet")(*task))
    method.log_alpha.data.fill_(math.log(3))
    torch.testing.assert_close(method(*task), 3 * make("protonet")(*task))


def test_protomaml_begins_as_protonet(task: tuple[Tensor, Tensor, Tensor]) -> None:
    method, expected = make("protomaml"), make("protonet")(*task)
    method.steps = 0
    logits = method(*task)
    torch.testing.assert_close(logits - logits[:, :1], expected - expected[:, :1], rtol=1e-4, atol=1e-3)


def test_maml_takes_gradient_steps_on_the_last_layer(task: tuple[Tensor, Tensor, Tensor]) -> None:
    features, labels, queries = task
    weight, bias = torch.zeros(4, 16), torch.zeros(4)
    for _ in range(10):
        error = ((features @ weight.T + bias).softmax(1) - F.one_hot(labels, 4)) / len(labels)
        weight, bias = weight - 0.01 * error.T @ features, bias - 0.01 * error.sum(0)
    torch.testing.assert_close(make("maml")(*task), queries @ weight.T + bias, rtol=1e-4, atol=1e-4)


def test_leo_moves_codes_and_then_weights(task: tuple[Tensor, Tensor, Tensor]) -> None:
    features, labels, queries = task
    method = make("leo")
    unit = F.normalize(features, dim=1)
    encoded = [method.encoder(x) for x in unit]
    relations = [sum(method.relation(torch.cat([a, b])) for b in encoded) / len(encoded) for a in encoded]
    codes = torch.stack(
        [torch.stack([r for r, y in zip(relations, labels, strict=True) if y == k]).mean(0) for k in range(4)]
    )
    with torch.no_grad():
        weight = codes @ method.decoder.weight.T
        for step in range(10):
            error = ((unit @ weight.T).softmax(1) - F.one_hot(labels, 4)) / len(labels)
            if step < 5:
                codes = codes - method.code_rate * (error.T @ unit @ method.decoder.weight)
                weight = codes @ method.decoder.weight.T
            else:
                weight = weight - method.weight_rate * (error.T @ unit)
        torch.testing.assert_close(method(*task), F.normalize(queries, dim=1) @ weight.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    sorted(METHODS.keys() - {"knn", "finetune", "maml"}),  # first order from zero: no gradient to the support features
)
def test_every_weight_gets_a_gradient(name: str, task: tuple[Tensor, Tensor, Tensor]) -> None:
    features, labels, queries = task
    features.requires_grad_()
    method = make(name)
    method.loss(method(features, labels, queries), torch.tensor([3, 0, 1, 1, 2, 0])).backward()
    for weight in method.parameters():
        assert weight.grad is not None
        assert weight.grad.isfinite().all()
    assert features.grad is not None
    assert features.grad.abs().max() > 0
