"""Any frozen network under the head: timm's, torchvision's and one of the user's own, on random weights, offline."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
import torchvision
from numpy.typing import NDArray
from PIL import Image
from sklearn.base import clone
from torch import Tensor, nn

from fewshot_mahalanobis import MahalanobisHead, RegularizedCovariance, SimpleCNAPS, SimpleCNAPSClassifier, checkpoints
from fewshot_mahalanobis.checkpoints import CheckpointError
from fewshot_mahalanobis.checkpoints.load import load_checkpoint
from fewshot_mahalanobis.gaussians.covariance import CovarianceSettings
from fewshot_mahalanobis.gaussians.leave_out import choose_beta
from fewshot_mahalanobis.heads import EuclideanHead
from fewshot_mahalanobis.networks.simple_cnaps import film_parameters

SIZE = 32
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
LABELS = np.array(["blue", "green", "red", "green", "blue", "red", "green", "blue"])


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def own_network() -> nn.Sequential:
    """Maps of one position: (n, 8, 1, 1). In training mode, with a Dropout."""
    layers = [nn.Conv2d(3, 8, 5, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers)


def torchvision_resnet18() -> nn.Module:
    network = torchvision.models.resnet18()
    network.fc = nn.Identity()
    return network


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "timm resnet18": lambda: timm.create_model("resnet18", num_classes=0),
    "timm ViT tiny": lambda: timm.create_model("vit_tiny_patch16_224", img_size=SIZE, num_classes=0),
    "timm ConvNeXt atto": lambda: timm.create_model("convnext_atto", num_classes=0, drop_path_rate=0.2),
    "torchvision resnet18": torchvision_resnet18,
    "plain Sequential": own_network,
}


def pictures(n: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size=(n, 40, 50, 3), dtype=np.uint8)


def classifier_images(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The same in [-1, 1] (n, 3, s, s), as the model reads them."""
    resized = [Image.fromarray(i).resize((SIZE, SIZE), Image.Resampling.BILINEAR) for i in images]
    return np.stack(resized).transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1


def by_hand(network: nn.Module, images: NDArray[np.uint8]) -> Tensor:
    """Features of a network in evaluation mode, of images resized and normalised here."""
    resized = [Image.fromarray(i).resize((SIZE, SIZE), Image.Resampling.BILINEAR) for i in images]
    x = torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2) / 255
    x = (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    with torch.no_grad():
        return network.eval()(x.contiguous()).flatten(1)


def model_on(network: nn.Module, **arguments: Any) -> SimpleCNAPS:
    return SimpleCNAPS.from_backbone(network, **{"image_size": SIZE, "mean": MEAN, "std": STD, **arguments})


def classifier_on(network: nn.Module, **arguments: Any) -> SimpleCNAPSClassifier:
    return SimpleCNAPSClassifier(model_on(network), device="cpu", **{"head": "mahalanobis", **arguments})


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return seeded(own_network)


@pytest.fixture(scope="module")
def fitted(network: nn.Module) -> SimpleCNAPSClassifier:
    return classifier_on(network).fit(pictures(8), LABELS)


# ------------------------------------------------------------------------------------- features


@pytest.mark.parametrize("name", NETWORKS)
def test_features_are_those_of_the_module_on_images_normalised_by_hand(name: str) -> None:
    network = seeded(NETWORKS[name]).train()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    classifier = classifier_on(network).fit(pictures(8), LABELS)
    features = classifier.transform(pictures(3, seed=1))

    # Nothing about the user's module has changed.
    assert all(module.training for module in network.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in network.parameters())
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())

    expected = by_hand(network, pictures(3, seed=1)).numpy()
    np.testing.assert_allclose(features, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert classifier.n_features_out_ == expected.shape[1]


def test_logits_are_the_heads_on_those_features_with_beta_chosen_on_the_support_set(network: nn.Module) -> None:
    classifier = classifier_on(network).fit(pictures(8), LABELS)
    # Random networks give nearly equal features: folding's rounding is enough to choose the next beta.
    support, queries = (torch.from_numpy(classifier.transform(x)) for x in (pictures(8), pictures(3, seed=1)))
    codes = torch.from_numpy(np.unique(LABELS, return_inverse=True)[1])
    beta = choose_beta(CovarianceSettings("auto"), support, codes).ridge
    assert beta != 1.0
    expected = MahalanobisHead(RegularizedCovariance(beta))(support, codes, queries).numpy()
    np.testing.assert_allclose(classifier.decision_function(pictures(3, seed=1)), expected, rtol=1e-3)


def test_settings_of_the_head_are_those_given_even_where_the_model_has_another_head(network: nn.Module) -> None:
    model = model_on(network, head="euclidean", scale=0.5, beta=0.25, task_covariance=False)
    assert isinstance(model.head, EuclideanHead)
    head = SimpleCNAPSClassifier(model, head="mahalanobis").fit(pictures(8), LABELS).fitted_head_.head
    assert isinstance(head, MahalanobisHead)
    assert (head.scale, head.covariance.settings.beta, head.covariance.settings.task_covariance) == (0.5, 0.25, False)


def test_an_episode_through_the_model_is_what_an_adapted_task_gives(network: nn.Module) -> None:
    model = model_on(network)
    images = torch.rand(8, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 2 - 1
    labels = torch.arange(8) % 3
    torch.testing.assert_close(model(images, labels, images), model.adapt(images, labels).logits(images))
    assert film_parameters(model, images) is None


def test_the_network_stays_in_evaluation_mode_and_without_gradients(network: nn.Module) -> None:
    model = model_on(network).train()
    assert model.training
    assert not any(module.training for module in model.feature_extractor.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_task_shares_what_it_does_not_fold_and_does_not_follow_a_converted_model(
    network: nn.Module,
) -> None:
    model = model_on(network)
    task = model.adapt(torch.zeros(4, 3, SIZE, SIZE), torch.tensor([0, 0, 1, 1]))
    ours = {parameter.data_ptr() for parameter in model.feature_extractor.parameters()}
    folds = any(isinstance(module, nn.BatchNorm2d) for module in model.feature_extractor.modules())
    assert folds or all(parameter.data_ptr() in ours for parameter in task.network.extractor.parameters())
    images = torch.ones(1, 3, SIZE, SIZE)
    before = task.features(images)
    model.double()
    assert torch.equal(task.features(images), before)


def test_bfloat16_runs_under_autocast_and_gives_nearly_the_same_features(network: nn.Module) -> None:
    exact = classifier_on(network, precision="float32").fit(pictures(8), LABELS).transform(pictures(3))
    rough = classifier_on(network, precision="bfloat16").fit(pictures(8), LABELS)
    assert next(rough.task_.network.extractor.parameters()).dtype == torch.float32
    assert not np.array_equal(rough.transform(pictures(3)), exact)
    np.testing.assert_allclose(rough.transform(pictures(3)), exact, atol=0.02 * np.abs(exact).max())


def test_wrapping_a_network_leaves_the_global_generator_alone(network: nn.Module) -> None:
    state = torch.get_rng_state()
    model_on(network)
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------------------------- the estimator


def test_partial_fit_equals_a_fit_on_the_union(network: nn.Module) -> None:
    whole = classifier_on(network).fit(pictures(8), LABELS)
    parts = classifier_on(network).fit(pictures(8)[:5], LABELS[:5]).partial_fit(pictures(8)[5:], LABELS[5:])
    queries = pictures(4, seed=1)
    np.testing.assert_allclose(parts.decision_function(queries), whole.decision_function(queries), rtol=1e-4)


def test_the_estimators_other_tools_work(fitted: SimpleCNAPSClassifier) -> None:
    queries = pictures(4, seed=1)
    expected = fitted.predict_proba(queries)
    np.testing.assert_allclose(expected.sum(axis=1), 1)
    assert fitted.score(pictures(8), LABELS) == (fitted.predict(pictures(8)) == LABELS).mean()
    again = clone(fitted).fit(pictures(8), LABELS)
    np.testing.assert_array_equal(again.predict_proba(queries), expected)
    restored = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_allclose(restored.predict_proba(queries), expected, rtol=1e-5)
    frame = again.set_output(transform="pandas").transform(queries)
    assert list(frame.columns) == [f"simplecnapsclassifier{i}" for i in range(8)]


@pytest.mark.parametrize("name", ["plain Sequential", "timm ViT"])
@pytest.mark.slow
def test_onnx_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    make = {**NETWORKS, "timm ViT": lambda: timm.create_model("test_vit", img_size=SIZE, num_classes=0)}[name]
    classifier = classifier_on(seeded(make)).fit(pictures(8), LABELS)
    classifier.export_onnx(tmp_path / "colours.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "colours.onnx")
    (logits,) = session.run(["logits"], {"images": classifier_images(pictures(3, seed=1))})
    expected = classifier.decision_function(pictures(3, seed=1))
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


def test_a_backbone_that_torchs_exporter_cannot_express_is_a_clear_error(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pooled = x.mean(dim=(2, 3))
            return pooled if float(pooled.sum()) > 1e9 else pooled * 2

    classifier = classifier_on(Branching()).fit(pictures(8), LABELS)
    with pytest.raises(ValueError, match="cannot make a graph of this backbone"):
        classifier.export_onnx(tmp_path / "colours.onnx")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------- what is refused


class Returns(nn.Module):
    """A network whose output is what a function makes of (n, 8) features."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.make = seeded(lambda: nn.Linear(3, 8)), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x.mean(dim=(2, 3))))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda f: (f, f), "tuple, not one tensor: wrap", id="tuple"),
        pytest.param(lambda f: SimpleNamespace(logits=f), "SimpleNamespace, not one tensor", id="object"),
        pytest.param(lambda f: f[:, :, None, None].expand(-1, -1, 2, 2), r"AdaptiveAvgPool2d", id="maps"),
        pytest.param(lambda f: f[:, None].expand(-1, 4, -1), r"\(2, 4, 8\), not features", id="tokens"),
        pytest.param(lambda f: f[:, 0], r"shape \(2,\), not features", id="numbers"),
        pytest.param(lambda f: f[:, :0], r"\(2, 0\), not features", id="nothing"),
        pytest.param(lambda f: f[:1], "1 rows of features for 2 images", id="rows"),
        pytest.param(lambda f: f / 0, "NaN or infinite", id="not finite"),
        pytest.param(lambda f: f - f.mean(dim=0), "depend on the other images", id="batch"),
        pytest.param(lambda f: f + torch.rand_like(f), "or on chance", id="chance"),
    ],
)
def test_a_network_that_gives_no_features_is_refused_with_the_remedy(
    make: Callable[[Tensor], Any], message: str
) -> None:
    with torch.random.fork_rng(devices=[]), pytest.raises(ValueError, match=message):
        model_on(Returns(make))


def test_a_module_without_its_preparation_of_images_is_refused_by_what_is_missing(network: nn.Module) -> None:
    with pytest.raises(ValueError, match="give image_size=, std= too"):
        SimpleCNAPS.from_backbone(network, mean=MEAN)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mean": (0.5, 0.5)}, "mean must be three numbers"),
        ({"mean": 0.5}, "mean must be three numbers"),
        ({"std": (0.2, 0.2, float("nan"))}, "std must be three numbers"),
        ({"std": (0.2, 0.2, 0.0)}, "std must be positive"),
        ({"image_size": 4096}, "image_size must be a whole number from 1 to 1024"),
        ({"image_size": 3}, r"cannot read images of shape \(2, 3, 3, 3\)"),
        ({"head": "linear"}, "linear head"),
        ({"head": "nearest"}, "head must be one of"),
        ({"beta": -1.0}, "beta must be positive"),
    ],
)
def test_a_wrong_argument_is_refused(arguments: dict[str, Any], message: str, network: nn.Module) -> None:
    with pytest.raises(ValueError, match=message):
        model_on(network, **arguments)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    network = own_network()
    network.cache = network[0].weight * 2  # which remembers how it was computed
    with pytest.raises(ValueError, match="cannot be copied"):
        model_on(network)


def test_a_network_that_cannot_read_channels_last_is_not_folded() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 5, stride=4), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)).view(len(x), -1)

    network = seeded(Views)
    backbone = model_on(network).feature_extractor
    folded = backbone.for_inference()
    assert any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    expected = by_hand(network, pictures(3))
    images = torch.from_numpy(classifier_images(pictures(3)))
    with torch.no_grad():
        torch.testing.assert_close(folded(images), expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------- files


def test_a_classifier_on_a_module_loads_with_that_module_and_takes_its_weights_from_the_file(
    fitted: SimpleCNAPSClassifier, tmp_path: Path
) -> None:
    fitted.save(tmp_path / "colours.safetensors")
    untrained = own_network()
    before = {key: value.clone() for key, value in untrained.state_dict().items()}
    for checkpoint in (untrained, model_on(untrained)):
        restored = SimpleCNAPSClassifier.load(tmp_path / "colours.safetensors", "cpu", backbone=checkpoint)
        np.testing.assert_allclose(restored.predict_proba(pictures(4)), fitted.predict_proba(pictures(4)), rtol=1e-5)
    assert all(torch.equal(value, before[key]) for key, value in untrained.state_dict().items())
    restored.fit(pictures(8), LABELS)  # the model it came with serves again


def test_the_file_of_a_classifier_on_a_module_says_that_it_needs_the_module(
    fitted: SimpleCNAPSClassifier, tmp_path: Path
) -> None:
    fitted.save(tmp_path / "colours.safetensors")
    with pytest.raises(CheckpointError, match="pass it as backbone=network"):
        SimpleCNAPSClassifier.load(tmp_path / "colours.safetensors")
    with pytest.raises(ValueError, match=r"missing|unexpected|shape"):
        SimpleCNAPSClassifier.load(tmp_path / "colours.safetensors", backbone=Returns(lambda features: features))


def test_a_module_of_the_same_weights_that_computes_something_else_is_refused(
    fitted: SimpleCNAPSClassifier, tmp_path: Path
) -> None:
    fitted.save(tmp_path / "colours.safetensors")
    other = own_network()
    other[2] = nn.Sigmoid()
    with pytest.raises(ValueError, match="computes other features"):
        SimpleCNAPSClassifier.load(tmp_path / "colours.safetensors", backbone=other)


def test_a_model_on_a_module_is_a_checkpoint(network: nn.Module, tmp_path: Path) -> None:
    model = model_on(network, scale=0.5)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["beta"] == "auto"
    restored = SimpleCNAPS.from_pretrained(tmp_path, backbone=own_network())
    assert restored.config == model.config
    images = torch.ones(1, 3, SIZE, SIZE)
    assert torch.equal(restored.feature_extractor(images), model.feature_extractor(images))
    with pytest.raises(CheckpointError, match="backbone=network"):
        load_checkpoint(tmp_path)
    assert "backbone=network" in (tmp_path / "README.md").read_text()


def test_simple_cnaps_takes_no_network_in_place_of_its_own(network: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="takes no other"):
        SimpleCNAPS.from_pretrained(Path(checkpoints.__file__).parent / "resnet18", backbone=network)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"origin": "hf-hub:user/repo"}, "no network 'hf-hub:user/repo'"),
        ({"origin": "local-dir:/tmp"}, "no network 'local-dir:/tmp'"),
        ({"origin": "resnet_of_the_future"}, "upgrade timm"),
        ({"origin": 18}, r"got `int` - at `\$\.backbone\.origin`"),
        ({"features": 0}, r">= 1 - at `\$\.backbone\.features`"),
        ({"features": True}, r"got `bool` - at `\$\.backbone\.features`"),
        ({"features": 9}, "shape"),
        ({"mean": [0.5, 0.5]}, r"length >= 3 - at `\$\.backbone\.mean`"),
        ({"std": [1, 1, "1"]}, r"got `str` - at `\$\.backbone\.std\[2\]`"),
        ({"std": [1, 1, -1]}, "std must be positive"),
        ({"depth": 18}, r"unknown field `depth` - at `\$\.backbone`"),
    ],
)
def test_a_hostile_description_of_a_backbone_is_refused(
    change: dict[str, Any], message: str, network: nn.Module, tmp_path: Path
) -> None:
    model_on(network).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["backbone"].update(change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = None if isinstance(change.get("origin"), str) else own_network()
    with pytest.raises(CheckpointError, match=message):
        SimpleCNAPS.from_pretrained(tmp_path, backbone=given)


def test_weights_of_a_module_with_whole_numbers_of_other_types_come_back(tmp_path: Path) -> None:
    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("order", torch.tensor([2, 0, 1], dtype=torch.int32))
            self.register_buffer("mask", torch.tensor([True, False, True]))

        def forward(self, x: Tensor) -> Tensor:
            return x.mean(dim=(2, 3))[:, self.order.long()] * self.mask

    model_on(Indexed()).save_pretrained(tmp_path / "checkpoint")
    restored = SimpleCNAPS.from_pretrained(tmp_path / "checkpoint", backbone=Indexed())
    assert restored.feature_extractor.network.order.dtype == torch.int32
    classifier = classifier_on(Indexed()).fit(pictures(8), LABELS)
    classifier.save(tmp_path / "colours.safetensors")
    loaded = SimpleCNAPSClassifier.load(tmp_path / "colours.safetensors", "cpu", backbone=Indexed())
    assert loaded.model_.feature_extractor.network.mask.tolist() == [True, False, True]
