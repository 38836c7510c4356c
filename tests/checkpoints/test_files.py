"""Atomic replacement of files and folders."""

import pytest

from fewshot_mahalanobis.checkpoints.files import atomic_replace


def test_file_is_replaced_when_the_block_ends(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with atomic_replace(path) as temporary:
        assert temporary.name == "a.txt"
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
        pytest.raises(FileNotFoundError, match=r"cannot write .*a\.txt: there is no folder .*missing$"),
        atomic_replace(tmp_path / "missing" / "a.txt"),
    ):
        pass


def test_folder_can_be_written_too(tmp_path):
    with atomic_replace(tmp_path / "folder") as temporary:
        temporary.mkdir()
        (temporary / "a.txt").write_text("a")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "a.txt").read_text() == "a"


def test_two_writers_do_not_share_a_temporary_file(tmp_path):
    with atomic_replace(tmp_path / "a.txt") as first, atomic_replace(tmp_path / "a.txt") as second:
        first.write_text("first")
        second.write_text("second")
    assert (tmp_path / "a.txt").read_text() == "first"  # the first block ends last
