"""Pretrained networks by name: timm's, from a hub on this machine."""

from __future__ import annotations

import json
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier, available_checkpoints, load_checkpoint
from fewshot_mahalanobis.checkpoints import CheckpointError, CheckpointRecord, DownloadError
from fewshot_mahalanobis.networks import pretrained
from fewshot_mahalanobis.networks.pretrained import is_pretrained_name
from tests.checkpoints.checkpoint_server import Hub, Server, hub_on_this_machine
from tests.networks.test_backbone import LABELS, SIZE, STD, pictures, seeded


def test_names_are_told_apart_without_timm_too(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("efficientnet-lite0", "resnet18", "resnet_of_the_future", "hf-hub:user/repo")
    assert [is_pretrained_name(name) for name in names] == [True, True, False, False]
    monkeypatch.setitem(sys.modules, "timm", None)
    assert [is_pretrained_name(name) for name in names] == [True, False, False, False]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with random weights for two small networks of timm, as timm would find its own there."""
    with hub_on_this_machine(monkeypatch, tmp_path / "cache") as hub:
        for name in ("test_vit.r160_in1k", "test_resnet.r160_in1k"):
            network = seeded(lambda name=name: timm.create_model(name))  # type: ignore[misc]
            hub.commit(f"timm/{name}", {"model.safetensors": save(network.state_dict())})
        yield hub


def test_a_name_gives_timms_pretrained_network_as_timm_prepares_its_images(hub: Hub) -> None:
    state = torch.get_rng_state()
    model = SimpleCNAPS.from_backbone("test_resnet")
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config["backbone"]["origin"] == "test_resnet.r160_in1k"
    assert model.image_size == 160
    network = timm.create_model("test_resnet.r160_in1k", pretrained=True, num_classes=0).eval()
    data = timm.data.resolve_model_data_config(network)
    assert (tuple(data["mean"]), tuple(data["std"])) == (model.feature_extractor.mean, model.feature_extractor.std)
    pixels = torch.rand(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    normalised = (pixels - torch.tensor(data["mean"])[:, None, None]) / torch.tensor(data["std"])[:, None, None]
    with torch.no_grad():
        torch.testing.assert_close(model.feature_extractor(2 * pixels - 1), network(normalised), rtol=1e-4, atol=1e-4)


def test_a_classifier_on_a_name_comes_back_from_its_file_without_a_connection(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SimpleCNAPS.from_backbone("test_vit.r160_in1k", image_size=SIZE, std=STD)  # other position embeddings
    classifier = SimpleCNAPSClassifier(model, device="cpu").fit(pictures(8), LABELS)
    classifier.save(tmp_path / "colours.safetensors")
    model.save_pretrained(tmp_path / "checkpoint")
    requests, state = len(hub.server.requests), torch.get_rng_state()
    restored = SimpleCNAPSClassifier.load(tmp_path / "colours.safetensors", device="cpu")
    assert len(hub.server.requests) == requests
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_allclose(restored.predict_proba(pictures(4)), classifier.predict_proba(pictures(4)), rtol=1e-5)
    again = SimpleCNAPSClassifier(tmp_path / "checkpoint", device="cpu").fit(pictures(8), LABELS)
    np.testing.assert_allclose(again.predict_proba(pictures(4)), classifier.predict_proba(pictures(4)), rtol=1e-5)

    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"fewshot-mahalanobis\[backbones\]"):
        SimpleCNAPSClassifier.load(tmp_path / "colours.safetensors")


def test_a_name_that_timm_does_not_know_or_cannot_fetch_is_a_clear_error(hub: Hub) -> None:
    with pytest.raises(ValueError, match=r"timm could not make 'resnet_of_the_future'.*list_models"):
        SimpleCNAPS.from_backbone("resnet_of_the_future")
    with pytest.raises(ValueError, match="timm could not make 'test_convnext'"):
        SimpleCNAPS.from_backbone("test_convnext")


def test_a_file_that_names_a_larger_network_than_it_holds_is_refused_before_that_takes_memory(
    hub: Hub, tmp_path: Path
) -> None:
    SimpleCNAPS.from_backbone("test_resnet").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["backbone"]["origin"] = "vit_gigantic_patch14_clip_224.laion2b"  # 1.8 billion weights
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="missing"):
        SimpleCNAPS.from_pretrained(tmp_path)


def test_without_a_connection_the_error_comes_at_once_and_names_the_hub(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(lambda handler: None) as gone:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", gone.url)
    for name in ("test_convnext", "hf-hub:user/repo"):
        with pytest.raises(
            ValueError, match=f"timm could not make '{name}'.*no connection to {gone.url}.*models--.*HF_HUB_CACHE"
        ):
            SimpleCNAPS.from_backbone(name)


def test_a_hub_that_never_answers_is_not_waited_for(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a firewall that drops packets: every address of the Hub would be waited for in turn."""
    silent = threading.Event()
    monkeypatch.setattr(pretrained, "_PATIENCE", 0.05)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: silent.wait())
    for name in ("test_convnext", "hf-hub:user/repo", "resnet18.a1_in1k"):
        with pytest.raises(ValueError, match=rf"'{name}'.*no connection.*no answer in 0.05 s.*HF_HUB_CACHE"):
            SimpleCNAPS.from_backbone(name)
    with pytest.raises(DownloadError, match=r"dinov2-small.*no answer in 0.05 s.*models--timm--vit.*HF_HUB_CACHE"):
        load_checkpoint("dinov2-small")
    silent.set()


def test_a_network_that_reads_large_images_warns_once_and_names_the_remedy(hub: Hub, monkeypatch) -> None:
    settings = timm.get_pretrained_cfg("test_vit.r160_in1k")
    monkeypatch.setattr(pretrained, "_LARGE", settings.input_size[-1] - 1)
    with pytest.warns(UserWarning, match="reads images of 160 pixels.*image_size=224") as caught:
        SimpleCNAPS.from_backbone("test_vit.r160_in1k")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SimpleCNAPS.from_backbone("test_vit.r160_in1k", image_size=SIZE)


STRONG = [record for record in available_checkpoints().values() if record.timm is not None]


@pytest.mark.parametrize("record", STRONG, ids=lambda record: record.name)
def test_timm_has_each_named_network_with_that_licence_and_size(record: CheckpointRecord) -> None:
    settings = timm.get_pretrained_cfg(record.timm)
    assert settings.license == record.licence.lower().replace(" ", "-")
    assert settings.hf_hub_id == record.url.removeprefix("https://huggingface.co/")
    with torch.device("meta"):
        network = timm.create_model(record.timm)
    assert sum(tensor.nbytes for tensor in network.state_dict().values()) == record.size


@pytest.fixture
def dinov2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with random weights of DINOv2's architecture, for images of 518 pixels."""
    with hub_on_this_machine(monkeypatch, tmp_path / "cache") as hub:
        network = seeded(lambda: timm.create_model("vit_small_patch14_dinov2.lvd142m"))
        hub.commit("timm/vit_small_patch14_dinov2.lvd142m", {"model.safetensors": save(network.state_dict())})
        yield hub


def test_one_word_gives_a_strong_network_under_the_default_head(
    dinov2: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        classifier = SimpleCNAPSClassifier("dinov2-small", device="cpu").fit(pictures(8), LABELS)
    model = classifier.model_
    assert (model.image_size, model.config["head"], model.config["adaptation"]) == (224, "auto", "none")
    assert classifier.transform(pictures(2)).shape == (2, 384)
    network = timm.create_model("vit_small_patch14_dinov2.lvd142m", pretrained=True, num_classes=0, img_size=224).eval()
    images = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0)) * 2 - 1
    mean, std = (torch.tensor(values)[:, None, None] for values in (network.pretrained_cfg[k] for k in ("mean", "std")))
    with torch.no_grad():
        wanted = network(((images + 1) / 2 - mean) / std)
        torch.testing.assert_close(model.feature_extractor(images), wanted, rtol=1e-3, atol=1e-3)
    requests = len(dinov2.server.requests)
    classifier.save(tmp_path / "colours.safetensors")
    restored = SimpleCNAPSClassifier.load(tmp_path / "colours.safetensors", device="cpu")
    np.testing.assert_allclose(restored.predict_proba(pictures(2)), classifier.predict_proba(pictures(2)), rtol=1e-4)
    assert len(dinov2.server.requests) == requests  # a saved classifier needs no connection


def test_without_a_connection_a_strong_network_names_the_folder_for_a_copy(
    dinov2: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(lambda handler: None) as gone:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", gone.url)
    with pytest.raises(
        DownloadError, match=r"'dinov2-base' cannot be fetched.*no connection.*models--timm--.*HF_HUB_CACHE"
    ):
        load_checkpoint("dinov2-base")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"fewshot-mahalanobis\[backbones\]"):
        load_checkpoint("dinov2-base")
