"""The page that is taught in its visitor's browser: it learns what Python learns, and its files go both ways."""

from __future__ import annotations

import json
import shutil
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Page, expect
from scipy.special import logit
from torch import nn
from typer.testing import CliRunner

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.apps.teaching import export_teaching_page
from fewshot_mahalanobis.export.network import film_vector
from fewshot_mahalanobis.networks import devices
from fewshot_mahalanobis.networks.film import Film
from tests.browser import NARROW, WIDE, contrast, drop, is_dark, keep, nameless, overflow, requests_of
from tests.images.test_same_picture import COPIES, photographs
from tests.page.web_server import served
from tests.tiny import LABELS, adapting_model, drawn, pictures, tiny_classifier, tiny_model

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TIMEOUT = 120_000  # milliseconds
NAMES = ["red", "green", "blue"]
HOSTILE = "<img src=x onerror=\"document.title='taken over'\">"


@pytest.fixture(scope="module")
def model() -> SimpleCNAPS:
    return load_checkpoint("default").at_size(64)


@pytest.fixture(scope="module")
def folder(model: SimpleCNAPS, runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxscript")
    folder = tmp_path_factory.mktemp("teach") / "site"
    export_teaching_page(folder, model, title="Teach & <ask>", runtime=runtime)
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder) as site:
        yield site.address


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page computes in float32; its files leave the precision to the processor."""
    monkeypatch.setattr(devices, "native_bfloat16", lambda device: False)


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport=WIDE)
    yield context
    context.close()


@pytest.fixture(scope="module")
def support(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Five pictures of each class, of the size that the network reads."""
    return {name: saved(drawn([name] * 5, seed), tmp_path_factory.mktemp(name)) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def queries(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return saved([*drawn(NAMES * 3, 7), *pictures(2, 1)], tmp_path_factory.mktemp("queries"))


def saved(images: Any, folder: Path) -> list[Path]:
    paths = []
    for index, image in enumerate(images):
        Image.fromarray(image).resize((64, 64), Image.Resampling.NEAREST).save(folder / f"{folder.name}{index}.png")
        paths.append(folder / f"{folder.name}{index}.png")
    return paths


def open_page(context: BrowserContext, address: str) -> Page:
    page = context.new_page()
    page.on("pageerror", lambda error: pytest.fail(f"an error on the page: {error}"))
    page.goto(address)
    expect(page.locator("#status")).to_contain_text("Ready.", timeout=TIMEOUT)
    return page


def teach(page: Page, support: dict[str, list[Path]]) -> None:
    """Name classes by the keyboard, and drop their pictures."""
    for name, files in support.items():
        page.locator("#name").fill(name)
        page.locator("#name").press("Enter")
        expect(page.locator("#classes > .class h3").last).to_have_text(name)
        drop(page, files, "#classes > .class:last-child")
        expect(page.locator("#classes > .class:last-child .taught li")).to_have_count(len(files), timeout=TIMEOUT)
    learned(page)


def learned(page: Page) -> None:
    """Wait until the page has learned from its pictures and answered."""
    until(page, "learning === null && learned !== null && !reading && seen === version && !scheduled")


def until(page: Page, condition: str) -> None:
    """Wait for a condition; the page's own policy forbids ``wait_for_function``."""
    deadline = time.monotonic() + TIMEOUT / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"{condition}: {page.locator('#status').text_content()}"
        page.wait_for_timeout(50)


def ask(page: Page, files: list[Path]) -> None:
    drop(page, files)
    expect(page.locator("#answers > li")).to_have_count(len(files), timeout=TIMEOUT)
    until(page, "queries().every(query => query.answer?.by === learned) && !scheduled")


def answers(page: Page) -> dict[str, tuple[str, list[float]]]:
    """Label and probabilities of each picture, by the names of their files."""
    found = page.evaluate("queries().map(one => [one.name, one.answer.probabilities])")
    shown = {
        card.locator(".name").text_content(): card.locator(".label").text_content()
        for card in page.locator("#answers > li").all()
    }
    return {name: (shown[name], probabilities) for name, probabilities in found}


def forget(page: Page) -> None:
    """Remove everything, which the next visit finds gone too."""
    page.once("dialog", lambda dialog: dialog.accept())
    page.locator("#forget").click()
    expect(page.locator("#status")).to_have_text("Everything is removed.", timeout=TIMEOUT)
    page.reload()
    expect(page.locator("#status")).to_have_text("Ready.", timeout=TIMEOUT)
    assert page.locator("#classes > .class").count() == 0


def save(page: Page, path: Path) -> Path:
    with page.expect_download() as download:
        page.locator("#save").click()
    download.value.save_as(path)
    return path


def assert_same(page: Page, classifier: SimpleCNAPSClassifier, queries: list[Path]) -> None:
    expected, found = classifier.predict_all(queries), answers(page)
    assert {path.name for path in queries} == found.keys()
    for path, label, probabilities in zip(queries, expected.labels, expected.probabilities, strict=True):
        assert found[path.name][0] == label
        assert page.evaluate("name => queries().find(one => one.name === name).answer.threshold", path.name) == (
            None if classifier.threshold_ is None else pytest.approx(classifier.threshold_, rel=0.05)
        )
        # The page has the network's weights as float16, which moves the log-odds of noise that is of no class most.
        np.testing.assert_allclose(logit(found[path.name][1]), logit(probabilities), rtol=0, atol=0.1)


def test_it_learns_what_python_learns_and_keeps_it_without_a_network(
    context: BrowserContext,
    address: str,
    model: SimpleCNAPS,
    support: dict[str, list[Path]],
    queries: list[Path],
    tmp_path: Path,
) -> None:
    page = open_page(context, address)
    asked = requests_of(page)
    assert page.title() == page.locator("h1").text_content() == "Teach & <ask>"
    teach(page, support)
    ask(page, queries)
    files, labels = (
        [path for of_class in support.values() for path in of_class],
        [name for name, of_class in support.items() for _ in of_class],
    )
    rejection = {"unknown_label": "unknown", "false_rejection_rate": 1 / 16}
    classifier = SimpleCNAPSClassifier(model, device="cpu", **rejection).fit(files, labels)
    assert {"unknown", *NAMES} >= set(classifier.predict(queries)) > {"unknown"}
    assert_same(page, classifier, queries)
    settings, wanted = page.evaluate("learned.fitted.settings"), classifier.fitted_head_.settled.settings
    assert settings["beta"] == pytest.approx(wanted.beta, rel=0.01)
    assert (settings["power"], settings["shared"]) == (wanted.power, wanted.shared)
    summary = classifier.summary()
    expect(page.locator("#figure")).to_contain_text(f"{summary.right} of {summary.counted} pictures are recognised")

    loaded = SimpleCNAPSClassifier.load(save(page, tmp_path / "taught.safetensors"))
    assert_same(page, loaded, queries)
    assert loaded.summary().right == summary.right
    assert all(one.startswith((address, "blob:", "data:")) for one in asked)

    # The next visit, without a network.
    expect(page.locator("#offline")).to_have_text("It also works without a network.")
    before = answers(page)
    context.set_offline(True)
    page.reload()
    learned(page)
    after = answers(page)
    assert {name: label for name, (label, _) in after.items()} == {name: label for name, (label, _) in before.items()}
    for name, (_, probabilities) in before.items():
        assert after[name][1] == pytest.approx(probabilities, abs=1e-6)

    # Without a class, and without a picture.
    page.get_by_role("button", name="Remove the class red").press("Enter")
    expect(page.locator("#classes > .class")).to_have_count(2)
    page.locator(".taught button").first.click()
    expect(page.locator(".taught li")).to_have_count(9)
    learned(page)
    assert {len(probabilities) for _, probabilities in answers(page).values()} == {2}
    assert page.evaluate("learned.labels") == ["blue", "green"]

    forget(page)


def test_a_dropped_file_is_gone_on_from_as_partial_fit_does(
    context: BrowserContext, address: str, model: SimpleCNAPS, support: dict[str, list[Path]], queries: list[Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    first = {name: support[name] for name in ("red", "green")}
    files, labels = [*first["red"], *first["green"]], ["red"] * 5 + ["green"] * 5
    classifier = SimpleCNAPSClassifier(
        model, device="cpu", unknown_label="none", temperature="auto", false_rejection_rate=0.2
    ).fit(files, labels, groups=[0, 0, *range(2, 10)])
    classifier.save(tmp_path / "first.safetensors")
    page = open_page(context, address)
    drop(page, [tmp_path / "first.safetensors"])
    expect(page.locator("#classes > .class")).to_have_count(2)
    teach(page, {"blue": support["blue"]})
    ask(page, queries)
    classifier.partial_fit(support["blue"], ["blue"] * 5)
    assert_same(page, classifier, queries)
    more = SimpleCNAPSClassifier.load(save(page, tmp_path / "more.safetensors"))
    assert_same(page, more, queries)
    assert more.fitted_head_.group_names == classifier.fitted_head_.group_names == [0, 0, *range(2, 10), *[None] * 5]

    # What is no such file changes nothing.
    (tmp_path / "broken.safetensors").write_bytes((tmp_path / "first.safetensors").read_bytes()[:1000])
    tiny_classifier().save(tmp_path / "other.safetensors")
    for name, reason in (("broken", "it is damaged"), ("other", "made with another checkpoint")):
        drop(page, [tmp_path / f"{name}.safetensors"])
        expect(page.locator("#status")).to_contain_text(reason, timeout=TIMEOUT)
        assert page.evaluate("learned.labels") == ["blue", "green", "red"]


def test_pictures_of_no_class_and_shares_are_learned_as_in_python(
    context: BrowserContext, address: str, model: SimpleCNAPS, support: dict[str, list[Path]], queries: list[Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    (tmp_path / "others").mkdir()
    others = saved(pictures(5, 9), tmp_path / "others")
    files, labels = [path for of in support.values() for path in of], [name for name in NAMES for _ in range(5)]
    rejection = {"unknown_label": "unknown", "false_rejection_rate": 1 / 16}
    classifier = SimpleCNAPSClassifier(
        model, device="cpu", priors={"red": 0.6, "green": 0.3, "blue": 0.1}, **rejection
    ).fit([*files, *others[:3]], labels + ["unknown"] * 3)

    page = open_page(context, address)
    assert page.locator("#none").is_hidden()
    teach(page, support)
    drop(page, others[:3], "#none .class")
    expect(page.locator("#none .count")).to_have_text("3 pictures", timeout=TIMEOUT)
    page.get_by_label("Some classes are more common than others").press("Space")
    page.evaluate(  # the three at once: none waits until the page shows the one before
        """shares => { for (const [name, share] of Object.entries(shares)) {
             const field = document.querySelector(`[aria-label="Share of ${name}"]`);
             field.value = share;
             field.dispatchEvent(new Event("change"));
        } }""",
        {"red": "6", "green": "3", "blue": "1"},
    )
    ask(page, [*queries, *others[3:]])
    learned(page)
    assert_same(page, classifier, [*queries, *others[3:]])
    assert page.evaluate("Object.keys(learned.fitted.outliers.units)")[-1] == "negatives"
    page.get_by_label("Share of red").fill("-1")
    page.get_by_label("Share of red").press("Enter")
    expect(page.locator("#status")).to_contain_text("Give the share of “red” as a number that is 0 or more")

    # Its file, in Python and on the page again, where another class gets a share and is learned.
    loaded = SimpleCNAPSClassifier.load(save(page, tmp_path / "taught.safetensors"))
    assert_same(page, loaded, [*queries, *others[3:]])
    assert len(loaded.fitted_head_.negatives.adapted) == 3
    page.reload()
    learned(page)
    assert_same(page, classifier, [*queries, *others[3:]])
    page.once("dialog", lambda dialog: dialog.accept())
    drop(page, [tmp_path / "taught.safetensors"])
    expect(page.locator("#status")).to_contain_text("pictures: ", timeout=TIMEOUT)
    learned(page)
    assert_same(page, loaded, [*queries, *others[3:]])
    expect(page.locator("#none .count")).to_have_text("3 pictures")
    teach(page, {"grey": others[3:]})
    loaded.set_params(priors={"red": 0.45, "green": 0.225, "blue": 0.075, "grey": 0.25})
    loaded.partial_fit(others[3:], ["grey"] * 2, groups=["a", "b"])
    assert_same(page, loaded, [*queries, *others[3:]])


def test_copies_count_once_as_in_python_and_it_says_whether_more_would_help(
    context: BrowserContext, address: str, model: SimpleCNAPS, tmp_path: Path
) -> None:
    pieces = [image.resize((64, 64)) for image in photographs()]
    taught = {
        "pagoda": [*pieces[:4], COPIES["mirrored"](pieces[0]), COPIES["compressed"](pieces[1]), pieces[1]],
        "dahlia": [*pieces[6:10], pieces[3]],
    }
    support = {name: [tmp_path / f"{name}{index}.png" for index in range(len(of))] for name, of in taught.items()}
    for name, of_class in taught.items():
        for image, path in zip(of_class, support[name], strict=True):
            image.save(path)
    with pytest.warns(UserWarning, match="(are copies of others|are in different classes)"):
        classifier = SimpleCNAPSClassifier(model, device="cpu", unknown_label="unknown", false_rejection_rate=0.1).fit(
            [*support["dahlia"], *support["pagoda"]], ["dahlia"] * 5 + ["pagoda"] * 7
        )
    page = open_page(context, address)
    teach(page, support)
    names = page.evaluate("examples().map(one => one.name)")
    by_page = dict(zip(names, page.evaluate("learned.table.groups"), strict=True))
    assert page.evaluate("learned.table.labels") == [1] * 7 + [0] * 5
    in_order = [by_page[path.name] for of_class in ("dahlia", "pagoda") for path in support[of_class]]
    groups = classifier.fitted_head_.groups.tolist()
    assert [in_order.index(group) for group in in_order] == [groups.index(group) for group in groups]
    expect(page.locator("#figure")).to_contain_text("3 of the pictures are copies of others")
    expect(page.locator("#figure")).to_contain_text(
        "pagoda3.png in “pagoda” and dahlia4.png in “dahlia” are the same picture: remove one of them."
    )
    settings, wanted = page.evaluate("learned.fitted.settings"), classifier.fitted_head_.settled.settings
    assert settings["scale"] == pytest.approx(wanted.scale, rel=0.01)

    expect(page.locator("#enough")).to_be_visible(timeout=TIMEOUT)
    curve = classifier.summary().curve
    expect(page.locator("#expected")).to_contain_text(f"with {curve.usual_count} more of each class")
    last = page.locator("#measured-line").get_attribute("points").split()[-1]
    assert float(last.split(",")[1]) == pytest.approx(90 - 80 * [*curve.measured.values()][-1])


def test_one_class_is_told_from_everything_else(
    context: BrowserContext, address: str, model: SimpleCNAPS, support: dict[str, list[Path]], queries: list[Path]
) -> None:
    page = open_page(context, address)
    teach(page, {"red": support["red"]})
    ask(page, queries)
    classifier = SimpleCNAPSClassifier(model, device="cpu", unknown_label="unknown", false_rejection_rate=1 / 6).fit(
        support["red"], ["red"] * 5, groups=range(5)
    )
    assert_same(page, classifier, queries)
    expect(page.locator("#figure")).to_have_text("It tells “red” from everything else.")


def test_a_few_more_pictures_are_learned_under_the_adaptation_of_before_at_once(
    context: BrowserContext, address: str, support: dict[str, list[Path]], queries: list[Path]
) -> None:
    page = open_page(context, address)
    teach(page, {name: support[name][:4] for name in NAMES})
    ask(page, queries[:1])
    page.evaluate(
        """() => {
            window.rounds = [];
            const plain = shown, before = learned.film;
            shown = () => {
                const round = [learned.table.labels.length, learned.film === before];
                if (round[0] === 13 && rounds.at(-1)?.join() !== round.join()) rounds.push(round);
                plain();
            };
        }"""
    )
    drop(page, support["red"][4:], "#classes > .class")
    until(page, "rounds.length === 2")
    learned(page)
    assert page.evaluate("rounds") == [[13, True], [13, False]]

    # The next visit begins with what was adapted.
    page.reload()
    until(page, "typeof learned !== 'undefined' && learned !== null")
    assert page.evaluate("adaptation.key") == page.evaluate("examples().map(one => one.id).join()")
    learned(page)
    calls = page.evaluate("adaptation.features.size")
    assert calls == 13


def test_questions_and_the_wall_are_answered_by_keys_and_taken_back(
    context: BrowserContext, address: str, support: dict[str, list[Path]], queries: list[Path]
) -> None:
    page = open_page(context, address)
    teach(page, {name: support[name] for name in ("red", "green")})
    ask(page, queries)
    learned(page)

    def expect_labelled(number: int) -> None:
        expect(page.locator("#progress")).to_have_text(f"{number} of {10 + len(queries)} labelled", timeout=TIMEOUT)
        expect(page.locator("body[aria-busy]")).to_have_count(0)

    page.locator("h1").click()
    page.keyboard.press("q")
    expect(page.locator("#question-name")).not_to_be_empty(timeout=TIMEOUT)
    asked = page.locator("#question-name").text_content()
    assert page.locator("#choices button").all_text_contents()[-2:] == ["0 none of these", "s Later"]
    page.keyboard.press("/")
    page.keyboard.type("blue\n")
    expect_labelled(11)
    assert page.evaluate("pictures.find(one => one.label === 'blue').name") == asked
    learned(page)
    assert page.evaluate("learned.labels") == ["blue", "green", "red"]
    page.keyboard.press("u")
    expect_labelled(10)
    expect(page.locator("#question-name")).to_have_text(str(asked))
    learned(page)
    until(page, "queries().every(query => query.answer) && !scheduled")

    page.keyboard.press("w")
    page.locator("#tabs button", has_text="red").click()
    expect(page.locator("#shown")).to_have_text("red")
    tiles = page.locator(".tile")
    assert tiles.count() == sum(label == "red" for label, _ in answers_of(page)) + 5  # and those that taught it
    tiles.nth(0).click()
    tiles.nth(1).click(modifiers=["Shift"])
    page.keyboard.press("0")
    expect_labelled(12)
    page.keyboard.press("Control+z")
    expect_labelled(10)


def answers_of(page: Page) -> list[tuple[str, bool]]:
    """The label that the page shows for each picture that is asked about, and whether it is of no class."""
    return [
        ("" if unknown else label, unknown)
        for label, unknown in page.evaluate("queries().map(one => [one.answer.best[0][0], one.answer.unknown])")
    ]


def test_the_page_that_it_makes_answers_as_it_does(
    context: BrowserContext, address: str, support: dict[str, list[Path]], queries: list[Path], tmp_path: Path
) -> None:
    page = open_page(context, address)
    teach(page, support)
    ask(page, queries)
    page.once("dialog", lambda dialog: dialog.accept("Red & <blue>"))
    with page.expect_download(timeout=TIMEOUT) as download:
        page.locator("#save-page").click()
    with zipfile.ZipFile(download.value.path()) as archive:
        assert archive.testzip() is None
        archive.extractall(tmp_path / "site")
    described = json.loads((tmp_path / "site" / "page.json").read_text())
    assert described["files"] == sorted(path.name for path in (tmp_path / "site").iterdir())
    assert json.loads((tmp_path / "site" / "manifest.json").read_text())["name"] == "Red & <blue>"
    expected = answers(page)
    with served(tmp_path / "site") as site:
        other = open_page(context, site.address)
        assert other.title() == other.locator("h1").text_content() == "Red & <blue>"
        assert "these 3 classes apart: blue, green, red" in other.locator("main").text_content()
        expect(other.locator("#offline")).to_have_text("It also works without a network.")
        context.set_offline(True)
        other.reload()
        drop(other, queries)
        expect(other.locator("#status")).to_contain_text(f"{len(queries)} pictures: ", timeout=TIMEOUT)
        for card in other.locator(".answer").all():
            label, probabilities = expected[card.locator(".name").text_content()]
            assert card.locator(".label").text_content() == label
            if label != "unknown":
                assert f"{max(probabilities):.0%}" in card.locator(".text").text_content()


def test_the_example_is_taught_and_asked_about(context: BrowserContext, address: str) -> None:
    page = open_page(context, address)
    page.locator("#example").click()
    expect(page.locator("#answers > li")).to_have_count(7, timeout=TIMEOUT)
    learned(page)
    assert page.locator("#classes > .class h3").all_text_contents() == ["pagoda", "trees", "flower"]
    assert page.locator("#classes .count").all_text_contents() == ["5 pictures"] * 3
    until(page, "queries().every(query => query.answer) && !scheduled")
    assert [label for label, _ in answers_of(page)][4:6] == ["flower"] * 2


def test_a_page_made_with_a_classifier_begins_with_its_classes_until_they_are_removed(
    context: BrowserContext, folder: Path, queries: list[Path], tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "site")
    description = json.loads((folder / "page.json").read_text())
    (tmp_path / "site" / "page.json").write_text(json.dumps({**description, "goes_on": True}))
    with served(tmp_path / "site") as site:
        page = open_page(context, site.address)
        learned(page)
        assert page.locator("#classes > .class h3").all_text_contents() == ["a", "b"]
        assert page.locator("#classes .remove:visible").count() == 0
        ask(page, queries[:1])
        classifier = SimpleCNAPSClassifier.load(folder / "classifier.safetensors")
        assert answers(page)[queries[0].name][0] == classifier.predict(queries[:1])[0]
        forget(page)


def test_a_class_that_is_named_while_the_page_loads_is_there(context: BrowserContext, address: str) -> None:
    page = context.new_page()
    page.goto(address)
    page.locator("#name").fill("early")
    page.locator("#name").press("Enter")
    expect(page.locator("#classes > .class h3")).to_have_text("early", timeout=TIMEOUT)
    page.reload()
    expect(page.locator("#classes > .class h3")).to_have_text("early", timeout=TIMEOUT)


def test_names_of_classes_and_files_are_text(
    context: BrowserContext, address: str, support: dict[str, list[Path]], tmp_path: Path
) -> None:
    hostile = tmp_path / "<img onerror='document.title=1'>.png"
    hostile.write_bytes(support["red"][0].read_bytes())
    (tmp_path / "no picture.png").write_bytes(b"none")
    page = open_page(context, address)
    teach(page, {HOSTILE: [hostile, support["red"][1]], "other": support["blue"][:2]})
    ask(page, [hostile])
    assert page.locator("#classes > .class h3").first.text_content() == HOSTILE
    assert page.locator("main img").count() == 0
    assert page.title() == "Teach & <ask>"
    drop(page, [tmp_path / "no picture.png"])
    expect(page.locator("#status")).to_contain_text("Not opened as a picture: no picture.png")
    for name, reason in ((" ", "a name first"), ("Other", "“other” already"), ("Unknown", "choose another name")):
        page.locator("#name").fill(name)
        page.locator("#name").press("Enter")
        expect(page.locator("#status")).to_contain_text(reason)
    assert page.locator("#classes > .class").count() == 2

    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_viewport_size(WIDE)
        assert is_dark(page) == (scheme == "dark")
        assert nameless(page) == []
        for place in (
            "h1",
            "#status",
            ".button",
            ".remove",
            ".count",
            ".label",
            ".text",
            "#figure",
            "#name",
            "footer p",
        ):
            assert contrast(page, f"{place}:visible") >= 4.5, place
        keep(page, f"teaching-page-{scheme}", full_page=True)
        page.set_viewport_size(NARROW)
        assert overflow(page) <= 0
        keep(page, f"teaching-page-{scheme}-narrow", full_page=True)


def test_several_threads_find_the_same_where_the_server_allows_them_and_at_later_visits(
    context: BrowserContext, address: str, folder: Path
) -> None:
    features = """async () => {
        const square = Uint8Array.from({length: 3 * page.side * page.side}, (_, index) => 37 * index % 256);
        return [crossOriginIsolated, [...(await network(square, identityFilm())).features]];
    }"""
    first = open_page(context, address)
    isolated, alone = first.evaluate(features)
    assert not isolated
    with served(folder) as site:
        site.isolated = True
        isolated, together = open_page(context, site.address).evaluate(features)
    assert isolated
    assert together == pytest.approx(alone, rel=1e-4, abs=1e-5)
    first.reload()
    expect(first.locator("#status")).to_contain_text("Ready.", timeout=TIMEOUT)
    isolated, later = first.evaluate(features)
    assert isolated
    assert later == together


def test_the_cameras_frames_are_answered_and_kept_in_a_class(
    context: BrowserContext, address: str, support: dict[str, list[Path]]
) -> None:
    context.add_init_script(
        """navigator.mediaDevices.getUserMedia = async () => {
            const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
            setInterval(() => { context.fillStyle = "rgb(210, 50, 50)"; context.fillRect(0, 0, 300, 150); }, 20);
            return canvas.captureStream();
        };"""
    )
    page = open_page(context, address)
    teach(page, {name: support[name][:1] for name in ("red", "blue")})
    page.locator("#camera").click()
    expect(page.locator("#live .label")).to_have_text("red", timeout=TIMEOUT)
    page.locator("#target").select_option(label="blue")
    page.locator("#keep").click()
    expect(page.locator("#classes > .class:last-child .count")).to_have_text("2 pictures", timeout=TIMEOUT)
    page.locator("#stop").click()
    expect(page.locator("#live")).to_be_hidden()


# ---------------------------------------------------------------------- the folder


def test_the_command_writes_a_page_that_goes_on_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def write(folder: Path, model: SimpleCNAPS, save: Any, *, example: Any, **options: Any) -> None:
        folder.mkdir()
        save(folder / "classifier.safetensors")
        written.append(options)

    monkeypatch.setattr("fewshot_mahalanobis.apps.teaching.write_teaching_page", write)
    file = str(tmp_path / "m.safetensors")
    SimpleCNAPSClassifier(adapting_model(), device="cpu").fit(pictures(8, 1), LABELS).save(file)
    result = CliRunner().invoke(app, ["page", "--teach", "-o", str(tmp_path / "a"), "--model", file])
    assert result.exit_code == 0, result.output
    assert written == [{"goes_on": True, "title": "Teach a picture classifier", "runtime": None}]
    assert SimpleCNAPSClassifier.load(tmp_path / "a" / "classifier.safetensors").classes_.tolist() == sorted({*LABELS})
    for arguments, message in (
        (["--teach", file], "--model"),
        ([], "--model"),
        (["--model", file], "--model"),
        ([file, "--margin", "0.1"], "the pictures of --support, and there are none"),
        (["--teach", "--image-folder", "photos"], "the pictures of --support, and there are none"),
    ):
        result = CliRunner().invoke(app, ["page", "-o", str(tmp_path / "b"), *arguments])
        assert result.exit_code == 1
        assert message in result.stderr
    assert not (tmp_path / "b").exists()


def test_the_description_names_what_film_follows(folder: Path, model: SimpleCNAPS) -> None:
    page = json.loads((folder / "page.json").read_text())
    assert dict(page["positions"]) == model.feature_extractor.film_positions
    assert page["side"] == 64
    assert not page["goes_on"]
    assert {path.name for path in folder.iterdir()} == set(page["files"])


@pytest.mark.parametrize("adaptation", ["none", "film"])
def test_a_network_of_your_own_becomes_a_page(adaptation: str, tmp_path: Path) -> None:
    """It is exported by PyTorch, as there is no template of its graph."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    layers = (nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.2, 0.3]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(*layers)
        own = SimpleCNAPS.from_backbone(network, image_size=32, mean=mean, std=std, adaptation=adaptation)
        images = torch.rand(1, 3, 32, 32) * 2 - 1
    export_teaching_page(tmp_path / "site", own)
    page = json.loads((tmp_path / "site" / "page.json").read_text())
    assert page["positions"] == ([] if adaptation == "none" else [["1", 16]])
    assert (tmp_path / "site" / "film.onnx").exists() == (adaptation == "film")
    given = {"images": images.numpy()}
    if adaptation == "film":
        given["film"] = film_vector(Film.identity(own.feature_extractor.film_positions)).numpy()
    found = runtime.InferenceSession(tmp_path / "site" / "features.onnx").run(None, given)
    with torch.no_grad():
        expected = own.feature_extractor(images).numpy()
    np.testing.assert_allclose(found[0], expected, rtol=2e-3, atol=1e-3)  # weights in half precision


@pytest.mark.parametrize(
    ("arguments", "labels", "unlabelled", "message"),
    [
        ({"head": "cosine"}, ["a", "b"] * 4, None, 'head="auto"'),
        ({}, [1, 2] * 4, None, "not numbers such as 1"),
        ({}, ["a", "b"] * 4, pictures(5, 2), "fit without unlabelled="),
    ],
)
def test_a_classifier_that_the_page_cannot_go_on_from_is_refused(
    arguments: dict[str, Any], labels: list[Any], unlabelled: Any, message: str, tmp_path: Path
) -> None:
    classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu", **arguments)
    classifier.fit(pictures(8, 1), labels, unlabelled=unlabelled)
    with pytest.raises(ValueError, match=message):
        export_teaching_page(tmp_path / "site", classifier)
    assert not (tmp_path / "site").exists()
