"""What the page does with pictures, labels and the classifier, without the page."""

from __future__ import annotations

import copy
import json
import threading
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier
from fewshot_mahalanobis.apps.session import UNKNOWN, Answer, Session
from tests.tiny import LABELS, TinyExtractor, pictures, tiny_classifier, tiny_model

pytestmark = pytest.mark.usefixtures("narrow_resnet18")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, list[str]]:
    """Image files of the three classes that ``tiny_classifier`` knows."""
    made: dict[str, list[str]] = {}
    for index, (name, image) in enumerate(zip(LABELS, pictures(8, 1), strict=True)):
        file = tmp_path / f"{index}.png"
        Image.fromarray(image).save(file)
        made.setdefault(name, []).append(str(file))
    return made


def add(session: Session, files: Sequence[str], label: str | None = None) -> dict[str, str]:
    return session.add([(Path(file), Path(file).name) for file in files], label)


def taught(files: dict[str, list[str]], *names: str, start: Any = None) -> Session:
    """A session that has learned some of the classes, one after the other."""
    session = Session(tiny_model() if start is None else start, device="cpu")
    for name in names or files:
        add(session, files[name], name)
    return session


def waiting(session: Session) -> list[int]:
    """Numbers of the pictures that are asked about."""
    return [number for number in session.pictures if number not in session.labels]


def answers(session: Session) -> list[Answer]:
    found = [session.answer(number) for number in waiting(session)]
    return [answer for answer in found if answer is not None]


def labelled(session: Session, label: str) -> list[int]:
    return [number for number, given in session.labels.items() if given == label]


def in_order(files: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    return [file for group in files.values() for file in group], [name for name in files for _ in files[name]]


def fitted(files: Sequence[str], labels: Sequence[str], rate: float) -> SimpleCNAPSClassifier:
    classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu", unknown_label=UNKNOWN, false_rejection_rate=rate)
    return classifier.fit(files, labels)


def assert_answers(session: Session, classifier: SimpleCNAPSClassifier, files: Sequence[str]) -> None:
    """The session answers for these files, which wait, as a classifier does."""
    found = answers(session)
    assert [answer.label for answer in found] == list(map(str, classifier.predict(files)))
    for answer, row in zip(found, classifier.predict_proba(files), strict=True):
        wanted = dict(zip(map(str, classifier.classes_), row, strict=True))
        assert answer.probabilities == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        assert [*answer.probabilities.values()] == sorted(answer.probabilities.values(), reverse=True)


# ---------------------------------------------------------------------- learning


def test_it_fits_what_the_classifier_fits(files: dict[str, list[str]]) -> None:
    session = taught(files)
    assert session.counts() == {"blue": 3, "green": 3, "red": 2}
    direct = fitted(*in_order(files), 1 / 9)
    add(session, files["red"][:1])
    assert_answers(session, direct, files["red"][:1])
    curve, found = direct.summary().curve, session.curve()
    assert curve is not None
    assert found is not None
    assert (dict(found["measured"]), found["advice"]) == (curve.measured, replace(curve, noun="picture").advice)
    session.remove([*labelled(session, "red"), *labelled(session, "blue")])
    assert session.curve() is None


def test_few_new_labels_are_learned_under_the_adaptation_of_before_and_many_adapt_anew(
    files: dict[str, list[str]],
) -> None:
    session = Session(tiny_model(), device="cpu")
    add(session, [*files["blue"], *files["green"]])
    for number, label in zip(waiting(session), ["blue"] * 3 + ["green"] * 3, strict=True):
        session.label([number], label)
    paths, labels = [*files["blue"], *files["green"]], ["blue"] * 3 + ["green"] * 3
    adapted = fitted(paths[:5], labels[:5], 1 / 6)
    expected = adapted.set_params(false_rejection_rate=1 / 7).partial_fit(paths[5:], labels[5:])
    add(session, files["red"])
    assert_answers(session, expected, files["red"])
    session.label(waiting(session), "red")
    add(session, files["red"])
    assert_answers(session, fitted([*paths, *files["red"]], [*labels, "red", "red"], 1 / 9), files["red"])


def test_pictures_of_a_folder_go_through_a_model_once_and_are_learned_as_by_one_fit(
    files: dict[str, list[str]], tmp_path: Path
) -> None:
    paths, labels = in_order(files)
    model = tiny_model()
    session = Session(model, [Path(path) for path in paths], tmp_path / "checked.csv", device="cpu")
    assert session.classifier is None
    first = session.next_picture()
    assert first is not None
    batches = cast(TinyExtractor, model.feature_extractor).batches
    batches.clear()
    order = [first, *(number for number in session.pictures if number != first)]
    for number in order[:6]:
        session.label([number], labels[number])
    expected = SimpleCNAPSClassifier(
        tiny_model(), adapt=False, device="cpu", unknown_label=UNKNOWN, false_rejection_rate=1 / 7
    )
    counts = Counter(labels[number] for number in order[:6])
    rate = 1 / (sum(count for count in counts.values() if count > 1) + 1)
    expected.set_params(false_rejection_rate=rate).fit([paths[n] for n in order[:6]], [labels[n] for n in order[:6]])
    wanted = expected.predict_all(paths, transductive=True)
    for number, row in enumerate(wanted.probabilities):
        answer = session.answer(number)
        assert answer is not None
        found = [answer.probabilities[name] for name in expected.classes_]
        np.testing.assert_allclose(found, row, rtol=1e-4, atol=1e-6)


def test_neighbours_are_the_nearest_support_images(files: dict[str, list[str]]) -> None:
    session = taught(files)
    paths, names = in_order(files)
    query = files["green"][1]
    add(session, [query])
    assert session.classifier is not None
    features, (own,) = session.classifier.transform(paths), session.classifier.transform([query])
    distances = [float(np.sqrt(((row - own) ** 2).sum())) for row in features]
    neighbours = session.neighbours(waiting(session)[0])
    nearest = np.argsort(distances)[: len(neighbours)]
    assert [near.label for near in neighbours] == [names[i] for i in nearest]
    assert [near.distance for near in neighbours] == pytest.approx([distances[i] for i in nearest], abs=1e-5)
    assert [near.picture and near.picture.name for near in neighbours] == [Path(paths[i]).name for i in nearest]


def test_single_pictures_make_a_classifier_that_calls_nothing_unknown(files: dict[str, list[str]]) -> None:
    session = taught({name: group[:1] for name, group in files.items()})
    add(session, files["red"][1:])
    assert [answer.unknown for answer in answers(session)] == [False]


def test_removing_a_class_is_never_having_added_it(files: dict[str, list[str]]) -> None:
    session, without = taught(files, "red", "blue", "green"), taught(files, "red", "blue")
    for one in (session, without):
        add(one, files["red"][:1])
    session.remove(labelled(session, "green"))
    assert session.counts() == without.counts()
    assert answers(session)[0].probabilities == pytest.approx(answers(without)[0].probabilities)
    session.remove([*labelled(session, "red"), *labelled(session, "blue")])
    assert session.classifier is None
    assert answers(session) == []


def test_one_picture_can_be_removed(files: dict[str, list[str]]) -> None:
    session, without = taught(files, "red", "blue"), taught({**files, "blue": files["blue"][1:]}, "red", "blue")
    for one in (session, without):
        add(one, files["green"][:1])
    session.remove(labelled(session, "blue")[:1])
    assert session.counts() == {"blue": 2, "red": 2}
    assert answers(session)[0].probabilities == pytest.approx(answers(without)[0].probabilities)
    with pytest.raises(ValueError, match="there is no picture"):
        session.remove([99])


def test_queries_wait_for_a_class_and_are_answered_anew_after_each_change(files: dict[str, list[str]]) -> None:
    session = Session(tiny_model(), device="cpu")
    assert add(session, [*files["red"], files["blue"][0]]) == {}
    assert answers(session) == []
    assert session.next_picture() == 0
    add(session, files["red"][:1], "red")
    assert answers(session) == []
    add(session, files["blue"], "blue")
    assert [answer.label for answer in answers(session)[::2]] == ["red", "blue"]  # which it has learned
    add(session, files["green"], "green")
    assert all(answer.probabilities.keys() == {"blue", "green", "red"} for answer in answers(session))
    session.remove(waiting(session))
    assert (answers(session), session.next_picture()) == ([], None)


def test_from_a_fitted_classifier_on_more_images_are_a_partial_fit(files: dict[str, list[str]]) -> None:
    start = tiny_classifier(unknown_label=UNKNOWN, false_rejection_rate=0.2)
    before = start.predict_proba(pictures(2, 5))
    session = Session(start)
    assert session.counts() == {"blue": 3, "green": 3, "red": 2}
    add(session, files["red"][:1])
    (number,) = waiting(session)
    assert all(near.picture is None for near in session.neighbours(number))
    add(session, files["blue"][:2], "purple")
    assert_answers(session, copy.copy(start).partial_fit(files["blue"][:2], ["purple"] * 2), files["red"][:1])
    assert {near.label for near in session.neighbours(number) if near.picture is not None} <= {"purple"}
    session.remove(labelled(session, "purple"))
    assert_answers(session, start, files["red"][:1])
    np.testing.assert_array_equal(start.predict_proba(pictures(2, 5)), before)


def test_classes_that_are_numbers_stay_numbers(files: dict[str, list[str]]) -> None:
    session = Session(SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(4, 1), [3, 5, 3, 5]))
    add(session, files["red"], "5")
    add(session, files["blue"], "8")
    assert session.classifier is not None
    assert session.classifier.classes_.tolist() == [3, 5, 8]
    add(session, files["green"][:1])
    for change in (
        lambda: add(session, files["green"], "cat"),
        lambda: session.label(waiting(session), "cat"),
    ):
        with pytest.raises(ValueError, match="whole numbers"):
            change()
    assert session.counts() == {"3": 2, "5": 4, "8": 3}
    assert len(waiting(session)) == len(answers(session)) == 1


@pytest.mark.parametrize("value_range", [(0, 4095), (100, 300)])
def test_a_model_file_reads_pictures_by_its_range(tmp_path: Path, value_range: tuple[int, int]) -> None:
    low, high = value_range
    rng, stored = np.random.default_rng(0), []
    for index in range(9):
        file = tmp_path / f"{index}.png"
        Image.fromarray(rng.integers(low, high, (20, 20), dtype=np.uint16)).save(file)
        stored.append(str(file))
    start = SimpleCNAPSClassifier(tiny_model(), device="cpu", value_range=value_range).fit(stored[:4], list("abab"))
    session = Session(start)
    add(session, stored[4:])
    assert_answers(session, start, stored[4:])
    session.label(waiting(session)[:1], "b")
    assert_answers(session, copy.copy(start).partial_fit(stored[4:5], ["b"]), stored[5:])


@pytest.mark.parametrize("settings", [{}, {"unknown_label": "?", "false_rejection_rate": 0.2}], ids=str)
def test_a_model_file_sees_each_picture_once_however_many_answers_follow(
    files: dict[str, list[str]], settings: dict[str, Any]
) -> None:
    start = tiny_classifier(**settings)
    session = Session(start)
    batches = cast(TinyExtractor, start.model_.feature_extractor).batches
    batches.clear()
    add(session, [file for group in files.values() for file in group])
    passes = 1 if start.task_.unadapted is None else 2
    assert sum(batches) == 8 * passes
    for name in ("green", "purple", "blue"):
        number = session.next_picture()
        assert number is not None
        session.label([number], name)
    session.undo()
    session.remove(labelled(session, "purple"))
    assert sum(batches) == 8 * passes


def test_pictures_of_a_folder_are_remembered_and_those_that_are_sent_are_not(
    files: dict[str, list[str]], tmp_path: Path
) -> None:
    start = tiny_classifier().set_params(memory=tmp_path / "memory")
    session = Session(start)
    add(session, files["red"])
    session.classify([(Path(files["blue"][0]), "blue.png")])
    assert not (tmp_path / "memory").exists()
    Session(start, [Path(file) for file in files["red"]], tmp_path / "checked.csv")
    assert (tmp_path / "memory").exists()


# ---------------------------------------------------------------------- what is wrong


def test_files_that_cannot_be_read_are_named_and_the_others_used(files: dict[str, list[str]], tmp_path: Path) -> None:
    (tmp_path / "notes.png").write_text("hello")
    session = Session(tiny_model(), device="cpu")
    problems = add(session, [*files["blue"], str(tmp_path / "notes.png")], "blue")
    assert problems.keys() == {"notes.png"}
    assert session.counts() == {"blue": 3}
    with pytest.raises(ValueError, match="There is no class yet"):
        Session(tiny_model(), device="cpu").classify([(Path(files["red"][0]), "red.png")])
    for label in ("red", None):
        with pytest.raises(ValueError, match=r"Nothing was added. notes\.png: not an image file"):
            add(session, [str(tmp_path / "notes.png")], label)
    with pytest.raises(ValueError, match=r"Nothing was classified. notes\.png: not an image file"):
        session.classify([(Path(files["red"][0]), "red.png"), (tmp_path / "notes.png", "notes.png")])
    assert waiting(session) == []
    assert session.counts() == {"blue": 3}


def test_what_is_missing_is_said(files: dict[str, list[str]], tmp_path: Path) -> None:
    session = Session(tiny_model(), device="cpu")
    for change, message in (
        (lambda: add(session, files["red"], "  "), "name first"),
        (lambda: add(session, [], "red"), "one or more pictures first"),
        (lambda: session.label([], "red"), "Select one or more"),
        (lambda: session.label([0], "red"), "there is no picture 0"),
        (lambda: session.save(tmp_path / "none"), "Teach a class first"),
        (lambda: session.export_page(tmp_path / "none"), "Teach a class first"),
        (session.table_text, "no table of labels"),
    ):
        with pytest.raises(ValueError, match=message):
            change()
    assert not (tmp_path / "none").exists()


def test_what_cannot_be_said_of_a_picture_changes_nothing(files: dict[str, list[str]]) -> None:
    session = Session(tiny_classifier())
    add(session, files["red"])
    first, second = waiting(session)
    session.label([first], "Black cat")
    for number, name, message in (
        (second, " ", "name first"),
        (second, "black cat", "There is a class “Black cat”"),
        (second, UNKNOWN, "rejects nothing"),
        (-1, "red", "there is no picture -1"),
    ):
        with pytest.raises(ValueError, match=message):
            session.label([number], name)
    assert session.labels == {first: "Black cat"}


def test_a_label_that_somebody_else_has_given_meanwhile_is_not_overwritten(files: dict[str, list[str]]) -> None:
    session = Session(tiny_classifier())
    add(session, files["red"])
    first, second = waiting(session)
    session.label([first], "blue", {first: None})
    with pytest.raises(ValueError, match=rf"{session.pictures[first].name} has another label meanwhile.*: blue"):
        session.label([first, second], "red", {first: None, second: None})
    assert session.labels == {first: "blue"}
    session.label([first], "red", {first: "blue"})
    assert session.labels == {first: "red"}


# ---------------------------------------------------------------------- labels


@pytest.mark.parametrize("from_a_file", [False, True])
def test_labels_of_several_pictures_are_learned_together_and_taken_back_together(
    files: dict[str, list[str]], from_a_file: bool
) -> None:
    start = tiny_classifier() if from_a_file else None
    session = Session(start, device="cpu") if start else taught(files, "blue", "green")
    before, queries = session.counts(), [*files["red"], *files["blue"], *files["green"]]
    add(session, queries)
    numbers, earlier = waiting(session), answers(session)
    session.label([numbers[0], numbers[3]], " purple ")
    session.label([numbers[1]], "green")
    assert session.counts() == before | {"purple": 2, "green": before["green"] + 1}
    assert waiting(session) == [numbers[index] for index in (2, 4, 5, 6, 7)]
    assert session.undo() == [numbers[1]]
    assert session.undo() == [numbers[0], numbers[3]]
    assert not session.can_undo
    assert session.undo() == []
    for answer, other in zip(answers(session), earlier, strict=True):
        assert answer.label == other.label
        assert answer.probabilities == pytest.approx(other.probabilities, rel=1e-4, abs=1e-6)
    session.label([numbers[0]], "green")
    session.label([numbers[0]], None)  # asked about again
    assert session.counts() == before


def test_pictures_of_no_class_teach_what_to_reject(files: dict[str, list[str]]) -> None:
    session = Session(tiny_model(), device="cpu")
    add(session, files["green"], "Unknown ")
    assert session.classifier is None
    for name in ("red", "blue"):
        add(session, files[name], name)
    assert session.counts() == {"blue": 3, "red": 2}
    paths, names = in_order(files)
    direct = fitted(paths, [UNKNOWN if name == "green" else name for name in names], 1 / 6)
    without = fitted(*in_order({name: files[name] for name in ("red", "blue")}), 1 / 6)
    assert session.classifier is not None
    scores = session.classifier.outlier_score(paths)
    np.testing.assert_allclose(scores, direct.outlier_score(paths), rtol=1e-5)
    assert np.abs(scores - without.outlier_score(paths)).max() > 0.1
    add(session, paths)
    assert [answer.label for answer in answers(session)] == direct.predict(paths).tolist()
    for number in waiting(session):  # those that are shown are of classes, and have their own pictures
        for near in session.neighbours(number):
            assert near.picture is not None
            assert session.labels[near.picture.number] == near.label
    session.remove(labelled(session, UNKNOWN))
    np.testing.assert_allclose(session.classifier.outlier_score(paths), without.outlier_score(paths), rtol=1e-5)


def test_pictures_of_no_class_wait_until_something_can_be_rejected(files: dict[str, list[str]]) -> None:
    session = Session(tiny_model(), device="cpu")
    add(session, files["green"], UNKNOWN)
    add(session, files["red"][:1], "red")
    assert session.classifier is None
    add(session, files["blue"][:1], "blue")
    add(session, files["green"])
    assert not any(answer.unknown for answer in answers(session))
    assert session.neighbours(waiting(session)[0])[0].label in ("red", "blue")
    add(session, files["blue"][1:], "blue")
    assert session.classifier is not None
    assert session.classifier.fitted_head_.negatives is not None


def test_copies_of_one_picture_count_as_one(files: dict[str, list[str]], tmp_path: Path) -> None:
    again = tmp_path / "again.png"
    again.write_bytes(Path(files["blue"][0]).read_bytes())
    session = Session(tiny_model(), device="cpu")
    add(session, [files["blue"][0], str(again)], "blue")
    assert session.counts() == {"blue": 2}
    assert session.classifier is None  # there is nothing to leave out, and so no threshold
    add(session, files["red"][:1], "red")
    add(session, files["green"])
    assert [answer.unknown for answer in answers(session)] == [False] * 3
    add(session, files["blue"][1:], "blue")
    assert session.classifier is not None
    assert session.classifier.threshold_ is not None


def test_a_model_file_learns_of_no_class_by_its_own_label_or_says_that_it_cannot(files: dict[str, list[str]]) -> None:
    start = tiny_classifier(unknown_label="?", false_rejection_rate=0.2).partial_fit(files["green"][:1], ["?"])
    session = Session(start)
    assert (session.none, session.state()["none_known"]) == ("?", 1)
    add(session, files["green"][1:], UNKNOWN)
    add(session, files["blue"])
    session.label(waiting(session)[:1], "?")
    assert session.counts() == {"blue": 3, "green": 3, "red": 2}
    expected = copy.copy(start).partial_fit([*files["green"][1:], files["blue"][0]], ["?"] * 3)
    assert session.classifier is not None
    paths, _ = in_order(files)
    np.testing.assert_allclose(session.classifier.outlier_score(paths), expected.outlier_score(paths), rtol=1e-5)

    session = Session(tiny_classifier())
    assert not session.learns_none
    with pytest.raises(ValueError, match=r"rejects nothing.*fit --unknown-label"):
        add(session, files["green"], UNKNOWN)
    assert not session.pictures


def test_numbered_classes_and_pictures_of_no_class_stay_apart(files: dict[str, list[str]]) -> None:
    start = SimpleCNAPSClassifier(tiny_model(), device="cpu", unknown_label=-1, false_rejection_rate=0.2)
    session = Session(start.fit(pictures(4, 1), [3, 5, 3, 5]))
    add(session, files["green"], "-1")
    add(session, files["red"], "8")
    assert (session.counts(), len(labelled(session, "-1"))) == ({"3": 2, "5": 2, "8": 2}, 3)
    assert session.classifier is not None
    assert session.classifier.classes_.tolist() == [3, 5, 8]


def test_one_class_of_two_pictures_is_told_from_everything_else(files: dict[str, list[str]]) -> None:
    session = Session(tiny_model(), device="cpu")
    add(session, files["blue"][:1], "blue")
    assert session.classifier is None
    add(session, files["blue"][1:], "blue")
    add(session, [*files["red"], *files["green"]])
    assert_answers(session, fitted(files["blue"], ["blue"] * 3, 1 / 4), [*files["red"], *files["green"]])
    assert session.state()["sentences"] == ["It tells “blue” from everything else."]


@pytest.mark.parametrize("name", ["Unknown", "UNKNOWN ", "uNknown"])
def test_the_answer_for_no_class_is_no_class_however_it_is_written(files: dict[str, list[str]], name: str) -> None:
    session = Session(tiny_model(), device="cpu")
    add(session, files["red"], name)
    assert (session.counts(), [*session.labels.values()]) == ({}, [UNKNOWN] * 2)


@pytest.mark.parametrize(("known", "name"), [("cat", "Cat"), ("Black  cat", "black cat"), ("café", "cafe\u0301")])
@pytest.mark.parametrize("in_the_file", [False, True])
def test_a_name_that_looks_like_that_of_a_class_is_no_second_class(
    files: dict[str, list[str]], known: str, name: str, in_the_file: bool
) -> None:
    if in_the_file:
        labels = [known if label == "red" else label for label in LABELS]
        session = Session(SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(8, 1), labels))
    else:
        session = Session(tiny_model(), device="cpu")
        add(session, files["red"], known)
    add(session, files["blue"], "yellow")
    before = session.counts()
    with pytest.raises(ValueError, match=f"There is a class “{known}”"):
        add(session, files["green"], name)
    assert session.counts() == before
    add(session, files["green"], known)
    assert session.counts()[known] == before[known] + 3


# ---------------------------------------------------------------------- keeping


def test_a_file_is_gone_on_from_in_place_of_what_was_taught(files: dict[str, list[str]], tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SimpleCNAPS(image_size=32).eval()
    session = taught(files, "blue", "green", start=model)
    session.save(tmp_path / "taught.safetensors")
    add(session, files["red"])
    expected = [answer.probabilities for answer in answers(session)]
    other = taught(files, "red", "green", start=model)
    add(other, files["red"])
    other.open_model(tmp_path / "taught.safetensors")
    assert other.counts() == {"blue": 3, "green": 3}
    assert other.labels == {}
    for answer, wanted in zip(answers(other), expected, strict=True):
        assert answer.probabilities == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    before = other.counts(), [answer.label for answer in answers(other)]
    (tmp_path / "broken.safetensors").write_bytes((tmp_path / "taught.safetensors").read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"broken\.safetensors"):
        other.open_model(tmp_path / "broken.safetensors")
    assert (other.counts(), [answer.label for answer in answers(other)]) == before


def test_the_answering_page_is_exported_as_a_zip_file(files: dict[str, list[str]], tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        session = taught(files, start=SimpleCNAPS(adaptation="none", image_size=32).eval())
    for _ in range(2):  # a second one takes the place of the first
        session.export_page(tmp_path / "page.zip", "Red & blue")
    with zipfile.ZipFile(tmp_path / "page.zip") as zipped:
        names = zipped.namelist()
        assert {"page/index.html", "page/page.json", "page/classifier.onnx"} <= {*names}
        assert "<h1>Red &amp; blue</h1>" in zipped.read("page/index.html").decode()
        assert json.loads(zipped.read("page/page.json"))["labels"] == ["blue", "green", "red", UNKNOWN]


def test_the_example_has_three_classes_and_asks_about_seven_pictures() -> None:
    session = Session(tiny_model(), device="cpu")
    session.add_example()
    assert session.counts() == {"flower": 5, "pagoda": 5, "trees": 5}
    assert len(answers(session)) == 7


def test_who_asks_while_another_teaches_gets_an_answer_of_before_or_after(files: dict[str, list[str]]) -> None:
    start = tiny_classifier()
    session, query = Session(start), [(Path(files["red"][0]), "red.png")]
    after = copy.copy(start).partial_fit(files["blue"], ["purple"] * 3)
    allowed = [tuple(np.round(one.predict_proba([query[0][0]])[0], 5)) for one in (start, after)]
    found, wrong = list[tuple[float, ...]](), list[BaseException]()

    def ask() -> None:
        try:
            for _ in range(5):
                (answer,) = session.classify(query)
                found.append(tuple(np.round([answer.probabilities[name] for name in sorted(answer.probabilities)], 5)))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    add(session, files["blue"], "purple")
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(found) == 40
    for row in found:
        assert any(len(row) == len(one) and np.allclose(row, one, atol=1e-4) for one in allowed)
