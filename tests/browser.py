"""A real browser for tests: the Chromium of the system, without a window."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

#: Pictures of the pages are kept in this folder where the variable names one.
SCREENSHOTS = "FEWSHOT_MAHALANOBIS_SCREENSHOTS"
#: Roles of what needs a name.
_NAMED = {"button", "checkbox", "combobox", "DisclosureTriangle", "image", "listbox", "option", "region", "textbox"}
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

#: Relative luminances of the text of an element and of what is behind it (WCAG 2.2), in the page's own words.
_LUMINANCES = """element => {
    const parse = colour => {
        const canvas = document.createElement('canvas').getContext('2d');
        canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        return canvas.getImageData(0, 0, 1, 1).data;
    };
    const luminance = ([r, g, b]) => {
        const linear = [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    };
    let behind = element;
    while (behind && parse(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
    const background = behind ? getComputedStyle(behind).backgroundColor : 'white';
    return [luminance(parse(getComputedStyle(element).color)), luminance(parse(background))];
}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("there is no Chromium on PATH: install one, on Debian with `apt-get install chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def requests_of(page: Page) -> list[str]:
    """A list that every address which the page asks for is added to."""
    addresses: list[str] = []
    page.on("request", lambda request: addresses.append(request.url))
    return addresses


def keep(page: Page, name: str, **options: Any) -> None:
    """Keep a picture of the page as ``name``.png if the user wants them."""
    if folder := os.environ.get(SCREENSHOTS):
        page.screenshot(path=Path(folder) / f"{name}.png", **options)


def drop(page: Page, files: Sequence[Path], place: str = "body") -> None:
    """Drop files onto the first element of a selector, as a visitor does with the mouse."""
    contents = [(file.name, base64.b64encode(file.read_bytes()).decode()) for file in files]
    page.locator(place).first.evaluate(
        """(place, contents) => {
            const dataTransfer = new DataTransfer();
            for (const [name, text] of contents) {
                const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
                dataTransfer.items.add(new File([bytes], name));
            }
            place.dispatchEvent(new DragEvent("drop", {dataTransfer, bubbles: true, cancelable: true}));
        }""",
        contents,
    )


def nameless(page: Page) -> list[str]:
    """Roles of what a screen reader says without a name, though one can act on it or look at it."""
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    roles = [node["role"]["value"] for node in nodes if not node["ignored"] and not node.get("name", {}).get("value")]
    return [role for role in roles if role in _NAMED]


def contrast(page: Page, selector: str) -> float:
    """How much the text of the first such element stands out, from 1 to 21; 4.5 is enough to read it."""
    one, other = page.locator(selector).first.evaluate(_LUMINANCES)
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def is_dark(page: Page) -> bool:
    return page.locator("body").evaluate(_LUMINANCES)[1] < 0.1


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than the screen."""
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
