"""Tables of pictures: what is read as it is meant, what is refused, and which rows are labels."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from fewshot_mahalanobis.apps.answer_files import answer_columns, to_csv
from fewshot_mahalanobis.apps.labelling import Grade, LabelledFile
from fewshot_mahalanobis.images.folders import read_labels


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
    text = to_csv(answer_columns(rows, classes, top_k))
    columns, *cells = csv.reader(io.StringIO(text, newline=""))
    assert len(set(columns)) == len(columns) == 5 + len(classes) + 2 * top_k
    assert all(len(row) == len(columns) for row in cells)
    (tmp_path / "labels.csv").write_text(text)
    paths, found = read_labels(tmp_path / "labels.csv")[:2]
    assert found == labels
    assert [path.name for path in paths] == [f"{number}, a.jpg" for number in range(len(labels))]


def test_a_file_whose_name_has_two_lines_can_be_in_a_table(tmp_path: Path) -> None:
    (tmp_path / "two\nlines.jpg").touch()
    (tmp_path / "labels.csv").write_text('path,label\n"two\nlines.jpg",cat\n')
    assert read_labels(tmp_path / "labels.csv")[:2] == ([tmp_path / "two\nlines.jpg"], ["cat"])


# Paths of other systems, and links ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["sub\\5.jpg", ".\\sub\\5.jpg", "sub\\more\\..\\5.jpg", "sub/more\\../5.jpg", "{folder}\\sub\\5.jpg"]
)
def test_a_path_with_backslashes_is_the_file_that_it_means(path: str, tmp_path: Path) -> None:
    (tmp_path / "sub" / "more").mkdir(parents=True)
    (tmp_path / "sub" / "5.jpg").touch()
    rows = f"path,label\n1.jpg,cat\n{path.format(folder=tmp_path)},dog\n"
    read(tmp_path, "path,label\n1.jpg,cat\n")
    (tmp_path / "labels.csv").write_text(rows)
    (_, image), labels, *_ = read_labels(tmp_path / "labels.csv")
    assert image.samefile(tmp_path / "sub" / "5.jpg")
    assert labels == ["cat", "dog"]


def test_a_file_whose_own_name_has_a_backslash_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("a\\b.jpg", "a/b.jpg"):
        (tmp_path / name).touch()
    (tmp_path / "labels.csv").write_text("path,label\na\\b.jpg,cat\na/b.jpg,dog\n")
    assert read_labels(tmp_path / "labels.csv").images == [tmp_path / "a\\b.jpg", tmp_path / "a/b.jpg"]


@pytest.mark.parametrize("path", ["C:\\photos\\1.jpg", "d:/photos/1.jpg", "\\\\server\\share\\1.jpg"])
def test_a_full_path_of_windows_is_refused_by_that(path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none of the 1 files.*Full paths of Windows lead nowhere here"):
        read(tmp_path, f"path,label\n{path},cat\n")


@pytest.mark.parametrize("link", ["link.jpg", "other/1.jpg"])
def test_one_picture_with_two_labels_is_refused_through_links_too(link: str, tmp_path: Path) -> None:
    (tmp_path / "link.jpg").symlink_to("1.jpg")
    (tmp_path / "other").symlink_to(".", target_is_directory=True)
    with pytest.raises(ValueError, match=rf"lines 2 and 3 .* give {link} two labels, 'cat' and 'dog'"):
        read(tmp_path, f"path,label\n1.jpg,cat\n{link},dog\n")


# Which rows are labels ---------------------------------------------------------------------------------------


def checked(folder: Path, *marks: str) -> tuple[int, str]:
    """How many rows with these marks are taken, and the note."""
    for number in range(len(marks)):
        (folder / f"{number}.jpg").touch()
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["path", "label", "checked", "predicted", "probability"])
        table.writerows([f"{number}.jpg", "a", mark, "a", "0.6"] for number, mark in enumerate(marks))
    found = read_labels(folder / "labels.csv", rows="checked")
    return len(found.images), found.note


@pytest.mark.parametrize(
    ("yes", "no"),
    [
        ("PRAWDA", "FAŁSZ"),
        ("TOSI", "EPÄTOSI"),
        ("DOĞRU", "YANLIŞ"),
        ("ИСТИНА", "ЛОЖЬ"),
        ("Sim", "Não"),
        ("はい", "いいえ"),
        ("✔\ufe0f", "☐\ufe0e"),
        ("[x]", "[ ]"),
        ("-1", "0,00"),
        ("=TRUE()", "=FALSE()"),
        ("X\u00a0", "n/a"),
        ("\u200bja", "niet waar"),
    ],
)
def test_a_mark_says_yes_or_no_in_many_languages(yes: str, no: str, tmp_path: Path) -> None:
    taken, note = checked(tmp_path, yes, no, no.lower(), "")
    assert taken == 1
    assert note.endswith("Left out: 3 answers that nobody has checked (--rows all takes them).")


def test_a_mark_that_says_neither_yes_nor_no_is_named_and_not_taken(tmp_path: Path) -> None:
    taken, note = checked(tmp_path, "x", "MK", "MK", "✗", "")
    assert taken == 1
    assert "3 answers whose mark says neither yes nor no: 'MK', '✗' (write x for yes)" in note
    with pytest.raises(ValueError, match=r"nobody has checked any \('perhaps' in the column checked says neither"):
        checked(tmp_path, "perhaps", "")


def test_labels_that_predict_gave_without_a_probability_are_of_no_class(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.jpg").touch()
    rows = ["0.jpg,cat,x,cat,0.9", "1.jpg,neither,x,neither,", "2.jpg,cat,,neither,", "3.jpg,dog,,cat,"]
    (tmp_path / "labels.csv").write_text("path,label,checked,predicted,probability\n" + "\n".join(rows))
    found = read_labels(tmp_path / "labels.csv", rows="checked")
    assert found.labels == ["cat", "neither", "cat", "dog"]
    assert found.rejected_labels == {"neither"}  # cat has a probability elsewhere: somebody has deleted this one


def test_labels_of_pictures_above_the_threshold_are_of_no_class(tmp_path: Path) -> None:
    grades = {"cat": Grade("cat", -1.0, 2.5, 0.1), "neither": Grade("cat", 2.6, 2.5, 0.9)}
    rows = [LabelledFile(Path(f"{label}.jpg"), label, 0.7, label == "neither", grade=g) for label, g in grades.items()]
    table = to_csv(answer_columns(rows, min_probability=0.6))
    (tmp_path / "labels.csv").write_text(table)
    for label in grades:
        (tmp_path / f"{label}.jpg").touch()
    assert [row["doubtful"] for row in csv.DictReader(io.StringIO(table))] == ["", "yes"]
    assert read_labels(tmp_path / "labels.csv", rows="sure").labels == ["cat"]
    assert read_labels(tmp_path / "labels.csv").rejected_labels == {"neither"}
