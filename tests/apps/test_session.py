"""What the app does, without its page."""

from __future__ import annotations

import copy
import json
import zipfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier
from fewshot_mahalanobis.apps.active_learning import most_useful_first
from fewshot_mahalanobis.apps.session import UNKNOWN, Session
from tests.tiny import LABELS, TinyExtractor, pictures, tiny_classifier, tiny_model


@pytest.fixture
def files(tmp_path: Path) -> dict[str, list[str]]:
    """Image files of the three classes that ``tiny_classifier`` knows."""
    made: dict[str, list[str]] = {}
    for index, (name, image) in enumerate(zip(LABELS, pictures(8, 1), strict=True)):
        file = tmp_path / f"{index}.png"
        Image.fromarray(image).save(file)
        made.setdefault(name, []).append(str(file))
    return made


def label(session: Session, index: int, name: str) -> None:
    """Say what one query is, and learn it."""
    session.mark(session.queries[index].number, name)
    session.learn()


def in_order(files: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    return [file for group in files.values() for file in group], [name for name in files for _ in files[name]]


def test_the_bench_fits_what_the_classifier_fits(files: dict[str, list[str]]) -> None:
    session = Session(tiny_model(), device="cpu")
    for name, group in files.items():
        assert session.add(f" {name} ", group) == {}
    assert session.counts() == {"blue": 3, "green": 3, "red": 2}
    direct = SimpleCNAPSClassifier(tiny_model(), device="cpu", unknown_label=UNKNOWN, false_rejection_rate=1 / 9).fit(
        *in_order(files)
    )
    query = files["red"][0]
    session.ask([query])
    (answer,) = session.answers
    (row,) = direct.predict_proba([query])
    assert answer.probabilities == pytest.approx(dict(zip(direct.classes_, row, strict=True)))
    assert answer.label == max(answer.probabilities, key=answer.probabilities.get)
    assert [UNKNOWN if answer.unknown else answer.label] == direct.predict([query]).tolist()
    assert session.curve == direct.summary().curve
    session.remove("red")
    session.remove("blue")
    assert session.curve is None


def test_neighbours_are_the_nearest_support_images(files: dict[str, list[str]]) -> None:
    session = Session(tiny_model(), device="cpu")
    for name, group in files.items():
        session.add(name, group)
    paths, names = in_order(files)
    query = files["green"][1]
    session.ask([query])
    (answer,) = session.answers
    assert session.classifier is not None
    features, (own,) = session.classifier.transform(paths), session.classifier.transform([query])
    distances = [float(np.sqrt(((row - own) ** 2).sum())) for row in features]
    neighbours = session.neighbours(answer)
    nearest = np.argsort(distances)[: len(neighbours)]
    assert [n.label for n in neighbours] == [names[i] for i in nearest]
    assert [n.distance for n in neighbours] == pytest.approx([distances[i] for i in nearest], abs=1e-5)
    assert neighbours[0].picture is not None  # it is in the support set
    np.testing.assert_array_equal(neighbours[0].picture.pixels, answer.picture.pixels)


def test_files_that_cannot_be_read_are_named_and_the_others_used(files: dict[str, list[str]], tmp_path: Path) -> None:
    (tmp_path / "notes.png").write_text("hello")
    session = Session(tiny_model(), device="cpu")
    problems = session.add("blue", [*files["blue"], str(tmp_path / "notes.png")])
    assert problems.keys() == {"notes.png"}
    assert session.counts() == {"blue": 3}
    with pytest.raises(ValueError, match=r"Nothing was added. notes\.png: not an image file"):
        session.add("red", [str(tmp_path / "notes.png")])
    session.add("red", files["red"])
    with pytest.raises(ValueError, match=r"notes\.png: not an image file"):
        session.ask([str(tmp_path / "notes.png")])
    assert session.queries == []
    assert session.counts() == {"blue": 3, "red": 2}


def test_what_is_missing_is_said(files: dict[str, list[str]]) -> None:
    session = Session(tiny_model(), device="cpu")
    for name, given, message in (
        ("  ", files["red"], "name first"),
        ("red", [], "pictures of “red” first"),
        (UNKNOWN, [], "pictures of no class first"),
    ):
        with pytest.raises(ValueError, match=message):
            session.add(name, given)
    session.add("red", files["red"][:1])
    assert session.save() is None


def test_single_pictures_make_a_classifier_that_calls_nothing_unknown(files: dict[str, list[str]]) -> None:
    session = Session(tiny_model(), device="cpu")
    for name, group in files.items():
        session.add(name, group[:1])
    session.ask([files["red"][1]])
    assert not session.answers[0].unknown


def test_removing_a_class_is_never_having_added_it(files: dict[str, list[str]]) -> None:
    session, without = Session(tiny_model(), device="cpu"), Session(tiny_model(), device="cpu")
    for name, group in files.items():
        session.add(name, group)
        if name != "green":
            without.add(name, group)
    for one in (session, without):
        one.ask(files["red"][:1])
    session.remove("green")
    assert session.counts() == without.counts()
    assert session.answers[0].probabilities == without.answers[0].probabilities
    session.remove("red")
    session.remove("blue")
    assert session.classifier is None
    assert session.answers == []


def test_from_a_fitted_classifier_on_more_images_are_a_partial_fit(files: dict[str, list[str]]) -> None:
    start = tiny_classifier(unknown_label=UNKNOWN, false_rejection_rate=0.2)
    before = start.predict_proba(pictures(2, 5))
    session = Session(start)
    assert session.counts() == {"blue": 3, "green": 3, "red": 2}
    session.ask(files["red"][:1])
    assert all(near.picture is None for near in session.neighbours(session.answers[0]))
    session.add("purple", files["blue"][:2])
    expected = tiny_classifier(unknown_label=UNKNOWN, false_rejection_rate=0.2).partial_fit(
        files["blue"][:2], ["purple"] * 2
    )
    (row,) = expected.predict_proba(files["red"][:1])
    (answer,) = session.answers
    assert answer.probabilities == pytest.approx(dict(zip(expected.classes_, row, strict=True)))
    assert {near.label for near in session.neighbours(answer) if near.picture is not None} <= {"purple"}
    session.remove("purple")
    assert session.classifier is start
    np.testing.assert_array_equal(start.predict_proba(pictures(2, 5)), before)


def test_classes_that_are_numbers_stay_numbers(files: dict[str, list[str]]) -> None:
    start = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(4, 1), [3, 5, 3, 5])
    session = Session(start)
    session.add("5", files["red"])
    session.add("8", files["blue"])
    assert session.classifier is not None
    assert session.classifier.classes_.tolist() == [3, 5, 8]
    with pytest.raises(ValueError, match="whole numbers"):
        session.add("cat", files["green"])
    assert session.counts() == {"3": 2, "5": 4, "8": 3}


def test_one_picture_can_be_removed(files: dict[str, list[str]]) -> None:
    session, without = Session(tiny_model(), device="cpu"), Session(tiny_model(), device="cpu")
    for one in (session, without):
        one.ask(files["green"][:1])
        one.add("red", files["red"])
    session.add("blue", files["blue"])
    without.add("blue", files["blue"][1:])
    index = next(index for index, _, name in session.pictures() if name == "blue")
    session.remove_picture(index)
    assert session.counts() == {"blue": 2, "red": 2}
    assert session.answers[0].probabilities == without.answers[0].probabilities


def test_pictures_are_listed_class_by_class(files: dict[str, list[str]]) -> None:
    session = Session(tiny_model(), device="cpu")
    for index in range(2):
        for name in ("red", "blue"):
            session.add(name, files[name][index : index + 1])
    assert [(index, name) for index, _, name in session.pictures()] == [
        (1, "blue"),
        (3, "blue"),
        (0, "red"),
        (2, "red"),
    ]
    assert all(picture is session.images[index] for index, picture, _ in session.pictures())


def test_queries_wait_for_a_class_and_are_answered_anew_after_each_change(files: dict[str, list[str]]) -> None:
    session = Session(tiny_model(), device="cpu")
    assert session.ask([*files["red"], files["blue"][0]]) == {}
    assert session.answers == []
    assert session.ranked() == []
    session.add("red", files["red"][:1])
    assert session.answers == []
    session.add("blue", files["blue"])
    assert [answer.label for answer in session.answers[::2]] == ["red", "blue"]  # which it has learned
    session.add("green", files["green"])
    assert all(answer.probabilities.keys() == {"blue", "green", "red"} for answer in session.answers)
    session.forget_queries()
    assert (session.queries, session.answers, session.ranked()) == ([], [], [])


def test_of_each_drop_those_come_first_that_would_teach_most_and_the_last_drop_before_others(
    files: dict[str, list[str]],
) -> None:
    start = tiny_classifier()
    session, ranked = Session(start), list[int]()
    for drop in (files["green"], files["blue"] + files["red"]):
        session.ask(drop)
        known = start.fitted_head_.support.adapted.numpy()
        order = most_useful_first(start.predict_proba(drop), start.transform(drop), known)
        first = len(session.queries) - len(drop)
        ranked = [first + index for index in order] + ranked
    assert [session.queries.index(answer.picture) for answer in session.ranked()] == ranked


@pytest.mark.parametrize("from_a_file", [False, True])
def test_what_queries_are_is_learned_in_one_fit(files: dict[str, list[str]], from_a_file: bool) -> None:
    session = Session(tiny_classifier() if from_a_file else tiny_model(), device="cpu")
    if not from_a_file:
        session.add("blue", files["blue"])
        session.add("green", files["green"])
    before = session.counts()
    queries = [*files["red"], *files["blue"], *files["green"]]
    session.ask(queries)
    with pytest.raises(ValueError, match="Press what some"):
        session.learn()
    numbers = [query.number for query in session.queries]
    answers = session.answers
    for index, name in ((0, " purple "), (1, "purple"), (3, "blue"), (4, "blue"), (4, None), (1, "green")):
        session.mark(numbers[index], name)
    assert (session.answers, session.counts()) == (answers, before)  # nothing is learned yet
    session.learn()
    assert session.counts() == before | {name: before.get(name, 0) + 1 for name in ("purple", "green", "blue")}
    assert [query.number for query in session.queries] == [numbers[index] for index in (2, 4, 5, 6, 7)]
    assert len(session.answers) == 5
    assert session.marks == {}
    direct = Session(tiny_classifier() if from_a_file else tiny_model(), device="cpu")
    if not from_a_file:
        direct.add("blue", files["blue"])
        direct.add("green", files["green"])
    for index, name in ((0, "purple"), (3, "blue"), (1, "green")):
        direct.add(name, [queries[index]])
    direct.ask([queries[index] for index in (2, 4, 5, 6, 7)])
    for answer, other in zip(session.answers, direct.answers, strict=True):
        assert answer.probabilities == pytest.approx(other.probabilities)
        assert answer.unknown == other.unknown


def test_what_cannot_be_said_of_a_query_changes_nothing(files: dict[str, list[str]]) -> None:
    session = Session(tiny_classifier())
    session.ask(files["red"])
    first, second = (query.number for query in session.queries)
    session.mark(first, "Black cat")
    for number, name, message in (
        (first, " ", "name first"),
        (second, "black cat", "There is a class “Black cat”"),  # which is to be learned
        (second, UNKNOWN, "rejects nothing"),
        (-1, "red", "not asked about any more"),
    ):
        with pytest.raises(ValueError, match=message):
            session.mark(number, name)
    assert [*session.marks.values()] == ["Black cat"]


# ---------------------------------------------------------------------- none of these, and one class


def test_pictures_of_no_class_teach_what_to_reject(files: dict[str, list[str]]) -> None:
    session = Session(tiny_model(), device="cpu")
    session.add("Unknown ", files["green"])
    assert session.classifier is None
    for name in ("red", "blue"):
        session.add(name, files[name])
    assert session.counts() == {"blue": 3, "red": 2}
    assert session.count_of_none() == 3
    paths, names = in_order(files)
    names = [UNKNOWN if name == "green" else name for name in names]
    direct = SimpleCNAPSClassifier(tiny_model(), device="cpu", unknown_label=UNKNOWN, false_rejection_rate=1 / 6)
    direct.fit(paths, names)
    without = SimpleCNAPSClassifier(tiny_model(), device="cpu", unknown_label=UNKNOWN, false_rejection_rate=1 / 6)
    without.fit(*in_order({name: files[name] for name in ("red", "blue")}))
    assert session.classifier is not None
    scores = session.classifier.outlier_score(paths)
    np.testing.assert_allclose(scores, direct.outlier_score(paths), rtol=1e-5)
    assert np.abs(scores - without.outlier_score(paths)).max() > 0.1
    session.ask(paths)
    assert [UNKNOWN if answer.unknown else answer.label for answer in session.answers] == direct.predict(paths).tolist()
    for answer in session.answers:  # which are of classes, and have their own pictures
        shown = [(near.label, near.picture) for near in session.neighbours(answer)]
        assert {picture: name for name, picture in shown}.items() <= {*zip(session.images, session.names, strict=True)}
    session.remove(UNKNOWN)
    np.testing.assert_allclose(session.classifier.outlier_score(paths), without.outlier_score(paths), rtol=1e-5)


def test_pictures_of_no_class_wait_until_something_can_be_rejected(files: dict[str, list[str]]) -> None:
    session = Session(tiny_model(), device="cpu")
    session.add(UNKNOWN, files["green"])
    session.add("red", files["red"][:1])
    assert session.classifier is None
    session.add("blue", files["blue"][:1])
    session.ask(files["green"])
    assert not any(answer.unknown for answer in session.answers)
    assert session.neighbours(session.answers[0])[0].label in ("red", "blue")
    session.add("blue", files["blue"][1:])
    assert session.classifier is not None
    assert session.classifier.fitted_head_.negatives is not None


def test_copies_of_one_picture_count_as_one(files: dict[str, list[str]], tmp_path: Path) -> None:
    again = tmp_path / "again.png"
    again.write_bytes(Path(files["blue"][0]).read_bytes())
    session = Session(tiny_model(), device="cpu")
    session.add("blue", [files["blue"][0], str(again)])
    assert session.counts() == {"blue": 2}
    assert session.classifier is None  # there is nothing to leave out, and so no threshold
    session.add("red", files["red"][:1])
    session.ask(files["green"])
    assert not any(answer.unknown for answer in session.answers)
    session.add("blue", files["blue"][1:])
    assert session.classifier is not None
    assert session.classifier.threshold_ is not None


def test_a_model_file_learns_of_no_class_by_its_own_label_or_says_that_it_cannot(files: dict[str, list[str]]) -> None:
    start = tiny_classifier(unknown_label="?", false_rejection_rate=0.2).partial_fit(files["green"][:1], ["?"])
    session = Session(start)
    assert (session.none, session.count_of_none()) == ("?", 1)
    session.add(UNKNOWN, files["green"][1:])
    session.ask(files["blue"])
    session.mark(session.queries[0].number, "?")
    session.learn()
    assert (session.counts(), session.count_of_none()) == ({"blue": 3, "green": 3, "red": 2}, 4)
    expected = copy.copy(start).partial_fit([*files["green"][1:], files["blue"][0]], ["?"] * 3)
    assert session.classifier is not None
    paths, _ = in_order(files)
    np.testing.assert_allclose(session.classifier.outlier_score(paths), expected.outlier_score(paths), rtol=1e-5)

    session = Session(tiny_classifier())
    assert not session.can_learn_none
    with pytest.raises(ValueError, match=r"rejects nothing.*fit --unknown-label"):
        session.add(UNKNOWN, files["green"])
    assert session.images == []


def test_numbered_classes_and_pictures_of_no_class_stay_apart(files: dict[str, list[str]]) -> None:
    start = SimpleCNAPSClassifier(tiny_model(), device="cpu", unknown_label=-1, false_rejection_rate=0.2)
    session = Session(start.fit(pictures(4, 1), [3, 5, 3, 5]))
    session.add("-1", files["green"])
    session.add("8", files["red"])
    assert (session.counts(), session.count_of_none()) == ({"3": 2, "5": 2, "8": 2}, 3)
    assert session.classifier is not None
    assert session.classifier.classes_.tolist() == [3, 5, 8]


def test_one_class_of_two_pictures_is_told_from_everything_else(files: dict[str, list[str]]) -> None:
    session = Session(tiny_model(), device="cpu")
    session.add("blue", files["blue"][:1])
    assert session.classifier is None
    session.add("blue", files["blue"][1:])
    direct = SimpleCNAPSClassifier(tiny_model(), device="cpu", unknown_label=UNKNOWN, false_rejection_rate=1 / 4)
    direct.fit(files["blue"], ["blue"] * 3)
    session.ask([*files["red"], *files["green"]])
    expected = direct.predict([*files["red"], *files["green"]]).tolist()
    assert [UNKNOWN if answer.unknown else answer.label for answer in session.answers] == expected
    assert len(session.ranked()) == 5
    session.mark(session.queries[0].number, UNKNOWN)
    session.mark(session.queries[2].number, "green")
    session.learn()
    assert (session.counts(), session.count_of_none()) == ({"blue": 3, "green": 1}, 1)


@pytest.mark.parametrize("name", ["Unknown", "UNKNOWN ", "uNknown"])
def test_the_answer_for_no_class_is_no_class_however_it_is_written(files: dict[str, list[str]], name: str) -> None:
    session = Session(tiny_model(), device="cpu")
    session.add(name, files["red"])
    assert (session.counts(), session.names) == ({}, [UNKNOWN] * 2)


@pytest.mark.parametrize(("known", "name"), [("cat", "Cat"), ("Black  cat", "black cat"), ("café", "cafe\u0301")])
@pytest.mark.parametrize("taught", ["added", "in the file", "asked about"])
def test_a_name_that_looks_like_that_of_a_class_is_no_second_class(
    files: dict[str, list[str]], known: str, name: str, taught: str
) -> None:
    if taught == "in the file":
        labels = [known if label == "red" else label for label in LABELS]
        session = Session(SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(8, 1), labels))
    else:
        session = Session(tiny_model(), device="cpu")
        session.add(known, files["red"])
    session.add("yellow", files["blue"])
    session.ask(files["green"][:1])
    before = session.counts()
    with pytest.raises(ValueError, match=f"There is a class “{known}”"):
        label(session, 0, name) if taught == "asked about" else session.add(name, files["green"])
    assert session.counts() == before
    session.add(known, files["green"])
    assert session.counts()[known] == before[known] + 3


@pytest.mark.parametrize("settings", [{}, {"unknown_label": "?", "false_rejection_rate": 0.2}], ids=str)
def test_a_model_file_sees_each_picture_once_however_many_answers_follow(
    files: dict[str, list[str]], settings: dict[str, Any]
) -> None:
    session = Session(tiny_classifier(**settings))
    batches = cast(TinyExtractor, session.start.model_.feature_extractor).batches
    batches.clear()
    session.ask([file for group in files.values() for file in group])
    passes = 1 if session.start.task_.unadapted is None else 2
    assert sum(batches) == 8 * passes
    for name in ("green", "purple", "blue"):
        session.mark(session.ranked()[0].picture.number, name)
        session.learn()
    session.remove_picture(0)
    session.remove("purple")
    assert sum(batches) == 8 * passes


@pytest.mark.parametrize("value_range", [(0, 4095), (0, 1000), (100, 300)])
def test_a_model_file_reads_pictures_by_its_range_and_once(tmp_path: Path, value_range: tuple[int, int]) -> None:
    low, high = value_range
    rng, stored = np.random.default_rng(0), []
    for index in range(9):
        file = tmp_path / f"{index}.png"
        Image.fromarray(rng.integers(low, high, (20, 20), dtype=np.uint16)).save(file)
        stored.append(str(file))
    start = SimpleCNAPSClassifier(tiny_model(), device="cpu", value_range=value_range).fit(stored[:4], list("abab"))
    session = Session(start)
    session.ask(stored[4:])
    np.testing.assert_allclose(
        [list(answer.probabilities.values()) for answer in session.answers], start.predict_proba(stored[4:]), rtol=1e-5
    )
    label(session, 0, "b")
    session.add("c", stored[6:8])
    learned = copy.copy(start).partial_fit([stored[4], *stored[6:8]], ["b", "c", "c"])
    np.testing.assert_allclose(
        [list(answer.probabilities.values()) for answer in session.answers],
        learned.predict_proba(stored[5:]),
        rtol=1e-5,
    )
    assert start.classes_.tolist() == ["a", "b"]


def test_a_label_that_cannot_be_learned_changes_nothing(files: dict[str, list[str]]) -> None:
    session = Session(SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(4, 1), [3, 5, 3, 5]))
    session.ask(files["red"])
    with pytest.raises(ValueError, match="whole numbers"):
        label(session, 0, "cat")
    assert len(session.queries) == len(session.answers) == 2
    assert session.counts() == {"3": 2, "5": 2}


def test_the_answering_page_is_exported_as_a_zip_file(files: dict[str, list[str]], tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        session = Session(SimpleCNAPS(adaptation="none", image_size=32).eval(), device="cpu")
    with pytest.raises(ValueError, match="Teach a class first"):
        session.export_page()
    for name, group in files.items():
        session.add(name, group)
    for _ in range(2):  # a second one takes the place of the first
        archive = session.export_page()
    with zipfile.ZipFile(archive) as zipped:
        names = zipped.namelist()
        assert {"page/index.html", "page/page.json", "page/classifier.onnx"} <= {*names}
        assert json.loads(zipped.read("page/page.json"))["labels"] == ["blue", "green", "red", UNKNOWN]
    assert {path.name for path in archive.parent.iterdir()} == {"page.zip"}


def test_the_example_has_three_classes_and_asks_about_seven_pictures() -> None:
    session = Session(tiny_model(), device="cpu")
    session.add_example()
    assert session.counts() == {"flower": 5, "pagoda": 5, "trees": 5}
    assert len(session.answers) == 7
