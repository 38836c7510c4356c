"""FiLM on any network: real architectures of timm on random weights, against a naive reference."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import lru_cache

import pytest
import timm
import torch
from torch import Tensor, nn

from fewshot_mahalanobis import SimpleCNAPS
from fewshot_mahalanobis.networks.backbone import Backbone
from fewshot_mahalanobis.networks.film import Film
from tests.tiny import task_representation

SIZE = 64
ARCHITECTURES = [
    "efficientnet_b0",
    "tf_efficientnet_lite0",
    "mobilenetv3_small_050",
    "convnext_atto",
    "vit_tiny_patch16_224",
    "regnety_002",
    "resnet50",
    "densenet121",
]
PREPARED = {"image_size": SIZE, "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3)}


def make_network(name: str) -> nn.Module:
    """A network with random weights, whose BatchNorms have seen something."""
    size = {"img_size": SIZE} if name.startswith("vit") else {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = timm.create_model(name, num_classes=0, **size)
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0.0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
                nn.init.normal_(module.weight, 1.0, 0.1)
                nn.init.normal_(module.bias, 0.0, 0.1)
    return network.eval()


@lru_cache(maxsize=1)
def make_model(name: str) -> SimpleCNAPS:
    return SimpleCNAPS.from_backbone(make_network(name), adaptation="film", beta=1.0, **PREPARED)


def make_film(backbone: Backbone, spread: float = 0.2) -> Film:
    generator = torch.Generator().manual_seed(1)

    def draw(centre: float, width: int) -> Tensor:
        return centre + spread * torch.randn(width, generator=generator)

    return Film({name: (draw(1.0, width), draw(0.0, width)) for name, width in backbone.film_positions.items()})


IMAGES = torch.rand(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2)) * 2 - 1


class NaiveFilm(nn.Module):
    """A normalisation layer, then gamma * x + beta along its channels, then the activation that timm hides in it."""

    def __init__(self, norm: nn.Module, gamma: Tensor, beta: Tensor) -> None:
        super().__init__()
        self.norm, self.gamma, self.beta = copy.deepcopy(norm), gamma, beta
        self.activation: nn.Module = nn.Identity()
        if hasattr(norm, "act"):
            self.activation, self.norm.act = norm.act, nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        along = -1 if type(self.norm).__name__ == "LayerNorm" else 1
        shape = [1] * y.ndim
        shape[along] = len(self.gamma)
        return self.activation(self.gamma.view(shape) * y + self.beta.view(shape))


def naive_features(name: str, film: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
    network = make_network(name)
    for position, (gamma, beta) in film.items():
        network.set_submodule(position, NaiveFilm(network.get_submodule(position), gamma, beta))
    mean, std = (torch.tensor(PREPARED[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        return network(((IMAGES + 1) / 2 - mean) / std)


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_film_while_training_and_folded_is_what_a_naive_layer_behind_each_norm_computes(name):
    backbone = make_model(name).feature_extractor
    film = make_film(backbone)
    wanted = naive_features(name, film)
    with torch.no_grad():
        assert difference(backbone(IMAGES, film), wanted) < 1e-5
        assert difference(backbone.for_inference(film)(IMAGES), wanted) < 1e-5
        assert difference(backbone(IMAGES), wanted) > 0.05  # FiLM does something


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_identity_film_is_the_plain_network(name):
    backbone = make_model(name).feature_extractor
    identity = make_film(backbone, spread=0.0)
    wanted = naive_features(name, {})
    with torch.no_grad():
        for found in (
            backbone(IMAGES, identity),
            backbone.for_inference(identity)(IMAGES),
            backbone.for_inference()(IMAGES),
        ):
            assert difference(found, wanted) < 1e-5


def load_other_weights(network: nn.Module) -> None:
    network.load_state_dict({name: 0.9 * x if x.is_floating_point() else x for name, x in network.state_dict().items()})


def change_convolutions_in_place(network: nn.Module) -> None:
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.data.mul_(0.9)


def replace_convolutions(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.weight = nn.Parameter(0.9 * module.weight.detach(), requires_grad=False)


def change_statistics(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.add_(0.1)


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "resnet50"])
@pytest.mark.parametrize(
    "change", [load_other_weights, change_convolutions_in_place, replace_convolutions, change_statistics]
)
def test_film_follows_weights_that_change_after_a_forward_pass(name, change):
    backbone = copy.deepcopy(make_model(name).feature_extractor)
    film = make_film(backbone)
    with torch.no_grad():
        before = backbone(IMAGES, film)
        change(backbone.network)
        after = backbone(IMAGES, film)
        assert difference(after, before) > 0.01
        assert difference(after, backbone.for_inference(film)(IMAGES)) < 1e-5


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "resnet50", "mobilenetv3_small_050"])
def test_no_batch_norm_is_left_at_inference(name):
    folded = make_model(name).feature_extractor.for_inference()
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())


def depthwise_norms(name: str) -> list[str]:
    """By the names that timm gives them: the norm behind the depthwise convolution of each block."""
    network = make_network(name)
    found = []
    for path, module in network.named_modules():
        if type(module).__name__ in ("InvertedResidual", "DepthwiseSeparableConv"):
            found.append(f"{path}.{'bn2' if hasattr(module, 'conv_pwl') else 'bn1'}")
    return found


@pytest.mark.parametrize("name", ["efficientnet_b0", "tf_efficientnet_lite0"])
def test_inverted_bottlenecks_have_film_where_lite_has_it(name):
    positions = list(make_model(name).feature_extractor.film_positions)
    assert positions == ["bn1", *depthwise_norms(name), "bn2"]
    assert len(positions) == 18


def test_positions_of_other_kinds_of_networks():
    def positions(name: str) -> list[str]:
        return list(make_model(name).feature_extractor.film_positions)

    bottlenecks = [f"layer{j}.{i}.bn2" for j, n in enumerate((3, 4, 6, 3), 1) for i in range(n)]
    assert positions("resnet50") == ["bn1", *bottlenecks, "layer4.2.bn3"]
    blocks = [f"blocks.{i}.norm{j}" for i in range(12) for j in (1, 2)]
    assert positions("vit_tiny_patch16_224") == [*blocks, "norm"]
    depths = enumerate((2, 2, 6, 2))
    convnext = [f"stages.{stage}.blocks.{i}.norm" for stage, depth in depths for i in range(depth)]
    assert positions("convnext_atto") == ["stem.1", *convnext, "head.norm"]


def test_positions_named_by_the_user():
    network = make_network("resnet50")
    model = SimpleCNAPS.from_backbone(network, adaptation="film", positions=["layer4.2.bn1"], **PREPARED)
    assert model.feature_extractor.film_positions == {"layer4.2.bn1": 512}
    with pytest.raises(ValueError, match=r"FiLM cannot follow 'layer9'.*layer4\.2\.bn1"):
        SimpleCNAPS.from_backbone(network, adaptation="film", positions=["layer9"], **PREPARED)


def test_a_network_without_norms_cannot_have_film():
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    with pytest.raises(ValueError, match="no normalisation layer"):
        SimpleCNAPS.from_backbone(network, adaptation="film", **PREPARED)


def test_a_convolution_that_feeds_more_than_its_norm_is_not_folded():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
            self.bn.running_var.fill_(4.0)

        def forward(self, x: Tensor) -> Tensor:
            maps = self.conv(x)
            return (maps + self.bn(maps)).mean(dim=(2, 3))

    model = SimpleCNAPS.from_backbone(Twice(), adaptation="film", **PREPARED)
    backbone = model.feature_extractor
    film = make_film(backbone)
    with torch.no_grad():
        assert difference(backbone.for_inference(film)(IMAGES), backbone(IMAGES, film)) < 1e-6
    assert any(isinstance(module, nn.BatchNorm2d) for module in backbone.for_inference(film).modules())


def test_gradients_reach_set_encoder_and_generator_and_nothing_else():
    model = make_model("mobilenetv3_small_050")
    model.zero_grad()
    images = IMAGES.repeat(2, 1, 1, 1) + 0.1 * torch.randn(6, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    model(images, labels, images).logsumexp(1).sum().backward()
    trained = [*model.set_encoder.parameters(), *model.film_generator.parameters()]
    with_gradient = [p for p in model.parameters() if p.grad is not None and float(p.grad.abs().sum()) > 0]
    assert {id(p) for p in with_gradient} <= {id(p) for p in trained}
    assert len(with_gradient) > 0.9 * len(trained)
    model.zero_grad()


def test_a_set_encoder_may_see_images_at_another_size():
    backbone = Backbone.from_module(make_network("mobilenetv3_small_050"), positions=None, **PREPARED)
    model = SimpleCNAPS(image_size=backbone.image_size, encoder_size=32, backbone=backbone)
    smaller = nn.functional.interpolate(IMAGES, (32, 32), mode="bilinear", antialias=True)
    with torch.no_grad():
        torch.testing.assert_close(task_representation(model, IMAGES), model.set_encoder(smaller))
    assert model.config["encoder_size"] == 32
    with pytest.raises(ValueError, match="encoder_size"):
        SimpleCNAPS(adaptation="none", encoder_size=64)
