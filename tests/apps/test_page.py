"""The app's command, and its page in a real browser."""

from __future__ import annotations

import inspect
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio
import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import Page, expect
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.apps.page import make_page, serve, start_server
from fewshot_mahalanobis.apps.session import UNKNOWN, Session
from tests.browser import NARROW, WIDE, chromium, contrast, is_dark, keep, overflow, requests_of
from tests.tiny import LABELS, pictures, tiny_classifier, tiny_model

#: Pixels a side: the page does not depend on it, and the tests take a third of the time.
SIZE = 128


def test_the_command_serves_a_checkpoint_or_a_model_file_on_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[dict[str, Any]] = []
    monkeypatch.setattr("fewshot_mahalanobis.apps.page.make_page", lambda start, device: start)
    signature = inspect.signature(serve)
    monkeypatch.setattr(
        "fewshot_mahalanobis.apps.page.serve",
        lambda *given, **named: served.append(signature.bind(*given, **named).arguments),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SimpleCNAPS(image_size=32).eval()
    SimpleCNAPSClassifier(model, device="cpu").fit(pictures(8, 1), LABELS).save(tmp_path / "m.safetensors")
    assert CliRunner().invoke(app, ["app", "--model", str(tmp_path / "m.safetensors")]).exit_code == 0
    assert served[0]["page"].classes_.tolist() == ["blue", "green", "red"]
    assert served[0]["host"] == "127.0.0.1"
    assert served[0]["share"] is False
    for arguments, message in (
        (["--model", "m", "--checkpoint", "other"], "exclude each other"),
        (["--model", str(tmp_path / "none")], "no saved classifier"),
    ):
        result = CliRunner().invoke(app, ["app", *arguments])
        assert result.exit_code == 1
        assert message in result.stderr


# ---------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, list[Any]]]:
    """The address of a page that starts from the default checkpoint at ``SIZE``, and where its process connected to."""
    connections: list[Any] = []
    connect = socket.socket.connect

    def recorded(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            connections.append(address[0])
        connect(self, address)

    page = make_page(load_checkpoint("default").at_size(SIZE), device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", recorded)
        address = start_server(page)
        yield address, connections
    page.close(verbose=False)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Handwritten digits as PNG files, six of each name; the last is for asking."""
    data, folder = load_digits(), tmp_path_factory.mktemp("digits")
    files: dict[str, list[str]] = {}
    for name, digit in (("three", 3), ("seven", 7), ("nine", 9), ("one", 1)):
        for index in np.flatnonzero(data.target == digit)[:6]:
            file = folder / f"{name}-{index}.png"
            pixels = np.round(data.images[index] * (255 / 16)).astype(np.uint8)
            Image.fromarray(pixels).resize((160, 160), Image.Resampling.BICUBIC).save(file)
            files.setdefault(name, []).append(str(file))
    return files


@pytest.fixture
def files_of_two(tmp_path: Path) -> dict[str, list[str]]:
    """Two picture files of each of two classes."""
    for index, image in enumerate(pictures(4, 3)):
        Image.fromarray(image).save(tmp_path / f"{index}.png")
    files = [str(tmp_path / f"{index}.png") for index in range(4)]
    return {"red": files[:2], "<img src=x onerror=document.title='taken'> blue": files[2:]}


@contextmanager
def visiting(served: gradio.Blocks) -> Iterator[Page]:
    """What is served, opened in a browser."""
    address = start_server(served)
    try:
        with chromium() as browser:
            expect.set_options(timeout=120_000)
            visit = browser.new_context(viewport=WIDE).new_page()
            visit.goto(address)
            yield visit
    finally:
        served.close(verbose=False)


def teach(page: Page, name: str, files: list[str]) -> None:
    page.locator("#class-name").locator("input, textarea").first.fill(name)
    page.locator("#class-files input[type=file]").set_input_files(files)
    expect(page.locator("#class-files")).to_contain_text(Path(files[-1]).suffix)  # the list of uploaded files
    page.locator("#add").click()


def ask(page: Page, *files: str) -> None:
    page.locator("#query input[type=file]").set_input_files(list(files))


def expect_readable(page: Page) -> None:
    for text in (
        "#answers .said",
        "#answers figcaption",
        "#classes .class",
        "#state .said",
        "#answers .choices button",
        "#answers .choices button[aria-pressed=true]",
        "h1",
        "h2",
    ):
        assert contrast(page, text) >= 4.5, text
    assert overflow(page) <= 0


def test_in_a_browser_pictures_are_uploaded_classified_and_the_model_downloaded(
    served: tuple[str, list[Any]], digits: dict[str, list[str]], tmp_path: Path
) -> None:
    address, connections = served
    broken = tmp_path / "broken.png"
    broken.write_bytes(Path(digits["three"][0]).read_bytes()[:60])
    taught = {name: digits[name][:5] for name in ("three", "seven", "nine")}
    support = [file for group in taught.values() for file in group], [name for name in taught for _ in range(5)]
    direct = SimpleCNAPSClassifier(
        image_size=SIZE, device="cpu", unknown_label=UNKNOWN, false_rejection_rate=1 / 16
    ).fit(*support)
    queries = [digits["nine"][5], digits["seven"][5], digits["one"][5]]
    expected = direct.predict(queries).tolist()

    with chromium() as browser:
        page = browser.new_page(viewport=WIDE)
        page.set_default_timeout(300_000)
        expect.set_options(timeout=300_000)
        asked, errors = requests_of(page), []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        state, classes, answers = page.locator("#state"), page.locator("#classes"), page.locator("#answers")
        expect(state).to_contain_text("No class yet")
        keep(page, "app-start", full_page=True)

        # One picture is asked about before there is a class: it waits. One class is told from everything else.
        ask(page, queries[0])
        expect(page.locator("#asked")).to_contain_text("1 picture waits")
        teach(page, "three", [*taught["three"], str(broken)])
        expect(classes).to_contain_text("three 5")
        expect(state).to_contain_text("broken.png: ")
        expect(state).to_contain_text("Ready to tell “three” from everything else")
        expect(answers.locator("strong")).to_have_text([re.compile("^(three|unknown)$")])
        expect(page.locator("#asked")).to_have_text("")
        ask(page, str(broken))
        expect(page.locator("#asked")).to_contain_text("broken.png: ")
        keep(page, "app-problem", full_page=True)

        teach(page, "seven", taught["seven"])
        expect(classes).to_contain_text("seven 5")
        teach(page, "nine", taught["nine"])
        expect(classes).to_contain_text("nine 5")
        expect(state).to_contain_text("Ready to classify")
        (row,) = direct.predict_proba(queries[:1])
        expect(answers.locator("strong")).to_have_text(expected[:1])
        shown = answers.locator(".probabilities").inner_text()
        assert {f"{round(p * 100)}%" for p in row} <= set(re.findall(r"\d+%", shown))
        expect(answers.locator(".neighbours img")).to_have_count(6)
        expect(classes.locator(".enough svg")).to_be_visible()
        expect(classes.locator(".enough")).to_contain_text(re.compile(r"More images|About \d+ more image"))
        assert contrast(page, "#classes .enough div") >= 4.5
        keep(page, "app-answer", full_page=True)

        # Several at once are classified when they are dropped, and stand first.
        ask(page, *queries[1:])
        expect(answers.locator("strong")).to_have_count(3)
        shown_labels = answers.locator("strong").all_inner_texts()
        assert (sorted(shown_labels[:2]), shown_labels[2:]) == (sorted(expected[1:]), expected[:1])
        answers.locator("summary").first.click()
        expect(answers.locator(".neighbours img:visible")).to_have_count(6)

        with page.expect_download() as download:
            page.get_by_text("Download the model").click()
        download.value.save_as(tmp_path / "classifier.safetensors")

        answers.get_by_role("button", name="seven").first.click()
        page.emulate_media(color_scheme="dark")
        page.wait_for_function("document.body.classList.contains('dark')")
        assert is_dark(page)
        expect_readable(page)
        keep(page, "app-dark", full_page=True)
        page.set_viewport_size(NARROW)
        page.wait_for_function("window.innerWidth < 400")
        expect_readable(page)
        keep(page, "app-dark-narrow", full_page=True)
        page.emulate_media(color_scheme="light")
        page.wait_for_function("!document.body.classList.contains('dark')")
        expect_readable(page)
        keep(page, "app-narrow", full_page=True)

        # One picture is of a new class, another one is taken back; then one picture and one class are removed.
        answers.locator("input").nth(1).fill("one")
        answers.locator("input").nth(1).press("Enter")
        expect(page.locator("#marked")).to_have_text("2 pictures have your labels.")
        answers.get_by_role("button", name="seven", pressed=True).click()
        expect(page.locator("#marked")).to_have_text("1 picture has your label.")
        page.locator("#learn").click()
        expect(classes).to_contain_text("one 1")
        expect(answers.locator("strong")).to_have_count(2)
        page.locator("#gallery button").first.click()
        page.locator("#remove-picture").click()
        expect(classes).to_contain_text("nine 4")
        page.locator("#gallery button").first.click()
        expect(page.locator("#remove-class")).to_contain_text("nine")
        page.locator("#remove-class").click()
        expect(classes).not_to_contain_text("nine")
        page.locator("#clear").click()
        expect(answers.locator("strong")).to_have_count(0)

    loaded = SimpleCNAPSClassifier.load(tmp_path / "classifier.safetensors", device="cpu")
    assert loaded.predict(queries).tolist() == expected
    np.testing.assert_allclose(loaded.predict_proba(queries), direct.predict_proba(queries), rtol=1e-6)
    assert not errors
    local = ("http://127.0.0.1", "data:", "blob:")
    assert not [url for url in asked if not url.startswith(local)]  # no font, script or telemetry from elsewhere
    assert {*connections} <= {"127.0.0.1", "localhost", "::1"}


def test_the_example_is_taught_and_asked_by_one_button(served: tuple[str, list[Any]]) -> None:
    with chromium() as browser:
        page = browser.new_page(viewport=WIDE)
        page.set_default_timeout(300_000)
        expect.set_options(timeout=300_000)
        page.goto(served[0])
        expect(page.locator("#state")).to_contain_text("No class yet")
        page.locator("#example").click()
        expect(page.locator("#answers strong")).to_have_count(7)
        keep(page, "app-example", full_page=True)
        page.set_viewport_size(NARROW)
        page.wait_for_function("window.innerWidth < 400")
        keep(page, "app-example-narrow", full_page=True)
        # On a phone, asking is within two screens of the top, however many classes there are.
        box = page.locator("#query").bounding_box()
        assert box is not None
        assert box["y"] + page.evaluate("window.scrollY") < 2 * NARROW["height"]


def test_a_round_of_corrections_is_learned_at_once_and_those_of_no_class_too(tmp_path: Path) -> None:
    for index, image in enumerate(pictures(30, 3)):
        Image.fromarray(image).save(tmp_path / f"{index}.png")
    with visiting(make_page(tiny_classifier(unknown_label="?", false_rejection_rate=0.2))) as visit:
        ask(visit, *map(str, sorted(tmp_path.iterdir())))
        answers, marked = visit.locator(".answer"), visit.locator("#marked")
        expect(answers).to_have_count(24)
        expect(visit.locator(".place")).to_have_text("1 to 24 of 30")
        expect(visit.locator("#learn")).to_be_hidden()
        for number, label in enumerate(["green", "none of these", "green", "blue"], start=1):
            answers.nth(number).get_by_role("button", name=label, exact=True).click()
            expect(marked).to_contain_text(str(number))
        expect(visit.locator("#learn")).to_be_in_viewport()  # however far down the page is
        keep(visit, "app-marked")
        visit.locator("#later").click()
        expect(visit.locator(".place")).to_have_text("25 to 30 of 30")
        answers.nth(0).locator("input").fill("Green")
        answers.nth(0).locator("input").press("Enter")
        expect(marked).to_contain_text("There is a class “green”")
        answers.nth(0).locator("input").fill("purple")
        answers.nth(0).locator("input").press("Enter")
        expect(answers.nth(0).get_by_role("button", name="purple", pressed=True)).to_be_visible()
        assert visit.locator("#classes-known option[value=purple]").count() == 1  # offered where others are typed
        answers.nth(1).get_by_role("button", name="blue", exact=True).click()
        expect(marked).to_have_text("6 pictures have your labels.")
        answers.nth(1).locator("input").fill("purple ")
        answers.nth(1).locator("input").press("Enter")
        expect(answers.nth(1).get_by_role("button", pressed=True)).to_have_text(["purple"])
        answers.nth(1).get_by_role("button", name="purple").click()
        expect(marked).to_have_text("5 pictures have your labels.")
        visit.reload()
        expect(answers.nth(1).get_by_role("button", name="green", exact=True, pressed=True)).to_be_visible()
        visit.locator("#learn").click()
        expect(visit.locator(".place")).to_have_text("1 to 24 of 25")
        expect(visit.locator("#classes")).to_contain_text(re.compile("blue 4.*green 5.*purple 1.*none of these 1"))
        expect(visit.locator("#learn")).to_be_hidden()
        expect(visit.locator("#gallery button img")).to_have_count(5)


def test_pictures_of_no_class_are_taught_by_a_button_of_their_own(files_of_two: dict[str, list[str]]) -> None:
    with visiting(make_page(tiny_model(), device="cpu")) as visit:
        expect(visit.locator("#state")).to_contain_text("No class yet")
        visit.locator("#add-none").click()
        expect(visit.locator("#state")).to_contain_text("Choose one or more pictures of no class first.")
        red, other = files_of_two.values()
        visit.locator("#class-files input[type=file]").set_input_files(other)
        expect(visit.locator("#class-files")).to_contain_text(".png")
        visit.locator("#add-none").click()
        expect(visit.locator("#classes")).to_contain_text("none of these 2")
        expect(visit.locator("#state")).to_contain_text("No class yet")
        teach(visit, "red", red)
        expect(visit.locator("#state")).to_contain_text("Ready to tell “red” from everything else")
        keep(visit, "app-none", full_page=True)
        visit.locator("#gallery button").last.click()
        visit.locator("#remove-class").click()
        expect(visit.locator("#classes")).not_to_contain_text("none of these")


def test_what_is_taught_survives_a_reload_and_is_no_other_browsers(files_of_two: dict[str, list[str]]) -> None:
    with visiting(make_page(tiny_model(), device="cpu")) as visit:
        expect(visit.locator("#state")).to_contain_text("No class yet")
        for name, files in files_of_two.items():
            teach(visit, name, files)
            expect(visit.locator("#classes")).to_contain_text(f"{name} {len(files)}")
        ask(visit, *files_of_two["red"])
        expect(visit.locator("#answers strong")).to_have_count(2)
        visit.reload()
        expect(visit.locator("#classes")).to_contain_text("red 2")
        expect(visit.locator("#answers strong")).to_have_count(2)
        expect(visit.locator("#gallery button img")).to_have_count(4)
        assert visit.locator("img[src=x]").count() == 0  # the name of the second class is text
        teach(visit, [*files_of_two][1], files_of_two["red"])
        again = visit.context.new_page()  # another tab
        again.goto(visit.url)
        expect(again.locator("#classes")).to_contain_text("blue 4")
        browser = visit.context.browser
        assert browser is not None
        stranger = browser.new_context().new_page()
        stranger.goto(visit.url)
        expect(stranger.locator("#state")).to_contain_text("No class yet")


def test_the_answering_page_is_exported_by_one_button(
    files_of_two: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def exported(session: Session) -> Path:
        (tmp_path / "page.zip").write_bytes(b"a zip file")
        return tmp_path / "page.zip"

    monkeypatch.setattr(Session, "export_page", exported)
    with visiting(make_page(tiny_model(), device="cpu")) as visit:
        expect(visit.locator("#state")).to_contain_text("No class yet")
        expect(visit.locator("#export")).to_be_hidden()
        for name, files in files_of_two.items():
            teach(visit, name, files)
            expect(visit.locator("#classes")).to_contain_text(name)
        with visit.expect_download() as download:
            visit.locator("#export").click()
        assert download.value.suggested_filename == "page.zip"
        assert Path(download.value.path()).read_bytes() == b"a zip file"

        def refused(session: Session) -> Path:
            raise ValueError("this head cannot be exported")

        monkeypatch.setattr(Session, "export_page", refused)
        visit.locator("#export").click()
        expect(visit.locator("#state")).to_contain_text("this head cannot be exported")


def test_gradio_is_told_to_send_nothing() -> None:
    assert make_page(tiny_model()).analytics_enabled is False
    assert isinstance(make_page(tiny_classifier()), gradio.Blocks)
