"""Each method on features against a plain loop or an example worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.baselines import METHODS
from tests.drawn_tasks import make_task

UNTRAINED = [name for name, method in METHODS.items() if not method.needs_training]


@pytest.fixture
def task() -> tuple[Tensor, Tensor, Tensor]:
    """Support features (11, 16) of four classes, labels, and queries (6, 16)."""
    return make_task(0, [1, 5, 2, 3], 16, queries=6)


def make(name: str, **settings: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return METHODS[name](**settings)


@pytest.mark.parametrize("name", UNTRAINED)
def test_a_method_has_the_interface_and_the_checks_of_a_head(name: str, task: tuple[Tensor, Tensor, Tensor]) -> None:
    features, labels, queries = task
    method = make(name)
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
        attention = [math.exp(float(F.cosine_similarity(x, query, dim=0))) for x in features]
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
