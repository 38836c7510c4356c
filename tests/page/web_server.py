"""A web server on this machine whose answers a test changes while it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Site:
    """What is at an address: the files of a folder, of which some requests may get something else."""

    folder: Path
    address: str = ""
    redirects: dict[str, str] = field(default_factory=dict)  # path -> path
    everything: str | int | None = None  # every path gets this file, or this status
    offline: bool = False
    isolated: bool = False  # whether pages may have several threads
    answers: list[tuple[str, int]] = field(default_factory=list)  # path and status, in their order


@contextmanager
def served(folder: Path) -> Iterator[Site]:
    """A server of a folder, until the block ends."""
    site = Site(folder)

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if site.offline:
                self.close_connection = True  # and no answer
            elif path in site.redirects:
                self.send_response(302)
                self.send_header("Location", site.redirects[path])
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif isinstance(site.everything, int):
                self.send_error(site.everything)
            else:
                super().do_GET()

        def translate_path(self, path: str) -> str:
            self.directory = str(site.folder)
            return super().translate_path(path if site.everything is None else f"/{site.everything}")

        def end_headers(self) -> None:
            self.send_header("Access-Control-Allow-Origin", "*")
            if site.isolated:
                self.send_header("Cross-Origin-Opener-Policy", "same-origin")
                self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
            super().end_headers()

        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            site.answers.append((self.path, int(code)))

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        site.address = f"http://127.0.0.1:{server.server_port}/"
        yield site
        server.shutdown()
        thread.join()
