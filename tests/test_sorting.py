"""Sorting: files go where the classifier says, nothing is overwritten, a run can stop anywhere, and be undone."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fewshot_mahalanobis import SimpleCNAPSClassifier, sorting
from fewshot_mahalanobis.sorting import TABLE, UNSURE, sort_files, undo_sorting
from tests.tiny import LABELS, pictures, tiny_classifier, tiny_model


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Eight pictures that ``tiny_classifier`` was fitted to, in two folders with the same names."""
    paths = []
    for index, image in enumerate(pictures(8, 1)):
        path = tmp_path / "photos" / "ab"[index % 2] / f"{index // 2}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def classifier() -> SimpleCNAPSClassifier:
    return tiny_classifier()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != TABLE
    }


@pytest.mark.parametrize("link", [False, True])
def test_files_go_to_the_folder_of_their_class_and_the_table_says_so(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path, link: bool
) -> None:
    output = tmp_path / "sorted"
    rows, problems = sort_files(classifier, files, output, link=link, min_probability=0)
    assert not problems
    expected = classifier.predict(files).tolist()
    assert [row.label for row in rows] == expected
    for path, label, row in zip(files, expected, rows, strict=True):
        target = output / row.sorted_as
        assert target.parent.name == label
        assert target.read_bytes() == path.read_bytes()
        assert target.is_symlink() == link
        assert Path(row.path) == path
    with (output / TABLE).open(newline="") as table:
        assert [row["sorted_as"] for row in csv.DictReader(table)] == [row.sorted_as for row in rows]
    assert len({row.sorted_as for row in rows}) == len(files)  # two files of each name


def test_of_equal_names_the_later_gets_a_number(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path
) -> None:
    output, file = tmp_path / "sorted", files[0]
    label = classifier.predict([file])[0]
    (output / label).mkdir(parents=True)
    (output / label / file.name).write_text("mine")
    rows, _ = sort_files(classifier, [file], output, min_probability=0)
    assert rows[0].sorted_as == f"{label}/{file.stem}-2.png"
    assert (output / label / file.name).read_text() == "mine"
    assert undo_sorting(output) == []
    assert contents(output) == {f"{label}/{file.name}": b"mine"}


def test_files_in_doubt_go_to_the_unsure_folder(files: list[Path], tmp_path: Path) -> None:
    classifier = tiny_classifier()
    sure = classifier.predict_proba(files).max(axis=1)
    limit = float(np.sort(sure)[2:4].mean())  # between two, as other batches round otherwise
    rows, _ = sort_files(classifier, files, tmp_path / "one", min_probability=limit)
    assert [row.sorted_as.startswith(UNSURE) for row in rows] == [p < limit for p in sure]

    classifier = tiny_classifier(unknown_label="none", false_rejection_rate=0.4)
    classifier.threshold_ = float(np.median(classifier.outlier_score(files)))
    rows, _ = sort_files(classifier, files, tmp_path / "two", min_probability=0)
    assert [row.sorted_as.startswith(UNSURE) for row in rows] == (classifier.predict(files) == "none").tolist()
    assert [row.label for row in rows].count("none") == 4


def test_a_second_run_adds_new_files_only(classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "sorted"
    first, _ = sort_files(classifier, files[:5], output, min_probability=0)
    moved = output / first[0].sorted_as
    moved.rename(output / "moved by hand.png")
    second, _ = sort_files(classifier, files, output, min_probability=0)
    assert [row.path for row in second] == [str(path) for path in files[5:]]
    assert not moved.exists()
    assert sort_files(classifier, files, output) == ([], {})
    assert sort_files(classifier, [output / second[0].sorted_as], output) == ([], {})  # sorted once is enough


@pytest.mark.parametrize("link", [False, True])
def test_what_the_user_moved_is_not_sorted_again_and_stays_in_the_table(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path, link: bool
) -> None:
    output = tmp_path / "sorted"
    rows, _ = sort_files(classifier, files, output, link=link, min_probability=0)
    last = output / rows[-1].sorted_as  # where an interrupted run would have stopped
    last.rename(output / "moved by hand.png")
    assert sort_files(classifier, files, output, link=link) == ([], {})
    assert not last.exists()
    assert undo_sorting(output) == [last]
    assert list(contents(output)) == ["moved by hand.png"]
    assert (output / TABLE).is_file()


def test_an_image_is_sorted_once_however_it_is_named(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "photos")
    output = Path("..") / "photos" / "sorted"
    given = [*files, Path("a", files[0].name), Path("..", "photos", "b", files[1].name)]
    rows, _ = sort_files(classifier, given, output, min_probability=0)
    assert sorted(row.path for row in rows) == sorted(map(str, files))
    copies = [path for path in Path().rglob("*.png") if path.parts[0] == "sorted"]
    assert len(copies) == len(files)
    assert sort_files(classifier, [*files, *copies], output) == ([], {})


def test_sorting_a_folder_into_itself_is_refused(classifier: SimpleCNAPSClassifier, files: list[Path]) -> None:
    photos = files[0].parent.parent
    with pytest.raises(ValueError, match=r"sort into another folder, such as .*sorted"):
        sort_files(classifier, files, photos)
    assert not (photos / TABLE).exists()
    assert sort_files(classifier, [], photos) == ([], {})


@pytest.mark.parametrize("name", ["a\u2028b.png", "a\u0085b.png", 'a,"b\n.png'])
def test_any_file_name_can_be_read_from_the_table(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path, name: str
) -> None:
    odd = files[0].rename(tmp_path / name)
    sort_files(classifier, [odd], tmp_path / "sorted")
    assert sort_files(classifier, [odd], tmp_path / "sorted") == ([], {})
    assert undo_sorting(tmp_path / "sorted") == []


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("when", ["in the line", "before", "half", "after"])
def test_an_interrupted_run_goes_on_where_it_stopped(
    classifier: SimpleCNAPSClassifier,
    files: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    link: bool,
) -> None:
    if link and when == "half":
        pytest.skip("a link is there or not")
    whole = tmp_path / "whole"
    sort_files(classifier, files, whole, link=link, min_probability=0)
    output, put, number = tmp_path / "sorted", sorting._put, 0

    def killed(source: Path, target: Path, link: bool) -> None:  # as by a signal that cannot be caught
        nonlocal number
        number += 1
        if number == 4:
            if when == "half":
                target.write_bytes(source.read_bytes()[:20])
            if when == "after":
                put(source, target, link)
            raise KeyboardInterrupt
        put(source, target, link)

    with monkeypatch.context() as patch:
        patch.setattr(sorting, "_put", killed)
        with pytest.raises(KeyboardInterrupt):
            sort_files(classifier, files, output, link=link, min_probability=0)
    if when == "in the line":
        (output / TABLE).write_bytes((output / TABLE).read_bytes()[:-6])
    sort_files(classifier, files, output, link=link, min_probability=0)
    assert contents(output) == contents(whole)
    assert (output / TABLE).read_text() == (whole / TABLE).read_text()


def test_an_error_while_copying_leaves_no_half_file(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Any, target: Any) -> None:
        target.write(source.read(10))
        raise OSError(28, "No space left on device")

    output = tmp_path / "sorted"
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfileobj", full)
        with pytest.raises(OSError, match="No space"):
            sort_files(classifier, files, output, min_probability=0)
    assert contents(output) == {}
    assert len(sort_files(classifier, files, output, min_probability=0)[0]) == len(files)


@pytest.mark.parametrize("link", [False, True])
def test_undo_takes_all_away_and_leaves_the_photos(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path, link: bool
) -> None:
    before = contents(tmp_path / "photos")
    sort_files(classifier, files, tmp_path / "sorted", link=link)
    (tmp_path / "sorted").rename(tmp_path / "elsewhere")  # the table is relative to its folder
    assert undo_sorting(tmp_path / "elsewhere" / TABLE) == []
    assert not (tmp_path / "elsewhere").exists()
    assert contents(tmp_path / "photos") == before


def test_undo_keeps_what_was_changed_or_has_lost_its_original(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path
) -> None:
    output = tmp_path / "sorted"
    rows, _ = sort_files(classifier, files, output, min_probability=0)
    (output / rows[0].sorted_as).write_text("changed")
    files[1].unlink()
    (output / rows[2].sorted_as).unlink()
    kept = undo_sorting(output)
    assert kept == [output / row.sorted_as for row in rows[:3]]
    assert len(contents(output)) == 2
    assert undo_sorting(output) == kept  # the table still has them


def test_an_interrupted_undo_goes_on_where_it_stopped(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "sorted"
    rows, _ = sort_files(classifier, files, output, min_probability=0)
    compare = sorting._is_ours

    def interrupted(target: Path, source: Path) -> bool:
        if source == files[3]:
            raise KeyboardInterrupt
        return compare(target, source)

    with monkeypatch.context() as patch:
        patch.setattr(sorting, "_is_ours", interrupted)
        with pytest.raises(KeyboardInterrupt):
            undo_sorting(output)
    assert len(contents(output)) == len(rows) - 3
    assert undo_sorting(output) == []
    assert not output.exists()


def test_what_cannot_be_sorted_is_said_before_anything_is_written(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path
) -> None:
    broken = tmp_path / "photos" / "broken.png"
    broken.write_text("hello")
    output = tmp_path / "sorted"
    with pytest.raises(ValueError, match="1 of 9 images cannot be read"):
        sort_files(classifier, [*files, broken], output)
    assert not output.exists()
    rows, problems = sort_files(classifier, [*files, broken], output, skip_errors=True)
    assert len(rows) == 8
    assert problems.keys() == {broken}
    for labels, message in ((["a/b", "a:b"], "share the folder 'a_b'"), (["x", UNSURE], "rename the class")):
        odd = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(8, 1), labels * 4)
        with pytest.raises(ValueError, match=message):
            sort_files(odd, files, tmp_path / "odd")
    with pytest.raises(FileNotFoundError, match="nothing was sorted"):
        undo_sorting(tmp_path / "photos")
    (tmp_path / "photos" / TABLE).write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no table of sorted files"):
        undo_sorting(tmp_path / "photos")


def test_class_names_become_folders_of_any_system(files: list[Path], tmp_path: Path) -> None:
    names = {"blue": "sky/blue", "green": "..", "red": "red?"}
    classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(8, 1), [names[n] for n in LABELS])
    rows, _ = sort_files(classifier, files, tmp_path / "deep" / "sorted", min_probability=0)
    assert {row.sorted_as.split("/")[0] for row in rows} == {"sky_blue", "__", "red_"}
