"""Atomic replacement of files and folders: permissions, links, and what must not be replaced."""

from __future__ import annotations

import dataclasses
import errno
import functools
import importlib
import os
import re
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

import fewshot_mahalanobis
from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.checkpoints import CheckpointError, save_checkpoint
from fewshot_mahalanobis.checkpoints.files import (
    atomic_replace,
    check_writable,
    locked,
    readable_file,
    remove_leftovers,
)
from fewshot_mahalanobis.checkpoints.load import resnet18_weights
from fewshot_mahalanobis.export.web_page.page_files import page_folder
from fewshot_mahalanobis.research.evaluation.result import Accuracy, Result, write_results
from fewshot_mahalanobis.research.evaluation.shots_and_ways import plot_curves
from fewshot_mahalanobis.research.training.run import RunFolder
from tests.tiny import LABELS, pictures, tiny_classifier, tiny_model

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

posix = pytest.mark.skipif(os.name != "posix", reason="modes and owners are those of POSIX")
NOBODY = 65534
RESULT = Result(source="digits", way=5, shot=1, scores={"a": Accuracy(0.5, 0.1, 2)})


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can look into."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def another_user() -> Iterator[None]:
    """Root may do everything, so it is somebody else meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    before, group = os.getgroups(), os.getegid()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(before)


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def replaced_file(path: Path, text: str) -> None:
    with atomic_replace(path) as temporary:
        temporary.write_text(text)


def replaced(path: Path, text: str = "new") -> None:
    """Replace by a writer that gives its files to their owner alone, as safetensors does."""
    with atomic_replace(path) as temporary:
        temporary.write_text(text)
        temporary.chmod(0o600)


def test_file_is_replaced_when_the_block_ends(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with atomic_replace(path) as temporary:
        assert temporary.name == "a.txt"
        assert not temporary.exists()
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_error_in_the_block_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fill_the_disk() -> None:
        with atomic_replace(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        fill_the_disk()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_folder_that_is_missing_is_named(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match=r"cannot write .*a\.txt: there is no folder .*missing\. Make it first$"),
        atomic_replace(tmp_path / "missing" / "a.txt"),
    ):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*file\. Make it"):
        check_writable(tmp_path / "file" / "a.txt")


def test_folder_can_be_written_too(tmp_path):
    with atomic_replace(tmp_path / "folder") as temporary:
        temporary.mkdir()
        (temporary / "a.txt").write_text("a")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "a.txt").read_text() == "a"


def test_a_file_does_not_take_the_place_of_a_folder(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=r"cannot write .*folder: it is a folder\. Name a file in it"):
        replaced(tmp_path / "folder")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_two_writers_do_not_share_a_temporary_file(tmp_path):
    with atomic_replace(tmp_path / "a.txt") as first, atomic_replace(tmp_path / "a.txt") as second:
        first.write_text("first")
        second.write_text("second")
    assert (tmp_path / "a.txt").read_text() == "first"  # the first block ends last


@pytest.mark.parametrize("character", ["a", "é", "猫", "🐈"])
def test_a_name_of_the_largest_length_can_be_written_and_its_leftovers_found(character, tmp_path):
    path = tmp_path / (character * (255 // len(character.encode())))
    replaced(path)
    replaced(path, "newer")
    assert path.read_text() == "newer"
    folders = []
    with atomic_replace(path) as temporary:
        temporary.write_text("half")
        folders = [folder.name for folder in tmp_path.iterdir() if folder != path]
        remove_leftovers(path)
        assert list(tmp_path.iterdir()) == [path]
        temporary.parent.mkdir()
        temporary.write_text("whole")
    assert len(folders) == 1
    assert path.read_text() == "whole"


# ------------------------------------------------------------------------------------------- permissions


@posix
@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(("bits", "expected"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_mode_that_the_umask_leaves(bits, expected, tmp_path):
    os.umask(bits)
    replaced(tmp_path / "new")
    assert mode(tmp_path / "new") == expected
    assert os.umask(bits) == bits


@posix
@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("old", [0o600, 0o640, 0o664, 0o666, 0o755])
def test_a_file_that_is_replaced_keeps_its_mode(old, tmp_path):
    path = tmp_path / "old"
    path.touch()
    path.chmod(old)
    replaced(path)
    assert (mode(path), path.read_text()) == (old, "new")


@posix
def test_a_mode_that_is_asked_for_is_given(tmp_path):
    path = tmp_path / "file"
    path.touch(0o644)
    with atomic_replace(path, mode=0o440) as temporary:
        temporary.write_text("new")
    assert mode(path) == 0o440


@posix
def test_a_write_protected_file_and_folder_are_refused_and_stay(open_folder):
    (open_folder / "file").write_text("old")
    (open_folder / "file").chmod(0o444)
    (open_folder / "locked").mkdir(mode=0o555)
    open_folder.chmod(0o777)
    with another_user():
        with pytest.raises(PermissionError, match=r"cannot write .*file: it is write-protected\. Name another file"):
            replaced(open_folder / "file")
        with pytest.raises(PermissionError, match=r"cannot write .*new in the folder .*locked: Permission denied"):
            replaced(open_folder / "locked" / "new")
        with pytest.raises(PermissionError, match="locked: Permission denied"):
            check_writable(open_folder / "locked" / "new")
    assert (open_folder / "file").read_text() == "old"
    assert sorted(path.name for path in open_folder.rglob("*")) == ["file", "locked"]


@posix
def test_what_may_not_be_read_is_told_from_what_is_not_there(open_folder):
    secret = open_folder / "secret"
    (open_folder / "closed").mkdir()
    for path in (secret, open_folder / "closed" / "in it"):
        path.write_text("secret")
    secret.chmod(0)
    (open_folder / "closed").chmod(0)
    with another_user():
        for path in (secret, open_folder / "closed" / "in it"):
            with pytest.raises(PermissionError, match=f"no permission to read {path}"):
                readable_file(path)
        assert not readable_file(open_folder / "none")
        assert not readable_file(open_folder)


# --------------------------------------------------------------------- file systems that lack an operation


def lacking(monkeypatch: pytest.MonkeyPatch, names: str, code: int) -> None:
    """Let the operations of this file system fail, as those of mounted buckets and shares do."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    for name in names.split():
        module, function = name.split(".")
        monkeypatch.setattr(importlib.import_module(module), function, refuse)


@posix
@pytest.mark.parametrize("code", ["ENOSYS", "ENOTSUP", "EINVAL", "EPERM"])
@pytest.mark.parametrize("names", ["os.chmod os.chown os.utime", "os.fsync", "os.replace os.rename", "fcntl.flock"])
def test_what_a_file_system_lacks_stops_no_writing(names, code, tmp_path, monkeypatch):
    lacking(monkeypatch, names, getattr(errno, code))
    for text in ("one", "two"):
        with locked(tmp_path / "lock"):
            replaced_file(tmp_path / "table.csv", text)
        assert (tmp_path / "table.csv").read_text() == text
    with atomic_replace(tmp_path / "folder") as temporary:
        (temporary / "sub").mkdir(parents=True)
        (temporary / "sub" / "a.txt").write_text("a")
    assert (tmp_path / "folder" / "sub" / "a.txt").read_text() == "a"
    assert {path.name for path in tmp_path.iterdir()} - {"lock"} == {"table.csv", "folder"}


@posix
@pytest.mark.parametrize("code", ["EXDEV", "EBUSY"])
def test_a_file_that_is_mounted_by_itself_is_written_in_its_place(code, tmp_path, monkeypatch):
    path = tmp_path / "model"
    path.write_text("old, and longer than the new one")
    inode = path.stat().st_ino
    lacking(monkeypatch, "os.replace", getattr(errno, code))
    replaced_file(path, "new")
    assert (path.read_text(), path.stat().st_ino) == ("new", inode)


@pytest.mark.parametrize("code", ["ENOSPC", "EIO", "EACCES", "EROFS"])
def test_other_failures_of_renaming_are_errors_and_leave_the_old_file(code, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("old")
    lacking(monkeypatch, "os.replace", getattr(errno, code))
    with pytest.raises(OSError, match=re.escape(os.strerror(getattr(errno, code)))):
        replaced_file(tmp_path / "a.txt", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("writing", [atomic_replace, page_folder])
def test_a_full_disk_is_named_with_the_remedy_and_leaves_what_was_there(writing, code, tmp_path):
    path = tmp_path / "place"

    def write() -> None:
        with writing(path) as temporary:
            (temporary / "half" if temporary.is_dir() else temporary).write_text("half")
            raise OSError(code, os.strerror(code))

    said = re.escape(f"cannot write {path}: {os.strerror(code)}. Make room there, and try again")
    with pytest.raises(OSError, match=said):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_page_on_a_full_disk_names_its_own_folder(tmp_path):
    def write() -> None:
        with page_folder(tmp_path / "page") as folder, atomic_replace(folder / "classifier.onnx"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=re.escape(f"cannot write {tmp_path / 'page'}: No space left")) as raised:
        write()
    assert raised.value.errno == errno.ENOSPC


@pytest.mark.parametrize("call", [check_writable, lambda path: replaced_file(path, "new")])
def test_a_disk_without_room_for_a_folder_is_full_too(call, tmp_path, monkeypatch):
    lacking(monkeypatch, "tempfile.mkdtemp", errno.ENOSPC)
    with pytest.raises(OSError, match=r"cannot write .*a\.txt: No space.*Make room"):
        call(tmp_path / "a.txt")


# ------------------------------------------------------------------------------------- links and devices


@pytest.mark.parametrize("target", ["v1", "elsewhere/v1", "absolute", "chain", "dangling"])
def test_a_link_stays_and_what_it_leads_to_is_written(target, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link, real = tmp_path / "latest.txt", tmp_path / "elsewhere" / "v1" if "/" in target else tmp_path / "v1"
    if target != "dangling":
        real.write_text("old")
    if target == "chain":
        (tmp_path / "middle").symlink_to("v1")
    leads = {"absolute": real, "chain": Path("middle"), "dangling": Path("v1")}.get(target, Path(target))
    link.symlink_to(leads)
    with atomic_replace(link) as temporary:
        assert temporary.name == "latest.txt"  # the ending may choose the format
        temporary.write_text("new")
    assert link.is_symlink()
    assert link.readlink() == leads
    assert real.read_text() == "new"
    assert not real.is_symlink()
    assert not list(tmp_path.rglob(".saving-*"))


def test_links_that_lead_nowhere_are_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").symlink_to("missing/file")
    with pytest.raises(OSError, match=r"symbolic links.*a'"):
        replaced(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match=r"cannot write .*c: there is no folder .*missing\. Make it first"):
        replaced(tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@posix
def test_pipes_sockets_devices_and_links_to_them_are_refused_before_the_block(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # addresses of sockets are short
    os.mkfifo("pipe")
    Path("link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    kinds = {"pipe": "pipe", "link": "pipe", "socket": "socket", os.devnull: "device"}
    for name, kind in kinds.items():
        with pytest.raises(OSError, match=f"cannot write {name}: it is a {kind}, which must not be replaced"):
            check_writable(Path(name))
        with pytest.raises(OSError, match=f"it is a {kind}"), atomic_replace(name):
            pytest.fail("the block ran")
        assert not readable_file(Path(name))
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "socket"]


# --------------------------------------------------------------------------------- everything that writes


def export(path: Path) -> None:
    pytest.importorskip("torch", minversion="2.5")
    small_classifier().export_program(path)


def plot(path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_curves([RESULT, dataclasses.replace(RESULT, shot=5)], path.parent)


@functools.cache
def small_classifier() -> SimpleCNAPSClassifier:
    return SimpleCNAPSClassifier(SimpleCNAPS(adaptation="none", image_size=32), device="cpu").fit(
        pictures(8, 1), LABELS
    )


#: File -> what of the package writes it.
WRITERS: dict[str, Callable[[Path], object]] = {
    "classifier.safetensors": lambda path: tiny_classifier().save(path),
    "classifier.pt2": export,
    "results.json": lambda path: write_results(path, [RESULT]),
    "accuracy_by_shot.png": plot,
    "model.safetensors": lambda path: save_checkpoint(tiny_model(), path.parent),
    "config.json": lambda path: save_checkpoint(tiny_model(), path.parent),
    "README.md": lambda path: save_checkpoint(tiny_model(), path.parent, card="about it"),
    "state.pt": lambda path: RunFolder(path.parent, {}).save(lambda: {"step": 1}, now=True),
    "recipe.json": lambda path: RunFolder(path.parent, {}),
}


@posix
@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "classifier.pt2" else ()) for n in WRITERS]
)
def test_every_file_of_the_package_is_written_with_the_modes_and_links_of_its_place(name, tmp_path):
    write, path = WRITERS[name], tmp_path / name
    os.umask(0o027)
    write(path)
    assert mode(path) == 0o640
    path.chmod(0o664)
    path.rename(tmp_path / "real")
    path.symlink_to("real")
    write(path)
    assert path.is_symlink()
    assert mode(tmp_path / "real") == 0o664
    path.unlink()
    os.mkfifo(path)
    with pytest.raises((OSError, CheckpointError), match=f"{name}: it is a pipe, which must not be replaced"):
        write(path)
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_no_module_renames_or_writes_files_by_itself():
    """Those listed write into folders of their own, which nobody else sees."""
    package = Path(fewshot_mahalanobis.__file__).parent
    writing = re.compile(
        r"os\.replace\(|save_file\(|\.savefig\(|\.write_text\(|\.write_bytes\(|torch\.save\(|onnx\.save\("
    )
    alone = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if writing.search(text := file.read_text(encoding="utf-8")) and "atomic_replace(" not in text
    }
    assert alone == {"apps/ray.py", "checkpoints/card.py", "images/memory.py"}


@posix
def test_what_may_not_be_read_is_called_so_by_every_reader(open_folder):
    tiny_classifier().save(open_folder / "classifier.safetensors")
    load_checkpoint("default").save_pretrained(open_folder / "weights")
    load_checkpoint("default").save_pretrained(open_folder / "closed" / "checkpoint")
    (open_folder / "classifier.safetensors").chmod(0)
    (open_folder / "weights" / "model.safetensors").chmod(0)
    (open_folder / "closed").chmod(0)
    with another_user():
        with pytest.raises(PermissionError, match=r"no permission to read .*/classifier\.safetensors$"):
            SimpleCNAPSClassifier.load(open_folder / "classifier.safetensors")
        with pytest.raises(CheckpointError, match=r"no permission to read .*weights/model\.safetensors$"):
            load_checkpoint(open_folder / "weights")
        with pytest.raises(CheckpointError, match=r"no permission to read .*weights/model\.safetensors$"):
            resnet18_weights(str(open_folder / "weights" / "model.safetensors"))
        with pytest.raises(CheckpointError, match=r"closed/checkpoint: no permission to look into the folder"):
            load_checkpoint(open_folder / "closed" / "checkpoint")
