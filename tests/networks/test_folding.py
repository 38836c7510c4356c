"""Convolutions that absorb BatchNorm, FiLM, a shortcut and an activation."""

from __future__ import annotations

import subprocess
import sys

import pytest
import timm
import torch
from torch import nn

from fewshot_mahalanobis.networks.folding import Conv2dSame, FoldedConv


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


def test_folding_needs_no_timm():
    code = (
        "import sys\nfrom torch import nn\n"
        "from fewshot_mahalanobis.networks.folding import Conv2dSame, FoldedConv\n"
        "assert FoldedConv(Conv2dSame(3, 4, 3, stride=2), nn.BatchNorm2d(4).eval()).pads_by_size\n"
        "assert 'timm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
