"""The page of the app and of ``review`` in a real browser, and their commands."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from safetensors import safe_open
from typer.testing import CliRunner

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier
from fewshot_mahalanobis.apps import server
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.apps.server import Server
from fewshot_mahalanobis.apps.session import Session
from tests.apps.test_label_table import coloured_classifier, grouped, with_two_new_colours, write_pictures
from tests.browser import NARROW, WIDE, chromium, contrast, drop, is_dark, keep, nameless, overflow
from tests.tiny import LABELS, pictures

HOSTILE = "<img src=x onerror=document.title='taken'>"


def test_the_commands_serve_a_checkpoint_a_model_file_or_pictures_on_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, ...]] = []

    class Recorded:
        def __init__(self, session: Session, host: str, port: int | None, token: str | None) -> None:
            made.append((session, host, port, token))

        def serve(self, *, browser: bool) -> None:
            made[-1] += (browser,)

    monkeypatch.setattr(server, "Server", Recorded)
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SimpleCNAPS(image_size=32).eval()
    SimpleCNAPSClassifier(model, device="cpu").fit(pictures(8, 1), LABELS).save(tmp_path / "m.safetensors")
    write_pictures(tmp_path / "new", ["red", "blue"])
    (tmp_path / "new" / "notes.png").write_text("hello")
    for arguments in (
        ["app", "--model", "m.safetensors", "--no-browser"],
        ["app", "--model", "m.safetensors", "new", "-o", "labels.csv"],
        ["review", "m.safetensors", "new", "--port", "7000", "--group-by", "folder"],
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    assert "notes.png: not an image file" in result.stderr
    assert [session.counts() for session, *_ in made] == [{"blue": 3, "green": 3, "red": 2}] * 3
    assert [len(session.pictures) for session, *_ in made] == [0, 2, 2]
    assert [session.shown() for session, *_ in made] == [[], [0, 1], [0]]
    tables = [session.table and str(session.table.path) for session, *_ in made]
    assert tables == [None, "labels.csv", "checked.csv"]
    assert [rest for _, *rest in made] == [
        ["127.0.0.1", None, None, False],
        ["127.0.0.1", None, None, True],
        ["127.0.0.1", 7000, None, True],
    ]
    for arguments, message in (
        (["--model", "m", "--checkpoint", "other"], "exclude each other"),
        (["--model", str(tmp_path / "none")], "no saved classifier"),
        (["--group-by", "folder"], "name the images or the table that it groups"),
        (["--margin", "0.1", "--category", "1"], "--margin, --category: for files of boxes, and there is none"),
        (["new", "--group-by", "seconds"], "it is folder, seconds=60 or column=NAME"),
    ):
        result = CliRunner().invoke(app, ["app", *arguments])
        assert result.exit_code == 1
        assert message in result.stderr


# ---------------------------------------------------------------------- the page


@contextmanager
def visiting(browser: Browser, session: Session) -> Iterator[Page]:
    """The page of a session; nothing may go wrong on it, and it may ask no other server."""
    wrong: list[str] = []
    server = Server(session)
    thread = Thread(target=server.serve)
    thread.start()
    page = browser.new_page(viewport=WIDE)
    try:
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if "Policy" in message.text else None)
        local = (server.address, "data:", "blob:")
        page.on("request", lambda request: None if request.url.startswith(local) else wrong.append(request.url))
        page.goto(server.address)
        expect(page.locator("#status")).not_to_have_text("Loading …")
        yield page
        assert page.title() == "Picture classifier"
    finally:
        page.close()
        server.stop()
        thread.join()
    assert wrong == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        expect.set_options(timeout=60_000)
        yield one


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """70 red pictures, 6 blue ones, and two green ones, of which one has a hostile name."""
    paths = write_pictures(tmp_path / "new", ["red"] * 70 + ["blue"] * 6 + ["green"] * 2)
    paths[-1] = paths[-1].rename(tmp_path / "new" / f"{HOSTILE}.png")
    return Session(coloured_classifier(), paths, tmp_path / "checked.csv")


@pytest.fixture
def page(browser: Browser, session: Session) -> Iterator[Page]:
    """The page on a folder, which begins with a question."""
    with visiting(browser, session) as page:
        expect(page.locator("#choices button")).not_to_have_count(0)
        yield page


def table_of(session: Session) -> Path:
    assert session.table is not None
    return session.table.path


def labels_in(session: Session) -> dict[str, str]:
    """File name -> label in the table on disk."""
    with table_of(session).open(newline="", encoding="utf-8") as file:
        return {Path(path).name: label for path, label in [*csv.reader(file)][1:]}


def expect_ready(page: Page) -> None:
    """Wait until the page takes the next key, and shows what it knows."""
    expect(page.locator("body[aria-busy]")).to_have_count(0)
    page.evaluate("new Promise(resolve => setTimeout(resolve, 150))")


def expect_labelled(page: Page, number: int) -> None:
    expect(page.locator("#progress")).to_contain_text(f"{number} of 78 labelled, in ")
    expect_ready(page)


def asked_about(page: Page) -> str:
    expect_ready(page)
    return Path(page.locator("#question-name").inner_text()).name


def open_wall(page: Page, label: str) -> None:
    page.keyboard.press("w")
    expect_ready(page)
    page.get_by_role("group", name="Answers").get_by_role("button", name=label).first.click()
    expect(page.locator("#shown")).to_have_text(label)
    expect_ready(page)


@pytest.mark.browser
def test_questions_are_answered_by_keys(page: Page, session: Session) -> None:
    given = {}
    for number, (key, place) in enumerate([("1", 0), ("2", 1), ("0", None)], start=1):
        name = asked_about(page)
        texts = page.locator("#choices button").all_inner_texts()
        choices = [re.sub(r" \d+%$", "", text).split(" ", 1) for text in texts]
        assert [shown for shown, _ in choices] == ["1", "2", "3", "0", "s"]
        page.keyboard.press(key)
        expect_labelled(page, number)
        given[name] = "unknown" if place is None else choices[place][1]
    assert labels_in(session) == given
    name = asked_about(page)
    page.keyboard.press("s")
    expect(page.locator("#question-name")).not_to_contain_text(name)
    name = asked_about(page)
    page.keyboard.press("/")
    page.keyboard.type("RED\n")
    expect(page.locator("#status.problem")).to_contain_text("There is a class “red”")
    assert labels_in(session) == given
    page.locator("#typed").fill("purple 1")
    page.locator("#typed").press("Enter")
    expect_labelled(page, 4)
    assert labels_in(session) == {**given, name: "purple 1"}
    page.keyboard.press("u")
    expect_labelled(page, 3)
    assert asked_about(page) == name
    assert labels_in(session) == given
    expect(page.locator("#status.problem")).to_have_count(0)


@pytest.mark.browser
def test_in_the_end_nothing_is_asked_and_what_others_label_is_not_lost(page: Page, session: Session) -> None:
    name = asked_about(page)
    number = next(number for number, picture in session.pictures.items() if Path(picture.name).name == name)
    session.label([number], "blue")  # in another tab
    page.keyboard.press("1")
    expect(page.locator("#status.problem")).to_contain_text("has another label meanwhile, by somebody else: blue")
    assert labels_in(session) == {name: "blue"}
    last = next(other for other in session.pictures if other != number)
    session.label([other for other in session.pictures if other not in (number, last)], "red")
    page.reload()
    expect(page.locator("#question-name")).to_have_text(session.pictures[last].name)
    page.keyboard.press("1")
    expect(page.locator("#what")).to_have_text("Every picture has a label.")
    expect(page.locator("#labelling")).to_be_hidden()
    keep(page, "page-done")


@pytest.mark.browser
def test_forty_are_corrected_in_two_gestures_and_taken_back_by_one(page: Page, session: Session) -> None:
    open_wall(page, "red")
    tiles = page.locator(".tile")
    expect(tiles).to_have_count(60)
    names = {Path(tile.get_attribute("title") or "").name for tile in tiles.all()[:40]}
    tiles.nth(0).click()
    tiles.nth(39).click(modifiers=["Shift"])
    expect(page.locator("#selected")).to_contain_text("40 selected")
    keep(page, "page-wall-selected")
    page.keyboard.press("2")
    expect_labelled(page, 40)
    assert labels_in(session).keys() == names
    assert len(set(labels_in(session).values())) == 1
    expect(page.locator("#shown")).to_have_text("red")
    page.keyboard.press("Control+z")
    expect_labelled(page, 0)
    assert labels_in(session) == {}
    expect(page.locator("#undo")).to_be_disabled()

    page.keyboard.press("Escape")
    tiles.nth(0).click()
    tiles.nth(2).click(modifiers=["Shift"])
    page.keyboard.press("1")  # they stay with the reds
    expect_labelled(page, 3)
    expect(page.locator("#tabs button", has_text="red")).to_contain_text("+ 3 ✓")
    expect(page.locator("#selected")).to_have_text("None selected.")


@pytest.mark.browser
def test_the_wall_is_worked_by_the_keyboard_alone_and_its_pages_have_each_picture_once(
    page: Page, session: Session
) -> None:
    open_wall(page, "red")
    page.locator("#tabs button", has_text="red").focus()
    page.keyboard.press("Tab")
    page.locator(".tile").first.focus()
    titles = [tile.get_attribute("title") or "" for tile in page.locator(".tile").all()]
    columns = len({tile.bounding_box()["x"] for tile in page.locator(".tile").all()})  # type: ignore[index]
    page.keyboard.press("Space")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    selected = {tile.get_attribute("title") for tile in page.locator(".tile[aria-selected=true]").all()}
    assert selected == {titles[place] for place in (0, columns, columns + 1, columns + 2)}
    page.keyboard.press("Escape")
    expect(page.locator("#selected")).to_have_text("None selected.")
    page.keyboard.press("1")
    expect(page.locator("#status.problem")).to_contain_text("Select one or more pictures first.")
    total = sum(answer is not None and answer.label == "red" for answer in map(session.answer, session.pictures))
    expect(page.locator("#place")).to_have_text(f"1 to 60 of {total}")
    expect(page.locator("#before")).to_be_disabled()
    page.keyboard.press("PageDown")
    expect(page.locator("#place")).to_have_text(f"61 to {total} of {total}")
    expect(page.locator("#after")).to_be_disabled()
    both = [*titles, *(tile.get_attribute("title") or "" for tile in page.locator(".tile").all())]
    assert len(set(both)) == total
    by_name = {picture.name: number for number, picture in session.pictures.items()}
    doubts = [session.answer(by_name[name]).doubt for name in both]  # type: ignore[union-attr]
    np.testing.assert_allclose(doubts, sorted(doubts, reverse=True), atol=1e-3)  # the most doubtful first
    page.keyboard.press("PageUp")
    expect(page.locator("#place")).to_have_text(f"1 to 60 of {total}")
    page.locator(".tile").first.focus()
    page.keyboard.press("End")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")  # the first one, large
    assert asked_about(page) == Path(titles[0]).name
    page.keyboard.press("0")
    expect_labelled(page, 1)
    assert labels_in(session) == {Path(titles[0]).name: "unknown"}


@pytest.mark.browser
def test_a_heap_of_pictures_that_look_alike_is_named_at_once_and_taken_back_by_one_undo(
    browser: Browser, tmp_path: Path
) -> None:
    session = with_two_new_colours(tmp_path)

    def shown() -> list[str]:
        expect_ready(page)
        return sorted(re.sub(r"-\d+\.png$", "", Path(str(tile.get_attribute("title"))).name) for tile in tiles.all())

    with visiting(browser, session) as page:
        tiles = page.locator(".tile")
        expect(page.locator("#to-heaps")).to_be_visible()
        sent: list[str] = []
        page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
        page.keyboard.press("h")
        expect(page.locator("#shown")).to_have_text("These 6 look like one thing")
        expect(page.locator("#place")).to_have_text("1 of 2")
        assert shown() == ["yellow"] * 6
        expect(page.locator("#selected")).to_have_text("6 selected. What are they?")
        keep(page, "page-heap")
        assert nameless(page) == []
        page.keyboard.press("PageDown")
        expect(page.locator("#shown")).to_have_text("These 5 look like one thing")
        expect(page.locator("#after")).to_be_disabled()
        assert shown() == ["purple"] * 5
        page.keyboard.press("PageUp")
        expect(page.locator("#shown")).to_have_text("These 6 look like one thing")
        page.keyboard.press("/")
        page.keyboard.type("sun\n")
        expect(page.locator("#shown")).to_have_text("These 5 look like one thing")
        expect(page.locator("#place")).to_have_text("1 of 1")
        assert len(sent) == 1
        assert set(labels_in(session).values()) == {"sun"}
        assert sorted(labels_in(session)) == sorted(f"yellow-{number}.png" for number in range(9, 15))

        expect_ready(page)
        tiles.nth(2).click()  # something else, perhaps
        expect(page.locator("#selected")).to_have_text("4 selected. What are they?")
        page.keyboard.press("0")
        expect(page.locator("#to-heaps")).to_be_hidden()  # one is left
        assert sorted(labels_in(session).values()) == ["other"] * 4 + ["sun"] * 6
        expect_ready(page)
        page.keyboard.press("u")
        expect(page.locator("#to-heaps")).to_be_visible()
        expect_ready(page)
        page.keyboard.press("u")
        expect_ready(page)
        assert labels_in(session) == {}
        page.keyboard.press("h")
        expect(page.locator("#place")).to_have_text("1 of 2")
        page.keyboard.press("w")
        expect(page.locator("#shown")).to_have_text("none of these")
        assert shown() == ["purple"] * 5 + ["yellow"] * 6
        expect(page.locator("#selected")).to_have_text("None selected.")


@pytest.mark.browser
def test_a_key_labels_a_whole_group_which_is_shown_once(browser: Browser, tmp_path: Path) -> None:
    session = grouped(tmp_path)
    with visiting(browser, session) as page:
        open_wall(page, "red")
        expect(page.locator(".tile")).to_have_count(1)
        expect(page.locator(".tile .name")).to_have_text("red-0.png and 2 more")
        page.locator(".tile").click()
        page.keyboard.press("1")
        expect(page.locator("#progress")).to_contain_text("1 of 3 labelled")
        assert labels_in(session) == {f"red-{number}.png": "red" for number in range(3)}
        expect_ready(page)
        page.keyboard.press("u")
        expect(page.locator("#progress")).to_contain_text("0 of 3 labelled")
        assert labels_in(session) == {}


@pytest.mark.browser
def test_a_rejected_picture_shows_its_best_class_its_outlier_score_and_its_doubt(
    browser: Browser, tmp_path: Path
) -> None:
    session = with_two_new_colours(tmp_path)
    with visiting(browser, session) as page:
        page.keyboard.press("w")
        page.locator("#tabs button", has_text="none of these").click()
        expect(page.locator(".tile")).to_have_count(11)
        page.locator(".tile").first.click()
        name = page.locator(".tile").first.get_attribute("title")
        (number,) = [number for number, picture in session.pictures.items() if picture.name == name]
        answer = session.answer(number)
        assert answer is not None
        (best, share), *_ = answer.probabilities.items()
        grade = (
            f"Outlier score {answer.outlier_score:,.2f}, unknown above {answer.outlier_threshold:.2f}. "
            f"Doubt {answer.doubt:.0%}."
        )
        line = f"other; the most probable class is {best}, {share:.0%}. {grade}"
        expect(page.locator(".tile").first.locator(".sure")).to_have_text(f"{best} {share:.0%}")
        expect(page.locator("#selected")).to_have_text(f"1 selected: {line}")
        page.keyboard.press("Enter")
        expect(page.locator("#grade")).to_have_text(line)
        page.keyboard.press("t")
        card = page.locator(f".answer[data-id='{number}']")
        expect(card.locator(".label")).to_have_text("other")
        expect(card.locator(".text")).to_have_text(
            f"It is unlike the pictures of every class. The most probable one is {best}, {share:.0%}."
        )
        expect(card.locator(".grade")).to_have_text(grade)


@pytest.mark.browser
def test_hostile_names_are_text_and_labels_and_model_are_downloaded(page: Page, session: Session) -> None:
    page.locator("#typed").fill(HOSTILE)
    page.locator("#typed").press("Enter")
    expect_labelled(page, 1)
    open_wall(page, HOSTILE)
    expect(page.locator(".tile")).not_to_have_count(0)
    assert page.locator("img[src=x]").count() == 0
    page.keyboard.press("t")
    expect(page.locator("#classes h3").filter(has_text="<img")).to_have_text(HOSTILE)
    with page.expect_download() as labels:
        page.get_by_role("button", name="Save the labels").click()
    assert labels.value.suggested_filename == "labels.csv"
    assert Path(labels.value.path()).read_text() == session.table_text()
    with page.expect_download() as model:
        page.get_by_role("button", name="Save the classifier").click()
    assert model.value.suggested_filename == "classifier.safetensors"
    with safe_open(model.value.path(), "np") as saved:
        assert HOSTILE in json.loads(saved.metadata()["classifier"])["labels"]["classes"]
    assert page.locator("#forget").is_hidden()  # which would empty the table


@pytest.mark.browser
def test_classes_are_taught_asked_corrected_and_forgotten(browser: Browser, tmp_path: Path) -> None:
    own = {name: write_pictures(tmp_path / name, [name] * 4) for name in ("red", "blue")}
    queries = write_pictures(tmp_path / "queries", ["red", "blue", "green"], seed=3)
    (tmp_path / "notes.png").write_text("hello")
    session = Session(coloured_classifier().model_, device="cpu")
    with visiting(browser, session) as page:
        drop(page, queries[:1])
        expect(page.locator("#answers > li")).to_have_count(1)
        expect(page.locator("#status")).to_contain_text("Give two classes at least one picture each")
        for name, files in own.items():
            page.locator("#name").fill(name)
            page.locator("#name").press("Enter")
            expect(page.locator("#classes > .class h3").last).to_have_text(name)
            drop(page, [*files, tmp_path / "notes.png"], "#classes > .class:last-child")
            expect(page.locator("#classes > .class:last-child .count")).to_have_text("4 pictures")
            expect(page.locator("#status")).to_contain_text("notes.png: not an image file")
        drop(page, queries[1:])
        expect(page.locator("#answers > li")).to_have_count(3)
        expect(page.locator("#enough")).to_be_visible()
        shown = {card.locator(".name").inner_text(): card.locator(".label") for card in page.locator(".answer").all()}
        for number, picture in session.pictures.items():
            if number not in session.labels:
                expect(shown[picture.name]).to_have_text(session.answer(number).label)  # type: ignore[union-attr]
        page.locator(".answer summary").first.click()
        expect(page.locator(".answer .nearest li")).to_have_count(6)
        keep(page, "page-taught", full_page=True)
        assert nameless(page) == []

        page.locator(".answer").first.get_by_role("button", name="none of these").click()
        expect(page.locator("#none .count")).to_have_text("1 picture")
        page.locator(".answer").first.locator(".choices input").fill("purple")
        page.locator(".answer").first.locator(".choices input").press("Enter")
        expect(page.locator("#classes > .class h3", has_text="purple")).to_be_visible()
        expect(page.locator("#answers > li")).to_have_count(1)
        page.locator("#undo").click()
        expect(page.locator("#answers > li")).to_have_count(2)
        page.get_by_role("button", name="Remove the class blue").click()
        expect(page.locator("#classes > .class h3", has_text="blue")).to_have_count(0)
        expect_ready(page)
        page.once("dialog", lambda dialog: dialog.accept())
        page.locator("#forget").click()
        expect(page.locator("#classes > .class")).to_have_count(0)
        assert session.pictures == {}
        page.locator("#example").click()
        expect(page.locator("#answers > li")).to_have_count(7)
        expect(page.locator("#classes > .class h3")).to_have_text(["flower", "pagoda", "trees"])


@pytest.mark.browser
@pytest.mark.slow
def test_it_is_readable_wide_narrow_and_dark(page: Page) -> None:
    page.keyboard.press("1")
    expect_labelled(page, 1)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        for view, key, texts in (
            ("question", "q", ("#question-name", "#what", "#choices button", "#choices button span", "#progress")),
            ("wall", "w", (".tile p span", "#tabs button", "#tabs button[aria-pressed=true]", "#selected", "#place")),
            ("teach", "t", (".answer .label", ".choices button", ".count", "#name", "footer p", "nav button")),
        ):
            page.set_viewport_size(WIDE)
            page.keyboard.press(key)
            expect(page.locator(f"body.{view}")).to_have_count(1)
            assert is_dark(page) == (scheme == "dark")
            assert nameless(page) == []
            assert page.locator("#labelling").is_visible() == (view != "teach")
            for name, size in (("", WIDE), ("-narrow", NARROW)):
                page.set_viewport_size(size)
                for text in texts:
                    assert contrast(page, f"{text}:visible") >= 4.5, text
                assert overflow(page) <= 0
                keep(page, f"page-{view}-{scheme}{name}")


@pytest.mark.browser
@pytest.mark.process
@pytest.mark.slow
def test_killed_and_opened_again_it_goes_on(browser: Browser, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SimpleCNAPS(image_size=32).eval()
    SimpleCNAPSClassifier(model, device="cpu").fit(pictures(8, 1), LABELS).save(tmp_path / "m.safetensors")
    (tmp_path / "new").mkdir()
    for index, image in enumerate(pictures(5, 3)):
        Image.fromarray(image).save(tmp_path / "new" / f"{index}.png")
    page = browser.new_page()

    def started() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "fewshot_mahalanobis", "review", "m.safetensors", "new", "--no-browser"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("The page is at http"), line
        page.goto(line.split()[4])
        expect(page.locator("#choices button")).not_to_have_count(0)
        return process

    process = started()
    for number in (1, 2):
        page.keyboard.press("1")
        expect(page.locator("#progress")).to_contain_text(f"{number} of 5 labelled, in checked.csv")
        expect_ready(page)
    page.reload()
    expect(page.locator("#progress")).to_contain_text("2 of 5 labelled")
    process.kill()
    process.communicate()
    page.keyboard.press("1")
    expect(page.locator("#status.problem")).to_contain_text("has stopped. Start it again")
    process = started()
    expect(page.locator("#progress")).to_contain_text("2 of 5 labelled")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "checked.csv has labels of 2 images already" in errors
    assert not list(tmp_path.glob(".saving-*"))
    page.close()
