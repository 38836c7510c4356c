"""Networks as parts of graphs: FiLM parameters as an input, and the graph that makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fewshot_mahalanobis import SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.export.network import FilmedNetwork, FilmParameters, SupportGraph, film_vector, support_graph
from fewshot_mahalanobis.networks.backbone import Backbone
from fewshot_mahalanobis.networks.simple_cnaps import film_parameters
from fewshot_mahalanobis.networks.task import AdaptedNetwork
from tests.tiny import adapting_model

pytestmark = pytest.mark.usefixtures("narrow_resnet18")


class Transformed(nn.Module):
    """A convolution with a BatchNorm, and a LayerNorm, which no convolution can absorb."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.norm = nn.Conv2d(3, 8, 5, stride=3), nn.BatchNorm2d(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.bn(self.conv(x)).relu().mean((2, 3)))


def small_default() -> SimpleCNAPS:
    return load_checkpoint("default").at_size(64)


def own_network() -> SimpleCNAPS:
    backbone = Backbone.from_module(
        Transformed(), image_size=32, mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.3), positions=["bn", "norm"]
    )
    model = SimpleCNAPS(adaptation="film", image_size=32, frozen_features=True, backbone=backbone)
    for name, parameter in model.named_parameters():
        if "film_generator" in name or "feature_encoder" in name:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def images(model: SimpleCNAPS, n: int = 5) -> Tensor:
    side = model.image_size
    colours = torch.rand(n, 3, 1, 1, generator=torch.Generator().manual_seed(1))
    noise = torch.rand(n, 3, side, side, generator=torch.Generator().manual_seed(2))
    return (colours + noise - 1).clamp(-1, 1)


MODELS = pytest.mark.parametrize("make", [small_default, adapting_model, own_network])


@MODELS
def test_features_by_a_vector_of_film_parameters_are_those_of_the_adapted_network(make: Any) -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = make()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        x = images(model)
        film = film_parameters(model, x)
        network = FilmedNetwork(model).eval()
        for vector, parameters in ((film_vector(film), film), (None, None)):
            expected = AdaptedNetwork(model.feature_extractor, parameters, projection=model.projection).features(x)
            assert (network(x, vector) - expected).abs().max() < 1e-4 * expected.abs().max()
        assert not torch.allclose(network(x), network(x, film_vector(film)), rtol=1e-2)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@MODELS
def test_film_parameters_of_a_set_are_those_of_the_model(make: Any) -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = make()
        for norm in model.set_encoder.norms:  # scales of both signs
            norm.weight.copy_(torch.linspace(-1, 1, len(norm.weight)))
        x = images(model)
        expected = film_vector(film_parameters(model, x))
        features, small, read = SupportGraph(model)(x)
        found = FilmParameters(model)(small, read)
        as_pretrained = AdaptedNetwork(model.feature_extractor, projection=model.projection).features(x)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (features - as_pretrained).abs().max() < 1e-4 * as_pretrained.abs().max()


@pytest.mark.parametrize("adapts", [True, False])
@pytest.mark.parametrize("make", [small_default, adapting_model])
@torch.no_grad()
def test_the_graph_of_a_page_that_is_taught_computes_what_its_module_does(make: Any, adapts: bool) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = make()
    model.config["encoder_size"] = 32  # the default's images are larger
    x = images(model, 1)
    graph = support_graph(model, adapts=adapts)
    assert graph is not None
    inputs = {"images": x}
    if adapts:
        inputs["film"] = film_vector(film_parameters(model, images(model)))
    session = onnxruntime.InferenceSession(graph.model(with_weights=True))
    found = session.run(["features", "small", "read"], {name: value.numpy() for name, value in inputs.items()})
    for value, expected in zip(found, SupportGraph(model)(*inputs.values()), strict=True):
        assert value.shape == expected.shape
        assert np.abs(value - expected.numpy()).max() < 1e-4 * expected.abs().max()


def test_other_networks_have_no_such_graph() -> None:
    assert support_graph(own_network(), adapts=True) is None


def test_an_auto_regressive_model_has_no_graph_of_its_film_parameters() -> None:
    with pytest.raises(ValueError, match="choose a checkpoint of another kind"):
        FilmParameters(SimpleCNAPS(adaptation="auto-regressive", image_size=32))
