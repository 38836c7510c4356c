"""ONNX Runtime as the engine of a network: when it is chosen, and that it answers as PyTorch does."""

from __future__ import annotations

import copy
import pickle
import platform
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fewshot_mahalanobis import AdaptedFeatures, SimpleCNAPS, SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.networks import engine as engine_module
from fewshot_mahalanobis.networks import task
from fewshot_mahalanobis.networks.engine import ONNX_RUNTIME, PYTORCH, choose_engine
from fewshot_mahalanobis.networks.simple_cnaps import film_parameters
from fewshot_mahalanobis.networks.task import AdaptedNetwork
from tests.forked import forked_pool, needs_fork
from tests.tiny import SUPPORT_LABELS, adapting_model, drawn, pictures, tiny_model

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("narrow_resnet18")

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def small_default() -> SimpleCNAPS:
    return load_checkpoint("default").at_size(64)


def images(n: int, height: int = 32, width: int = 32) -> Tensor:
    return torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1


def with_engine(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose this one for the networks made from here on."""
    monkeypatch.setattr(task, "choose_engine", lambda *arguments: engine)


@pytest.fixture
def on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.mark.usefixtures("on_x86")
def test_the_engine_is_chosen_by_network_device_precision_and_number_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    network = adapting_model().feature_extractor.for_inference()
    assert choose_engine(network, CPU, torch.float32) == ONNX_RUNTIME
    assert choose_engine(network, CPU, torch.float32, pixels=1000 * 224**2) == ONNX_RUNTIME
    assert choose_engine(network, CPU, torch.float32, pixels=224**2) == PYTORCH
    assert choose_engine(network, CPU, torch.bfloat16) == PYTORCH
    assert choose_engine(network, GPU, torch.float32) == PYTORCH
    assert choose_engine(tiny_model().feature_extractor.for_inference(None), CPU, torch.float32) == PYTORCH
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert choose_engine(network, CPU, torch.float32) == PYTORCH


@pytest.mark.usefixtures("on_x86")
def test_without_onnx_runtime_it_is_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "find_spec", lambda name: None)
    assert choose_engine(adapting_model().feature_extractor.for_inference(), CPU, torch.float32) == PYTORCH


@pytest.mark.parametrize("make", [small_default, adapting_model])
def test_features_are_those_of_pytorch(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    support = images(6, model.image_size, model.image_size)
    film = film_parameters(model, support)
    found, fingerprints = {}, set()
    for engine in (PYTORCH, ONNX_RUNTIME):
        with_engine(engine, monkeypatch)
        network = AdaptedNetwork(model.feature_extractor, film)
        assert network.engine == engine
        fingerprints.add(network.fingerprint())
        found[engine] = [network.features(images(5, *size)) for size in ((64, 64), (47, 70))]
    for one, other in zip(*found.values(), strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype == torch.float32
        assert (one - other).abs().max() < 1e-5 * one.abs().max()
    assert len(fingerprints) == 2  # features that are remembered are not mixed


def test_labels_and_probabilities_are_those_of_pytorch_and_the_classifier_names_its_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, queries = {}, [*drawn(["red", "green", "blue", "red"], 3), *pictures(20, 1)]
    for engine in (PYTORCH, ONNX_RUNTIME):
        with_engine(engine, monkeypatch)
        classifier = SimpleCNAPSClassifier(small_default(), device="cpu", precision="float32", unknown_label="none",
                                           false_rejection_rate=0.3)  # fmt: skip
        found[engine] = classifier.fit(drawn(SUPPORT_LABELS, 0), SUPPORT_LABELS).predict_all(queries)
        assert classifier.engine_ == engine
    one, other = found.values()
    assert (one.labels == other.labels).all()
    assert np.abs(one.probabilities - other.probabilities).max() < 1e-5


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> AdaptedNetwork:
    with_engine(ONNX_RUNTIME, monkeypatch)
    return AdaptedNetwork(adapting_model().feature_extractor)


def test_threads_that_need_the_network_at_once_get_the_same_bits(network: AdaptedNetwork) -> None:
    expected = AdaptedNetwork(adapting_model().feature_extractor).features(images(6))
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(network.features, [images(6)] * 16)]
    assert all(torch.equal(features, expected) for features in found)


def test_copies_and_pickles_compute_the_same(network: AdaptedNetwork) -> None:
    expected = network.features(images(3))
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network)), copy.copy(network)):
        assert torch.equal(other.features(images(3)), expected)


def test_an_estimator_that_was_pickled_keeps_its_engine(network: AdaptedNetwork) -> None:
    features = AdaptedFeatures(adapting_model(), device="cpu", precision="float32").fit(pictures(4, 1))
    again = pickle.loads(pickle.dumps(features))
    assert (features.engine_, again.engine_) == (ONNX_RUNTIME, ONNX_RUNTIME)
    np.testing.assert_array_equal(again.transform(pictures(3, 2)), features.transform(pictures(3, 2)))


@needs_fork
def test_a_forked_process_goes_on_with_the_session(network: AdaptedNetwork) -> None:
    expected = network.features(images(3))
    global _shared
    _shared = network
    with forked_pool(1) as pool:
        assert torch.equal(pool.apply_async(_features_in_child).get(timeout=60), expected)


_shared: AdaptedNetwork


def _features_in_child() -> Tensor:
    return _shared.features(images(3)).clone()
