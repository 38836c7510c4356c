"""Take the picture of the page that is taught in the browser: ``python docs/teaching_page.py RUNTIME``.

It writes docs/teaching_page.png: a page that was taught the task of ``first_task.py`` in Chromium. RUNTIME is a folder
with the npm package onnxruntime-web.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from first_task import QUERIES, SUPPORT, pieces
from PIL import Image
from playwright.sync_api import FilePayload, Page, sync_playwright

from fewshot_mahalanobis.apps.teaching import export_teaching_page

PICTURE = Path(__file__).with_name("teaching_page.png")


def main(runtime: Path) -> None:
    """Export, teach, ask, and take the picture."""
    with tempfile.TemporaryDirectory() as name:
        export_teaching_page(Path(name) / "site", runtime=runtime)
        handler = partial(SimpleHTTPRequestHandler, directory=str(Path(name) / "site"))
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as playwright:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1180, "height": 900})
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            _teach_and_ask(page)
            page.screenshot(path=PICTURE, full_page=True)
            browser.close()
            server.shutdown()
    with Image.open(PICTURE) as picture:
        smaller = picture.convert("RGB").resize((picture.width // 2, picture.height // 2), Image.Resampling.LANCZOS)
    smaller.quantize(128).save(PICTURE, optimize=True)


def _teach_and_ask(page: Page) -> None:
    for name, squares in SUPPORT.items():
        page.locator("#name").fill(name)
        page.locator("#name").press("Enter")
        _wait(page, f"document.querySelector('#classes > .class:last-child h3')?.textContent === {name!r}")
        page.locator("#classes > .class:last-child [type=file]").set_input_files(
            _files(name, pieces({name: squares})[0])
        )
    _wait(page, "examples().length === 25 && learning === null && !reading && seen === version && !scheduled")
    for name, squares in QUERIES.items():
        page.locator("#files").set_input_files(_files(name, pieces({name: squares})[0][:1]))
    _wait(page, "queries().length === 5 && queries().every(query => query.answer?.by === learned) && !scheduled")


def _wait(page: Page, condition: str) -> None:
    while not page.evaluate(condition):  # the page's policy forbids wait_for_function
        time.sleep(0.2)


def _files(name: str, images: list[Image.Image]) -> list[FilePayload]:
    files: list[FilePayload] = []
    for index, image in enumerate(images):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        files.append({"name": f"{name} {index + 1}.png", "mimeType": "image/png", "buffer": buffer.getvalue()})
    return files


if __name__ == "__main__":
    main(Path(sys.argv[1]))
