"""Opens a page in the browser of this machine."""

from __future__ import annotations

import threading
import webbrowser

#: Browsers in the terminal: they run no scripts, and would take the terminal from the server.
_TEXT = {"www-browser", "links", "links2", "elinks", "lynx", "w3m"}


def open_page(address: str) -> None:
    """Open a page without waiting for the browser; do nothing if there is none outside the terminal."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    if getattr(browser, "basename", None) not in _TEXT:
        threading.Thread(target=browser.open, args=[address], daemon=True).start()
