"""LITE: the logits are the whole task's, the gradient is right on average over the subsets, memory is bounded."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from fewshot_mahalanobis import SimpleCNAPS
from fewshot_mahalanobis.networks.simple_cnaps import film_parameters
from fewshot_mahalanobis.research.training.bounded_memory import lite_logits

pytestmark = pytest.mark.training

SIZE = 32
LABELS = torch.tensor([0, 1, 1, 1])
QUERY_LABELS = torch.tensor([0, 1])


def small_model(**settings):
    """With FiLM of a size that shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SimpleCNAPS(image_size=SIZE, beta=20.0, **settings)
        with torch.no_grad():
            for name, scales in model.film_generator.named_parameters():
                if ".scales." in name:
                    scales.normal_(0, 0.1)
    return model.train()


def images(n, seed):
    return torch.rand(n, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def gradient(model, logits):
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = torch.nn.functional.cross_entropy(logits, QUERY_LABELS)
    found = torch.autograd.grad(loss, parameters)
    return torch.cat([g.flatten() for g in found]).double()


def relative_error(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("settings", [{"projection": True}, {"adaptation": "auto-regressive"}], ids=str)
def test_the_mean_of_lite_s_gradients_over_all_subsets_is_the_gradient(settings):
    """|H| = 2 of 3: three subsets, all equally likely; one alone is far from the gradient."""
    model, support, labels, query = small_model(**settings), images(3, 1), LABELS[:3], images(2, 2)
    logits = model(support, labels, query)
    expected = gradient(model, logits)
    gradients = []
    for subset in combinations(range(3), 2):
        order = torch.tensor([*subset, *(i for i in range(3) if i not in subset)])
        found = lite_logits(model, support[order], labels[order], query, 2)
        torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3)
        gradients.append(gradient(model, found))
    assert relative_error(torch.stack(gradients).mean(0), expected) < 1e-3
    assert min(relative_error(one, expected) for one in gradients) > 1e-2


@pytest.mark.parametrize("adaptation", ["film", "auto-regressive"])
def test_film_parameters_in_chunks_and_their_gradient_are_those_of_the_whole_set(adaptation):
    model, support = small_model(adaptation=adaptation), images(4, 1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    weights = None
    results = []
    for film in (film_parameters(model, support), film_parameters(model, support, 2)):
        vector = torch.cat(list(film.tensors().values()))
        if weights is None:
            weights = torch.randn(len(vector), generator=torch.Generator().manual_seed(3))
        found = torch.autograd.grad((vector * weights).sum(), parameters)
        results.append((vector, torch.cat([g.flatten() for g in found])))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-4, atol=1e-5)
    assert relative_error(results[1][1], results[0][1]) < 1e-3


def test_a_subset_of_the_whole_support_set_gives_the_gradient():
    model, support, query = small_model(), images(4, 1), images(2, 2)
    expected = gradient(model, model(support, LABELS, query))
    assert relative_error(gradient(model, lite_logits(model, support, LABELS, query, 9)), expected) < 1e-4


def held_for_the_gradient(run):
    """Bytes of activations that wait for the backward pass; weights are not counted."""
    held = {}

    def keep(tensor):
        if not isinstance(tensor, torch.nn.Parameter) and tensor.ndim == 4:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    assert result.requires_grad
    return sum(held.values())


def test_lite_holds_the_activations_of_its_subset_alone():
    model, query = small_model(), images(2, 2)
    small, large = images(8, 1), images(16, 1)
    labels = torch.arange(2).repeat(8)
    plain = [held_for_the_gradient(lambda s=s: model(s, labels[: len(s)], query)) for s in (small, large)]
    lite = [
        held_for_the_gradient(lambda s=s: lite_logits(model, s, labels[: len(s)], query, 2)) for s in (small, large)
    ]
    assert lite[1] < plain[1] / 4
    # What a further support image adds: the maps between the layers of the set encoder, a small part of the whole.
    assert lite[1] - lite[0] < (plain[1] - plain[0]) / 8
