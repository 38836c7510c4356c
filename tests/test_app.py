"""The app: what it does, and the page in a real browser."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
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
from fewshot_mahalanobis.app import UNKNOWN, Bench, make_page, serve
from fewshot_mahalanobis.cli import app
from tests.browser import NARROW, WIDE, chromium, contrast, is_dark, keep, overflow, requests_of
from tests.tiny import LABELS, pictures, tiny_classifier, tiny_model


@pytest.fixture
def files(tmp_path: Path) -> dict[str, list[str]]:
    """Image files of the three classes that ``tiny_classifier`` knows."""
    made: dict[str, list[str]] = {}
    for index, (name, image) in enumerate(zip(LABELS, pictures(8, 1), strict=True)):
        file = tmp_path / f"{index}.png"
        Image.fromarray(image).save(file)
        made.setdefault(name, []).append(str(file))
    return made


def in_order(files: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    return [file for group in files.values() for file in group], [name for name in files for _ in files[name]]


def test_the_bench_fits_what_the_classifier_fits(files: dict[str, list[str]]) -> None:
    bench = Bench(tiny_model(), device="cpu")
    for name, group in files.items():
        assert bench.add(f" {name} ", group) == {}
    assert bench.counts() == {"blue": 3, "green": 3, "red": 2}
    direct = SimpleCNAPSClassifier(tiny_model(), device="cpu", unknown_label=UNKNOWN, false_rejection_rate=1 / 9).fit(
        *in_order(files)
    )
    query = files["red"][0]
    answer = bench.ask(query)
    (row,) = direct.predict_proba([query])
    assert answer.probabilities == pytest.approx(dict(zip(direct.classes_, row, strict=True)))
    assert answer.label == max(answer.probabilities, key=answer.probabilities.get)
    assert [UNKNOWN if answer.unknown else answer.label] == direct.predict([query]).tolist()


def test_neighbours_are_the_nearest_support_images(files: dict[str, list[str]]) -> None:
    bench = Bench(tiny_model(), device="cpu")
    for name, group in files.items():
        bench.add(name, group)
    paths, names = in_order(files)
    query = files["green"][1]
    answer = bench.ask(query)
    assert bench.classifier is not None
    features, (own,) = bench.classifier.transform(paths), bench.classifier.transform([query])
    distances = [float(np.sqrt(((row - own) ** 2).sum())) for row in features]
    nearest = np.argsort(distances)[: len(answer.neighbours)]
    assert [n.label for n in answer.neighbours] == [names[i] for i in nearest]
    assert [n.distance for n in answer.neighbours] == pytest.approx([distances[i] for i in nearest], abs=1e-5)
    np.testing.assert_array_equal(answer.neighbours[0].picture, answer.picture)  # it is in the support set


def test_files_that_cannot_be_read_are_named_and_the_others_used(files: dict[str, list[str]], tmp_path: Path) -> None:
    (tmp_path / "notes.png").write_text("hello")
    bench = Bench(tiny_model(), device="cpu")
    problems = bench.add("blue", [*files["blue"], str(tmp_path / "notes.png")])
    assert problems.keys() == {"notes.png"}
    assert bench.counts() == {"blue": 3}
    with pytest.raises(ValueError, match=r"Nothing was added. notes\.png: not an image file"):
        bench.add("red", [str(tmp_path / "notes.png")])
    bench.add("red", files["red"])
    with pytest.raises(ValueError, match=r"notes\.png: not an image file"):
        bench.ask(str(tmp_path / "notes.png"))
    assert bench.counts() == {"blue": 3, "red": 2}


def test_what_is_missing_is_said(files: dict[str, list[str]]) -> None:
    bench = Bench(tiny_model(), device="cpu")
    for name, given, message in (
        ("  ", files["red"], "name first"),
        (UNKNOWN, files["red"], "another name"),
        ("red", [], "pictures of “red” first"),
    ):
        with pytest.raises(ValueError, match=message):
            bench.add(name, given)
    bench.add("red", files["red"])
    with pytest.raises(ValueError, match="two classes"):
        bench.ask(files["red"][0])
    assert bench.save() is None


def test_single_pictures_make_a_classifier_that_calls_nothing_unknown(files: dict[str, list[str]]) -> None:
    bench = Bench(tiny_model(), device="cpu")
    for name, group in files.items():
        bench.add(name, group[:1])
    assert not bench.ask(files["red"][1]).unknown


def test_removing_a_class_is_never_having_added_it(files: dict[str, list[str]]) -> None:
    bench, without = Bench(tiny_model(), device="cpu"), Bench(tiny_model(), device="cpu")
    for name, group in files.items():
        bench.add(name, group)
        if name != "green":
            without.add(name, group)
    bench.remove("green")
    assert bench.counts() == without.counts()
    assert bench.ask(files["red"][0]).probabilities == without.ask(files["red"][0]).probabilities
    bench.remove("red")
    assert bench.classifier is None


def test_from_a_fitted_classifier_on_more_images_are_a_partial_fit(files: dict[str, list[str]]) -> None:
    start = tiny_classifier(unknown_label=UNKNOWN, false_rejection_rate=0.2)
    before = start.predict_proba(pictures(2, 5))
    bench = Bench(start)
    assert bench.counts() == {"blue": 3, "green": 3, "red": 2}
    assert all(near.picture is None for near in bench.ask(files["red"][0]).neighbours)
    bench.add("purple", files["blue"][:2])
    expected = tiny_classifier(unknown_label=UNKNOWN, false_rejection_rate=0.2).partial_fit(
        files["blue"][:2], ["purple"] * 2
    )
    (row,) = expected.predict_proba(files["red"][:1])
    answer = bench.ask(files["red"][0])
    assert answer.probabilities == pytest.approx(dict(zip(expected.classes_, row, strict=True)))
    assert {near.label for near in answer.neighbours if near.picture is not None} <= {"purple"}
    bench.remove("purple")
    assert bench.classifier is start
    np.testing.assert_array_equal(start.predict_proba(pictures(2, 5)), before)


def test_classes_that_are_numbers_stay_numbers(files: dict[str, list[str]]) -> None:
    start = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(4, 1), [3, 5, 3, 5])
    bench = Bench(start)
    bench.add("5", files["red"])
    bench.add("8", files["blue"])
    assert bench.classifier is not None
    assert bench.classifier.classes_.tolist() == [3, 5, 8]
    with pytest.raises(ValueError, match="whole numbers"):
        bench.add("cat", files["green"])
    assert bench.counts() == {"3": 2, "5": 4, "8": 3}


def test_the_command_serves_a_checkpoint_or_a_model_file_on_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[dict[str, Any]] = []
    monkeypatch.setattr("fewshot_mahalanobis.app.make_page", lambda start, device: start)
    monkeypatch.setattr(
        "fewshot_mahalanobis.app.serve", lambda page, **options: served.append({"page": page, **options})
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
    """The address of a page that starts from the default checkpoint, and where its process connected to."""
    connections: list[Any] = []
    connect = socket.socket.connect

    def recorded(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            connections.append(address[0])
        connect(self, address)

    page = make_page(load_checkpoint("default"), device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", recorded)
        address = serve(page, wait=False)
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


def teach(page: Page, name: str, files: list[str]) -> None:
    page.locator("#class-name").locator("input, textarea").first.fill(name)
    page.locator("#class-files input[type=file]").set_input_files(files)
    expect(page.locator("#class-files")).to_contain_text(Path(files[-1]).suffix)  # the list of uploaded files
    page.get_by_role("button", name="Add to the class").click()


def ask(page: Page, file: str) -> None:
    if (clear := page.locator("#query").get_by_label("Clear")).count():
        clear.first.click()
    page.locator("#query input[type=file]").set_input_files(file)
    expect(page.locator("#query")).to_contain_text(Path(file).suffix)
    page.get_by_role("button", name="Classify").click()


def test_in_a_browser_pictures_are_uploaded_classified_and_the_model_downloaded(
    served: tuple[str, list[Any]], digits: dict[str, list[str]], tmp_path: Path
) -> None:
    address, connections = served
    broken = tmp_path / "broken.png"
    broken.write_bytes(Path(digits["three"][0]).read_bytes()[:60])
    taught = {name: digits[name][:5] for name in ("three", "seven", "nine")}
    direct = SimpleCNAPSClassifier(device="cpu", unknown_label=UNKNOWN, false_rejection_rate=1 / 16).fit(
        *in_order(taught)
    )
    (certain, odd), query = [digits["seven"][5], digits["one"][5]], digits["nine"][5]

    with chromium() as browser:
        page = browser.new_page(viewport=WIDE)
        page.set_default_timeout(300_000)
        expect.set_options(timeout=300_000)
        asked, errors = requests_of(page), []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        classes, answer = page.locator("#classes"), page.locator("#answer")
        expect(classes).to_contain_text("No class yet")
        keep(page, "app-start", full_page=True)

        teach(page, "three", [*taught["three"], str(broken)])
        expect(classes).to_contain_text("three 5")
        expect(classes).to_contain_text("broken.png: ")
        ask(page, query)
        expect(answer).to_contain_text("two classes")
        keep(page, "app-problem", full_page=True)

        teach(page, "seven", taught["seven"])
        expect(classes).to_contain_text("seven 5")
        teach(page, "nine", taught["nine"])
        expect(classes).to_contain_text("nine 5")
        expect(classes).to_contain_text("Ready to classify")
        for index, file in enumerate((query, certain, odd)):
            ask(page, file)
            (row,) = direct.predict_proba([file])
            (label,) = direct.predict([file])
            expect(answer.locator("strong")).to_have_text(label)
            shown = page.locator("#probabilities").inner_text()
            assert {f"{round(p * 100)}%" for p in row} <= set(re.findall(r"\d+%", shown))
            expect(page.locator("#neighbours img")).to_have_count(6)
            keep(page, f"app-answer-{index}", full_page=True)

        with page.expect_download() as download:
            page.get_by_text("Download the model").click()
        download.value.save_as(tmp_path / "classifier.safetensors")

        page.emulate_media(color_scheme="dark")
        page.wait_for_function("document.body.classList.contains('dark')")
        assert is_dark(page)
        for text in ("#answer .said", "#classes .said", "#neighbours figcaption", "#classify", "h1", "h2"):
            assert contrast(page, text) >= 4.5, text
        keep(page, "app-dark", full_page=True)
        page.set_viewport_size(NARROW)
        page.wait_for_function("window.innerWidth < 400")
        keep(page, "app-dark-narrow", full_page=True)
        assert overflow(page) <= 0
        page.emulate_media(color_scheme="light")
        page.wait_for_function("!document.body.classList.contains('dark')")
        for text in ("#answer .said", "#classes .said", "#neighbours figcaption", "#classify", "h1", "h2"):
            assert contrast(page, text) >= 4.5, text
        keep(page, "app-narrow", full_page=True)

    loaded = SimpleCNAPSClassifier.load(tmp_path / "classifier.safetensors", device="cpu")
    queries = [query, certain, odd]
    assert loaded.predict(queries).tolist() == direct.predict(queries).tolist()
    np.testing.assert_allclose(loaded.predict_proba(queries), direct.predict_proba(queries), rtol=1e-6)
    assert not errors
    local = ("http://127.0.0.1", "data:", "blob:")
    assert not [url for url in asked if not url.startswith(local)]  # no font, script or telemetry from elsewhere
    assert {*connections} <= {"127.0.0.1", "localhost", "::1"}


def test_gradio_is_told_to_send_nothing() -> None:
    assert make_page(tiny_model()).analytics_enabled is False
    assert isinstance(make_page(tiny_classifier()), gradio.Blocks)
