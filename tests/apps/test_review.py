"""Labelling a collection of pictures, without the page."""

from __future__ import annotations

import copy
import io
import os
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from PIL import Image

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.apps.active_learning import density, most_useful, typicality
from fewshot_mahalanobis.apps.review import Review
from fewshot_mahalanobis.images.folders import read_labels
from tests.tiny import SUPPORT_LABELS, TinyExtractor, drawn, pictures, tiny_model


def coloured_classifier(**settings: object) -> SimpleCNAPSClassifier:
    """Fitted to noisy patches of three colours."""
    images, labels = drawn(SUPPORT_LABELS, 0), SUPPORT_LABELS
    return SimpleCNAPSClassifier(tiny_model(), device="cpu", **settings).fit(images, labels)  # type: ignore[arg-type]


def write_pictures(folder: Path, labels: list[str], seed: int = 1) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{label}-{index}.png" for index, label in enumerate(labels)]
    for path, image in zip(paths, drawn(labels, seed), strict=True):
        Image.fromarray(image).save(path)
    return paths


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return write_pictures(tmp_path / "new", ["red", "blue", "green"] * 4)


def answers(review: Review) -> list[tuple[str, float, bool]]:
    return [review.answer(picture)[1:] for picture in range(len(review.paths))]


def test_a_label_is_in_the_table_at_once_as_fit_reads_it(paths: list[Path], tmp_path: Path) -> None:
    table = tmp_path / "labels" / "checked.csv"
    table.parent.mkdir()
    review = Review(coloured_classifier(), paths, table)
    assert not table.exists()
    review.label([3, 5], "blue")
    review.label([0], "a, “new” class")
    files, labels, *_ = read_labels(table)
    assert [os.path.abspath(file) for file in files] == [str(paths[i]) for i in (3, 5, 0)]  # noqa: PTH100
    assert labels == ["blue", "blue", "a, “new” class"]


def test_a_table_beside_its_pictures_goes_with_them(paths: list[Path], tmp_path: Path) -> None:
    table = tmp_path / "checked.csv"
    review = Review(coloured_classifier(), paths, table)
    review.label([0], "blue")
    moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    try:
        ((file,), *_) = read_labels(moved / "checked.csv")
        assert file == moved / "new" / paths[0].name
        assert review.table_text() == f"path,label\n{paths[0]},blue\n"  # to be kept anywhere
    finally:
        moved.rename(tmp_path)


def test_another_day_goes_on(paths: list[Path], tmp_path: Path) -> None:
    first = Review(coloured_classifier(), paths, tmp_path / "checked.csv")
    first.label([0, 1], "purple")
    first.label([2], first.none)
    again = Review(coloured_classifier(), [*reversed(paths)], tmp_path / "checked.csv")
    assert again.labels == {11: "purple", 10: "purple", 9: "unknown"}
    for own, other in zip(answers(again)[::-1], answers(first), strict=True):
        assert own == (other[0], pytest.approx(other[1]), other[2])
    again.label([0], "red")
    assert read_labels(tmp_path / "checked.csv")[1] == ["purple", "purple", "unknown", "red"]


def test_rows_about_other_pictures_stay(paths: list[Path], tmp_path: Path) -> None:
    Review(coloured_classifier(), paths[:6], tmp_path / "checked.csv").label([0], "blue")
    review = Review(coloured_classifier(), paths[6:], tmp_path / "checked.csv")
    assert (review.labels, review.other_rows) == ({}, 1)
    review.label([0], "green")
    review.undo()
    review.label([1], "green")
    assert (
        tmp_path / "checked.csv"
    ).read_text() == f"path,label\nnew/{paths[0].name},blue\nnew/{paths[7].name},green\n"


@pytest.mark.parametrize("text", ["path,label,probability\na.png,blue,0.3\n", "hello\n", "", "label,path\nblue,a.png"])
def test_a_table_that_no_review_wrote_is_refused_and_stays(paths: list[Path], tmp_path: Path, text: str) -> None:
    (tmp_path / "checked.csv").write_text(text)
    with pytest.raises(ValueError, match=r"checked\.csv is no table that a review wrote.*name another file with -o"):
        Review(coloured_classifier(), paths, tmp_path / "checked.csv")
    assert (tmp_path / "checked.csv").read_text() == text


def test_a_table_whose_label_cannot_be_learned_is_refused_by_name(paths: list[Path], tmp_path: Path) -> None:
    numbers = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(4, 1), [3, 5, 3, 5])
    (tmp_path / "checked.csv").write_text(f"path,label\n{paths[0]},cat\n")
    with pytest.raises(ValueError, match=r"checked\.csv: The classes of this model are numbers"):
        Review(numbers, paths, tmp_path / "checked.csv")


@pytest.mark.parametrize("settings", [{}, {"unknown_label": "?", "false_rejection_rate": 0.2}], ids=str)
def test_it_learns_what_partial_fit_learns(paths: list[Path], tmp_path: Path, settings: dict[str, object]) -> None:
    start = coloured_classifier(**settings)
    review = Review(start, paths, tmp_path / "checked.csv")
    review.label([0, 3], "purple")
    review.label([1], "blue")
    learned = copy.copy(start).partial_fit([paths[i] for i in (0, 3, 1)], ["purple", "purple", "blue"])
    expected = learned.predict_all(paths)
    assert [row[1] for row in answers(review)] == pytest.approx(expected.probabilities.max(axis=1))
    own = {0: "purple", 3: "purple", 1: "blue"}
    assert [row[0] for row in answers(review)] == [own.get(i, label) for i, label in enumerate(expected.labels)]
    assert start.classes_.tolist() == ["blue", "green", "red"]
    assert review.classifier.predict(paths).tolist() == learned.predict(paths).tolist()


def test_pictures_of_no_class_teach_what_to_reject_where_the_model_rejects(paths: list[Path], tmp_path: Path) -> None:
    start = coloured_classifier(unknown_label="?", false_rejection_rate=0.2)
    review = Review(start, paths, tmp_path / "checked.csv")
    assert review.none == "?"
    expected = copy.copy(start).partial_fit(paths[:3], ["?", "?", "blue"])
    for written in ("?", " Unknown"):
        review.label([0, 1], written)
        review.label([2], "blue")
        assert [review.answer(i).label for i in (0, 1, 2)] == ["?", "?", "blue"]
        assert review.classifier.classes_.tolist() == start.classes_.tolist()
        assert review.classifier.class_counts_.tolist() == expected.class_counts_.tolist()
        np.testing.assert_allclose(review.classifier.outlier_score(paths), expected.outlier_score(paths), rtol=1e-6)
        assert not np.allclose(start.outlier_score(paths), expected.outlier_score(paths), rtol=1e-2)
        review.undo()
        review.undo()


def test_a_picture_of_no_class_teaches_nothing_where_the_model_rejects_nothing(
    paths: list[Path], tmp_path: Path
) -> None:
    start = coloured_classifier()
    review = Review(start, paths, tmp_path / "checked.csv")
    assert review.none == "unknown"
    review.label([0, 1], "unknown")
    assert review.classifier is start
    assert [review.answer(i).label for i in (0, 1)] == ["unknown", "unknown"]


def test_undo_takes_the_last_answer_back_and_no_more(paths: list[Path], tmp_path: Path) -> None:
    table = tmp_path / "checked.csv"
    review = Review(coloured_classifier(), paths, table)
    assert review.undo() == []
    states = [(answers(review), "path,label\n")]
    for given, label in (([0, 1, 2], "blue"), ([2, 3], "purple"), ([0], review.none)):
        review.label(given, label)
        states.append((answers(review), table.read_text()))
    review.label([0], review.none)  # changes nothing, so there is nothing to take back
    for undone in ([0], [2, 3], [0, 1, 2]):
        states.pop()
        assert review.can_undo
        assert sorted(review.undo()) == undone
        assert (answers(review), table.read_text()) == states[-1]
    assert not review.can_undo


def test_each_picture_goes_through_the_network_once(paths: list[Path], tmp_path: Path) -> None:
    start = coloured_classifier()
    batches = cast(TinyExtractor, start.model_.feature_extractor).batches
    batches.clear()
    review = Review(start, [*paths, paths[0]], tmp_path / "checked.csv")
    for label in ("red", "purple", "none of them"):
        picture = review.next_picture()
        assert picture is not None
        review.label([picture], label)
    review.undo()
    review.page("red")
    assert sum(batches) == len(paths)


def test_a_table_that_cannot_be_written_changes_nothing(paths: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "labels"
    folder.mkdir()
    review = Review(coloured_classifier(), paths, folder / "checked.csv")
    review.label([0], "blue")
    (folder / "checked.csv").unlink()
    folder.rmdir()
    before = answers(review)
    for change in (lambda: review.label([1], "red"), review.undo):
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            change()
        assert (answers(review), review.labels, review.can_undo) == (before, {0: "blue"}, True)


def test_labels_that_cannot_be_used_are_refused(paths: list[Path], tmp_path: Path) -> None:
    review = Review(coloured_classifier(), paths, tmp_path / "checked.csv")
    review.label([0], "Black cat")
    for given, label, message in (
        ([1], " ", "name first"),
        ([], "red", "Select one or more"),
        ([1], "Red", "There is a class “red”"),
        ([1], "black  cat", "There is a class “Black cat”"),
    ):
        with pytest.raises(ValueError, match=message):
            review.label(given, label)
    assert review.labels == {0: "Black cat"}


def test_files_that_no_table_can_name_and_those_that_are_no_pictures_are_left_out(tmp_path: Path) -> None:
    paths = write_pictures(tmp_path, ["red", "blue"])
    odd = [tmp_path / os.fsdecode(b"\xff.png"), tmp_path / " a.png", tmp_path / "a, “b”.png"]
    for path in odd:
        path.write_bytes(paths[0].read_bytes())
    (tmp_path / "notes.png").write_text("hello")
    review = Review(coloured_classifier(), [tmp_path / "notes.png", *odd, *paths], tmp_path / "checked.csv")
    assert review.paths == [*odd[1:], *paths]
    assert {path: problem.partition(",")[0] for path, problem in review.problems.items()} == {
        tmp_path / "notes.png": "not an image file of a known format",
        odd[0]: "its name is not valid UTF-8",
    }
    review.label([0, 1], "red")
    again = Review(coloured_classifier(), review.paths, tmp_path / "checked.csv")
    assert again.labels == {0: "red", 1: "red"}
    with pytest.raises(ValueError, match="none of the 1 images can be read"):
        Review(coloured_classifier(), [tmp_path / "notes.png"], tmp_path / "checked.csv")


def test_the_wall_has_the_least_sure_first_and_the_labelled_last(tmp_path: Path) -> None:
    paths = write_pictures(tmp_path / "new", ["red"] * 130 + ["blue"] * 5)
    review = Review(coloured_classifier(), paths, tmp_path / "checked.csv")
    review.label([3, 70], "red")
    pages = [review.page("red", first) for first in (0, 60, 119, 120, 500)]
    assert [page.first for page in pages] == [0, 60, 60, 120, 120]
    assert {page.total for page in pages} == {review.classes()["red"]}
    shown = [answer for page in (pages[0], pages[1], pages[3]) for answer in page.answers]
    assert {answer.label for answer in shown} == {"red"}
    assert {answer.picture for answer in shown[-2:]} == {3, 70}
    sure = [answer.probability for answer in shown[:-2]]
    assert sure == sorted(sure)
    assert pages[0].likely[0] == "red"
    assert review.page("purple").answers == []


def test_classes_are_counted_by_answers(paths: list[Path], tmp_path: Path) -> None:
    review = Review(coloured_classifier(), paths, tmp_path / "checked.csv")
    assert review.classes() == {"blue": 4, "green": 4, "red": 4}
    review.label([0, 1, 2], "purple")
    review.label([3], review.none)
    assert review.classes()["purple"] >= 3
    assert review.classes()["unknown"] == 1
    assert sum(review.classes().values()) == len(paths)


def test_the_most_useful_picture_is_asked_about_and_one_like_those_of_no_class_is_not(tmp_path: Path) -> None:
    start = coloured_classifier()
    review = Review(start, write_pictures(tmp_path / "new", ["red", "blue", "green"] * 4), tmp_path / "checked.csv")
    review.label([0, 1], review.none)
    review.label([2], "purple")
    free, features = [*range(3, 12)], start.transform(review.paths)
    known = np.concatenate([review.classifier.fitted_head_.support.adapted.numpy(), features[:2]])
    typical = typicality(features[free], density(features)[free], known)
    assert len(known) == len(SUPPORT_LABELS) + 3
    assert review.next_picture() == free[most_useful(review.classifier.predict_proba(review.paths)[free], typical)]


def test_pictures_that_were_passed_over_come_last_and_all_come(paths: list[Path], tmp_path: Path) -> None:
    review = Review(coloured_classifier(), paths, tmp_path / "checked.csv")
    first = review.next_picture()
    assert first is not None
    review.pass_over(first)
    asked = []
    while (picture := review.next_picture()) is not None:
        asked.append(picture)
        review.label([picture], "red")
    assert asked[-1] == first
    assert sorted(asked) == list(range(len(paths)))


def test_thumbnails_have_the_aspect_of_their_files(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(np.full((40, 80, 3), 99, np.uint8))
    image.save(tmp_path / "wide.png")
    image.save(tmp_path / "turned.jpg", exif=exif)
    review = Review(coloured_classifier(), [tmp_path / "wide.png", tmp_path / "turned.jpg"], tmp_path / "checked.csv")
    sizes = [Image.open(io.BytesIO(data)).size for data in review.thumbnails]
    assert sizes == [(128, 64), (64, 128)]
