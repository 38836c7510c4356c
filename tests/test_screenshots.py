"""The documentation site as a browser shows it: wide, narrow, in the light and in the dark.

It looks at a site that was built before, which takes minutes: in ``docs/_build``, or where the variable
``FEWSHOT_MAHALANOBIS_SITE`` says. The pictures are kept where ``FEWSHOT_MAHALANOBIS_SCREENSHOTS`` says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.browser import NARROW, WIDE, chromium, contrast, is_dark, keep, overflow

pytestmark = [pytest.mark.docs, pytest.mark.browser]

SITE = Path(os.environ.get("FEWSHOT_MAHALANOBIS_SITE", Path(__file__).parents[1] / "docs" / "_build"))
PAGES = {
    "start": "index.html",
    "first-steps": "start.html",
    "guide": "guide.html",
    "app": "app.html",
    "folders": "messy_folders.html",
    "research": "research.html",
    "accuracy": "evaluation.html",
    "methods": "which_method.html",
    "api": "api.html",
    "api-class": "generated/fewshot_mahalanobis.SimpleCNAPSClassifier.html",
    "gallery": "auto_examples/index.html",
    "gallery-page": "auto_examples/plot_gaussians.html",
}


#: Pages to look something up in, and the longest of the others, in pixels.
REFERENCE = {
    *("api", "app", "changelog", "cli", "data", "genindex", "model_card", "py-modindex", "trust"),
}
LONGEST = 5_400


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not (SITE / "index.html").is_file():
        pytest.skip(f"no site in {SITE}: build it with `python -m sphinx -W docs docs/_build`")
    with chromium() as one:
        yield one


@pytest.fixture(params=["light", "dark"])
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[tuple[Page, str, list[str]]]:
    """A page in one colour scheme, and what it asked for in vain or of others."""
    context = browser.new_context(viewport=WIDE, color_scheme=request.param)
    one, wrong = context.new_page(), list[str]()
    one.route("http*://**", lambda route: (wrong.append(route.request.url), route.abort()))
    one.on("requestfailed", lambda failed: wrong.append(failed.url))
    one.on("pageerror", lambda error: wrong.append(str(error)))
    yield one, request.param, wrong
    context.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_and_readable_wide_and_narrow(page: tuple[Page, str, list[str]], name: str) -> None:
    one, scheme, wrong = page
    one.goto((SITE / PAGES[name]).as_uri())
    formulas = one.locator(".math").count()
    one.wait_for_function("n => document.querySelectorAll('mjx-container').length >= n", arg=formulas)
    assert not one.locator("mjx-merror").count()
    assert not wrong
    assert is_dark(one) == (scheme == "dark")
    for image in one.locator("img:visible").all():
        image.scroll_into_view_if_needed()  # pictures are loaded when they come into view
        one.wait_for_function("image => image.complete", arg=image.element_handle())
        assert image.evaluate("image => image.naturalWidth") > 0, image.get_attribute("src")
    for text in ("h1", "article p", "article a", "pre span", "code"):
        if one.locator(f"{text}:visible").count():
            assert contrast(one, f"{text}:visible") >= 4.5, text
    one.evaluate("window.scrollTo(0, 0)")
    keep(one, f"docs-{name}-{scheme}")
    one.set_viewport_size(NARROW)
    one.wait_for_function("window.innerWidth < 400")
    keep(one, f"docs-{name}-{scheme}-narrow")
    assert overflow(one) <= 0  # tables and code scroll within their own boxes
    assert one.locator("h1").first.evaluate("title => title.scrollWidth - title.clientWidth") <= 0
    headings = [one.locator(f"article {level}:visible") for level in ("h1", "h2", "h3")]
    sizes = [
        float(heading.first.evaluate("title => parseFloat(getComputedStyle(title).fontSize)"))
        for heading in headings
        if heading.count()
    ]
    assert sizes == sorted(sizes, reverse=True)
    # The name of the site ends before the next thing in the header begins.
    name, search = (
        one.locator(f"{part}:visible").first.bounding_box() for part in (".logo__title", ".search-button__button")
    )
    assert name is not None
    assert search is not None
    assert name["x"] + name["width"] <= search["x"]


@pytest.mark.usefixtures("browser")  # which skips without a site
def test_language_models_find_every_page() -> None:
    listed = re.findall(r"\]\((.+)\)", (SITE / "llms.txt").read_text())
    assert {Path(file).name.removesuffix(".md.txt") for file in listed} >= {"index", "start", "guide", "faq", "api"}
    assert [file for file in listed if not (SITE / file).is_file()] == []


def test_pages_are_short_and_no_code_is_cut_on_a_wide_screen(browser: Browser) -> None:
    one = browser.new_page(viewport=WIDE)
    for file in sorted(SITE.glob("*.html")):
        one.goto(file.as_uri())
        cut = one.locator("article pre").evaluate_all("all => all.filter(e => e.scrollWidth > e.clientWidth).length")
        assert cut == 0, file.stem
        height = one.evaluate("document.documentElement.scrollHeight")
        assert height <= LONGEST or file.stem in REFERENCE, f"{file.stem}: {height}"
    one.close()
