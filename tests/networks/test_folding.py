"""Convolutions that absorb BatchNorm, FiLM, a shortcut and an activation."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from fewshot_mahalanobis.networks.devices import without_cudnn
from fewshot_mahalanobis.networks.folding import Conv2dSame, FoldedConv, pointwise


@pytest.mark.parametrize("activation", ["none", "relu", "relu6"])
@pytest.mark.parametrize("with_shortcut", [True, False])
@pytest.mark.parametrize("groups", [1, 8])
def test_a_folded_convolution_is_convolution_norm_film_sum_and_activation(activation, with_shortcut, groups):
    rng = torch.Generator().manual_seed(0)
    conv, norm = nn.Conv2d(8, 8, 3, padding=1, groups=groups), nn.BatchNorm2d(8).eval()
    film = torch.randn(8, generator=rng), torch.randn(8, generator=rng)
    x, shortcut = (4 * torch.randn(2, 8, 9, 9, generator=rng) for _ in range(2))
    with torch.no_grad():
        wanted = norm(conv(x)) * film[0][:, None, None] + film[1][:, None, None]
        wanted = wanted + shortcut if with_shortcut else wanted
        wanted = {"none": wanted, "relu": wanted.relu(), "relu6": wanted.clamp(0, 6)}[activation]
        folded = FoldedConv(conv, norm, film, activation=activation)
        torch.testing.assert_close(folded(x, shortcut.clone() if with_shortcut else None), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [Conv2dSame, timm.layers.Conv2dSame])
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("sides", [(8, 8), (9, 9), (8, 9)])
def test_a_folded_convolution_pads_as_tensorflow_does(kind, kernel, sides):
    conv, norm = kind(4, 6, kernel, stride=2, bias=False), nn.BatchNorm2d(6).eval()
    x = torch.randn(2, 4, *sides, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        folded = FoldedConv(conv, norm)
        assert folded.pads_by_size
        torch.testing.assert_close(folded(x), norm(conv(x)), rtol=1e-4, atol=1e-5)


def test_another_class_of_that_name_is_not_taken_for_it():
    other = type("Conv2dSame", (nn.Conv2d,), {})(4, 6, 3, stride=2)
    assert not FoldedConv(other, nn.BatchNorm2d(6).eval()).pads_by_size


@pytest.mark.process
@pytest.mark.slow
def test_folding_needs_no_timm():
    code = (
        "import sys\nfrom torch import nn\n"
        "from fewshot_mahalanobis.networks.folding import Conv2dSame, FoldedConv\n"
        "assert FoldedConv(Conv2dSame(3, 4, 3, stride=2), nn.BatchNorm2d(4).eval()).pads_by_size\n"
        "assert 'timm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def folded(*, activation: str = "none") -> FoldedConv:
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(16, 24, 1, bias=False), nn.BatchNorm2d(24).eval()
    return FoldedConv(conv, norm, activation=activation)


def maps(count: int, side: int = 7, channels: int = 16) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(count, channels, side, side, generator=rng).contiguous(memory_format=torch.channels_last)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
@torch.no_grad()
def test_a_convolution_of_1x1_without_activation_takes_onednn_on_one_thread():
    """PyTorch by itself takes another one there for fewer than 16 images, with other bits."""
    threads, convolution, x = torch.get_num_threads(), folded(), maps(2)
    torch.set_num_threads(1)
    try:
        with torch.profiler.profile() as profile:
            convolution(x)
    finally:
        torch.set_num_threads(threads)
    names = {event.name for event in profile.events()}
    assert "mkldnn::_convolution_pointwise" in names
    assert not any("slow_conv2d" in name for name in names)


@torch.no_grad()
def test_one_convolution_reads_maps_of_several_sizes():
    convolution = folded(activation="relu")
    for side in (7, 15, 7, 8):
        x = maps(2, side)
        wanted = nn.functional.conv2d(x, convolution.weight, convolution.bias).relu()
        torch.testing.assert_close(convolution(x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
@torch.no_grad()
def test_the_order_of_the_weight_is_that_for_the_number_of_threads():
    """A kernel for two threads that gets the order for one may bring it into its own in every call, and slowly."""
    convolution, x, before = folded(), maps(2), torch.get_num_threads()
    kept = []
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            convolution(x)
            kept.append(dict(convolution._for_onednn))
    finally:
        torch.set_num_threads(before)
    assert [list(orders) for orders in kept] == [[1], [1, 2], [1, 2]]
    assert kept[0][1] is kept[2][1]


@torch.no_grad()
def test_a_convolution_that_moved_computes_with_its_new_weights():
    convolution, x = folded(), maps(2)
    convolution(x)
    convolution.double().float().apply(lambda module: module.weight.mul_(2))
    wanted = nn.functional.conv2d(x, convolution.weight, convolution.bias)
    torch.testing.assert_close(convolution(x), wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_folded_convolution_obeys_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert folded()(maps(2)).dtype == folded()(maps(2).bfloat16()).dtype == torch.bfloat16


@torch.no_grad()
def test_a_convolution_that_has_run_can_be_copied_and_pickled():
    convolution, x = folded(), maps(2)
    wanted = convolution(x)
    for other in (copy.deepcopy(convolution), pickle.loads(pickle.dumps(convolution))):
        assert torch.equal(other(x), wanted)


def test_a_matrix_product_is_a_convolution_of_1x1_with_its_gradients():
    x, weight, bias = torch.rand(3, 5, 4, 6) - 0.5, torch.rand(7, 5, 1, 1) - 0.5, torch.rand(7)
    results = []
    for convolve in (pointwise, F.conv2d):
        parts = [part.clone().requires_grad_() for part in (x, weight, bias)]
        parts[0] = parts[0].detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        y = convolve(*parts)
        y.square().sum().backward()
        results.append([y, *(part.grad for part in parts)])
    assert results[0][0].is_contiguous(memory_format=torch.channels_last)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("device", "enabled"), [("cuda", False), ("cpu", True)])
def test_cudnn_is_switched_off_for_a_gpu_and_comes_back_after_an_error(device, enabled):
    assert torch.backends.cudnn.enabled
    found = []

    def fails():
        with without_cudnn(torch.device(device)):
            found.append(torch.backends.cudnn.enabled)
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        fails()
    assert found == [enabled]
    assert torch.backends.cudnn.enabled
