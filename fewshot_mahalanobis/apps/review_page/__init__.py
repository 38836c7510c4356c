"""The page of ``review``: a :class:`~fewshot_mahalanobis.apps.review.Review` in the browser (the extra ``app``).

The page asks for what it shows, one picture or one page of the wall, and sends what its user decides. It loads nothing
from elsewhere, and other sites can neither read nor change anything.
"""

from __future__ import annotations

import io
import secrets
import socket
import webbrowser
from collections.abc import Callable
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from fewshot_mahalanobis.apps.review import Answer, Review
from fewshot_mahalanobis.extras import install_command
from fewshot_mahalanobis.images.picture import read_within
from fewshot_mahalanobis.images.ranges import checked_range

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise ImportError(f"the page of `review` needs Starlette and uvicorn: {install_command('app')}") from error

__all__ = ["ReviewServer"]

#: Longest side of the picture that is asked about, in pixels.
_LARGE = 1280
#: Classes that have a key.
_KEYS = 9
#: Address -> file and type of what is always the same.
_ASSETS = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
#: Ports that are tried if none is given.
_PORTS = range(7860, 7960)


class ReviewServer:
    """A server for the page of a review, which listens at once and answers while :meth:`serve` runs.

    Parameters
    ----------
    review : Review
    host : str
        The address to listen at: "0.0.0.0" lets other machines of the network in.
    port : int, optional
        Default: the first free one from 7860 on.

    Attributes
    ----------
    address : str
        Of the page.

    Raises
    ------
    OSError
        The port is taken.
    """

    def __init__(self, review: Review, host: str = "127.0.0.1", port: int | None = None) -> None:
        self._socket = _listening(host, port)
        name = f"[{host}]" if ":" in host else host
        self.address = f"http://{name}:{self._socket.getsockname()[1]}"
        # A name of another site that leads to this machine is refused, so that the site cannot read the page.
        hosts = ["localhost", name] if _is_loopback(host) else ["*"]
        app = Starlette(
            routes=_Page(review).routes(),
            middleware=[Middleware(TrustedHostMiddleware, hosts)],
            exception_handlers=dict.fromkeys((ValueError, KeyError, TypeError, OSError), _said),
        )
        self._stopped = False
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))

    def serve(self, *, browser: bool = False) -> None:
        """Answer until Ctrl+C, which raises KeyboardInterrupt, or :meth:`stop`.

        ``browser`` opens the page on this machine.
        """
        print(f"The page is at {self.address}. Ctrl+C stops it.", flush=True)
        if browser:
            webbrowser.open(self.address)
        self._server.run(sockets=[self._socket])
        if not self._stopped:  # uvicorn itself may end as if nothing had interrupted it
            raise KeyboardInterrupt

    def stop(self) -> None:
        """End :meth:`serve`, which runs in another thread."""
        self._stopped = True
        self._server.should_exit = True


def _listening(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in _PORTS if port is None else [port]:
        try:
            return socket.create_server((host, candidate), family=family)
        except OSError as error:
            problem = error
    raise OSError(f"cannot listen at {host}, port {candidate}: {problem.strerror}. Name another with --port")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Page:
    """What the addresses of the page answer; one question at a time, whoever asks."""

    def __init__(self, review: Review) -> None:
        self.review = review
        self.lock = Lock()
        self.run = secrets.token_hex(4)  # browsers keep thumbnails, but must not take them for those of another run

    def routes(self) -> list[Route]:
        return [
            *(_asset(address, *asset) for address, asset in _ASSETS.items()),
            Route("/question", self._answering(self.question)),
            Route("/wall", self._answering(self.wall)),
            Route("/label", self._answering(self.label), methods=["POST"]),
            Route("/undo", self._answering(self.undo), methods=["POST"]),
            Route("/skip", self._answering(self.skip), methods=["POST"]),
            Route("/thumbnail/{picture:int}", self.thumbnail),
            Route("/picture/{picture:int}", self.picture),
            Route("/labels.csv", self.table),
            Route("/reviewed.safetensors", self.model),
        ]

    def _answering(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Request], Any]:
        """What handles a request: JSON out of JSON or of a query."""

        def locked(asked: dict[str, Any]) -> Response:
            with self.lock:
                return JSONResponse(answer(asked))

        async def handle(request: Request) -> Response:
            if request.method != "POST":
                return await run_in_threadpool(locked, dict(request.query_params))
            if request.headers.get("content-type") != "application/json":  # which no form of another site can send
                return PlainTextResponse("not JSON", 415)
            return await run_in_threadpool(locked, await request.json())

        return handle

    # ---------------------------------------------------------------- JSON

    def question(self, asked: dict[str, Any]) -> dict[str, Any]:
        """One picture, that which is named or the next, and its most probable classes."""
        picture = self._known(int(asked["picture"])) if "picture" in asked else self.review.next_picture()
        if picture is None:
            return {**self._state(), "question": None}
        likely = self.review.likely([picture])[:_KEYS]
        return {**self._state(), "question": {**self._tile(self.review.answer(picture)), "likely": likely}}

    def wall(self, asked: dict[str, Any]) -> dict[str, Any]:
        """One page of the answers with one label."""
        page = self.review.page(asked["label"], int(asked["first"]))
        shown = {"answers": [*map(self._tile, page.answers)], "likely": page.likely[:_KEYS]}
        return {**self._state(), "page": {**page._asdict(), **shown}}

    def label(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.review.label([*map(self._known, asked["pictures"])], asked["label"])
        return {}

    def undo(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"pictures": self.review.undo()}

    def skip(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.review.pass_over(self._known(asked["picture"]))
        return {}

    def _state(self) -> dict[str, Any]:
        """What every answer says."""
        review = self.review
        return {
            "run": self.run,
            "none": review.none,
            "classes": sorted(review.classes().items()),
            "labelled": len(review.labels),
            "total": len(review.paths),
            "undo": review.can_undo,
            "table": str(review.table),
        }

    def _tile(self, answer: Answer) -> dict[str, Any]:
        return {**answer._asdict(), "name": str(self.review.paths[answer.picture])}

    def _known(self, picture: Any) -> int:
        """The number of a picture; ValueError if there is none such."""
        if type(picture) is not int or not 0 <= picture < len(self.review.paths):
            raise ValueError(f"there is no picture {picture!r}")
        return picture

    # ---------------------------------------------------------------- files

    def thumbnail(self, request: Request) -> Response:
        data = self.review.thumbnails[self._known(request.path_params["picture"])]
        return Response(data, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=86400, immutable"})

    def picture(self, request: Request) -> Response:
        path, file = self.review.paths[self._known(request.path_params["picture"])], io.BytesIO()
        read_within(path, _LARGE, checked_range(self.review.start.value_range)).save(file, "JPEG", quality=88)
        return Response(file.getvalue(), media_type="image/jpeg", headers={"Cache-Control": "no-cache"})

    def table(self, request: Request) -> Response:
        with self.lock:
            text = self.review.table_text()
        return Response(text, media_type="text/csv", headers={"Content-Disposition": "attachment; filename=labels.csv"})

    def model(self, request: Request) -> Response:
        folder = TemporaryDirectory(prefix="fewshot-review-")
        path = Path(folder.name, "reviewed.safetensors")
        self.review.classifier.save(path)
        return FileResponse(path, filename=path.name, background=BackgroundTask(folder.cleanup))


def _said(request: Request, error: Exception) -> Response:
    """What went wrong, as a sentence for the user."""
    return PlainTextResponse(str(error), 400)


def _asset(address: str, name: str, media_type: str) -> Route:
    text = (files(__name__) / name).read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
    return Route(address, lambda request: Response(text, media_type=media_type, headers=headers))
