"""The page that classifies in its visitor's browser: in a real one, and when its folder cannot be written."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import typer.main
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from typer.testing import CliRunner

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.export import web_page
from fewshot_mahalanobis.export.web_page import RUNTIME, RUNTIME_VERSION, page_files
from tests.browser import NARROW, WIDE, contrast, drop, is_dark, keep, overflow, requests_of
from tests.page.web_server import served
from tests.tiny import SUPPORT_LABELS, adapting_model, drawn, pictures, tiny_model

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SUPPORT = drawn(SUPPORT_LABELS, 0)
TIMEOUT = 60_000  # milliseconds


@pytest.fixture(scope="module")
def classifier() -> SimpleCNAPSClassifier:
    classifier = SimpleCNAPSClassifier(
        tiny_model(), precision="float32", device="cpu", unknown_label="none", temperature="auto",
        false_rejection_rate=0.3,
    )  # fmt: skip
    return classifier.fit(SUPPORT, SUPPORT_LABELS, groups=range(len(SUPPORT)))


@pytest.fixture(scope="module")
def graph(classifier: SimpleCNAPSClassifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page's graph, which takes the longest of all its files."""
    pytest.importorskip("onnxscript")
    path = tmp_path_factory.mktemp("graph") / "classifier.onnx"
    web_page.write_page_onnx(classifier.model_, classifier.task_, path, distances=True)
    return path


@pytest.fixture
def quick(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page gets that graph."""
    monkeypatch.setattr(web_page, "write_page_onnx", lambda model, task, path, **options: shutil.copyfile(graph, path))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """20 pictures, of the classes and of none, as people have them."""
    folder = tmp_path_factory.mktemp("files")
    pictures = [Image.fromarray(one).resize((90, 70)) for one in drawn(["red", "green", "blue"] * 5, 3)]
    for index, picture in enumerate(pictures):
        picture.save(folder / f"{index:02}.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    pictures[0].rotate(90, expand=True).save(folder / "rotated.jpg", exif=exif, quality=95)
    pictures[1].putalpha(Image.linear_gradient("L").resize(pictures[1].size))
    pictures[1].save(folder / "transparent.png")
    pictures[2].quantize(16).save(folder / "palette.gif")
    grey = np.asarray(pictures[3].convert("L"))
    Image.fromarray(grey.astype(np.uint16) * 257).save(folder / "deep.png")
    noise = np.random.default_rng(0).integers(0, 256, (15, 20, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((900, 600)).save(folder / "large.png")
    return sorted(folder.iterdir())


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder for a page, and its address."""
    with served(tmp_path / "site") as one:
        yield one.folder, one.address


@pytest.fixture
def public_server(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the runtime, on another server that takes the place of the public one."""
    folder = tmp_path / "public"
    folder.mkdir()
    for name, _ in RUNTIME.values():
        shutil.copyfile(runtime / name, folder / name)
    with served(folder) as public:
        monkeypatch.setattr(page_files, "RUNTIME_ADDRESS", public.address)
        yield folder


def expect_readable(page: Page) -> None:
    """Wide and narrow, in the light and in the dark."""
    places = ("h1", "#status", ".button", "#camera", ".label", ".text", ".name", ".bars span", "summary", "footer p")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_viewport_size(WIDE)
        assert is_dark(page) == (scheme == "dark")
        for place in places:
            assert contrast(page, f"{place}:visible") >= 4.5, place
        keep(page, f"web-page-{scheme}", full_page=True)
        page.set_viewport_size(NARROW)
        assert overflow(page) <= 0
        keep(page, f"web-page-{scheme}-narrow", full_page=True)


def texts(page: Page, selector: str) -> list[str]:
    return page.locator(selector).all_text_contents()


@pytest.mark.usefixtures("quick")
def test_dropped_pictures_get_the_labels_of_predict_with_and_without_a_network(
    classifier: SimpleCNAPSClassifier,
    files: list[Path],
    runtime: Path,
    browser: Browser,
    site: tuple[Path, str],
    tmp_path: Path,
) -> None:
    folder, address = site
    classifier.export_page(folder, title="Red, <green> & blue", support=SUPPORT[::-1], runtime=runtime)
    broken = tmp_path / "broken.png"
    broken.write_bytes(files[0].read_bytes()[:40])
    expected = classifier.predict_all(files)
    assert {"none", "red", "green", "blue"} == set(expected.labels.tolist())

    context = browser.new_context(viewport=WIDE)
    page, errors = context.new_page(), list[str]()
    asked = requests_of(page)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    status = page.locator("#status")
    expect(status).to_have_text("Ready.", timeout=TIMEOUT)
    assert page.title() == page.locator("h1").text_content() == "Red, <green> & blue"
    keep(page, "web-page-start", full_page=True)

    drop(page, [*files, broken])
    expect(status).to_contain_text("20 pictures: ", timeout=TIMEOUT)
    expect(status).to_contain_text("1 could not be opened.")
    assert texts(page, ".answer .label") == [*expected.labels, "No answer"]
    assert texts(page, ".answer .name") == [*(file.name for file in files), "broken.png"]
    for card, probabilities in zip(page.locator(".answer").all(), expected.probabilities, strict=False):
        names, shares = (
            card.locator(f".bars span:{place}").all_text_contents() for place in ("first-child", "last-child")
        )
        shown = dict(zip(names, [int(share.rstrip("%")) / 100 for share in shares], strict=True))
        wanted = dict(zip(classifier.classes_, probabilities, strict=True))
        assert shown == pytest.approx(wanted, abs=0.02)  # shown in per cent
    assert "It is unlike the pictures of every class" in texts(page, ".answer.unknown .text")[0]

    # The pictures that it learned from: those with the nearest features.
    features, support = classifier.transform(files[:1]), classifier.fitted_head_.support.adapted.numpy()
    nearest = np.linalg.norm(support - features, axis=1).argsort()[:6]
    assert texts(page, ".answer:first-child .pictures span") == [SUPPORT_LABELS[index] for index in nearest]
    shown = page.locator(".answer:first-child .pictures img").first.get_attribute("src")
    assert shown == json.loads((folder / "page.json").read_text())["support"][nearest[0]]["picture"]
    assert not page.locator(".answer:first-child details").evaluate("details => details.open")
    page.locator(".answer:first-child summary").press("Enter")
    assert page.locator(".answer:first-child details").evaluate("details => details.open")
    expect_readable(page)
    reasons = context.new_cdp_session(page).send("Page.getInstallabilityErrors")["installabilityErrors"]
    assert {reason["errorId"] for reason in reasons} <= {"in-incognito"}  # as every context of a test is
    assert {re.sub(r"(://[^/]*/).*", r"\1", one) for one in asked if not one.startswith(("blob:", "data:"))} == {
        address
    }

    # Nothing can be sent anywhere else.
    sent = page.evaluate(
        "fetch('https://example.org/', {method: 'POST', body: 'x'}).then(() => 'sent', () => 'refused')"
    )
    assert sent == "refused"
    assert not any("example.org" in one for one in asked)

    # After the first visit it opens without a network.
    expect(page.locator("#offline")).to_have_text("It also works without a network.")
    context.set_offline(True)
    page.reload()
    page.locator("#files").set_input_files(files[:1])
    expect(page.locator(".answer .label")).to_have_text(str(expected.labels[0]), timeout=TIMEOUT)
    assert errors == []
    context.close()


@pytest.mark.usefixtures("quick", "public_server")
def test_the_cameras_frames_are_classified_by_the_runtime_of_the_public_server(
    classifier: SimpleCNAPSClassifier, browser: Browser, site: tuple[Path, str]
) -> None:
    folder, address = site
    classifier.export_page(folder)
    assert not any((folder / name).exists() for name, _ in RUNTIME.values())
    page = browser.new_page(viewport=WIDE)
    page.add_init_script(
        """navigator.mediaDevices.getUserMedia = async () => {
            const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
            setInterval(() => { context.fillStyle = "rgb(210, 50, 50)"; context.fillRect(0, 0, 300, 150); }, 20);
            return canvas.captureStream();
        };"""
    )
    page.goto(address)
    page.locator("#camera").click()
    expect(page.locator("#live .label")).to_have_text("red", timeout=TIMEOUT)
    page.locator("#keep").click()
    expect(page.locator(".answer .label")).to_have_text("red", timeout=TIMEOUT)
    assert page.locator(".answer .nearest").is_hidden()  # the page has no support pictures
    keep(page, "web-page-camera", full_page=True)
    page.locator("#stop").click()
    expect(page.locator("#live")).to_be_hidden()
    expect(page.locator("#offline")).to_have_text("It also works without a network.")
    page.close()


@pytest.mark.usefixtures("quick")
def test_another_runtime_than_the_page_names_is_refused(
    classifier: SimpleCNAPSClassifier, public_server: Path, browser: Browser, site: tuple[Path, str]
) -> None:
    folder, address = site
    classifier.export_page(folder)
    script = public_server / RUNTIME["script"][0]
    script.write_bytes(script.read_bytes() + b"\n")
    page = browser.new_page(service_workers="block")
    page.goto(address)
    expect(page.locator("#status")).to_contain_text(f"{script.name} could not be loaded", timeout=TIMEOUT)
    page.close()


def test_a_page_that_is_opened_as_a_file_says_what_to_do(
    classifier: SimpleCNAPSClassifier, browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_page, "write_page_onnx", lambda model, task, path, **options: path.write_bytes(b"graph"))
    classifier.export_page(tmp_path / "site")
    page = browser.new_page()
    page.goto((tmp_path / "site" / "index.html").as_uri())
    expect(page.locator("#status")).to_contain_text("python3 -m http.server")
    page.close()


# ---------------------------------------------------------------------- the folder


def test_a_page_that_cannot_be_written_leaves_nothing(
    classifier: SimpleCNAPSClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_page, "write_page_onnx", lambda model, task, path, **options: path.write_bytes(b"graph"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    (tmp_path / "npm" / "dist").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for arguments, kind, message in (
        ({"folder": tmp_path / "other"}, ValueError, "other has other files: name a new folder"),
        ({"folder": tmp_path / "other" / "thesis.tex"}, ValueError, "thesis.tex: it is no folder"),
        ({"folder": tmp_path / "none" / "site"}, FileNotFoundError, "there is no folder .*none"),
        ({"runtime": tmp_path / "npm"}, FileNotFoundError, f"npm install onnxruntime-web@{re.escape(RUNTIME_VERSION)}"),
        ({"support": [*SUPPORT[:2], 255 - SUPPORT[2]]}, ValueError, "image 2 \\(ndarray\\): it is none of the images"),
    ):
        with pytest.raises(kind, match=message):
            classifier.export_page(**{"folder": tmp_path / "site", **arguments})
    for name, _ in RUNTIME.values():
        (tmp_path / "npm" / "dist" / name).write_text("another version")
    with pytest.raises(ValueError, match=f"is not that of onnxruntime-web {re.escape(RUNTIME_VERSION)}"):
        classifier.export_page(tmp_path / "site", runtime=tmp_path / "npm")
    shutil.rmtree(tmp_path / "npm")
    assert sorted(tmp_path.rglob("*")) == [path for path in before if "npm" not in path.parts]


@pytest.fixture
def any_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of files that pages take for the runtime."""
    folder = tmp_path / "runtime"
    folder.mkdir()
    digests = {}
    for kind, (name, _) in RUNTIME.items():
        (folder / name).write_text(kind)
        digests[kind] = name, base64.b64encode(hashlib.sha384(kind.encode()).digest()).decode()
    monkeypatch.setattr(page_files, "RUNTIME", digests)
    monkeypatch.setattr(web_page, "write_page_onnx", lambda model, task, path, **options: path.write_bytes(b"graph"))
    return folder


def test_a_rewritten_page_keeps_no_file_of_the_earlier_one_and_all_others(
    classifier: SimpleCNAPSClassifier, any_runtime: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    classifier.export_page(site, runtime=any_runtime)
    names = {path.name for path in site.iterdir()}
    assert names == set(json.loads((site / "page.json").read_text())["files"])
    (site / "robots.txt").write_text("mine")
    described = json.loads((site / "page.json").read_text())
    (site / "teach.js").write_text("of an earlier version")
    (tmp_path / "thesis.tex").write_text("mine")
    described["files"] += ["teach.js", "../thesis.tex", "gone.js"]
    (site / "page.json").write_text(json.dumps(described))
    classifier.export_page(site)
    runtime = {path.name for path in any_runtime.iterdir()}
    assert {path.name for path in site.iterdir()} == names - runtime | {"robots.txt"}
    assert (tmp_path / "thesis.tex").exists()
    classifier.export_page(site, runtime=any_runtime)
    assert {path.name for path in site.iterdir()} == names | {"robots.txt"}


@pytest.mark.parametrize(
    "page_file", ["{}", "[1]", '{"made_by": 5}', '{"made_by": "another tool", "files": ["index.html"]}', "no json"]
)
def test_another_tools_page_is_not_overwritten(
    page_file: str, classifier: SimpleCNAPSClassifier, tmp_path: Path
) -> None:
    (tmp_path / "page.json").write_text(page_file)
    (tmp_path / "index.html").write_text("another tool's")
    with pytest.raises(ValueError, match="has other files"):
        classifier.export_page(tmp_path)
    assert (tmp_path / "index.html").read_text() == "another tool's"


def test_the_help_names_the_version_of_the_runtime() -> None:
    options = {option.name: option.help for option in typer.main.get_command(app).commands["page"].params}
    assert f"onnxruntime-web {RUNTIME_VERSION}," in options["runtime"]


def test_of_many_classes_the_page_names_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_page, "write_page_onnx", lambda model, task, path, **options: path.write_bytes(b"graph"))
    names = [f"kind {number:02}" for number in range(22)]
    SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(22, 1), names).export_page(tmp_path / "site")
    index = (tmp_path / "site" / "index.html").read_text()
    assert f"22 classes apart: {', '.join(names[:20])} and 2 more" in index


def test_the_command_writes_a_page_anew_and_says_how_to_open_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_page, "write_page_onnx", lambda model, task, path, **options: path.write_bytes(b"graph"))
    for index, (picture, label) in enumerate(zip(SUPPORT, SUPPORT_LABELS, strict=True)):
        (tmp_path / "photos" / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(tmp_path / "photos" / label / f"{index}.png")
    paths = sorted((tmp_path / "photos").glob("*/*.png"))
    classifier = SimpleCNAPSClassifier(adapting_model(), device="cpu").fit(paths, [path.parent.name for path in paths])
    classifier.save(tmp_path / "m.safetensors")
    site, photos = tmp_path / "site", tmp_path / "photos"
    arguments = ["page", str(tmp_path / "m.safetensors"), "-o", str(site), "--support", str(photos), "--title", "Two"]
    classifier.export_page(site, title="One")
    workers = [(site / "service-worker.js").read_text()]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert f"http.server --bind 127.0.0.1 --directory {site}" in result.stdout
    workers.append((site / "service-worker.js").read_text())
    assert workers[0] != workers[1]  # so that browsers notice the new version
    index = (site / "index.html").read_text()
    assert "<h1>Two</h1>" in index
    assert "3 classes apart: blue, green and red" in index
    assert "It knows these classes alone" in index
    assert "{{" not in index + workers[1]
    page = json.loads((site / "page.json").read_text())
    assert [one["label"] for one in page["support"]] == [path.parent.name for path in paths]
    assert all(one["picture"].startswith("data:image/jpeg;base64,") for one in page["support"])
    manifest = json.loads((site / "manifest.json").read_text())
    for icon in manifest["icons"]:
        with Image.open(site / icon["src"]) as picture:
            assert f"{picture.width}x{picture.height}" == icon["sizes"]
