"""Pictures that were read once are not read again, and what is remembered is never another picture."""

from __future__ import annotations

import os
import sqlite3
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from fewshot_mahalanobis import Region, SimpleCNAPSClassifier
from fewshot_mahalanobis.images import memory as memory_module
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.images.memory import PictureMemory, remembered_in
from fewshot_mahalanobis.networks.task import AdaptedNetwork
from tests.forked import forked_pool, needs_fork
from tests.tiny import QUERY_LABELS, SUPPORT_LABELS, drawn, narrow, tiny_classifier, tiny_model, unadapted_model

SIZE = 32


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    rng, found = np.random.default_rng(0), []
    for index in range(5):
        found.append(tmp_path / f"{index}.png")
        Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(found[-1])
    return found


@pytest.fixture
def memory(tmp_path: Path) -> PictureMemory:
    return PictureMemory(tmp_path / "memory")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files whose pixels were decoded."""
    names, load = list[str](), ImageFile.ImageFile.load

    def counted(image: Any) -> Any:
        names.extend([Path(image.fp.name).name] if image.tile else [])
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    return names


def tensor(images: Any, memory: PictureMemory | None, **settings: Any) -> torch.Tensor:
    return torch.cat([*ImageBatches(images, SIZE, batch_size=2, n_jobs=2, memory=memory, **settings)])


def test_a_file_is_decoded_once(paths: list[Path], memory: PictureMemory, decoded: list[str]) -> None:
    expected = tensor(paths, None)
    decoded.clear()
    assert torch.equal(tensor(paths, memory), expected)
    assert len(decoded) == len(paths)
    assert torch.equal(tensor(paths[::-1], PictureMemory(memory.folder)), expected.flip(0))
    assert len(decoded) == len(paths)
    assert memory.contents().pictures == len(paths)


def test_a_renamed_file_is_the_same_and_a_changed_one_is_another(
    paths: list[Path], memory: PictureMemory, decoded: list[str]
) -> None:
    """Also one of the same name, size and, by a trick, date."""
    first, other = paths[0], paths[0].with_name("other.png")
    pixels = np.random.default_rng(1).integers(0, 256, (2, 40, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels[0]).save(first, "BMP")
    before = tensor([first], memory)
    first.rename(other)
    decoded.clear()
    assert torch.equal(tensor([other], memory), before)
    assert decoded == []
    times, size = other.stat(), other.stat().st_size
    Image.fromarray(pixels[1]).save(other, "BMP")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert other.stat().st_size == size
    after = tensor([other], memory)
    assert torch.equal(after, tensor([other], None))
    assert not torch.equal(after, before)


def test_regions_sizes_and_ways_to_read_are_told_apart(paths: list[Path], memory: PictureMemory) -> None:
    regions = [
        Region(paths[0], (0, 0, 20, 20)),
        Region(paths[0], (5, 5, 20, 20)),
        Region(paths[0], (0, 0, 20, 20), 0.5),
    ]
    for _ in range(2):
        for images, settings in ((regions, {}), (paths[:1], {}), (paths[:1], {"bands": 0}), (paths[:1], {"bands": 1})):
            assert torch.equal(tensor(images, memory, **settings), tensor(images, None, **settings))
        for size in (16, 24):
            batches = [[*ImageBatches(paths[:1], size, memory=each)] for each in (memory, None)]
            assert torch.equal(torch.cat(batches[0]), torch.cat(batches[1]))


def test_what_was_noticed_is_remembered_too(tmp_path: Path, memory: PictureMemory) -> None:
    """The warning of a small part of the range, and the box in pixels of a region in shares."""
    file = tmp_path / "dark.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 4095, (40, 50), dtype=np.uint16)).save(file)
    for _ in range(2):
        batches = ImageBatches([file], SIZE, memory=memory)
        with pytest.warns(UserWarning, match="value_range"):
            list(batches)
        assert batches.is_narrow
    region = Region(file, (0.1, 0.1, 0.5, 0.5), normalized=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        boxes = [next(ImageBatches([region], SIZE, memory=memory).decoded()).boxes for _ in range(2)]
    assert boxes == [((5, 4, 25, 20),)] * 2


def test_what_cannot_be_read_is_not_remembered(paths: list[Path], memory: PictureMemory) -> None:
    content = paths[0].read_bytes()
    paths[0].write_bytes(content[:-100])
    for _ in range(2):
        with pytest.raises(ImageError):
            tensor(paths, memory)
    paths[0].write_bytes(content)
    assert torch.equal(tensor(paths, memory), tensor(paths, None))


@pytest.mark.parametrize("damage", ["value", "cut", "not bytes"])
def test_a_damaged_entry_is_computed_again(damage: str, paths: list[Path], memory: PictureMemory) -> None:
    expected = tensor(paths, memory)
    with sqlite3.connect(memory.folder / "pictures.sqlite") as database:
        for key, value in database.execute("SELECT key, value FROM entries").fetchall():
            spoilt = {"value": value[:-1] + bytes([value[-1] ^ 1]), "cut": value[:9], "not bytes": 7}[damage]
            database.execute("UPDATE entries SET value = ? WHERE key = ?", (spoilt, key))
    database.close()
    assert torch.equal(tensor(paths, PictureMemory(memory.folder)), expected)
    assert len(memory.get(keys_in(memory))) == len(paths)


def keys_in(memory: PictureMemory) -> list[bytes]:
    database = sqlite3.connect(memory.folder / "pictures.sqlite")
    keys = [key for (key,) in database.execute("SELECT key FROM entries")]
    database.close()
    return keys


def test_a_damaged_database_is_begun_anew(paths: list[Path], memory: PictureMemory) -> None:
    expected = tensor(paths, memory)
    (memory.folder / "pictures.sqlite").write_bytes(b"no database" * 1000)
    again = PictureMemory(memory.folder)
    with pytest.warns(UserWarning, match=r"pictures\.sqlite is damaged .*begun anew"):
        assert torch.equal(tensor(paths, again), expected)
    assert again.contents().pictures == len(paths)


def test_where_nothing_can_be_written_a_warning_says_so_once(paths: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    memory = PictureMemory(tmp_path / "file" / "memory")
    with pytest.warns(UserWarning, match="are not remembered in") as said:
        found = [tensor(paths, memory) for _ in range(2)]
    assert len(said) == 1
    assert all(torch.equal(each, tensor(paths, None)) for each in found)


def test_a_full_disk_costs_nothing_but_the_memory(paths: list[Path], memory: PictureMemory) -> None:
    """SQLite refuses to let the database grow, with the error that it has for a full disk."""
    tensor(paths[:1], memory)
    assert memory._connection is not None
    (pages,) = memory._connection.execute("PRAGMA page_count").fetchone()
    memory._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.warns(UserWarning, match="full"):
        assert torch.equal(tensor(paths, memory), tensor(paths, None))
    assert torch.equal(tensor(paths, PictureMemory(memory.folder)), tensor(paths, None))


def test_the_last_bytes_of_a_disk_are_left_to_others(
    paths: list[Path], memory: PictureMemory, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered already is still found, and what is forgotten makes room."""
    tensor(paths[:2], memory)
    before = memory.contents()
    free = type("Usage", (), {"free": 99_000_000})
    monkeypatch.setattr(memory_module.shutil, "disk_usage", lambda folder: free)
    expected = tensor(paths, None)
    decoded.clear()
    with pytest.warns(UserWarning, match="less than 100 MB left") as said:
        found = [tensor(paths, memory) for _ in range(2)]
    assert len(said) == 1
    assert all(torch.equal(each, expected) for each in found)
    assert sorted(decoded) == sorted(2 * ["2.png", "3.png", "4.png"])
    assert memory.contents() == before
    memory.clear()
    assert memory.contents().pictures == 0
    assert memory.contents().size < before.size


def test_old_entries_make_room_and_those_in_use_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10_000
    monkeypatch.setattr(memory_module.time, "time", lambda: now)
    memory = PictureMemory(tmp_path, most_bytes=400_000)

    def put(*names: bytes) -> None:
        for name in names:
            memory.put({name: name * 100_000})

    put(b"a", b"b", b"c", b"d", b"e")
    assert [*memory.get([b"a", b"b", b"c", b"d", b"e"])] == [b"a", b"b", b"c"]
    now += 3000
    memory.get([b"a"])
    now += 3000
    put(b"d", b"e", b"f")
    assert [*memory.get([b"a", b"b", b"c", b"d", b"e", b"f"])] == [b"a", b"d", b"e"]
    assert memory.contents().size < 450_000


def test_threads_and_memories_of_one_folder_write_at_a_time(tmp_path: Path) -> None:
    def write(memory: PictureMemory, name: int) -> None:
        for number in range(10):
            memory.put({b"%d %d" % (name, number): b"%d" % number * 1000})

    memories = [PictureMemory(tmp_path) for _ in range(2)]
    workers = [threading.Thread(target=write, args=(memories[name % 2], name)) for name in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    keys = {b"%d %d" % (name, number): b"%d" % number * 1000 for name in range(4) for number in range(10)}
    assert PictureMemory(tmp_path).get(keys) == keys


@needs_fork
@pytest.mark.process
def test_two_processes_read_with_one_memory(paths: list[Path], memory: PictureMemory) -> None:
    """One is used before the fork too, whose connection a child must not use."""
    tensor(paths[:1], memory)
    expected = tensor(paths, None)
    with forked_pool(2) as pool:
        found = pool.starmap(tensor, [(paths, memory)] * 4)
    assert all(torch.equal(each, expected) for each in found)
    assert torch.equal(tensor(paths, memory), expected)
    assert memory.contents().pictures == len(paths)


# -------------------------------------------------------------------- features


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of images of which a network has computed features."""
    numbers, features = list[int](), AdaptedNetwork.features

    def counted(self: AdaptedNetwork, images: Any, batch_size: int = 64) -> Any:
        numbers.append(len(images))
        return features(self, images, batch_size)

    monkeypatch.setattr(AdaptedNetwork, "features", counted)
    return numbers


@pytest.fixture(scope="module")
def fitted() -> SimpleCNAPSClassifier:
    with narrow():
        model = unadapted_model()
        return SimpleCNAPSClassifier(model, device="cpu").fit(drawn(SUPPORT_LABELS, 0), SUPPORT_LABELS)


def test_features_are_computed_once(fitted: SimpleCNAPSClassifier, tmp_path: Path, computed: list[int]) -> None:
    queries = drawn(QUERY_LABELS, 1)
    expected = fitted.predict_proba(queries)
    remembering = SimpleCNAPSClassifier._of(fitted._state()).set_params(memory=tmp_path)
    computed.clear()
    np.testing.assert_array_equal(remembering.predict_proba(queries), expected)
    assert computed == [len(queries)]
    computed.clear()
    np.testing.assert_array_equal(remembering.predict_proba(queries[::-1]), expected[::-1])
    assert computed == []
    more = np.concatenate([queries, drawn(QUERY_LABELS, 2)[:2]])
    np.testing.assert_allclose(remembering.predict_proba(more), fitted.predict_proba(more), rtol=1e-4, atol=1e-7)
    assert computed[0] == 2


def test_each_network_has_a_fingerprint_of_its_own() -> None:
    with narrow():
        model = unadapted_model()
        networks = [
            AdaptedNetwork(model.feature_extractor),
            AdaptedNetwork(model.feature_extractor, dtype=torch.bfloat16),
            AdaptedNetwork(model.feature_extractor, projection=torch.nn.Linear(2, 2)),
        ]
        again = AdaptedNetwork(model.feature_extractor).fingerprint()
        with torch.no_grad():
            model.feature_extractor.conv1.weight[0, 0, 0, 0] += 1
        networks.append(AdaptedNetwork(model.feature_extractor))
    found = [network.fingerprint() for network in networks]
    assert found[0] == again
    assert None not in found
    assert len({*found}) == len(networks)
    assert AdaptedNetwork(tiny_model().feature_extractor).fingerprint() is None  # of whose code nothing is known


def test_a_memory_is_no_part_of_a_saved_classifier(fitted: SimpleCNAPSClassifier, tmp_path: Path) -> None:
    remembering = SimpleCNAPSClassifier._of(fitted._state()).set_params(memory=tmp_path / "memory")
    with narrow():
        remembering.save(tmp_path / "model.safetensors")
        assert SimpleCNAPSClassifier.load(tmp_path / "model.safetensors", device="cpu").memory is None


@pytest.mark.parametrize("memory", [7, b"folder"])
def test_a_memory_that_is_no_folder_is_refused(memory: Any) -> None:
    with pytest.raises(ValueError, match=f"memory must be a folder or None, got {memory!r}"):
        tiny_classifier(memory=memory)
    assert remembered_in(None) is None
