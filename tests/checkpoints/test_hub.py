"""Checkpoints in repositories of a model hub, by the real client against a server here."""

from __future__ import annotations

import json

import huggingface_hub
import pytest

from fewshot_mahalanobis.checkpoints import CheckpointError, DownloadError, read_checkpoint
from fewshot_mahalanobis.checkpoints.loading import load_checkpoint
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
    assert same_weights(load_checkpoint("user/repo"), read_checkpoint(saved, SimpleCNAPS))
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


@pytest.mark.parametrize("name", ["resnet18", "default"])
def test_a_named_checkpoint_is_not_looked_for_on_the_hub(name):
    with pytest.raises(ValueError, match=rf"use load_checkpoint\('{name}'\)"):
        SimpleCNAPS.from_pretrained(name)


def test_saved_pretrained_folder_is_a_checkpoint(model, tmp_path):
    model.save_pretrained(tmp_path / "pretrained")
    assert same_weights(load_checkpoint(tmp_path / "pretrained"), model)
    assert same_weights(SimpleCNAPS.from_pretrained(tmp_path / "pretrained"), model)
