"""The table of checkpoints, and which names load what."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fewshot_mahalanobis.checkpoints import CheckpointError, available_checkpoints
from fewshot_mahalanobis.checkpoints import download as download_module
from fewshot_mahalanobis.checkpoints.catalogue import CHECKPOINTS, DEFAULT
from fewshot_mahalanobis.checkpoints.load import load_checkpoint


def test_a_saved_classifier_is_told_from_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "birds.st").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"birds\.st: is a file.*SimpleCNAPSClassifier\.load"):
        load_checkpoint("birds.st")


def test_table_lists_the_default_first_and_digests_of_all_published_files():
    records = available_checkpoints()
    assert next(iter(records)) == "default"
    assert records["default"].embedded
    for name, record in records.items():
        assert record.name == (DEFAULT if name == "default" else name)
        if not record.embedded:
            assert record.url.startswith("https://")
        if record.url is not None and record.timm is None:
            assert record.revision in record.url
            assert len(record.blob_id) == 40
            assert record.size <= download_module.LARGEST_FILE


def test_changing_the_returned_table_changes_nothing():
    available_checkpoints().clear()
    assert "default" in available_checkpoints()


def test_a_named_checkpoint_takes_no_other_network():
    for name in ("default", "simple-cnaps-meta-dataset"):
        with pytest.raises(CheckpointError, match="takes no other"):
            load_checkpoint(name, backbone=torch.nn.Flatten())


def test_record_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        available_checkpoints()["default"].name = "other"


def test_misspelt_name_is_answered_with_a_suggestion_and_the_names():
    with pytest.raises(ValueError, match="Did you mean 'default'") as caught:
        load_checkpoint("defualt")
    assert all(name in str(caught.value) for name in CHECKPOINTS)


@pytest.mark.parametrize(
    "name", ["", "a b", "user/", "user/repo/more", "user/..", "user/repo@../../x", "x" * 5000, "\0"]
)
def test_name_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match="unknown checkpoint"):
        load_checkpoint(name)


@pytest.mark.parametrize(
    "name", ["./absent", "../absent", "/absent/folder", "~/absent/folder", "./\0", "/" + "x" * 5000]
)
def test_path_without_a_folder_is_not_looked_up_elsewhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        load_checkpoint(name)


def test_file_in_place_of_its_folder_is_told_apart(saved):
    with pytest.raises(CheckpointError, match="give the folder"):
        load_checkpoint(str(saved / "model.safetensors"))


@pytest.mark.parametrize("name", [3, None, b"default"])
def test_name_of_another_type_is_a_type_error(name):
    with pytest.raises(TypeError, match="must be a str or a path"):
        load_checkpoint(name)


def test_local_folder_loads_by_str_by_path_and_by_relative_name(model, saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    for name in (saved, str(saved), "checkpoint", "./checkpoint"):
        assert load_checkpoint(name).config == model.config
