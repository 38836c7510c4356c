"""Opening a page: no text browser, and no waiting."""

from __future__ import annotations

import threading
import webbrowser

import pytest

from fewshot_mahalanobis.apps.browser import open_page


class Recorded(webbrowser.GenericBrowser):
    """A browser that stays open until it is closed."""

    def __init__(self, name: str | list[str]) -> None:
        super().__init__(name)
        self.opened, self.closed, self.address = threading.Event(), threading.Event(), ""

    def open(self, url: str, new: int = 0, autoraise: bool = True) -> bool:
        self.address = url
        self.opened.set()
        return self.closed.wait()


@pytest.mark.parametrize("name", ["w3m", "lynx", "/usr/bin/elinks", "links2", "www-browser", ["w3m", "-M", "%s"]])
def test_a_browser_in_the_terminal_is_left_alone(name, monkeypatch):
    browser = Recorded(name)
    monkeypatch.setattr(webbrowser, "get", lambda: browser)
    open_page("http://127.0.0.1:7860")
    assert not browser.opened.wait(0.2)


def test_a_browser_that_stays_open_is_not_waited_for(monkeypatch):
    browser = Recorded("firefox")
    monkeypatch.setattr(webbrowser, "get", lambda: browser)
    open_page("http://127.0.0.1:7860")
    assert browser.opened.wait(60)
    assert browser.address == "http://127.0.0.1:7860"
    browser.closed.set()


def test_no_browser_at_all_is_no_error(monkeypatch):
    def none() -> webbrowser.BaseBrowser:
        raise webbrowser.Error("could not locate runnable browser")

    monkeypatch.setattr(webbrowser, "get", none)
    open_page("http://127.0.0.1:7860")
