"""Checkpoints: the format and what it refuses, the table, downloads that fail, conversion, Hub repositories."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import os
import pickle
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from fewshot_mahalanobis.checkpoints import (
    CheckpointError,
    DownloadError,
    available_checkpoints,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from fewshot_mahalanobis.checkpoints import download as download_module
from fewshot_mahalanobis.checkpoints.download import LOCAL_COPIES_VARIABLE, blob_id, download
from fewshot_mahalanobis.checkpoints.authors_weights import CACHE_VARIABLE
from fewshot_mahalanobis.checkpoints.table import CHECKPOINTS
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from tests.checkpoints.checkpoint_server import Server, git_blob_id, go_offline, hub_on_this_machine, send, send_and_drop
from tests.golden import recipe

FILE = bytes(range(256)) * 4096  # a megabyte, for the downloads whose contents do not matter


def same_weights(a: SimpleCNAPS, b: SimpleCNAPS) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def model():
    """The smallest model: no adaptation, settings other than the defaults."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SimpleCNAPS(adaptation="none", scale=0.5, one_shot_covariance="published", image_size=64).eval()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    save_checkpoint(model, folder, dtype=torch.float16)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """A checkpoint for one test to damage: its own config.json, the weights by link."""
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "config.json").write_bytes((saved / "config.json").read_bytes())
    os.link(saved / "model.safetensors", folder / "model.safetensors")
    return folder


# ------------------------------------------------------------------------------------------- format


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
    loaded = read_checkpoint(saved)
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
    loaded = read_checkpoint(saved)
    assert not any(tensor.is_meta for tensor in [*loaded.parameters(), *loaded.buffers()])
    assert {n: p.requires_grad for n, p in loaded.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }


def test_loaded_weights_do_not_follow_later_changes_of_the_file(model, tmp_path):
    save_checkpoint(model, tmp_path)
    loaded = read_checkpoint(tmp_path)
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
    assert same_weights(read_checkpoint(copy), other)
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


def test_integer_storage_type_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match="dtype"):
        save_checkpoint(model, tmp_path, dtype=torch.int8)


def test_loading_leaves_the_global_generator_alone(saved):
    before = torch.get_rng_state()
    read_checkpoint(saved)
    assert torch.equal(torch.get_rng_state(), before)


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
        ({"depth": 18}, "unknown field 'depth'"),
        ({"head": ...}, "'head' is missing"),
        ({"head": 3}, "'head' must be of type str"),
        ({"head": "oracle"}, "head must be one of"),
        ({"adaptation": "lora"}, "adaptation must be one of"),
        ({"scale": "1"}, "'scale' must be of type float"),
        ({"scale": True}, "'scale' must be of type float"),
        ({"beta": None}, "'beta' must be of type float"),
        ({"task_covariance": 1}, "'task_covariance' must be of type bool"),
        ({"image_size": 84.0}, "'image_size' must be of type int"),
        ({"image_size": True}, "'image_size' must be of type int"),
        ({"format_version": 2}, "upgrade fewshot_mahalanobis"),
        ({"format_version": ...}, "'format_version' must be"),
        ({"format_version": "1"}, "'format_version' must be"),
        ({"format_version": True}, "'format_version' must be"),
        ({"format_version": 0}, "'format_version' must be"),
    ],
)
def test_wrong_config_field_is_refused_by_name(copy, changes, message):
    edit(copy, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(copy)
    assert str(copy / "config.json") in str(caught.value)


def test_whole_number_is_taken_for_a_float_setting(copy):
    edit(copy, scale=1)
    assert read_checkpoint(copy).config["scale"] == 1


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
        read_checkpoint(copy)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file_is_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        read_checkpoint(copy)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_named_pipe_in_place_of_the_weights_is_refused_without_waiting(copy):
    (copy / "model.safetensors").unlink()
    os.mkfifo(copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_checkpoint(copy)


class Bomb:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def header_only(header: object, size: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text


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
        header_only({}, size=2**62),
        header_only(huge),
        header_only(overlapping) + b"\0" * 4,
        header_only([1, 2]),
    ):
        (copy / "model.safetensors").unlink()
        (copy / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            read_checkpoint(copy)
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
        read_checkpoint(copy)
    assert name in str(caught.value)
    assert str(copy / "model.safetensors") in str(caught.value)


def test_tensors_of_other_settings_are_refused(copy, tensors):
    edit(copy, adaptation="film")
    with pytest.raises(CheckpointError, match="missing for the settings"):
        read_checkpoint(copy)
    edit(copy, adaptation="none")
    (copy / "model.safetensors").unlink()
    save_file({**tensors, "extra": torch.zeros(1)}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected for the settings .* 'extra' first"):
        read_checkpoint(copy)


def test_bfloat16_and_float32_storage_are_read(copy, tensors):
    name = "feature_extractor.conv1.weight"
    stored = {key: value.bfloat16() if key == name else value.float() for key, value in tensors.items()}
    stored = {key: value.long() if key.endswith("num_batches_tracked") else value for key, value in stored.items()}
    (copy / "model.safetensors").unlink()
    save_file(stored, copy / "model.safetensors")
    assert torch.equal(read_checkpoint(copy).state_dict()[name], tensors[name].bfloat16().float())


# ------------------------------------------------------------------------------------ table and names


def test_table_lists_the_default_first_and_digests_of_all_published_files():
    records = available_checkpoints()
    assert next(iter(records)) == "default"
    assert records["default"].embedded
    for name, record in records.items():
        assert record.name == name
        if not record.embedded:
            assert record.url.startswith("https://")
            assert record.revision in record.url
            assert len(record.blob_id) == 40
            assert record.size <= download_module.LARGEST_FILE


def test_changing_the_returned_table_changes_nothing():
    available_checkpoints().clear()
    assert "default" in available_checkpoints()


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
    with pytest.raises(TypeError, match="str or a path"):
        load_checkpoint(name)


def test_local_folder_loads_by_str_by_path_and_by_relative_name(model, saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    for name in (saved, str(saved), "checkpoint", "./checkpoint"):
        assert load_checkpoint(name).config == model.config


# ------------------------------------------------------------------------------------------ downloads


@pytest.fixture
def destination(tmp_path):
    folder = tmp_path / "downloads"
    folder.mkdir()
    return folder / "weights.pt"


def test_right_file_arrives_whole(destination):
    with Server(lambda handler: send(handler, FILE)) as server:
        download(f"{server.url}/weights.pt", destination, git_blob_id(FILE))
    assert destination.read_bytes() == FILE
    assert list(destination.parent.iterdir()) == [destination]


def test_blob_id_is_the_one_git_computes(tmp_path):
    (tmp_path / "file").write_bytes(b"what is up, doc?")
    # The example of the book Pro Git, "Git Objects".
    assert blob_id(tmp_path / "file") == "bd9dbf5aae1a3862dd1526723246b20206e5fc37"


def test_redirect_to_another_host_is_followed(destination):
    with (
        Server(lambda handler: send(handler, FILE)) as other,
        Server(lambda handler: send(handler, b"", 302, Location=f"{other.url}/x")) as server,
    ):
        download(f"{server.url}/weights.pt", destination, git_blob_id(FILE))
    assert destination.read_bytes() == FILE


def stall(handler):
    send(handler, FILE[:1000], length=len(FILE))
    handler.wfile.flush()
    handler.rfile.read(1)  # until the client gives up


def unannounced_then_cut(handler):
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(FILE[:1000])


def wrong_part(handler):
    """Drops the first connection, then sends the beginning again as if it were the rest."""
    if "Range" in handler.headers:
        send(handler, FILE[:-1000], 206, Content_Range=f"bytes 1000-{len(FILE) - 1}/{len(FILE)}")
    else:
        send(handler, FILE[:1000], length=len(FILE))


HTML = b"<!DOCTYPE html><html><body>rate limit</body></html>"
FAULTS = {
    "truncated": (lambda handler: send(handler, FILE[: len(FILE) // 2], length=len(FILE)), "broke off or stalled"),
    "truncated without a length": (unannounced_then_cut, "are not the published file"),
    "stalled": (stall, "broke off or stalled"),
    "forbidden": (lambda handler: send(handler, b"", 403), "403"),
    "not found": (lambda handler: send(handler, HTML, 404), "404"),
    "server error": (lambda handler: send(handler, b"", 500), "500"),
    "web page": (lambda handler: send(handler, HTML, content_type="text/html"), "text/html"),
    "wrong bytes": (lambda handler: send(handler, FILE[::-1]), "git blob id"),
    "empty": (lambda handler: send(handler, b""), "0 bytes"),
    "drops every connection": (lambda handler: send_and_drop(handler, FILE, after=1000, ranges=False), "broke off"),
    "gives a byte at a time": (lambda handler: send_and_drop(handler, FILE, after=1), "broke off"),
    "another part than asked for": (wrong_part, "broke off|git blob id"),
    "closed at once": (lambda handler: handler.connection.close(), "offline"),
    "too long": (lambda handler: send(handler, FILE * 4), "longer than"),
    "redirected to a file": (lambda handler: send(handler, b"", 302, Location="file:///etc/passwd"), "No connection"),
    "redirected for ever": (lambda handler: send(handler, b"", 302, Location="/again"), "redirects"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_download_is_one_clear_error_and_leaves_no_file_and_a_second_try_succeeds(
    fault, destination, monkeypatch
):
    monkeypatch.setattr(download_module, "TIMEOUT", (1.0, 0.2))
    monkeypatch.setattr(download_module, "LARGEST_FILE", 2 * len(FILE))
    answer, message = FAULTS[fault]
    with Server(answer) as server:
        url = f"{server.url}/weights.pt"
        with pytest.raises(DownloadError, match=message) as caught:
            download(url, destination, git_blob_id(FILE))
        assert all(part in str(caught.value) for part in (url, str(destination), LOCAL_COPIES_VARIABLE))
        assert list(destination.parent.iterdir()) == []
        server.answer = lambda handler: send(handler, FILE)
        download(url, destination, git_blob_id(FILE))
    assert destination.read_bytes() == FILE


@pytest.mark.parametrize("after", [len(FILE) // 3, len(FILE) - 1])
def test_download_that_drops_is_taken_up_where_it_broke(after, destination):
    with Server(lambda handler: send_and_drop(handler, FILE, after)) as server:
        download(f"{server.url}/weights.pt", destination, git_blob_id(FILE))
        assert len(server.requests) == -(-len(FILE) // after)
    assert destination.read_bytes() == FILE
    assert list(destination.parent.iterdir()) == [destination]


def test_redirect_to_another_host_that_serves_other_bytes_is_refused(destination):
    with (
        Server(lambda handler: send(handler, HTML, content_type="text/html")) as other,
        Server(lambda handler: send(handler, b"", 302, Location=f"{other.url}/login")) as server,
        pytest.raises(DownloadError, match="text/html"),
    ):
        download(f"{server.url}/weights.pt", destination, git_blob_id(FILE))
    assert list(destination.parent.iterdir()) == []


def test_failed_download_leaves_an_older_file_as_it_was(destination):
    destination.write_bytes(b"older")
    with Server(lambda handler: send(handler, HTML)) as server, pytest.raises(DownloadError):
        download(f"{server.url}/weights.pt", destination, git_blob_id(FILE))
    assert destination.read_bytes() == b"older"


def test_refused_connection_says_offline_and_names_address_destination_and_variable(destination):
    with Server(lambda handler: None) as server:
        url = f"{server.url}/weights.pt"
    with pytest.raises(DownloadError, match="offline") as caught:
        download(url, destination, git_blob_id(FILE))
    assert all(part in str(caught.value) for part in (url, str(destination), LOCAL_COPIES_VARIABLE))


# ----------------------------------------------------------------------------------------- conversion


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A file as the authors publish them, with fixed random weights."""
    weights = {name: torch.from_numpy(value) for name, value in recipe.state_dict("simple_cnaps").items()}
    path = tmp_path_factory.mktemp("published") / "best_simple_cnaps.pt"
    torch.save(weights, path)
    return SimpleNamespace(
        path=path,
        content=path.read_bytes(),
        blob_id=blob_id(path),
        model=SimpleCNAPS.from_published_state_dict(weights),
    )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(LOCAL_COPIES_VARIABLE, raising=False)
    return tmp_path / "cache"


NAME = "simple-cnaps-meta-dataset"


@pytest.fixture
def server(published, cache, monkeypatch):
    """The published file's server; the table's record points to it."""
    with Server(lambda handler: send(handler, published.content)) as server:
        record = dataclasses.replace(
            CHECKPOINTS[NAME], url=f"{server.url}/best_simple_cnaps.pt", blob_id=published.blob_id
        )
        monkeypatch.setitem(CHECKPOINTS, NAME, record)
        yield server


def test_published_weights_are_downloaded_once_converted_and_then_need_no_connection(published, server, cache):
    before = torch.get_rng_state()
    first = load_checkpoint(NAME)
    assert torch.equal(torch.get_rng_state(), before)
    assert same_weights(first, published.model)
    assert first.config == published.model.config
    assert CHECKPOINTS[NAME].settings.items() <= first.config.items()
    assert server.requests == [("GET", "/best_simple_cnaps.pt")]
    assert same_weights(load_checkpoint(NAME), first)
    assert len(server.requests) == 1
    # What stays: the converted folder, and the lock's empty file where the platform keeps it.
    (folder,) = (path for path in cache.iterdir() if path.suffix != ".lock")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_eight_threads_asking_at_once_download_once(server, published):
    with ThreadPoolExecutor(8) as pool:
        models = list(pool.map(lambda _: load_checkpoint(NAME).config, range(8)))
    assert models == [published.model.config] * 8
    assert len(server.requests) == 1


def _load(name: str) -> object:
    return load_checkpoint(name).config


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork, to start eight quickly")
def test_eight_processes_asking_at_once_download_once(server, published):
    # One thread each: a forked child has none of its parent's OpenMP threads and would wait for them for ever.
    fork = multiprocessing.get_context("fork")
    with fork.Pool(8, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        assert pool.map(_load, [NAME] * 8, chunksize=1) == [published.model.config] * 8
    assert len(server.requests) == 1


def test_failed_download_leaves_the_cache_clean_and_the_second_try_succeeds(server, published, cache):
    server.answer = lambda handler: send(handler, published.content[:-1])
    with pytest.raises(DownloadError):
        load_checkpoint(NAME)
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []
    server.answer = lambda handler: send(handler, published.content)
    assert load_checkpoint(NAME).config == published.model.config


def test_leftovers_of_killed_processes_do_no_harm(server, published, cache):
    cache.mkdir()
    (cache / "best_simple_cnaps.pt.part").write_bytes(published.content[:1000])
    (cache / "best_simple_cnaps.pt").write_bytes(b"not it")
    half = cache / f"{NAME}-{published.blob_id[:12]}-v1.part"
    half.mkdir()
    (half / "config.json").write_text("{")
    assert load_checkpoint(NAME).config == published.model.config


def test_verified_download_of_a_killed_process_is_converted_without_another(server, published, cache):
    cache.mkdir()
    (cache / "best_simple_cnaps.pt").write_bytes(published.content)
    load_checkpoint(NAME)
    assert server.requests == []


def test_local_copy_serves_without_a_connection_and_stays(server, published, monkeypatch):
    monkeypatch.setenv(LOCAL_COPIES_VARIABLE, str(published.path.parent))
    assert load_checkpoint(NAME).config == published.model.config
    assert server.requests == []
    assert published.path.is_file()


def test_local_copy_with_other_bytes_is_refused_and_not_downloaded_instead(server, tmp_path, monkeypatch):
    (tmp_path / "best_simple_cnaps.pt").write_bytes(b"other")
    monkeypatch.setenv(LOCAL_COPIES_VARIABLE, str(tmp_path))
    with pytest.raises(CheckpointError, match="not the published file"):
        load_checkpoint(NAME)
    assert server.requests == []


def test_local_copies_in_a_folder_that_is_not_there_are_an_error(server, tmp_path, monkeypatch):
    monkeypatch.setenv(LOCAL_COPIES_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(CheckpointError, match=LOCAL_COPIES_VARIABLE):
        load_checkpoint(NAME)


def test_folder_of_local_copies_without_this_file_leads_to_the_download(server, tmp_path, monkeypatch):
    (tmp_path / "copies").mkdir()
    monkeypatch.setenv(LOCAL_COPIES_VARIABLE, str(tmp_path / "copies"))
    load_checkpoint(NAME)
    assert len(server.requests) == 1


def test_cache_that_cannot_be_made_is_one_clear_error(server, cache):
    cache.write_text("a file in the way")
    with pytest.raises(CheckpointError, match=CACHE_VARIABLE):
        load_checkpoint(NAME)


def test_damaged_cache_is_an_error_that_says_what_to_delete(server, cache):
    load_checkpoint(NAME)
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"delete the folder {folder}"):
        load_checkpoint(NAME)


@pytest.mark.parametrize("key", ["state_dict", "resnet_dict"])
def test_bare_pretrained_network_becomes_a_model_without_adaptation(key, published, server, tmp_path, monkeypatch):
    prefix = "feature_extractor."
    weights = torch.load(published.path, weights_only=True)
    bare = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    path = tmp_path / "pretrained_resnet_meta_dataset.pt.tar"
    torch.save({"epoch": 90, key: {**bare, "fc.weight": torch.zeros(712, 512), "fc.bias": torch.zeros(712)}}, path)
    record = dataclasses.replace(CHECKPOINTS["no-adaptation-meta-dataset"], blob_id=blob_id(path))
    monkeypatch.setitem(CHECKPOINTS, record.name, record)
    monkeypatch.setenv(LOCAL_COPIES_VARIABLE, str(tmp_path))
    model = load_checkpoint(record.name)
    assert record.settings.items() <= model.config.items()
    assert torch.equal(model.feature_extractor.conv1.weight, bare["conv1.weight"])


def test_published_file_with_code_in_it_is_refused_even_under_the_right_digest(server, tmp_path, monkeypatch):
    torch.save({"x": Bomb(tmp_path / "ran")}, tmp_path / "best_simple_cnaps.pt")
    record = dataclasses.replace(CHECKPOINTS[NAME], blob_id=blob_id(tmp_path / "best_simple_cnaps.pt"))
    monkeypatch.setitem(CHECKPOINTS, NAME, record)
    monkeypatch.setenv(LOCAL_COPIES_VARIABLE, str(tmp_path))
    with pytest.raises(CheckpointError, match="unpickling"):
        load_checkpoint(NAME)
    assert not (tmp_path / "ran").exists()


# ------------------------------------------------------------------------------------ the Hugging Face Hub


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
    assert same_weights(load_checkpoint("user/repo"), read_checkpoint(saved))
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


def test_saved_pretrained_folder_is_a_checkpoint(model, tmp_path):
    model.save_pretrained(tmp_path / "pretrained")
    assert same_weights(load_checkpoint(tmp_path / "pretrained"), model)
    assert same_weights(SimpleCNAPS.from_pretrained(tmp_path / "pretrained"), model)
