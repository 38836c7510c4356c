"""Folders of pictures: what is found, what is left out, and what is said of it."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from fewshot_mahalanobis.apps.labelling import LabelledFile, write_csv
from fewshot_mahalanobis.images import folders, formats
from fewshot_mahalanobis.images.folders import (
    find_class_images,
    find_images,
    image_names,
    is_image_name,
    load_folder,
    read_labels,
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


# Tables of labels --------------------------------------------------------------------------------------------


def read(folder: Path, text: str) -> list[tuple[str, str]]:
    """Names and labels that a table in a folder of 1.jpg to 4.jpg is read as."""
    for name in "1234":
        (folder / f"{name}.jpg").touch()
    table = folder / "labels.csv"
    table.write_bytes(text.encode())
    return [(path.relative_to(folder).as_posix(), label) for path, label in zip(*read_labels(table)[:2], strict=True)]


@pytest.mark.parametrize(
    "text",
    [
        'path,label\n1.jpg,"cat, black"\n2.jpg,dog\n',
        'path,label\r\n1.jpg, "cat, black"\r\n2.jpg , dog\r\n',
        "path;label\n1.jpg;cat, black\n2.jpg;dog\n",
        "path\tlabel\r1.jpg\tcat, black\r2.jpg\tdog",
        'path,label,,\n1.jpg,"cat, black",,\n2.jpg,dog\n,,,\n\n',
        'path,label\n1.jpg,"cat, black",,\n2.jpg,dog,,\n',
        ',label,path\n0,"cat, black",1.jpg\n1,dog,2.jpg\n',
        'path,note,label,note\n1.jpg,"first\nsecond","cat, black",x\n2.jpg,,dog,\n',
        'path,label,a;b;c\td\n1.jpg,"cat, black",0.5\n2.jpg,dog,0.5\n',
        '\npath,label\n"1.jpg","cat, black"\n"2.jpg","dog"\n',
    ],
)
def test_a_well_formed_table_is_read_as_it_is_meant(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, text) == [("1.jpg", "cat, black"), ("2.jpg", "dog")]


def test_quotes_within_a_cell_are_part_of_it(tmp_path: Path) -> None:
    assert read(tmp_path, 'path,label\n1.jpg,12" disc\n2.jpg,"the ""big"" one"\n')[0] == ("1.jpg", '12" disc')
    assert read(tmp_path, 'path,label\n1.jpg,12" disc\n2.jpg,"the ""big"" one"\n')[1] == ("2.jpg", 'the "big" one')


@pytest.mark.parametrize(
    ("text", "line", "cells", "separator"),
    [
        ("path,label\n1.jpg,dog\n2.jpg,cat, black\n", 3, 3, "comma"),
        ("path,label\nmy cat, 1.jpg,cat\n", 2, 3, "comma"),
        ("path;label;sure\r\n1.jpg;cat;yes\r\n2.jpg;dog; brown;no\r\n", 3, 4, "semicolon"),
        ("label\tpath\ncat\t\t1.jpg\tx\n", 2, 4, "tab"),
        ("path,label,,\n1.jpg,cat,,black\n", 2, 4, "comma"),
        ('path,note,label\n1.jpg,"two\nlines",cat\n2.jpg,,dog\n3.jpg,,cat, black\n', 5, 4, "comma"),
    ],
)
def test_a_row_with_more_cells_than_columns_is_refused_by_its_line(
    text: str, line: int, cells: int, separator: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"line {line} of .*csv has {cells} cells .* a {separator} in quotes"):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('path,label\n1.jpg,cat\n2.jpg,"dog\n3.jpg,dog\n4.jpg,owl\n', 3),
        ('path,label\n1.jpg,cat\n2.jpg, "dog\n3.jpg,dog', 3),
        ('path,label\n1.jpg,"cat\n2.jpg,dog\n3.jpg,"owl"\n', 2),
        ('path,label\n1.jpg,cat\n2.jpg,"dog\n3.jpg,owl"\n4.jpg,owl\n', 3),
        ('path,label\n"1.jpg,cat\n2.jpg",dog\n3.jpg,owl\n', 2),
        ('path,label,note\n1.jpg,cat,"good\n2.jpg,dog,"fine"\n', 2),
        ('path,"label\n1.jpg,cat\n', 1),
        ('path;label\r\n1.jpg;cat\r\n2.jpg;"dog\r\n' + "3.jpg;owl\r\n" * 20_000, 3),
        ('path,label\n1.jpg,"cat" black\n', 2),
    ],
)
def test_a_quote_that_is_not_closed_is_refused_by_its_line(text: str, line: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"line {line} of .*csv.* quote .* not closed"):
        read(tmp_path, text)


def test_a_long_text_that_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"labels\.csv.*(no column 'path'|not closed)"):
        read(tmp_path, "word " * 100_000)


@pytest.mark.parametrize("column", ["path", "label"])
@pytest.mark.parametrize("header", ["path,label,{}", "{},path,label", "path, {} ,label", "path,label,note,note,{}"])
def test_two_columns_of_a_name_that_counts_are_refused(header: str, column: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"line 1 of .*csv names two columns '{column}'"):
        read(tmp_path, header.format(column) + "\n1.jpg,cat,1.jpg\n2.jpg,dog,2.jpg\n")


@pytest.mark.parametrize("again", ["1.jpg", "./1.jpg", "more/../1.jpg", '"1.jpg"', "{folder}/1.jpg"])
def test_one_file_with_two_labels_is_refused_by_both_lines(again: str, tmp_path: Path) -> None:
    again = again.format(folder=tmp_path)
    text = f"path,label\n2.jpg,dog\n1.jpg,cat\n3.jpg,dog\n{again},dog\n"
    with pytest.raises(ValueError, match=r"lines 3 and 5 of .*csv give .*1\.jpg two labels, 'cat' and 'dog'"):
        read(tmp_path, text)
    assert len(read(tmp_path, text.replace("cat", "dog"))) == 4  # the same label twice contradicts nothing


@pytest.mark.parametrize(
    "classes",
    [
        ["label", "no label"],
        ["path", "trail"],
        ["label", "path", "probability of label", "probability of path"],
        [" label ", "Label", "label_1", "probability_1"],
        ["a;b;c;d;e", "f\tg\th\ti", "j, k", 'l"m', "n\no"],
        ["", "nothing"],
        ["checked", "predicted", "probability", "doubtful"],
    ],
)
@pytest.mark.parametrize("top_k", [0, 2])
def test_a_table_with_probabilities_can_be_fitted_again(classes: list[str], top_k: int, tmp_path: Path) -> None:
    labels = [name.strip() for name in classes if name.strip() and "\n" not in name]
    rows = []
    for number, label in enumerate(labels):
        (tmp_path / f"{number}, a.jpg").touch()
        shares = {name: (0.9 if name.strip() == label else 0.1) for name in classes}
        rows.append(LabelledFile(Path(f"{number}, a.jpg"), label, 0.9, probabilities=shares))
    stream = io.StringIO()
    write_csv(stream, rows, classes, top_k)
    columns, *cells = csv.reader(io.StringIO(stream.getvalue(), newline=""))
    assert len(set(columns)) == len(columns) == 5 + len(classes) + 2 * top_k
    assert all(len(row) == len(columns) for row in cells)
    (tmp_path / "labels.csv").write_text(stream.getvalue())
    paths, found = read_labels(tmp_path / "labels.csv")[:2]
    assert found == labels
    assert [path.name for path in paths] == [f"{number}, a.jpg" for number in range(len(labels))]


def test_a_file_whose_name_has_two_lines_can_be_in_a_table(tmp_path: Path) -> None:
    (tmp_path / "two\nlines.jpg").touch()
    (tmp_path / "labels.csv").write_text('path,label\n"two\nlines.jpg",cat\n')
    assert read_labels(tmp_path / "labels.csv")[:2] == ([tmp_path / "two\nlines.jpg"], ["cat"])
