"""Labelling the pictures of a folder, without the page."""

from __future__ import annotations

import copy
import io
import os
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from PIL import Image

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.apps.active_learning import density, most_useful, typicality
from fewshot_mahalanobis.apps.session import Session
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


def shown(session: Session, number: int) -> tuple[str, float, bool]:
    """What a page shows of a picture: its label, the user's if there is one, and how probable the best class is."""
    answer = session.answer(number)
    assert answer is not None
    return session.labels.get(number, answer.label), max(answer.probabilities.values()), number in session.labels


def answers(session: Session) -> list[tuple[str, float, bool]]:
    return [shown(session, number) for number in session.pictures]


def sources(session: Session) -> list[Path]:
    return [cast(Path, picture.source) for picture in session.pictures.values()]


def test_a_label_is_in_the_table_at_once_as_fit_reads_it(paths: list[Path], tmp_path: Path) -> None:
    table = tmp_path / "labels" / "checked.csv"
    table.parent.mkdir()
    session = Session(coloured_classifier(), paths, table)
    assert not table.exists()
    session.label([3, 5], "blue")
    session.label([0], "a, “new” class")
    files, labels, *_ = read_labels(table)
    assert [os.path.abspath(file) for file in files] == [str(paths[i]) for i in (3, 5, 0)]  # noqa: PTH100
    assert labels == ["blue", "blue", "a, “new” class"]


def test_a_table_beside_its_pictures_goes_with_them(paths: list[Path], tmp_path: Path) -> None:
    table = tmp_path / "checked.csv"
    session = Session(coloured_classifier(), paths, table)
    session.label([0], "blue")
    moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    try:
        ((file,), *_) = read_labels(moved / "checked.csv")
        assert file == moved / "new" / paths[0].name
        assert session.table_text() == f"path,label\n{paths[0]},blue\n"  # to be kept anywhere
    finally:
        moved.rename(tmp_path)


def test_a_fit_of_the_classifier_by_its_owner_does_not_reach_a_review(paths: list[Path], tmp_path: Path) -> None:
    start = coloured_classifier()
    session = Session(start, paths, tmp_path / "checked.csv")
    start.fit(pictures(4, 3), [1, 2, 1, 2])
    session.label([0], "red")
    assert [*session.counts()] == ["blue", "green", "red"]


def test_another_day_goes_on(paths: list[Path], tmp_path: Path) -> None:
    first = Session(coloured_classifier(), paths, tmp_path / "checked.csv")
    first.label([0, 1], "purple")
    first.label([2], first.none)
    again = Session(coloured_classifier(), [*reversed(paths)], tmp_path / "checked.csv")
    assert again.labels == {11: "purple", 10: "purple", 9: "unknown"}
    for own, other in zip(answers(again)[::-1], answers(first), strict=True):
        assert own == (other[0], pytest.approx(other[1]), other[2])
    again.label([0], "red")
    assert read_labels(tmp_path / "checked.csv")[1] == ["purple", "purple", "unknown", "red"]


def test_rows_about_other_pictures_stay(paths: list[Path], tmp_path: Path) -> None:
    Session(coloured_classifier(), paths[:6], tmp_path / "checked.csv").label([0], "blue")
    session = Session(coloured_classifier(), paths[6:], tmp_path / "checked.csv")
    assert (session.labels, session.other_rows) == ({}, 1)
    session.label([0], "green")
    session.undo()
    session.label([1], "green")
    assert (
        tmp_path / "checked.csv"
    ).read_text() == f"path,label\nnew/{paths[0].name},blue\nnew/{paths[7].name},green\n"


def rows_of(table: Path) -> dict[str, str]:
    """Name of a file -> label, in the order of the table."""
    return {Path(path).name: label for path, label in zip(*read_labels(table)[:2], strict=True)}


def test_two_reviews_of_one_table_keep_and_learn_the_labels_of_both(paths: list[Path], tmp_path: Path) -> None:
    start, table = coloured_classifier(), tmp_path / "checked.csv"
    one, other = Session(start, paths[:8], table), Session(start, paths[4:], table)
    one.label([0, 5], "blue")
    other.label([0, 7], "purple")  # the pictures 4 and 11
    one.label([1], "green")
    given = {11: "purple", 0: "blue", 5: "blue", 4: "purple", 1: "green"}
    assert rows_of(table) == {paths[i].name: label for i, label in given.items()}
    assert (one.labels, one.other_rows) == ({0: "blue", 5: "blue", 4: "purple", 1: "green"}, 1)
    assert (other.labels, other.other_rows) == ({1: "blue", 0: "purple", 7: "purple"}, 1)
    assert one.classifier.classes_.tolist() == ["blue", "green", "purple", "red"]
    assert answers(one) == answers(Session(start, paths[:8], table))
    one.undo()
    assert [*rows_of(table)] == [paths[i].name for i in (11, 0, 5, 4)]  # those of the other stay
    assert not [*tmp_path.glob(".*")]  # no lock is left


def test_a_picture_that_another_labels_meanwhile_is_not_overwritten(paths: list[Path], tmp_path: Path) -> None:
    start, table = coloured_classifier(), tmp_path / "checked.csv"
    one, other = Session(start, paths, table), Session(start, paths, table)
    one.label([0], "blue")
    for change in (lambda: other.label([0, 1], "red"), one.undo):
        with pytest.raises(ValueError, match=rf"{paths[0].name} has another label in .*checked.csv meanwhile"):
            change()
        other.label([0], "green")  # knowing it
        assert rows_of(table) == {paths[0].name: "green"}
    assert one.labels == other.labels == {0: "green"}
    other.label([0], "green")
    one.label([0], "green")  # no contradiction
    assert one.labels == {0: "green"}


@pytest.mark.parametrize(
    "edited",
    [
        "path,label\nnew/{0},red\nnew/{1},purple\nelsewhere/x.png,blue\n",
        "path;label;\r\nnew/{0};red;\r\nnew\\{1};purple;\r\nelsewhere/x.png;blue;\r\n",  # by a spreadsheet
        "path,label\n{folder}/link/{0},red\n{folder}/new/../new/{1},purple\nelsewhere/x.png,blue\n",
    ],
)
def test_what_a_person_writes_into_the_table_meanwhile_stays_however_the_paths_are_written(
    edited: str, paths: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to("new", target_is_directory=True)
    table = tmp_path / "checked.csv"
    session = Session(coloured_classifier(), paths, table)
    session.label([0], "blue")
    table.write_text(edited.format(paths[0].name, paths[1].name, folder=tmp_path))  # another label, and two rows
    session.label([2], "green")
    assert session.labels == {0: "red", 1: "purple", 2: "green"}
    expected = ["elsewhere/x.png,blue", *(f"new/{paths[i].name},{label}" for i, label in session.labels.items())]
    assert table.read_text().splitlines() == ["path,label", *expected]


def test_an_edit_that_makes_another_table_stops_the_answers_and_stays(paths: list[Path], tmp_path: Path) -> None:
    table = tmp_path / "checked.csv"
    session = Session(coloured_classifier(), paths, table)
    session.label([0], "blue")
    for edited, message in (
        (f"path,label,note\n{paths[0]},blue,sharp\n", "no table that a review wrote"),
        (f"path,label\n{paths[0]},Blue\n{paths[1]},\n", "line 3 of .* lacks"),
        (f"path,label\n{paths[0]},Blue\n", "There is a class “blue”"),
    ):
        table.write_text(edited)
        with pytest.raises(ValueError, match=message):
            session.label([1], "red")
        assert (table.read_text(), session.labels) == (edited, {0: "blue"})


def test_a_link_to_a_picture_is_that_picture(paths: list[Path], tmp_path: Path) -> None:
    links = [tmp_path / "link.png", *paths[:2]]
    links[0].symlink_to(paths[0])
    Session(coloured_classifier(), paths[:3], tmp_path / "checked.csv").label([0], "purple")
    session = Session(coloured_classifier(), links, tmp_path / "checked.csv")
    assert sources(session) == [links[0], paths[1]]
    assert session.labels == {0: "purple"}


@pytest.mark.parametrize("text", ["path,label,probability\na.png,blue,0.3\n", "hello\n", "", "label,path\nblue,a.png"])
def test_a_table_that_no_review_wrote_is_refused_and_stays(paths: list[Path], tmp_path: Path, text: str) -> None:
    (tmp_path / "checked.csv").write_text(text)
    with pytest.raises(ValueError, match=r"checked\.csv is no table that a review wrote.*name another file with -o"):
        Session(coloured_classifier(), paths, tmp_path / "checked.csv")
    assert (tmp_path / "checked.csv").read_text() == text


def test_a_table_whose_label_cannot_be_learned_is_refused_by_name(paths: list[Path], tmp_path: Path) -> None:
    numbers = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(4, 1), [3, 5, 3, 5])
    (tmp_path / "checked.csv").write_text(f"path,label\n{paths[0]},cat\n")
    with pytest.raises(ValueError, match=r"checked\.csv: The classes of this model are numbers"):
        Session(numbers, paths, tmp_path / "checked.csv")


@pytest.mark.parametrize("settings", [{}, {"unknown_label": "?", "false_rejection_rate": 0.2}], ids=str)
def test_it_learns_what_partial_fit_learns(paths: list[Path], tmp_path: Path, settings: dict[str, object]) -> None:
    start = coloured_classifier(**settings)
    session = Session(start, paths, tmp_path / "checked.csv")
    session.label([0, 3], "purple")
    session.label([1], "blue")
    learned = copy.copy(start).partial_fit([paths[i] for i in (0, 3, 1)], ["purple", "purple", "blue"])
    expected = learned.predict_all(paths, transductive=True)  # from all pictures, as from unlabelled ones
    assert [row[1] for row in answers(session)] == pytest.approx(expected.probabilities.max(axis=1))
    own = {0: "purple", 3: "purple", 1: "blue"}
    assert [row[0] for row in answers(session)] == [own.get(i, label) for i, label in enumerate(expected.labels)]
    assert start.classes_.tolist() == ["blue", "green", "red"]
    assert session.classifier.predict(paths).tolist() == learned.predict(paths).tolist()


def test_pictures_of_no_class_teach_what_to_reject_where_the_model_rejects(paths: list[Path], tmp_path: Path) -> None:
    start = coloured_classifier(unknown_label="?", false_rejection_rate=0.2)
    session = Session(start, paths, tmp_path / "checked.csv")
    assert session.none == "?"
    expected = copy.copy(start).partial_fit(paths[:3], ["?", "?", "blue"])
    for written in ("?", " Unknown"):
        session.label([0, 1], written)
        session.label([2], "blue")
        assert [shown(session, i)[0] for i in (0, 1, 2)] == ["?", "?", "blue"]
        assert session.classifier.classes_.tolist() == start.classes_.tolist()
        assert session.classifier.class_counts_.tolist() == expected.class_counts_.tolist()
        np.testing.assert_allclose(session.classifier.outlier_score(paths), expected.outlier_score(paths), rtol=1e-6)
        assert not np.allclose(start.outlier_score(paths), expected.outlier_score(paths), rtol=1e-2)
        session.undo()
        session.undo()


def test_a_picture_of_no_class_teaches_nothing_where_the_model_rejects_nothing(
    paths: list[Path], tmp_path: Path
) -> None:
    start = coloured_classifier()
    session = Session(start, paths, tmp_path / "checked.csv")
    assert session.none == "unknown"
    session.label([0, 1], "unknown")
    assert session.classifier is not None
    assert session.classifier.class_counts_.tolist() == start.class_counts_.tolist()
    assert [shown(session, i)[0] for i in (0, 1)] == ["unknown", "unknown"]


def test_undo_takes_the_last_answer_back_and_no_more(paths: list[Path], tmp_path: Path) -> None:
    table = tmp_path / "checked.csv"
    session = Session(coloured_classifier(), paths, table)
    assert session.undo() == []
    states = [(answers(session), "path,label\n")]
    for given, label in (([0, 1, 2], "blue"), ([2, 3], "purple"), ([0], session.none)):
        session.label(given, label)
        states.append((answers(session), table.read_text()))
    session.label([0], session.none)  # changes nothing, so there is nothing to take back
    for undone in ([0], [2, 3], [0, 1, 2]):
        states.pop()
        assert session.can_undo
        assert sorted(session.undo()) == undone
        assert (answers(session), table.read_text()) == states[-1]
    assert not session.can_undo


def test_each_picture_goes_through_the_network_once(paths: list[Path], tmp_path: Path) -> None:
    start = coloured_classifier()
    batches = cast(TinyExtractor, start.model_.feature_extractor).batches
    batches.clear()
    session = Session(start, [*paths, paths[0]], tmp_path / "checked.csv")
    for label in ("red", "purple", "none of them"):
        picture = session.next_picture()
        assert picture is not None
        session.label([picture], label)
    session.undo()
    session.state()
    assert sum(batches) == len(paths)


def test_a_table_that_cannot_be_written_changes_nothing(paths: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "labels"
    folder.mkdir()
    session = Session(coloured_classifier(), paths, folder / "checked.csv")
    session.label([0], "blue")
    (folder / "checked.csv").unlink()
    folder.rmdir()
    before = answers(session)
    for change in (lambda: session.label([1], "red"), session.undo):
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            change()
        assert (answers(session), session.labels, session.can_undo) == (before, {0: "blue"}, True)


def test_labels_that_cannot_be_used_are_refused(paths: list[Path], tmp_path: Path) -> None:
    session = Session(coloured_classifier(), paths, tmp_path / "checked.csv")
    session.label([0], "Black cat")
    for given, label, message in (
        ([1], " ", "name first"),
        ([], "red", "Select one or more"),
        ([1], "Red", "There is a class “red”"),
        ([1], "black  cat", "There is a class “Black cat”"),
    ):
        with pytest.raises(ValueError, match=message):
            session.label(given, label)
    assert session.labels == {0: "Black cat"}


def test_files_that_no_table_can_name_and_those_that_are_no_pictures_are_left_out(tmp_path: Path) -> None:
    paths = write_pictures(tmp_path, ["red", "blue"])
    odd = [tmp_path / os.fsdecode(b"\xff.png"), tmp_path / " a.png", tmp_path / "a, “b”.png"]
    for path in odd:
        path.write_bytes(paths[0].read_bytes())
    (tmp_path / "notes.png").write_text("hello")
    session = Session(coloured_classifier(), [tmp_path / "notes.png", *odd, *paths], tmp_path / "checked.csv")
    assert sources(session) == [*odd[1:], *paths]
    assert {path: problem.partition(",")[0] for path, problem in session.problems.items()} == {
        tmp_path / "notes.png": "not an image file of a known format",
        odd[0]: "its name is not valid UTF-8",
    }
    session.label([0, 1], "red")
    again = Session(coloured_classifier(), sources(session), tmp_path / "checked.csv")
    assert again.labels == {0: "red", 1: "red"}
    with pytest.raises(ValueError, match="none of the 1 images can be read"):
        Session(coloured_classifier(), [tmp_path / "notes.png"], tmp_path / "checked.csv")


def test_the_most_useful_picture_is_asked_about_and_one_like_those_of_no_class_is_not(tmp_path: Path) -> None:
    start = coloured_classifier()
    session = Session(start, write_pictures(tmp_path / "new", ["red", "blue", "green"] * 4), tmp_path / "checked.csv")
    session.label([0, 1], session.none)
    session.label([2], "purple")
    free, features = [*range(3, 12)], start.transform(sources(session))
    known = np.concatenate([session.classifier.fitted_head_.support.adapted.numpy(), features[:2]])
    typical = typicality(features[free], density(features)[free], known)
    assert len(known) == len(SUPPORT_LABELS) + 3
    assert (
        session.next_picture() == free[most_useful(session.classifier.predict_proba(sources(session))[free], typical)]
    )


def test_pictures_that_were_passed_over_come_last_and_all_come(paths: list[Path], tmp_path: Path) -> None:
    session = Session(coloured_classifier(), paths, tmp_path / "checked.csv")
    first = session.next_picture()
    assert first is not None
    session.pass_over(first)
    asked = []
    while (picture := session.next_picture()) is not None:
        asked.append(picture)
        session.label([picture], "red")
    assert asked[-1] == first
    assert sorted(asked) == list(range(len(paths)))


def test_thumbnails_have_the_aspect_of_their_files(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(np.full((40, 80, 3), 99, np.uint8))
    image.save(tmp_path / "wide.png")
    image.save(tmp_path / "turned.jpg", exif=exif)
    session = Session(coloured_classifier(), [tmp_path / "wide.png", tmp_path / "turned.jpg"], tmp_path / "checked.csv")
    sizes = [Image.open(io.BytesIO(data)).size for data in map(session.thumbnail, session.pictures)]
    assert sizes == [(128, 64), (64, 128)]


def with_two_new_colours(folder: Path) -> Session:
    """Pictures 0 to 3 are red and 15 to 17 blue, which it knows; 4 to 8 are purple and 9 to 14 yellow."""
    labels = ["red"] * 4 + ["purple"] * 5 + ["yellow"] * 6 + ["blue"] * 3
    start = coloured_classifier(unknown_label="other", false_rejection_rate=0.2)
    return Session(start, write_pictures(folder / "new", labels), folder / "checked.csv")


def test_pictures_of_no_class_that_look_alike_are_heaps_the_largest_first_until_they_are_named(tmp_path: Path) -> None:
    session = with_two_new_colours(tmp_path)
    yellow, purple = [*range(9, 15)], [*range(4, 9)]
    assert session.heaps() == (session.version, [yellow, purple])
    assert session.classifier is not None
    proposed = session.classifier.propose_classes(sources(session))
    assert sorted(np.flatnonzero(proposed == heap).tolist() for heap in range(proposed.max() + 1)) == [purple, yellow]

    session.label(yellow, "sun")
    assert session.heaps() == (session.version, [purple])
    assert session.counts()["sun"] == 6
    session.label([4, 5, 6], "other")  # of the others there are too few
    assert session.heaps() == (session.version, [])
    session.undo()
    session.undo()
    assert session.heaps() == (session.version, [yellow, purple])
    assert session.labels == {}


def test_a_classifier_that_rejects_none_has_no_heaps_and_no_threshold(paths: list[Path], tmp_path: Path) -> None:
    session = Session(coloured_classifier(), paths, tmp_path / "checked.csv")
    assert session.heaps() == (session.version, [])
    state = session.state()
    assert state["outlier_threshold"] is None
    assert {row[6] for row in state["pictures"]} == {None}
    assert all(0 <= row[5] < 1 for row in state["pictures"])


def test_every_answer_has_its_best_class_its_outlier_score_and_its_doubt(tmp_path: Path) -> None:
    session = with_two_new_colours(tmp_path)
    assert session.classifier is not None
    wanted = session.classifier.predict_all(sources(session), transductive=True)
    state = session.state()
    assert state["outlier_threshold"] == session.classifier.threshold_
    for number, (_, _, _, best, unknown, doubt, score, _) in enumerate(state["pictures"]):
        answer = session.answer(number)
        assert answer is not None
        assert answer.unknown == unknown == (4 <= number < 15)
        assert answer.outlier_threshold == session.classifier.threshold_
        assert answer.outlier_score == pytest.approx(wanted.outlier_scores[number], rel=1e-4, abs=1e-4)
        assert answer.doubt == pytest.approx(wanted.doubts[number], rel=1e-3, abs=1e-6)
        assert (score, doubt) == (round(cast(float, answer.outlier_score), 4), round(answer.doubt, 4))
        assert best[0][1] == round(max(answer.probabilities.values()), 4)
        assert unknown == (score > state["outlier_threshold"])


GROUPS = ["a", "a", "a", "b", "b", "c"]


def grouped(folder: Path) -> Session:
    """Three red pictures of one thing, two blue ones of another and a green one."""
    paths = write_pictures(folder / "new", ["red"] * 3 + ["blue"] * 2 + ["green"])
    return Session(coloured_classifier(), paths, folder / "checked.csv", groups=GROUPS)


def test_pictures_of_one_group_are_listed_once_and_share_answer_and_label(tmp_path: Path) -> None:
    session = grouped(tmp_path)
    assert session.classifier is not None
    assert [(row[0], row[-1]) for row in session.state()["pictures"]] == [(0, 3), (3, 2), (5, 1)]
    wanted = session.classifier.predict_all(sources(session), transductive=True, groups=GROUPS)
    for number, shares in enumerate(wanted.probabilities):
        answer = session.answer(number)
        assert answer is not None
        found = [answer.probabilities[name] for name in session.classifier.classes_]
        np.testing.assert_allclose(found, shares, rtol=1e-4, atol=1e-6)
    assert session.answer(0) == session.answer(2)

    asked = session.next_picture()
    assert asked in (0, 3, 5)
    session.label([0], "red")
    assert session.labels == {0: "red", 1: "red", 2: "red"}
    assert read_labels(tmp_path / "checked.csv").labels == ["red"] * 3
    groups = session.classifier.fitted_head_.groups
    assert groups is not None
    assert groups[-3:].unique().numel() == 1
    assert groups.unique().numel() == len(SUPPORT_LABELS) + 1
    assert session.next_picture() in (3, 5)
    # Only the others are unlabelled pictures, one a group.
    x = session.classifier.features(sources(session)).adapted
    learned = session.classifier.fitted_head_.with_unlabelled(torch.stack([x[3:5].mean(dim=0), x[5]]))
    logits = learned.joint_logits(learned.logits(x[3:5]), x[3:5], torch.tensor([0, 0]))
    shares = learned.log_probabilities(logits).exp()[0]
    answer = session.answer(3)
    assert answer is not None
    found = [answer.probabilities[name] for name in session.classifier.classes_]
    np.testing.assert_allclose(found, shares, rtol=1e-4, atol=1e-6)
    assert session.undo() == [0, 1, 2]
    assert session.labels == {}


def test_of_a_group_that_somebody_labelled_in_part_the_rest_is_asked_about(tmp_path: Path) -> None:
    (tmp_path / "checked.csv").write_text("path,label\nnew/red-0.png,red\n")
    session = grouped(tmp_path)
    assert session.labels == {0: "red"}
    assert session.shown() == [1, 3, 5]
    session.label([1], "red")
    assert session.labels == {0: "red", 1: "red", 2: "red"}
    assert session.shown() == [0, 3, 5]
