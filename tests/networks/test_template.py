"""The graph of a network, in ONNX Runtime, against the network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fewshot_mahalanobis import SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.template import (
    FLOAT32,
    INT64,
    Graph,
    add_network,
    as_array,
    film_layers,
    has_template,
    network_graph,
)
from tests.tiny import adapting_model, tiny_model

onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("narrow_resnet18")


def default_of(size: int) -> SimpleCNAPS:
    return load_checkpoint("default").at_size(size)


def drawn_film(model: SimpleCNAPS) -> Film:
    """FiLM parameters far from the identity."""
    generator = torch.Generator().manual_seed(3)
    return Film(
        {
            position: (1 + 0.3 * torch.randn(width, generator=generator), 0.3 * torch.randn(width, generator=generator))
            for position, width in model.feature_extractor.film_positions.items()
        }
    )


def images(n: int, size: int) -> Tensor:
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(1)) * 2 - 1


def answers(graph: Graph, inputs: dict[str, Any], *, with_weights: bool) -> list[NDArray[Any]]:
    """What ONNX Runtime computes, with the weights in the file or given from memory."""
    options = onnxruntime.SessionOptions()
    if not with_weights:
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(as_array(value)) for value in graph.weights.values()]
        options.add_external_initializers([*graph.weights], values)
    session = onnxruntime.InferenceSession(graph.model(with_weights=with_weights), options)
    found: list[NDArray[Any]] = session.run(None, inputs)
    return found


@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize(
    "make", [lambda: default_of(64), lambda: default_of(75), adapting_model], ids=["even", "odd", "resnet18"]
)
@torch.no_grad()
def test_the_graph_of_an_adapted_network_computes_its_features(make: Any, with_weights: bool) -> None:
    model = make()
    network = model.feature_extractor.for_inference(drawn_film(model))
    x = images(3, model.image_size)
    expected = network(x).numpy()
    (found,) = answers(
        network_graph(network, model.image_size, model.image_size), {"images": x.numpy()}, with_weights=with_weights
    )
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    assert not np.allclose(expected, model.feature_extractor(x).numpy(), rtol=0.01)


@pytest.mark.parametrize("make", [lambda: default_of(64), adapting_model], ids=["default", "resnet18"])
@torch.no_grad()
def test_film_parameters_in_the_graph_adapt_the_network_as_pretrained(make: Any) -> None:
    model = make()
    film, extractor = drawn_film(model), model.feature_extractor
    x = images(2, model.image_size)
    graph, network = Graph(), extractor.for_inference()
    layers = film_layers(extractor, network)
    pairs = {layers[position]: tuple(map(graph.constant, pair)) for position, pair in film.items()}
    name = graph.input("images", FLOAT32, [2, 3, model.image_size, model.image_size])
    for output, changed in (("adapted", pairs), ("pretrained", None)):
        graph.output(
            output, add_network(graph, network, name, (model.image_size, model.image_size), changed), FLOAT32, [2, "d"]
        )
    found = answers(graph, {"images": x.numpy()}, with_weights=True)
    for features, parameters in zip(found, (film, None), strict=True):
        expected = extractor.for_inference(parameters)(x).numpy()
        assert np.abs(features - expected).max() < 2e-5 * np.abs(expected).max()


def test_other_networks_have_no_template() -> None:
    assert not has_template(tiny_model().feature_extractor.for_inference(None))
    assert not has_template(nn.Identity())


def test_a_graph_is_a_valid_file() -> None:
    onnx = pytest.importorskip("onnx")
    graph = Graph()
    x = graph.input("x", FLOAT32, ["n", 2])
    branches = {}
    for name, factor in (("then_branch", 2.0), ("else_branch", -3.5)):
        branches[name] = branch = Graph(name)
        branch.output(f"{name}.y", branch.node("Mul", x, branch.constant(factor)), FLOAT32, ["n", 2])
    many = graph.node("Greater", graph.node("Size", x), graph.constant(300, INT64))  # 300 takes two bytes
    graph.output("y", graph.cut(graph.node("If", many, **branches), -5, -1, axis=0), FLOAT32, ["m", 2])
    onnx.checker.check_model(onnx.load_from_string(graph.model(with_weights=True)), full_check=True)
    for n, factor in ((200, 2.0), (20, -3.5)):
        rows = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
        (found,) = answers(graph, {"x": rows}, with_weights=True)
        np.testing.assert_array_equal(found, factor * rows[-5:-1])
