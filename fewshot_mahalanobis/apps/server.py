"""A session as a page in the browser and as a service for programs, over HTTP (the extra ``app``).

The page is that of the folder ``page/``; ``openapi.json`` beside it describes the interface. The page loads nothing
from elsewhere, and other sites can neither read nor change anything.
"""

from __future__ import annotations

import hmac
import html
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fewshot_mahalanobis import __version__
from fewshot_mahalanobis.apps.browser import open_page
from fewshot_mahalanobis.apps.session import Session
from fewshot_mahalanobis.extras import install_command

try:
    import python_multipart  # noqa: F401 (reads pictures that are sent; Starlette asks for it late)
    import uvicorn
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.concurrency import run_in_threadpool
    from starlette.datastructures import UploadFile
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as error:
    raise ImportError(f"the page needs Starlette, uvicorn and python-multipart: {install_command('app')}") from error

__all__ = ["Server"]

#: Most pictures and most bytes of one request, and most bytes of one that is JSON.
_MOST_FILES, _MOST_BYTES, _MOST_JSON = 100, 200 * 2**20, 2**20
#: Ports that are tried if none is given.
_PORTS = range(7860, 7960)
_SCRIPTS = ("pictures.js", "page.js", "machine.js", "learn.js", "correct.js")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TITLE = "Picture classifier"
_ELSEWHERE = (
    "This request is from another site. If it came through a proxy, let that pass on the host: in nginx, "
    "proxy_set_header X-Forwarded-Host $http_host;"
)
_WORDS = {
    "where": "",
    "kept": "What you teach is here until the command stops. Everybody who opens this page sees the same.",
    "promise": "Your pictures go to the program that serves this page, and nowhere else.",
}


class Server:
    """A server for a session, which listens at once and answers while :meth:`serve` runs.

    Parameters
    ----------
    session : Session
    host : str
        The address to listen at: "0.0.0.0" lets other machines of the network in, who need a token.
    port : int, optional
        Default: the first free one from 7860 on.
    token : str, optional
        What a request must carry. Default: a new one, where other machines are let in.

    Attributes
    ----------
    address : str
        Address of the page, with the token.

    Raises
    ------
    OSError
        The port is taken.
    """

    def __init__(
        self, session: Session, host: str = "127.0.0.1", port: int | None = None, token: str | None = None
    ) -> None:
        self._socket = _listening(host, port)
        name, port = f"[{host}]" if ":" in host else host, self._socket.getsockname()[1]
        if token is None and not _is_loopback(host):
            token = secrets.token_urlsafe()
        self.address = f"http://{name}:{port}/" + (f"?token={token}" if token else "")
        # A name of another site that leads to this machine is refused, so that the site cannot read the page.
        hosts = ["localhost", "127.0.0.1", name] if _is_loopback(host) else ["*"]
        guards = [Middleware(TrustedHostMiddleware, hosts), Middleware(_Guard, token, f"fewshot-{port}")]
        app = Starlette(
            routes=_Interface(session).routes(),
            middleware=[*guards, Middleware(GZipMiddleware, minimum_size=2000)],
            exception_handlers={**dict.fromkeys((ValueError, OSError, ImportError), _said), HTTPException: _refused},
        )
        self._stopped = False
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))

    def serve(self, *, browser: bool = False) -> None:
        """Answer until Ctrl+C, which raises KeyboardInterrupt, or :meth:`stop`.

        ``browser`` opens the page on this machine.
        """
        print(f"The page is at {self.address} and Ctrl+C stops it.", flush=True)
        if browser:
            open_page(self.address)
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


class _Guard:
    """Lets a request through if it is of no other site, carries the token and is not too large."""

    def __init__(self, app: ASGIApp, token: str | None, cookie: str) -> None:
        self._app, self._token, self._cookie = app, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = Request(scope)
        if problem := self._problem(request):
            return await problem(scope, receive, send)
        left = _MOST_JSON if request.headers.get("content-type") == "application/json" else _MOST_BYTES
        large = HTTPException(413, f"This is too much at once: send no more than {left // 2**20} MB.")

        async def limited() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise large
            return message

        await self._app(scope, limited, send)

    def _problem(self, request: Request) -> Response | None:
        """The answer to a request that is not let through."""
        if not _is_own(request):
            return JSONResponse({"error": _ELSEWHERE}, 403)
        if self._token is None:
            return None
        given = request.query_params.get("token")
        if request.url.path == "/" and given is not None and hmac.compare_digest(given.encode(), self._token.encode()):
            # Without the token in its address the page can be shown to others.
            response = RedirectResponse("./", 303)
            response.set_cookie(self._cookie, given, httponly=True, samesite="strict")
            return response
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        for one in (bearer, request.cookies.get(self._cookie, "")):
            if hmac.compare_digest(one.encode(), self._token.encode()):
                return None
        return JSONResponse({"error": "This needs the token that the command has printed."}, 401)


def _is_own(request: Request) -> bool:
    """Whether a request is of the page itself or of a program, not of another site that a browser shows."""
    if request.method in ("GET", "HEAD"):
        return True  # which other sites cannot read, and which change nothing
    fetch = request.headers.get("sec-fetch-site")
    if fetch is not None:
        return fetch in ("same-origin", "none")
    origin, host = request.headers.get("origin"), request.headers.get("host")
    return origin is None or origin.partition("://")[2] in (host, request.headers.get("x-forwarded-host"))


class _Interface:
    """What the addresses answer."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def routes(self) -> list[Route]:
        return [
            Route("/", self.page),
            *(_asset(name, "text/javascript") for name in _SCRIPTS),
            _asset("style.css", "text/css"),
            _asset("openapi.json", "application/json"),
            Route("/api/classify", self._with_files(self.classify), methods=["POST"]),
            Route("/api/examples", self._with_files(self.add), methods=["POST"]),
            Route("/api/examples", self._with_json(self.remove), methods=["DELETE"]),
            Route("/api/labels", self._with_json(self.label), methods=["POST"]),
            Route("/api/undo", self._with_json(self.undo), methods=["POST"]),
            Route("/api/skip", self._with_json(self.skip), methods=["POST"]),
            Route("/api/example", self._with_json(self.example), methods=["POST"]),
            Route("/api/state", self._with_json(lambda _: self.session.state())),
            Route("/api/curve", self._with_json(lambda _: self.session.curve())),
            Route("/api/heaps", self._with_json(self.heaps)),
            Route("/api/nearest/{picture:int}", self.nearest),
            Route("/api/thumbnail/{run}/{picture:int}", self.thumbnail),
            Route("/api/picture/{run}/{picture:int}", self.picture),
            Route("/api/model", self.model),
            Route("/api/model", self.open_model, methods=["PUT"]),
            Route("/api/page", self.answering_page),
            Route("/api/labels", self.labels),
        ]

    def _with_json(self, answer: Callable[[dict[str, Any]], Any]) -> Callable[[Request], Awaitable[Response]]:
        """A handler of requests that answers JSON with JSON."""

        async def handle(request: Request) -> Response:
            asked = {}
            if await request.body():
                if request.headers.get("content-type") != "application/json":
                    raise HTTPException(415, "Send JSON, as application/json.")
                asked = await request.json()
            if not isinstance(asked, dict):
                raise ValueError("Send a JSON object.")
            return await run_in_threadpool(lambda: JSONResponse(answer(asked)))

        return handle

    def _with_files(
        self, answer: Callable[[list[tuple[Path, str]], dict[str, str]], Any]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A handler of forms with pictures: it answers files and fields with JSON."""

        async def handle(request: Request) -> Response:
            async with request.form(max_files=_MOST_FILES, max_fields=20) as form:
                with TemporaryDirectory(prefix="fewshot-upload-") as folder:
                    given, fields = list[tuple[Path, str]](), dict[str, str]()
                    for name, value in form.multi_items():
                        if isinstance(value, UploadFile):
                            path = Path(folder, f"{len(given)}{_suffix(value.filename or '')}")
                            await run_in_threadpool(_write, path, value)
                            given.append((path, value.filename or f"picture {len(given) + 1}"))
                        else:
                            fields[name] = value
                    if not given:
                        raise ValueError('There is no picture in the form: send files as "pictures".')
                    return await run_in_threadpool(lambda: JSONResponse(answer(given, fields)))

        return handle

    # ---------------------------------------------------------------- for programs, and for the page

    def classify(self, given: list[tuple[Path, str]], fields: Mapping[str, str]) -> dict[str, Any]:
        answers = self.session.classify(given)
        return {
            "answers": [{"name": name, **answer._asdict()} for (_, name), answer in zip(given, answers, strict=True)]
        }

    def add(self, given: list[tuple[Path, str]], fields: Mapping[str, str]) -> dict[str, Any]:
        problems = self.session.add(given, fields.get("label"))
        return {"problems": problems, "state": self.session.state()}

    def remove(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.session.remove(_list_of(asked, "pictures"))
        return self.session.state()

    def label(self, asked: dict[str, Any]) -> dict[str, Any]:
        label, before = asked.get("label"), asked.get("before")
        if not isinstance(label, str | None) or not isinstance(before, dict | None):
            raise ValueError('"label" is a text or null, "before" an object.')
        seen = None if before is None else {int(number): was for number, was in before.items()}
        self.session.label(_list_of(asked, "pictures"), label, seen)
        return self.session.state()

    def undo(self, asked: dict[str, Any]) -> dict[str, Any]:
        pictures = self.session.undo()
        return {"pictures": pictures, "state": self.session.state()}

    def skip(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.session.pass_over(asked.get("picture"))  # type: ignore[arg-type]
        return self.session.state()

    def example(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.session.add_example()
        return self.session.state()

    def heaps(self, asked: dict[str, Any]) -> dict[str, Any]:
        version, heaps = self.session.heaps()
        return {"version": version, "heaps": heaps}

    def nearest(self, request: Request) -> Response:
        found = self.session.neighbours(request.path_params["picture"])
        nearest = [
            {"label": label, "distance": distance, "id": None if picture is None else picture.number}
            for label, distance, picture in found
        ]
        return JSONResponse({"nearest": nearest})

    # ---------------------------------------------------------------- files

    def page(self, request: Request) -> Response:
        head = _text("machine.html").replace("{{title}}", _TITLE)
        scripts = '<script src="machine.js" defer></script>\n'
        text = _text("learn.html").replace("{{head}}", head).replace("{{scripts}}", scripts)
        for place, words in {"title": _TITLE, "version": __version__, **_WORDS}.items():
            text = text.replace(f"{{{{{place}}}}}", html.escape(words))
        return Response(text, media_type="text/html", headers=_headers("no-cache"))

    def thumbnail(self, request: Request) -> Response:
        data = self.session.thumbnail(request.path_params["picture"])
        return Response(data, media_type="image/jpeg", headers=_headers("private, max-age=86400, immutable"))

    def picture(self, request: Request) -> Response:
        data = self.session.large(request.path_params["picture"])
        return Response(data, media_type="image/jpeg", headers=_headers("no-cache"))

    def labels(self, request: Request) -> Response:
        headers = {"Content-Disposition": "attachment; filename=labels.csv"}
        return Response(self.session.table_text(), media_type="text/csv", headers=headers)

    def model(self, request: Request) -> Response:
        return _written(self.session.save, "classifier.safetensors")

    def answering_page(self, request: Request) -> Response:
        title = request.query_params.get("title", _TITLE)
        return _written(lambda path: self.session.export_page(path, title), "page.zip")

    async def open_model(self, request: Request) -> Response:
        with TemporaryDirectory(prefix="fewshot-upload-") as folder:
            path = Path(folder, "model.safetensors")
            with path.open("wb") as file:
                async for part in request.stream():
                    file.write(part)
            await run_in_threadpool(self.session.open_model, path)
        return JSONResponse(await run_in_threadpool(self.session.state))


def _list_of(asked: Mapping[str, Any], name: str) -> list[Any]:
    found = asked.get(name)
    if not isinstance(found, list):
        raise ValueError(f'"{name}" is a list of numbers of pictures.')
    return found


def _written(write: Callable[[Path], None], name: str) -> Response:
    """A file that is written to be sent."""
    folder = TemporaryDirectory(prefix="fewshot-download-")
    path = Path(folder.name, name)
    write(path)
    return FileResponse(path, filename=name, background=BackgroundTask(folder.cleanup))


def _write(path: Path, sent: UploadFile) -> None:
    with path.open("wb") as file:
        while part := sent.file.read(2**20):
            file.write(part)


def _suffix(name: str) -> str:
    """The end of a file's name, which says what kind of picture it is."""
    suffix = Path(name).suffix
    return suffix if suffix[1:].isalnum() and len(suffix) < 10 and suffix.isascii() else ""


def _said(request: Request, error: Exception) -> Response:
    """What went wrong, as a sentence for the user."""
    return JSONResponse({"error": str(error)}, 400)


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


def _headers(cache: str) -> dict[str, str]:
    return {"Content-Security-Policy": _POLICY, "Cache-Control": cache, "X-Content-Type-Options": "nosniff"}


def _text(name: str) -> str:
    return (files("fewshot_mahalanobis") / "page" / name).read_text(encoding="utf-8")


def _asset(name: str, media_type: str) -> Route:
    text = _text(name)
    return Route(f"/{name}", lambda request: Response(text, media_type=media_type, headers=_headers("no-cache")))
