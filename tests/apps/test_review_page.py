"""The page of ``review`` in a real browser, and its command."""

from __future__ import annotations

import csv
import http.client
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

import pytest
import torch
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier
from fewshot_mahalanobis.apps.review import Review
from fewshot_mahalanobis.apps.review_page import ReviewServer
from tests.apps.test_review import coloured_classifier, write_pictures
from tests.browser import NARROW, WIDE, chromium, contrast, is_dark, keep, overflow
from tests.tiny import LABELS, pictures

HOSTILE = "<img src=x onerror=document.title='taken'>"


@contextmanager
def served(review: Review) -> Iterator[str]:
    server = ReviewServer(review)
    thread = Thread(target=server.serve)
    thread.start()
    try:
        yield server.address
    finally:
        server.stop()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        expect.set_options(timeout=60_000)
        yield one


@pytest.fixture
def review(tmp_path: Path) -> Review:
    """70 red pictures, 6 blue ones, and two green ones, of which one has a hostile name."""
    paths = write_pictures(tmp_path / "new", ["red"] * 70 + ["blue"] * 6 + ["green"] * 2)
    paths[-1] = paths[-1].rename(tmp_path / "new" / f"{HOSTILE}.png")
    return Review(coloured_classifier(), paths, tmp_path / "checked.csv")


@pytest.fixture
def page(browser: Browser, review: Review) -> Iterator[Page]:
    """The page of ``review``; nothing may go wrong on it, and it may ask no other server."""
    wrong: list[str] = []
    with served(review) as address:
        page = browser.new_page(viewport=WIDE)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if "Policy" in message.text else None)
        page.on(
            "request", lambda request: None if request.url.startswith((address, "data:")) else wrong.append(request.url)
        )
        page.goto(address)
        expect(page.locator("#choices button")).not_to_have_count(0)
        yield page
        assert page.title() == "Review"
        page.close()
    assert wrong == []


def labels_in(review: Review) -> dict[str, str]:
    """File name -> label in the table on disk."""
    with review.table.open(newline="", encoding="utf-8") as file:
        return {Path(path).name: label for path, label in [*csv.reader(file)][1:]}


def expect_ready(page: Page) -> None:
    """Wait until the page takes the next click: while it waits for the server it ignores them."""
    expect(page.locator("body[aria-busy]")).to_have_count(0)


def expect_labelled(page: Page, number: int) -> None:
    expect(page.locator("#progress")).to_contain_text(f"{number} of 78 labelled")
    expect_ready(page)


def asked_about(page: Page) -> str:
    expect(page.locator("body[aria-busy]")).to_have_count(0)
    return Path(page.locator("#name").inner_text()).name


# ---------------------------------------------------------------- one question at a time


def test_questions_are_answered_by_keys(page: Page, review: Review) -> None:
    given = {}
    for number, (key, place) in enumerate([("1", 0), ("2", 1), ("0", None)], start=1):
        name = asked_about(page)
        texts = page.locator("#choices button").all_inner_texts()
        choices = [re.sub(r"\d+%$", "", text).split(" ", 1) for text in texts]
        assert [shown for shown, _ in choices] == ["1", "2", "3", "0", "s"]
        page.keyboard.press(key)
        expect_labelled(page, number)
        given[name] = "unknown" if place is None else choices[place][1]
    assert labels_in(review) == given
    name = asked_about(page)
    page.keyboard.press("s")
    expect(page.locator("#name")).not_to_contain_text(name)
    page.keyboard.press("/")
    name = asked_about(page)
    page.keyboard.type("purple 1\n")
    expect_labelled(page, 4)
    assert labels_in(review) == {**given, name: "purple 1"}
    page.keyboard.press("u")
    expect_labelled(page, 3)
    assert asked_about(page) == name
    assert labels_in(review) == given


def test_a_label_that_cannot_be_used_is_said_and_changes_nothing(page: Page, review: Review) -> None:
    name = asked_about(page)
    page.locator("#typed").fill("RED")
    page.keyboard.press("Enter")
    expect(page.locator("#problem")).to_contain_text("There is a class “red”")
    assert asked_about(page) == name
    assert not review.table.exists()
    page.locator("#typed").fill("red")
    page.keyboard.press("Enter")
    expect_labelled(page, 1)
    expect(page.locator("#problem")).to_be_hidden()
    assert labels_in(review) == {name: "red"}


def test_in_the_end_nothing_is_asked(page: Page, review: Review) -> None:
    review.label([*range(77)], "red")
    page.reload()
    expect(page.locator("#name")).to_have_text(str(review.paths[77]))
    page.keyboard.press("1")
    expect(page.locator("#asked")).to_have_text("Every picture has a label.")
    expect(page.locator("#choices")).to_be_hidden()
    keep(page, "review-done")


# ---------------------------------------------------------------- the wall


def test_forty_are_corrected_in_two_gestures_and_taken_back_by_one(page: Page, review: Review) -> None:
    page.keyboard.press("w")
    expect_ready(page)
    page.get_by_role("group", name="Answers").get_by_text("red").click()
    tiles = page.locator(".tile")
    expect(tiles).to_have_count(60)
    names = {Path(tile.get_attribute("title") or "").name for tile in tiles.all()[:40]}
    tiles.nth(0).click()
    tiles.nth(39).click(modifiers=["Shift"])
    expect(page.locator("#selected")).to_contain_text("40 selected")
    keep(page, "review-wall")
    page.keyboard.press("2")
    expect_labelled(page, 40)
    assert labels_in(review).keys() == names
    assert len(set(labels_in(review).values())) == 1
    expect(page.locator("#shown")).to_have_text("red")
    page.keyboard.press("Control+z")
    expect_labelled(page, 0)
    assert labels_in(review) == {}
    expect(page.locator("#undo")).to_be_disabled()


def test_the_wall_is_worked_by_the_keyboard_alone(page: Page, review: Review) -> None:
    page.keyboard.press("w")
    expect_ready(page)
    page.locator("#tabs button").last.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#shown")).to_have_text("red")
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
    expect(page.locator("#problem")).to_contain_text("Select one or more pictures first.")
    page.keyboard.press("End")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")  # the first one, large
    assert asked_about(page) == Path(titles[0]).name
    page.keyboard.press("0")
    expect_labelled(page, 1)
    assert labels_in(review) == {Path(titles[0]).name: "unknown"}
    page.keyboard.press("w")
    expect_ready(page)
    expect(page.locator("#shown")).to_have_text("red")


def test_pages_are_turned_and_each_picture_is_on_one(page: Page, review: Review) -> None:
    page.keyboard.press("w")
    expect_ready(page)
    page.locator("#tabs button").last.click()
    total = review.classes()["red"]
    expect(page.locator("#place")).to_have_text(f"1 to 60 of {total}")
    expect(page.locator("#before")).to_be_disabled()
    shown = [tile.get_attribute("title") for tile in page.locator(".tile").all()]
    page.locator("#after").click()
    expect(page.locator("#place")).to_have_text(f"61 to {total} of {total}")
    expect(page.locator("#after")).to_be_disabled()
    shown += [tile.get_attribute("title") for tile in page.locator(".tile").all()]
    assert len(set(shown)) == total
    page.keyboard.press("PageUp")
    expect(page.locator("#place")).to_have_text(f"1 to 60 of {total}")


# ---------------------------------------------------------------- names, looks, downloads


def test_hostile_names_are_text(page: Page, review: Review) -> None:
    page.locator("#typed").fill(HOSTILE)
    page.keyboard.press("Enter")
    expect_labelled(page, 1)
    page.keyboard.press("w")
    expect_ready(page)
    page.locator("#tabs button").filter(has_text="<img").click()
    expect(page.locator("#shown")).to_have_text(HOSTILE)
    expect_ready(page)
    expect(page.locator(".tile")).not_to_have_count(0)
    assert page.locator("img[src=x]").count() == 0
    picture = next(picture for picture, path in enumerate(review.paths) if path.name == f"{HOSTILE}.png")
    page.locator("#tabs button").filter(has_text=review.answer(picture).label).first.click()
    tile = page.locator(f'.tile[title$="{HOSTILE}.png"]')
    expect(tile).to_contain_text("<img")
    tile.dblclick()
    expect(page.locator("#name")).to_have_text(str(review.paths[picture]))


def test_it_is_readable_wide_narrow_and_dark(page: Page) -> None:
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        for view, key, texts in (
            ("question", "q", ("#name", "#asked", "#choices button", "#choices button span", "#progress", "a")),
            ("wall", "w", (".tile p span", "#tabs button", "#tabs button[aria-pressed=true]", "#selected", "#place")),
        ):
            page.set_viewport_size(WIDE)
            page.keyboard.press(key)
            expect(page.locator(f"body.{view}")).to_have_count(1)
            assert is_dark(page) == (scheme == "dark")
            for name, size in (("", WIDE), ("-narrow", NARROW)):
                page.set_viewport_size(size)
                for text in texts:
                    assert contrast(page, text) >= 4.5, text
                assert overflow(page) <= 0
                keep(page, f"review-{view}-{scheme}{name}")


def test_the_labels_are_downloaded(page: Page, review: Review) -> None:
    page.keyboard.press("1")
    expect_labelled(page, 1)
    with page.expect_download() as labels:
        page.get_by_text("Download the labels").click()
    assert labels.value.suggested_filename == "labels.csv"
    assert Path(labels.value.path()).read_text() == review.table_text()


# ---------------------------------------------------------------- the server


def test_other_sites_can_neither_read_nor_change_anything(review: Review) -> None:
    with served(review) as address:
        connection = http.client.HTTPConnection(address.removeprefix("http://"))

        def status(method: str, path: str, body: str | None = None, **headers: str) -> int:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            response.read()
            return response.status

        answer = json.dumps({"pictures": [0], "label": "red"})
        assert status("GET", "/question") == 200
        assert status("GET", "/question", Host="evil.example") == 400
        assert status("POST", "/label", answer, **{"Content-Type": "text/plain"}) == 415
        assert status("OPTIONS", "/label", Origin="http://evil.example") == 405
        for wrong in ({"pictures": [99], "label": "red"}, {"pictures": ["0"], "label": "red"}, {"label": "red"}):
            assert status("POST", "/label", json.dumps(wrong), **{"Content-Type": "application/json"}) == 400
        assert status("GET", "/thumbnail/99") == 400
        assert not review.labels
        assert status("POST", "/label", answer, **{"Content-Type": "application/json"}) == 200
        assert review.labels == {0: "red"}


def test_a_picture_that_is_gone_is_no_hindrance(page: Page, review: Review) -> None:
    assert page.request.get(page.url + "picture/0").status == 200
    review.paths[0].unlink()
    gone = page.request.get(page.url + "picture/0")
    assert (gone.status, "no such file" in gone.text()) == (400, True)


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
        page.goto(line.split()[4].rstrip("."))
        expect(page.locator("#choices button")).not_to_have_count(0)
        return process

    process = started()
    for number in (1, 2):
        page.keyboard.press("1")
        expect(page.locator("#progress")).to_contain_text(f"{number} of 5 labelled, in checked.csv")
    page.reload()
    expect(page.locator("#progress")).to_contain_text("2 of 5 labelled")
    with page.expect_download() as model:
        page.get_by_text("Download the model").click()
    model.value.save_as(tmp_path / "reviewed.safetensors")
    assert SimpleCNAPSClassifier.load(tmp_path / "reviewed.safetensors").class_counts_.sum() == len(LABELS) + 2
    process.kill()
    process.communicate()
    page.keyboard.press("1")
    expect(page.locator("#problem")).to_contain_text("has stopped. Start it again")
    process = started()
    expect(page.locator("#progress")).to_contain_text("2 of 5 labelled")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "checked.csv has labels of 2 images already" in errors
    assert not list(tmp_path.glob(".saving-*"))
    page.close()
