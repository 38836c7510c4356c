from __future__ import annotations

import pytest
import torch
from torch import nn

from fewshot_mahalanobis.networks import film as film_module
from fewshot_mahalanobis.networks.backbone import Backbone
from fewshot_mahalanobis.networks.efficientnet import LITE0, MEAN, STD, EfficientNet
from fewshot_mahalanobis.networks.film import Film, FoldedConv
from fewshot_mahalanobis.networks.norms import affine_norms


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = EfficientNet(LITE0)
        for norm in network.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.running_mean.normal_(0.0, 0.1)
                norm.running_var.uniform_(0.5, 1.5)
    return Backbone(network, 1280, image_size=64, mean=MEAN, std=STD, positions=[*affine_norms(network)])


@pytest.fixture(scope="module")
def film(backbone: Backbone) -> Film:
    rng = torch.Generator().manual_seed(1)
    widths = backbone.film_positions.items()
    return Film(
        {name: (1 + 0.2 * torch.randn(n, generator=rng), 0.1 * torch.randn(n, generator=rng)) for name, n in widths}
    )


def pictures(side: int = 64) -> torch.Tensor:
    return torch.rand(3, 3, side, side, generator=torch.Generator().manual_seed(2)) * 2 - 1


def assert_alike(found: torch.Tensor, wanted: torch.Tensor, most: float) -> None:
    assert float((found - wanted).norm()) < most * float(wanted.norm())


@pytest.mark.parametrize("side", [64, 81, 50])
@pytest.mark.parametrize("fused", [True, False])
def test_folded_it_computes_what_the_network_does(backbone, film, side, fused, monkeypatch):
    if not fused:
        monkeypatch.setattr(film_module, "_fuses", lambda x: False)
    with torch.no_grad():
        for each in (film, None):
            assert_alike(backbone.for_inference(each)(pictures(side)), backbone(pictures(side), each), 1e-5)


def test_bfloat16_features_are_those_of_float32_but_for_rounding(backbone, film):
    folded = backbone.for_inference(film, torch.bfloat16)
    assert {parameter.dtype for parameter in folded.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        found = folded(pictures().bfloat16())
        assert found.dtype == torch.float32
        assert_alike(found, backbone(pictures(), film), 0.05)


def test_a_gradient_reaches_the_images_through_it(backbone, film):
    gradients = []
    for network in (backbone.for_inference(film), backbone):
        images = pictures().requires_grad_()
        network(images, *([film] if network is backbone else [])).square().sum().backward()
        gradients.append(images.grad)
    assert_alike(*gradients, 1e-3)


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
