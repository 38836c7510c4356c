"""The authors' published weights: downloaded once, converted, kept in the cache."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from fewshot_mahalanobis.checkpoints import CheckpointError, DownloadError
from fewshot_mahalanobis.checkpoints.catalogue import CHECKPOINTS
from fewshot_mahalanobis.checkpoints.download import LOCAL_COPIES_VARIABLE, blob_id
from fewshot_mahalanobis.checkpoints.load import load_checkpoint
from fewshot_mahalanobis.checkpoints.published import CACHE_VARIABLE
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from tests.checkpoints.checkpoint_server import Server, send
from tests.checkpoints.models import Bomb, same_weights
from tests.forked import forked_pool, needs_fork
from tests.golden import recipe


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


@needs_fork
def test_eight_processes_asking_at_once_download_once(server, published):
    with forked_pool(8) as pool:
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


@pytest.mark.parametrize(
    ("name", "keys", "repository"),
    [
        ("lite-simple-cnaps-224", "lite_simple_cnaps", "cambridge-mlg/LITE"),
        ("lite-simple-cnaps-84", "lite_simple_cnaps", "cambridge-mlg/LITE"),
        ("simple-cnaps-meta-dataset", "simple_cnaps", "plai-group/simple-cnaps"),
    ],
)
def test_every_kind_of_weights_is_downloaded_from_its_own_repository(
    name, keys, repository, cache, tmp_path, monkeypatch
):
    weights = {key: torch.from_numpy(value) for key, value in recipe.state_dict(keys).items()}
    path = tmp_path / CHECKPOINTS[name].url.rsplit("/", 1)[-1]
    torch.save(weights, path)
    assert CHECKPOINTS[name].url.startswith(f"https://raw.githubusercontent.com/{repository}/")
    with Server(lambda handler: send(handler, path.read_bytes())) as server:
        record = dataclasses.replace(CHECKPOINTS[name], url=f"{server.url}/{path.name}", blob_id=blob_id(path))
        monkeypatch.setitem(CHECKPOINTS, name, record)
        model = load_checkpoint(name)
        assert same_weights(load_checkpoint(name), model)
        assert server.requests == [("GET", f"/{path.name}")]
    assert record.settings.items() <= model.config.items()
    assert model.image_size == record.image_size
    assert same_weights(model, SimpleCNAPS.from_published_state_dict(weights, image_size=record.image_size))
    if "lite" in name:
        assert record.size == sum(t.numel() * t.element_size() for t in model.state_dict().values())
