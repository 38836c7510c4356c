"""The features of a picture, bit for bit, whatever else is computed at the time."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from fewshot_mahalanobis import load_checkpoint
from fewshot_mahalanobis.networks import efficientnet, task
from fewshot_mahalanobis.networks.engine import ONNX_RUNTIME, PYTORCH
from fewshot_mahalanobis.networks.task import AdaptedNetwork

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")

SIZE = 40


ENGINES = pytest.mark.parametrize("engine", [PYTORCH, ONNX_RUNTIME])


@functools.cache
def network(checkpoint: str, engine: str = PYTORCH) -> AdaptedNetwork:
    if engine == ONNX_RUNTIME:
        pytest.importorskip("onnxruntime")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "choose_engine", lambda *arguments: engine)
        return AdaptedNetwork(load_checkpoint(checkpoint).at_size(SIZE).feature_extractor)


@functools.cache
def images() -> Tensor:
    return torch.rand(33, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 2 - 1


@functools.cache
def one_by_one(checkpoint: str, engine: str = PYTORCH) -> Tensor:
    return torch.cat([network(checkpoint, engine).features(image[None]) for image in images()])


@pytest.fixture(autouse=True)
def threads_as_before() -> None:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@ENGINES
@pytest.mark.parametrize("checkpoint", ["efficientnet-lite0", "resnet18"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_features_have_the_same_bits_for_any_batch_and_number_of_threads(checkpoint, threads, batch_size, engine):
    torch.set_num_threads(threads)
    assert torch.equal(network(checkpoint, engine).features(images(), batch_size), one_by_one(checkpoint, engine))


@pytest.mark.parametrize("images_at_a_time", [1, 3])
def test_features_have_the_same_bits_however_many_images_share_large_maps(images_at_a_time, monkeypatch):
    calls, expected = list[int](), one_by_one("efficientnet-lite0")
    stem = network("efficientnet-lite0").extractor.stem
    hook = stem.register_forward_hook(lambda module, arguments, output: calls.append(len(output)))
    monkeypatch.setattr(efficientnet, "_LARGEST_MAPS", images_at_a_time * 4 * 96 * (SIZE // 2) ** 2)
    features = network("efficientnet-lite0").features(images())
    hook.remove()
    assert torch.equal(features, expected)
    assert max(calls) == images_at_a_time


@ENGINES
@pytest.mark.parametrize("checkpoint", ["efficientnet-lite0", "resnet18"])
def test_features_have_the_same_bits_in_any_order_and_company(checkpoint, engine):
    torch.set_num_threads(2)
    order = torch.randperm(len(images()), generator=torch.Generator().manual_seed(1))[:16]
    assert torch.equal(network(checkpoint, engine).features(images()[order]), one_by_one(checkpoint, engine)[order])


@ENGINES
def test_a_picture_alone_has_the_same_bits_for_any_number_of_threads(engine):
    alone = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        alone.append(network("efficientnet-lite0", engine).features(images()[:1]))
    assert torch.equal(alone[0], alone[1])
    assert torch.equal(alone[0], alone[2])
