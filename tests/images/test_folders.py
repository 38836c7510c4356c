"""Folders of pictures: what is found, what is left out, and what is said of it."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from fewshot_mahalanobis.images import folders, formats
from fewshot_mahalanobis.images.folders import (
    find_class_images,
    find_images,
    image_names,
    is_image_name,
    load_folder,
)
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
    assert load_folder(root) == before
    assert not recwarn.list


SYSTEM_FOLDERS = [
    *(".git/lfs/objects/ab", ".hg", ".dvc/cache/files", ".stversions/cat", ".sync/Archive", ".dropbox.cache", "..."),
    *(".thumbnails", ".Trash-1000/files", "lost+found", ".@__thumb", ".AppleDouble", ".ipynb_checkpoints", ".venv"),
    *("@eaDir/1.png", "#recycle", "#snapshot", "@Recycle", "@Recently-Snapshot", "Network Trash Folder", "~snapshot"),
    *("$RECYCLE.BIN/S-1-5", "$Recycle.Bin", "RECYCLER", "System Volume Information", "__MACOSX/cat", "Temporary Items"),
    *("FOUND.003", "LOST.DIR"),
]


@pytest.mark.parametrize("name", SYSTEM_FOLDERS)
@pytest.mark.parametrize("place", ["", "cat", "dog/more"])
def test_folders_that_are_no_classes_are_left_out_everywhere_and_listed(place: str, name: str, root: Path) -> None:
    before, pictures_before = find_class_images(root), find_images(root)
    for file in ("1.png", "2.JPG"):
        draw(root / place / name / file)
    shutil.copy(root / "cat" / "2.png", root / place / name / "0a1b2c")  # stores keep no extension
    folder = name.split("/")[0]
    found = find_class_images(root)
    assert (found.paths, found.labels, found.empty) == (before.paths, before.labels, before.empty)
    assert found.ignored == find_images(root).ignored == {f"{folder} folder": 1}
    assert find_images(root).paths == pictures_before.paths
    with pytest.warns(UserWarning, match=re.escape(f"Left out: 1 {folder} folder.")):
        assert load_folder(root)[0] == before.paths
    names = [path.relative_to(root.parent).as_posix() for path in sorted(root.parent.rglob("*")) if path.is_file()]
    images, note = image_names(names)
    assert images == [path.relative_to(root.parent).as_posix() for path in sorted(before.paths)]
    assert note == f"Left out: 1 {folder} folder."


def test_a_folder_that_is_asked_for_is_read_whatever_it_and_those_above_it_are_called(root: Path) -> None:
    hidden = root.parent / ".cache" / "#recycle" / ".photos"
    shutil.copytree(root, hidden)
    found = find_class_images(hidden)
    assert found.labels == ["cat", "cat", "dog", "dog"]
    assert not found.ignored
    assert len(find_images(hidden).paths) == 4


def test_classes_whose_names_resemble_those_of_system_folders_stay(tmp_path: Path) -> None:
    names = ["recycled", "trash", "thumbs", "@home", "#1", "$5", "temporary", "git", "found"]
    for name in names:
        draw(tmp_path / name / "1.png")
    assert sorted(set(load_folder(tmp_path)[1])) == sorted(names)


# Parts of a data set -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folders", "remedy"),
    [
        ("test/cat test/dog train/cat train/dog", "train"),
        ("Train/a Train/b Validation/c Validation/d", "Train"),  # few-shot splits share no class
        ("train/a train/b val/a val/b extra/a", "train"),
        ("train/cat train/dog test", "train"),  # test pictures without labels
        ("training_set valid", "training_set"),
        ("seg_train/sea seg_test/sea seg_train/ice", "seg_train"),
        ("train2017 val2017 test2017", "train2017"),
        ("test trainval", "trainval"),
        ("support/a query/a", "support"),
        ("fold_0/a fold_0/b fold_1/a fold_1/b fold_2/a", "fold_0"),
        ("site1/a site1/b site2/a site2/b site2/c", "site1"),
        ("bottle/train/good bottle/test/good cable/train/good cable/test/bent", "bottle"),
        ("north/cat north/dog south/cat south/dog north/.git south/@eaDir", "north"),
    ],
)
def test_parts_of_a_data_set_are_refused_with_the_remedy(folders: str, remedy: str, tmp_path: Path) -> None:
    for folder in folders.split():
        draw(tmp_path / folder / "1.png")
    (tmp_path / "README.md").write_text("about")
    with pytest.raises(ValueError, match=rf"give one of .*'{re.escape(str(tmp_path / remedy))}'"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    "folders",
    [
        "train bus car",  # vehicles
        "train/steam train/electric bus/red",
        "cat/tabby cat/black dog/poodle dog/black",
        "n01/images n02/images n03/images",
        "cat cat/a cat/b dog dog/a dog/b",  # pictures beside the sub-folders
        "blood_test urine_test",
        "part1 part2",
        "cat/@eaDir cat/#recycle cat/x dog/@eaDir dog/#recycle dog/y",
    ],
)
def test_classes_that_resemble_parts_of_a_data_set_stay(folders: str, tmp_path: Path) -> None:
    for folder in folders.split():
        draw(tmp_path / folder / "1.png")
    assert sorted(set(find_class_images(tmp_path).labels)) == sorted({name.split("/")[0] for name in folders.split()})


def test_a_folder_around_the_class_folders_is_named(tmp_path: Path) -> None:
    for folder in ("photos/cat", "photos/dog", "__MACOSX/photos"):
        draw(tmp_path / folder / "1.png")
    with pytest.raises(ValueError, match=r"one sub-folder with images, 'photos'.* Are the classes in '.*photos'\?"):
        load_folder(tmp_path)


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


def test_fewer_than_two_classes_are_refused_in_plain_words_unless_one_may_be_meant(root: Path) -> None:
    shutil.rmtree(root / "dog")
    assert {*load_folder(root)[1]} == {"cat"}
    (root / "dog").mkdir()
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
    assert not any(map(is_image_name, ("a.txt", "a", "._a.png", "a.pdf", "a.mpg")))


@pytest.mark.parametrize("target", [".", "..", "../photos/dog/..", "/"])
def test_a_link_to_a_folder_around_it_is_no_class(target: str, root: Path) -> None:
    before = find_class_images(root)
    (root / "again").symlink_to(target, target_is_directory=True)
    (root / "cat" / "again").symlink_to(root, target_is_directory=True)  # and one within a class
    found = find_class_images(root)
    assert (found.paths, found.labels) == (before.paths, before.labels)
    assert found.ignored == {"link to a folder around it": 1, "link to a folder": 1}
    assert folders.class_folders_in(root)[1] == "Left out: 1 link to a folder around it."


def test_links_that_lead_in_a_circle_are_broken_links(root: Path) -> None:
    (root / "cat" / "one.png").symlink_to("two.png")
    (root / "cat" / "two.png").symlink_to("one.png")
    (root / "horse").symlink_to("horse", target_is_directory=True)
    found = find_class_images(root)
    assert len(found.paths) == 4
    assert found.ignored == {"broken link": 3}
