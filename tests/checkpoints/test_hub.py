"""Checkpoints in repositories of a model hub, by the real client against a server here."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
from torch import nn

from fewshot_mahalanobis.checkpoints import CheckpointError, DownloadError
from fewshot_mahalanobis.checkpoints.load import load_checkpoint
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from tests.checkpoints.checkpoint_server import Server, go_offline, hub_on_this_machine
from tests.checkpoints.models import same_weights


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """``huggingface_hub`` talks to a hub on 127.0.0.1 and keeps its cache in a folder of this test."""
    with hub_on_this_machine(monkeypatch, tmp_path / "hub-cache") as state:
        yield state


@pytest.fixture(scope="module")
def files(saved):
    return {path.name: path.read_bytes() for path in saved.iterdir()}


def test_hub_repository_loads_by_name_and_takes_only_the_checkpoint_files(hub, model, saved, files, tmp_path):
    hub.commit("user/repo", {**files, "pytorch_model.bin": b"a pickle", "extra/file.txt": b"x"})
    assert same_weights(load_checkpoint("user/repo"), load_checkpoint(saved))
    fetched = {path.name for path in (tmp_path / "hub-cache").rglob("*") if path.is_file()}
    assert {"config.json", "model.safetensors", "README.md"} <= fetched
    assert not {"pytorch_model.bin", "file.txt"} & fetched


def test_hub_revision_is_the_tag_or_commit_asked_for(hub, files):
    first = hub.commit("user/repo", files, tag="v1.0")
    config = {**json.loads(files["config.json"]), "beta": 2.0}
    hub.commit("user/repo", {"config.json": json.dumps(config).encode()})
    assert load_checkpoint("user/repo").config["beta"] == 2.0
    assert load_checkpoint("user/repo@v1.0").config["beta"] == 1.0
    assert load_checkpoint(f"user/repo@{first}").config["beta"] == 1.0


def test_hub_checkpoint_in_the_cache_serves_offline(hub, model, files, monkeypatch):
    hub.commit("user/repo", files)
    load_checkpoint("user/repo")
    go_offline(monkeypatch)
    count = len(hub.server.requests)
    assert load_checkpoint("user/repo").config == model.config
    assert len(hub.server.requests) == count


def test_hub_checkpoint_in_the_cache_serves_where_the_hub_cannot_be_reached(hub, model, files, monkeypatch):
    hub.commit("user/repo", files)
    load_checkpoint("user/repo")
    with Server(lambda handler: None) as gone:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", gone.url)
    assert load_checkpoint("user/repo").config == model.config


def test_hub_file_whose_name_leads_out_of_the_cache_is_not_fetched(hub, model, files, tmp_path):
    hub.commit("user/repo", {**files, "../../../config.json": b"{}", "/config.json": b"{}"})
    assert load_checkpoint("user/repo").config == model.config
    assert not any(".." in path or "//" in path for _, path in hub.server.requests)
    assert [path.name for path in tmp_path.iterdir()] == ["hub-cache"]


@pytest.mark.parametrize("name", ["user/absent", "user/repo@absent"])
def test_absent_hub_repository_or_revision_is_a_clear_error(hub, files, name):
    hub.commit("user/repo", files)
    with pytest.raises(DownloadError, match=name.split("@")[0]) as caught:
        load_checkpoint(name)
    assert hub.server.url in str(caught.value)


def test_hub_that_cannot_be_reached_is_a_clear_error(hub, monkeypatch):
    with Server(lambda handler: None) as gone:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", gone.url)
    with pytest.raises(DownloadError, match="user/repo") as caught:
        load_checkpoint("user/repo")
    assert gone.url in str(caught.value)


def test_hub_repository_that_is_no_checkpoint_is_refused(hub):
    hub.commit("user/repo", {"README.md": b"# nothing else"})
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_checkpoint("user/repo")


def test_pushed_model_comes_back_from_the_hub(hub, model):
    model.push_to_hub("user/pushed", token="hf_test")
    assert set(hub.commits["user/pushed"][-1][1]) >= {"config.json", "model.safetensors", "README.md"}
    assert same_weights(load_checkpoint("user/pushed"), model)
    assert same_weights(SimpleCNAPS.from_pretrained("user/pushed"), model)


def test_the_options_of_the_hub_are_those_of_both_doors(hub, model, files, tmp_path):
    first = hub.commit("user/repo", files)
    config = {**json.loads(files["config.json"]), "beta": 2.0}
    hub.commit("user/repo", {"config.json": json.dumps(config).encode()})
    for load in (load_checkpoint, SimpleCNAPS.from_pretrained):
        cache = tmp_path / load.__name__
        assert load("user/repo", revision=first, cache_dir=cache).config == model.config
        assert cache.is_dir()
        with pytest.raises(DownloadError, match="user/repo"):
            load("user/repo", cache_dir=cache, local_files_only=True)
        with pytest.raises(TypeError, match="'betta'"):
            load("user/repo", betta=1.0)


def test_a_checkpoint_that_is_not_on_the_hub_has_no_revision(saved):
    for name in ("default", saved, str(saved)):
        with pytest.raises(ValueError, match="has no revision"):
            load_checkpoint(name, revision="main")


@pytest.mark.parametrize("name", ["resnet18", "default"])
def test_from_pretrained_loads_a_named_checkpoint_too(name):
    assert same_weights(SimpleCNAPS.from_pretrained(name), load_checkpoint(name))


def test_a_network_of_ones_own_comes_back_from_the_hub(hub, tmp_path):
    def network():
        return nn.Sequential(nn.Conv2d(3, 4, 5, stride=4), nn.AdaptiveAvgPool2d(1))

    model = SimpleCNAPS.from_backbone(network(), image_size=32, mean=[0.5] * 3, std=[0.5] * 3)
    model.push_to_hub("user/own", token="hf_test")
    with pytest.raises(CheckpointError, match="pass it as backbone=network"):
        load_checkpoint("user/own")
    for backbone in (network(), model):
        assert same_weights(load_checkpoint("user/own", backbone=backbone), model)


def test_saved_pretrained_folder_is_a_checkpoint(model, tmp_path):
    model.save_pretrained(tmp_path / "pretrained")
    assert same_weights(load_checkpoint(tmp_path / "pretrained"), model)
    assert same_weights(SimpleCNAPS.from_pretrained(tmp_path / "pretrained"), model)
