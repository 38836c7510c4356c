"""The format of a checkpoint, and what it refuses."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fewshot_mahalanobis.checkpoints import CheckpointError, save_checkpoint
from fewshot_mahalanobis.checkpoints.load import load_checkpoint
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from tests.checkpoints.forging import safetensors
from tests.checkpoints.models import Bomb, same_weights

CONV, BIAS = "feature_extractor.conv1.weight", "feature_extractor.bn1.bias"


@pytest.fixture
def copy(saved, tmp_path):
    """A checkpoint for one test to damage: its own config.json, the weights by link."""
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "config.json").write_bytes((saved / "config.json").read_bytes())
    os.link(saved / "model.safetensors", folder / "model.safetensors")
    return folder


def test_float32_checkpoint_comes_back_bit_for_bit(model, tmp_path):
    save_checkpoint(model, tmp_path / "new" / "folder")
    loaded = load_checkpoint(tmp_path / "new" / "folder")
    assert same_weights(loaded, model)
    assert loaded.config == model.config
    assert not loaded.training
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]


def test_float16_storage_is_read_as_float32_and_keeps_vectors_exact(model, saved):
    loaded = load_checkpoint(saved)
    stored = load_file(saved / "model.safetensors")
    for name, weight in model.state_dict().items():
        got = loaded.state_dict()[name]
        assert got.dtype == weight.dtype
        if weight.ndim > 1:
            assert stored[name].dtype == torch.float16
            assert torch.equal(got, weight.half().float())
        else:
            assert torch.equal(got, weight)


def test_loaded_model_has_no_parameter_left_without_memory_and_keeps_the_backbone_frozen(model, saved):
    loaded = load_checkpoint(saved)
    assert not any(tensor.is_meta for tensor in [*loaded.parameters(), *loaded.buffers()])
    assert {n: p.requires_grad for n, p in loaded.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }


def test_loaded_weights_do_not_follow_later_changes_of_the_file(model, tmp_path):
    save_checkpoint(model, tmp_path)
    loaded = load_checkpoint(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(b"\xff" * 4096)
    assert same_weights(loaded, model)


def test_config_holds_the_settings_and_the_format_version(model, saved):
    assert json.loads((saved / "config.json").read_text()) == {"format_version": 1, **model.config}


def test_saving_replaces_a_checkpoint_but_keeps_its_model_card(model, copy):
    (copy / "README.md").write_text("mine")
    other = SimpleCNAPS(adaptation="none")
    save_checkpoint(other, copy)
    assert (copy / "README.md").read_text() == "mine"
    assert same_weights(load_checkpoint(copy), other)
    save_checkpoint(other, copy, card="new")
    assert (copy / "README.md").read_text() == "new"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_weights_that_cannot_be_stored_are_refused_by_name_and_the_old_checkpoint_stays(model, copy, value):
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    broken = SimpleCNAPS(adaptation="none")
    with torch.no_grad():
        broken.feature_extractor.conv1.weight[0, 0, 0, 0] = value
    with pytest.raises(CheckpointError, match=r"feature_extractor\.conv1\.weight"):
        save_checkpoint(broken, copy, dtype=torch.float16)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


def test_saving_where_a_file_stands_is_one_clear_error(model, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_checkpoint(model, tmp_path / "file")


def test_storage_in_other_types_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match="dtype"):
        save_checkpoint(model, tmp_path, dtype=torch.int16)


@pytest.fixture(scope="module")
def quantised(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantised")
    save_checkpoint(model, folder, dtype=torch.int8)
    return folder


def test_int8_storage_is_as_near_as_a_scale_per_channel_allows_and_keeps_vectors_exact(model, saved, quantised):
    loaded = load_checkpoint(quantised).state_dict()
    for name, weight in model.state_dict().items():
        assert loaded[name].dtype == weight.dtype
        if weight.ndim > 1:
            channels = weight.flatten(1).double()
            step = channels.abs().amax(1, keepdim=True) / 127 * 9 / 8  # of four bits; at most half of it is lost
            assert (loaded[name].flatten(1) - channels).abs().le(step * (0.5 + 1e-4)).all()
        else:
            assert torch.equal(loaded[name], weight)
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (quantised, saved)]
    assert sizes[0] < 0.53 * sizes[1]


def test_weights_read_from_int8_fit_float16(quantised):
    """So a classifier fitted on them is saved in two bytes a weight, not four."""
    for name, weight in load_checkpoint(quantised).state_dict().items():
        if weight.ndim > 1:
            assert torch.equal(weight.half().float(), weight), name


def test_a_weight_beyond_float32_is_refused_in_int8(tmp_path):
    model = SimpleCNAPS(adaptation="none").double()
    with torch.no_grad():
        model.feature_extractor.conv1.weight[3] = 1e300
    with pytest.raises(CheckpointError, match=r"'feature_extractor\.conv1\.weight' does not fit"):
        save_checkpoint(model, tmp_path, dtype=torch.int8)


def test_a_pretrained_network_is_stored_in_float16_instead_of_int8(tmp_path):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1))
    model = SimpleCNAPS.from_backbone(network, image_size=32, mean=[0.5] * 3, std=[0.5] * 3)
    save_checkpoint(model, tmp_path, dtype=torch.int8)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["feature_extractor.network.0.weight"].dtype == torch.float16
    load_checkpoint(tmp_path, backbone=network)


def test_a_channel_of_zeros_survives_int8(tmp_path):
    model = SimpleCNAPS(adaptation="none")
    with torch.no_grad():
        model.feature_extractor.conv1.weight[3] = 0
    save_checkpoint(model, tmp_path, dtype=torch.int8)
    assert not load_checkpoint(tmp_path).feature_extractor.conv1.weight[3].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(CONV + ".scale"), "1 tensors are missing"),
        (lambda tensors: tensors.update({CONV + ".scale": torch.ones(3)}), r"shape \(3,\), not \(64,\)"),
        (lambda tensors: tensors.update({CONV + ".scale": torch.full((64,), math.nan)}), "NaN or infinite"),
        (lambda tensors: tensors.update({CONV + ".scale": torch.ones(64, dtype=torch.int8)}), "type I8"),
        (lambda tensors: tensors.update({CONV: tensors[CONV].float()}), "1 tensors are unexpected"),
        (lambda tensors: tensors.update({BIAS: tensors[BIAS].to(torch.int8)}), "type I8"),
    ],
    ids=["no scale", "wrong shape", "NaN", "scale in int8", "scale of a float", "vector in int8"],
)
def test_wrong_int8_storage_is_refused_by_name(quantised, tmp_path, change, message):
    (tmp_path / "config.json").write_bytes((quantised / "config.json").read_bytes())
    tensors = load_file(quantised / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "described", json.loads(Path(__file__).with_name("version_1.json").read_text()), ids=["film", "auto-regressive"]
)
def test_checkpoint_of_version_1_is_read(described, tmp_path):
    """version_1.json: config.json, and the type and shape of each tensor, as files of format version 1 have them."""
    types = {"F16": torch.float16, "F32": torch.float32, "I64": torch.int64}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.rand(shape, generator=generator).to(types[kind])
        for name, (kind, *shape) in described["tensors"].items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(described["config"]))
    model = load_checkpoint(tmp_path)
    assert {"format_version": 1, **model.config} == described["config"]
    weights = model.state_dict()
    assert weights.keys() == tensors.keys()
    assert all(torch.equal(weights[name], tensor.to(weights[name].dtype)) for name, tensor in tensors.items())


# ---------------------------------------------------------------------------------- malformed files


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        config[name] = value
        if value is ...:
            del config[name]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 18}, "unknown field `depth`"),
        ({"head": ...}, "missing required field `head`"),
        ({"head": 3}, r"Expected `str`, got `int` - at `\$\.head`"),
        ({"head": "oracle"}, "head must be one of"),
        ({"adaptation": "lora"}, "adaptation must be one of"),
        ({"scale": "1"}, r"Expected `float`, got `str` - at `\$\.scale`"),
        ({"scale": True}, r"Expected `float`, got `bool` - at `\$\.scale`"),
        ({"beta": None}, r"Expected `float \| str`, got `null` - at `\$\.beta`"),
        ({"task_covariance": 1}, r"Expected `bool`, got `int` - at `\$\.task_covariance`"),
        ({"image_size": 84.5}, r"Expected `int`, got `float` - at `\$\.image_size`"),
        ({"image_size": True}, r"Expected `int`, got `bool` - at `\$\.image_size`"),
        ({"format_version": 2}, "upgrade fewshot_mahalanobis"),
        ({"format_version": ...}, "missing required field `format_version`"),
        ({"format_version": "1"}, r"got `str` - at `\$\.format_version`"),
        ({"format_version": True}, r"got `bool` - at `\$\.format_version`"),
        ({"format_version": 0}, "'format_version' must be"),
    ],
)
def test_wrong_config_field_is_refused_by_name(copy, changes, message):
    edit(copy, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(copy)
    assert str(copy / "config.json") in str(caught.value)


def test_whole_number_is_taken_for_a_float_setting(copy):
    edit(copy, scale=1)
    assert load_checkpoint(copy).config["scale"] == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"format_version": NaN}',
        b"[" * 60000,
        b'{"format_version": ' + b"9" * 6000 + b"}",
        b" " * 2**20,
    ],
)
def test_config_that_is_no_small_json_object_is_refused(copy, content):
    (copy / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_checkpoint(copy)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file_is_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(copy)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_named_pipe_in_place_of_the_weights_is_refused_without_waiting(copy):
    (copy / "model.safetensors").unlink()
    os.mkfifo(copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_checkpoint(copy)


def test_files_that_are_no_safetensors_are_refused_and_no_code_runs(copy, saved, tmp_path):
    whole = (saved / "model.safetensors").read_bytes()
    huge = {"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    overlapping = {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"}
    buffer = io.BytesIO()
    torch.save({"x": Bomb(tmp_path / "ran")}, buffer)
    for content in (
        b"",
        b"\0" * 100,
        b"<!DOCTYPE html><html></html>",
        whole[: len(whole) // 2],
        whole[:-1],
        whole + b"\0",
        pickle.dumps(Bomb(tmp_path / "ran")),
        buffer.getvalue(),
        safetensors({}, size=2**62),
        safetensors(huge),
        safetensors(overlapping) + b"\0" * 4,
        safetensors([1, 2]),
    ):
        (copy / "model.safetensors").unlink()
        (copy / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            load_checkpoint(copy)
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def tensors(saved):
    return load_file(saved / "model.safetensors")


def with_nan(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.clone()
    weight.view(-1)[-1] = float("nan")
    return weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: None, "1 tensors are missing"),
        (lambda w: w[:-1].clone(), r"has shape \(63, 3, 5, 5\), not \(64, 3, 5, 5\)"),
        (lambda w: w.flatten(), r"has shape \(4800,\)"),
        (lambda w: w.to(torch.int64), "has type I64"),
        (lambda w: w.to(torch.float8_e4m3fn), "has type F8_E4M3"),
        (with_nan, "NaN or infinite"),
        (lambda w: torch.full_like(w, float("inf")), "NaN or infinite"),
    ],
)
def test_wrong_tensor_is_refused_by_name(copy, tensors, change, message):
    name = "feature_extractor.conv1.weight"
    changed = {**tensors, name: change(tensors[name])}
    (copy / "model.safetensors").unlink()
    save_file({key: value for key, value in changed.items() if value is not None}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(copy)
    assert name in str(caught.value)
    assert str(copy / "model.safetensors") in str(caught.value)


def test_tensors_of_other_settings_are_refused(copy, tensors):
    edit(copy, adaptation="film")
    with pytest.raises(CheckpointError, match="missing for the settings"):
        load_checkpoint(copy)
    edit(copy, adaptation="none")
    (copy / "model.safetensors").unlink()
    save_file({**tensors, "extra": torch.zeros(1)}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected for the settings .* 'extra' first"):
        load_checkpoint(copy)


def test_bfloat16_and_float32_storage_are_read(copy, tensors):
    name = "feature_extractor.conv1.weight"
    stored = {key: value.bfloat16() if key == name else value.float() for key, value in tensors.items()}
    stored = {key: value.long() if key.endswith("num_batches_tracked") else value for key, value in stored.items()}
    (copy / "model.safetensors").unlink()
    save_file(stored, copy / "model.safetensors")
    assert torch.equal(load_checkpoint(copy).state_dict()[name], tensors[name].bfloat16().float())
