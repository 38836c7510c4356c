"""Folders of pictures: what is found, what is left out, and what is said of it."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from fewshot_mahalanobis.images import folders, formats
from fewshot_mahalanobis.images.folders import find_class_images, find_images, is_image_name, load_folder
from fewshot_mahalanobis.images.picture import read_square_array
from tests.tiny import pictures


def draw(path: Path, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pictures(1, 0)[0]).save(path, **options)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes of two pictures each."""
    for name in ("cat/10.png", "cat/2.png", "dog/1.jpg", "dog/more/1.jpg"):
        draw(tmp_path / "photos" / name)
    return tmp_path / "photos"


def test_paths_come_in_natural_order_with_the_names_of_their_class_folders(root: Path) -> None:
    paths, labels = load_folder(root)
    assert [str(path.relative_to(root)) for path in paths] == ["cat/2.png", "cat/10.png", "dog/1.jpg", "dog/more/1.jpg"]
    assert labels == ["cat", "cat", "dog", "dog"]
    assert load_folder(str(root)) == (paths, labels)


@pytest.mark.parametrize("suffix", [".JPG", ".jpeg", ".PnG", ".jfif", ".webp", ".TIF", ".bmp", ".gif", ".ppm", ".jp2"])
def test_an_extension_in_any_case_is_found_and_read(root: Path, suffix: str) -> None:
    file = draw(root / "cat" / f"new{suffix}")
    paths, _ = load_folder(root)
    assert file in paths
    assert read_square_array(file, 8).shape == (8, 8, 3)


def test_an_image_is_told_by_its_first_bytes_where_its_name_says_nothing(root: Path) -> None:
    found = [shutil.copy(root / "cat" / "2.png", root / "cat" / name) for name in ("no extension", "2.png.backup")]
    assert {Path(file) for file in found} <= {*load_folder(root)[0]}


def test_junk_of_operating_systems_is_left_out_without_a_word(root: Path, recwarn: pytest.WarningsRecorder) -> None:
    before = load_folder(root)
    for name in ("cat/.DS_Store", "cat/._2.png", "Thumbs.db", "dog/desktop.ini", "cat/Icon\r"):
        (root / name).write_bytes(b"\0\0\0\1Bud1")
    for name in ("__MACOSX/cat/2.png", "$RECYCLE.BIN/1.png", ".ipynb_checkpoints/1.png", "cat/@eaDir/2.png"):
        draw(root / name)
    assert load_folder(root) == before
    assert not recwarn.list


def test_everything_else_that_is_left_out_is_said_by_kind_and_number(root: Path) -> None:
    for name in ("cat/a.mp4", "dog/b.MP4", "cat/notes.txt", "dog/README", "dog/1.jxl", "cat/1.CR2"):
        (root / name).write_text("not a picture")
    draw(root / "loose.png")
    (root / "cat" / "gone.png").symlink_to(root / "nowhere.png")
    (root / "dog" / "others").symlink_to(root / "cat", target_is_directory=True)
    os.mkfifo(root / "cat" / "pipe.png")
    (root / "horse").mkdir()
    (root / "mouse").mkdir()
    (root / "mouse" / "list.csv").write_text("1,2")
    found = find_class_images(root)
    assert found.ignored == Counter(
        {
            "MP4 file": 2,
            **dict.fromkeys(("TXT file", "file without an extension", "CR2 file", "CSV file", "JXL file"), 1),
            **dict.fromkeys(("broken link", "link to a folder", "pipe, socket or device"), 1),
            "image outside the class folders": 1,
        }
    )
    assert found.empty == ["horse", "mouse"]
    note = found.note()
    assert note.startswith("Left out: 2 MP4 files, 1 CR2 file (export them as JPEG), ")
    assert note.endswith("No image in class folders 'horse', 'mouse'.")
    with pytest.warns(UserWarning, match="2 MP4 files") as warned:
        paths, labels = load_folder(root)
    assert [w.filename for w in warned if "2 MP4 files" in str(w.message)] == [__file__]
    assert (paths, labels) == (found.paths, found.labels)
    assert len(paths) == 4


def test_links_to_files_and_to_class_folders_are_followed(root: Path, tmp_path: Path) -> None:
    (root / "cat" / "link.png").symlink_to(root / "cat" / "2.png")
    (root / "horse").symlink_to(root / "dog", target_is_directory=True)
    _, labels = load_folder(root)
    assert Counter(labels) == {"cat": 3, "dog": 2, "horse": 2}


def test_a_folder_of_nothing_but_heic_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "heif_decoder", lambda: None)
    monkeypatch.setattr(folders, "image_suffixes", formats.image_suffixes.__wrapped__)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for index in range(3):
            (tmp_path / name / f"IMG_{index}.HEIC").write_bytes(b"\0\0\0\x24ftypheic")
    expected = r"6 HEIC files \(pip install .*formats.*, or export them as JPEG\)"
    with pytest.raises(ValueError, match=rf"no sub-folder with images.*{expected}"):
        load_folder(tmp_path)
    with pytest.raises(ValueError, match=rf"holds no image\. Left out: {expected}"):
        find_images(tmp_path)


def test_fewer_than_two_classes_are_refused_in_plain_words(root: Path) -> None:
    shutil.rmtree(root / "dog")
    with pytest.raises(ValueError, match="has one sub-folder with images, 'cat'; at least two are needed"):
        load_folder(root)
    with pytest.raises(ValueError, match=r"has no sub-folder with images; .* 2 images outside the class folders"):
        load_folder(root / "cat")
    with pytest.raises(FileNotFoundError, match="no folder"):
        load_folder(root / "nowhere")


def test_one_file_is_taken_whatever_its_name(root: Path) -> None:
    file = root / "cat" / "odd.xyz"
    file.write_text("hello")
    assert find_images(file).paths == [file]
    with pytest.raises(FileNotFoundError, match="no image file or folder"):
        find_images(root / "nowhere")


def test_names_of_images() -> None:
    assert all(map(is_image_name, ("a.png", "a/b.JPG", "b.webp")))
    assert not any(map(is_image_name, ("a.txt", "a", "._a.png", "__MACOSX/cat/a.png", "a.pdf", "a.mpg")))
