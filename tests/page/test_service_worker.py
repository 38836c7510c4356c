"""The page's service worker in a real browser: what it answers, what it leaves to the server, and when it goes."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, Page, expect

from fewshot_mahalanobis.export import web_page
from fewshot_mahalanobis.export.web_page import page_files
from tests.browser import chromium
from tests.page.web_server import Site, served
from tests.tiny import tiny_classifier

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TIMEOUT = 20_000  # milliseconds


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab of a visitor who was nowhere yet."""
    with browser.new_context() as context:
        yield context.new_page()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with served(tmp_path / "page") as one:
        yield one


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write a page whose graph and runtime are a few bytes: which page is shown, and from where, is the point here."""
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    digests = {}
    for kind, (name, _) in web_page.RUNTIME.items():
        (runtime / name).write_text(f"export const {kind} = 0;")
        digests[kind] = name, base64.b64encode(hashlib.sha384((runtime / name).read_bytes()).digest()).decode()
    monkeypatch.setattr(page_files, "RUNTIME", digests)
    classifier = tiny_classifier()

    def write(folder: Path, title: str) -> None:
        monkeypatch.setattr(web_page, "write_page_onnx", lambda model, task, path, **options: path.write_text(title))
        classifier.export_page(folder, title=title, runtime=runtime)

    return write


def write_site(folder: Path, **pages: str) -> Path:
    """Write a folder of plain pages, each file with its title; they are a day older than any page of a classifier."""
    folder.mkdir(parents=True)
    for name, title in pages.items():
        file = folder / f"{name}.html"
        file.write_text(f"<!doctype html><title>{title}</title>")
        make_older(file)
    return folder


def make_older(file: Path) -> None:
    os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 86_400))


def visit(page: Page, address: str) -> None:
    """Open a page of a classifier, until its service worker has everything."""
    page.goto(address)
    page.evaluate("navigator.serviceWorker.ready.then(() => true)")


def title_at(page: Page, address: str) -> str:
    """What the browser shows at an address; "no connection" if it has nothing."""
    try:
        page.goto(address)
    except Error as error:
        assert "net::ERR" in str(error)  # noqa: PT017 (the browser's own page has no other mark)
        page.wait_for_url("chrome-error://**")
        page.goto("about:blank")
        return "no connection"
    return page.title()


def scopes(page: Page) -> list[str]:
    """Scopes of the service workers of the page's address."""
    return page.evaluate("navigator.serviceWorker.getRegistrations().then(all => all.map(one => one.scope).sort())")


def caches(page: Page) -> list[str]:
    return page.evaluate("caches.keys()")


def wait_until(page: Page, holds: Callable[[], bool]) -> None:
    for _ in range(TIMEOUT // 100):
        if holds():
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"not within {TIMEOUT / 1000:.0f} s; workers of {scopes(page)}, caches {caches(page)}")


def wait_until_gone(page: Page) -> None:
    wait_until(page, lambda: scopes(page) == caches(page) == [])


def wait_for_another_version(page: Page, earlier: list[str]) -> None:
    def is_there() -> bool:
        now = caches(page)
        return len(now) == 1 and now != earlier

    wait_until(page, is_there)


# ---------------------------------------------------------------- one site after the other


def no_such_files(site: Site) -> str:
    site.everything = 404
    return "Error response"


def one_page_for_every_path(site: Site) -> str:
    site.everything = "index.html"
    return "Thesis"


def a_login_before_everything(site: Site) -> str:
    site.redirects = {"/": "/login.html", "/service-worker.js": "/login.html"}
    return "Login"


def files_of_the_same_names(site: Site) -> str:
    for name in ("answers.js", "page.json", "service-worker.js"):
        (site.folder / name).write_text("// other")
    return "Thesis"


def a_folder_of_pages(site: Site) -> str:
    return "Thesis"


@pytest.mark.parametrize(
    "other",
    [a_folder_of_pages, no_such_files, one_page_for_every_path, a_login_before_everything, files_of_the_same_names],
)
def test_another_site_at_the_address_is_shown_and_the_worker_goes(
    other: Callable[[Site], str], page: Page, site: Site, export: Callable[..., None], tmp_path: Path
) -> None:
    export(site.folder, "Pets")
    visit(page, site.address)
    site.folder = write_site(tmp_path / "other", index="Thesis", chapter="Chapter", login="Login")
    title = other(site)
    assert title_at(page, site.address) == title
    wait_until_gone(page)
    assert title_at(page, site.address) == title
    site.offline = True
    assert title_at(page, site.address) in (title, "no connection")  # the browser may have kept the other site's page


@pytest.mark.parametrize("path", ["chapter.html", "missing.html", "?chapter=2", "index.html#end"])
def test_a_first_visit_below_the_other_sites_front_page_is_the_other_sites_too(
    path: str, page: Page, site: Site, export: Callable[..., None], tmp_path: Path
) -> None:
    export(site.folder, "Pets")
    visit(page, site.address)
    site.folder = write_site(tmp_path / "other", index="Thesis", chapter="Chapter")
    titles = {"chapter.html": "Chapter", "missing.html": "Error response"}
    assert title_at(page, site.address + path) == titles.get(path, "Thesis")
    wait_until_gone(page)


@pytest.mark.parametrize("older", [False, True], ids=["newer", "older"])
def test_another_page_of_a_classifier_at_the_address_takes_the_place_of_the_first(
    older: bool, page: Page, site: Site, export: Callable[..., None], tmp_path: Path
) -> None:
    export(site.folder, "Pets")
    export(tmp_path / "flowers", "Flowers")
    if older:
        for file in (tmp_path / "flowers").iterdir():
            make_older(file)
    visit(page, site.address)
    before = caches(page)
    site.folder = tmp_path / "flowers"
    assert title_at(page, site.address) == "Flowers"
    wait_for_another_version(page, before)
    site.offline = True
    assert title_at(page, site.address) == page.locator("h1").text_content() == "Flowers"


# ---------------------------------------------------------------- pages below a page


def test_a_page_below_a_page_shows_itself_with_and_without_a_network(
    page: Page, site: Site, export: Callable[..., None]
) -> None:
    export(site.folder, "Outer")
    export(site.folder / "inner", "Inner")
    write_site(site.folder / "plain", index="Plain")
    for _ in range(2):
        visit(page, site.address)
        assert page.title() == page.locator("h1").text_content() == "Outer"
        visit(page, f"{site.address}inner/")
        assert page.title() == page.locator("h1").text_content() == "Inner"
        assert title_at(page, f"{site.address}plain/") == "Plain"
    assert scopes(page) == [site.address, f"{site.address}inner/"]
    assert len(caches(page)) == 2
    site.offline = True
    shown = [title_at(page, site.address + path) for path in ("", "inner/", "missing", "inner/missing", "plain/")]
    assert shown[:-1] == ["Outer", "Inner", "no connection", "no connection"]
    assert shown[-1] in ("Plain", "no connection")  # the browser may have kept it


def test_a_page_below_goes_alone(page: Page, site: Site, export: Callable[..., None], tmp_path: Path) -> None:
    export(site.folder, "Outer")
    export(site.folder / "inner", "Inner")
    visit(page, site.address)
    visit(page, f"{site.address}inner/")
    (site.folder / "inner").rename(tmp_path / "elsewhere")
    assert title_at(page, f"{site.address}inner/") == "Error response"
    wait_until(page, lambda: scopes(page) == [site.address])
    site.offline = True
    assert title_at(page, site.address) == "Outer"


# ---------------------------------------------------------------- redirects


@pytest.mark.parametrize(
    "redirects",
    [{"/": "/index.html"}, {"/index.html": "/"}, {"/": "/index.html?from=start"}, {"/answers.js": "/moved/answers.js"}],
    ids=["to the file", "to the folder", "to a query", "of a script"],
)
def test_a_server_that_redirects_serves_every_visit_and_none_is_kept(
    redirects: dict[str, str], page: Page, site: Site, export: Callable[..., None]
) -> None:
    export(site.folder, "Pets")
    (site.folder / "moved").mkdir()
    (site.folder / "moved" / "answers.js").write_bytes((site.folder / "answers.js").read_bytes())
    site.redirects = redirects
    visit(page, site.address)
    for path in ("", "index.html", ""):
        assert title_at(page, site.address + path) == "Pets"
    kept = page.evaluate(
        """async () => {
            const cache = await caches.open((await caches.keys())[0]), responses = await cache.matchAll();
            return responses.map(response => [response.status, response.redirected]);
        }"""
    )
    assert len(kept) > 10
    assert {(status, redirected) for status, redirected in kept} == {(200, False)}
    site.offline = True
    for path in ("", "index.html"):
        assert title_at(page, site.address + path) == page.locator("h1").text_content() == "Pets"


# ---------------------------------------------------------------- without a network


def test_after_one_visit_the_page_opens_without_a_network_and_nothing_else_does(
    page: Page, site: Site, export: Callable[..., None]
) -> None:
    export(site.folder, "Pets")
    write_site(site.folder / "more", index="More")
    visit(page, site.address)
    site.offline = True
    paths = ("", "index.html", "?from=mail", "#answers", "missing", "more/", "index.htm")
    assert [title_at(page, site.address + path) for path in paths] == ["Pets"] * 4 + ["no connection"] * 3
    page.goto(site.address)
    described = json.loads((site.folder / "page.json").read_text())
    large = {file["address"] for file in (described["graph"], *described["runtime"].values())}
    small = set(described["files"]) - {"service-worker.js", *(address.partition("?")[0] for address in large)}
    assert {path.name for path in site.folder.iterdir() if path.is_file()} == set(described["files"])
    for address in large | small:
        assert page.evaluate("address => fetch(address).then(response => response.status)", address) == 200
    site.offline = False
    assert title_at(page, f"{site.address}more/") == "More"


def test_a_visit_asks_for_the_large_files_whole_only_once(page: Page, site: Site, export: Callable[..., None]) -> None:
    export(site.folder, "Pets")
    for _ in range(3):
        visit(page, site.address)
        expect(page.locator("#status")).not_to_contain_text("Loading", timeout=TIMEOUT)
    for name in ("classifier.onnx", *(name for name, _ in web_page.RUNTIME.values())):
        statuses = [status for path, status in site.answers if path.partition("?")[0] == f"/{name}"]
        assert statuses[0] == 200
        assert set(statuses[1:]) == {304}, name


def test_a_server_in_trouble_is_not_taken_for_a_page_that_is_gone(
    page: Page, site: Site, export: Callable[..., None]
) -> None:
    export(site.folder, "Pets")
    visit(page, site.address)
    site.everything = 503
    assert title_at(page, site.address) == "Error response"
    assert title_at(page, site.address) == "Error response"
    site.everything, site.offline = None, True
    assert title_at(page, site.address) == "Pets"


# ---------------------------------------------------------------- a rewritten page


@pytest.mark.parametrize("times", [1, 2])
def test_a_rewritten_page_is_shown_at_the_next_load_and_then_without_a_network(
    times: int, page: Page, site: Site, export: Callable[..., None], tmp_path: Path
) -> None:
    export(site.folder, "Pets")
    visit(page, site.address)
    for time in range(times):
        before = caches(page)
        export(site.folder, f"Pets {time}")
        assert title_at(page, site.address) == page.locator("h1").text_content() == f"Pets {time}"
        wait_for_another_version(page, before)
    site.offline = True
    assert title_at(page, site.address) == page.locator("h1").text_content() == f"Pets {times - 1}"


def test_a_rewritten_page_reaches_a_tab_that_was_open_all_the_time(
    page: Page, site: Site, export: Callable[..., None]
) -> None:
    export(site.folder, "Pets")
    visit(page, site.address)
    other = page.context.new_page()
    visit(other, site.address)
    export(site.folder, "Cats")
    assert title_at(other, site.address) == "Cats"
    page.reload()
    assert page.title() == "Cats"


def test_a_version_that_cannot_be_fetched_whole_leaves_the_earlier_one(
    page: Page, site: Site, export: Callable[..., None]
) -> None:
    export(site.folder, "Pets")
    visit(page, site.address)
    before = caches(page)
    export(site.folder, "Cats")
    (site.folder / "classifier.onnx").write_bytes(b"another graph than the page was made with")
    assert title_at(page, site.address) == "Cats"
    expect(page.locator("#status")).to_contain_text("classifier.onnx could not be loaded", timeout=TIMEOUT)
    page.evaluate("navigator.serviceWorker.ready.then(one => one.update()).catch(() => null)")
    assert before[0] in caches(page)
    site.offline = True
    assert title_at(page, site.address) == "Pets"
