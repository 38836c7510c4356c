"""Servers on 127.0.0.1 for the tests of checkpoints: one that misbehaves on request, one that acts as a model hub."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import huggingface_hub.file_download
import huggingface_hub.utils
import pytest


def git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Server:
    """Answers each request with ``answer(handler)`` and remembers ``(method, path)`` of all of them."""

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.answer = answer
        self.requests: list[tuple[str, str]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                server.requests.append((self.command, self.path))
                server.answer(self)

            do_GET = do_HEAD = do_POST = do_PUT = handle_any

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def send(
    handler: BaseHTTPRequestHandler,
    body: bytes,
    status: int = 200,
    length: int | None = None,
    content_type: str = "application/octet-stream",
    **headers: str,
) -> None:
    """One answer; ``length`` announces another length than the body's."""
    handler.send_response(status)
    handler.send_header("Content-Type", content_type)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


def read_body(handler: BaseHTTPRequestHandler) -> bytes:
    if handler.headers.get("Transfer-Encoding") != "chunked":
        return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    chunks = []
    while size := int(handler.rfile.readline(), 16):
        chunks.append(handler.rfile.read(size))
        handler.rfile.readline()
    handler.rfile.readline()
    return b"".join(chunks)


def send_and_drop(handler: BaseHTTPRequestHandler, body: bytes, after: int, ranges: bool = True) -> None:
    """Send ``after`` bytes of what is asked for, then drop the connection."""
    asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", "")) if ranges else None
    start = int(asked[1]) if asked else 0
    part = {"Content_Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if asked else {}
    send(handler, body[start : start + after], 206 if asked else 200, length=len(body) - start, **part)


class Hub:
    """The routes of a model hub that ``snapshot_download`` and ``push_to_hub`` use, over files in memory."""

    server: Server

    def __init__(self, large_files: tuple[str, ...] = ()) -> None:
        #: files that are uploaded on their own, before the commit, as the hub asks for large ones
        self.large_files = large_files
        #: repository -> commits, oldest first; each commit has all its files
        self.commits: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.tags: dict[tuple[str, str], str] = {}
        #: what /api/repos/create was asked for, and the tokens of all requests
        self.created: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self._large: dict[str, bytes] = {}  # by SHA-256: uploaded, perhaps not yet in a commit

    def commit(self, repo: str, files: dict[str, bytes], tag: str | None = None) -> str:
        """Add a commit with these files to those of the commit before it; -> its id."""
        history = self.commits.setdefault(repo, [])
        files = {**(history[-1][1] if history else {}), **files}
        sha = hashlib.sha1(f"{repo}/{len(history)}".encode()).hexdigest()
        history.append((sha, files))
        if tag is not None:
            self.tags[repo, tag] = sha
        return sha

    def _at(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        history = self.commits.get(repo, [])
        if revision == "main":  # which a new repository has, without a file
            return history[-1] if history else ("0" * 40, {})
        sha = self.tags.get((repo, revision), revision)
        return next((commit for commit in history if commit[0] == sha), None)

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path)
        body = read_body(handler)
        self.tokens.add(handler.headers.get("Authorization"))
        if path == "/api/repos/create":
            wanted = json.loads(body)
            self.created.append(wanted)
            repo = f"{wanted['organization']}/{wanted['name']}"
            self.commits.setdefault(repo, [])
            return self._json(handler, {"url": f"http://{handler.headers['Host']}/{repo}", "id": repo})
        if path == "/api/validate-yaml":
            return self._json(handler, {"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit|revision|tree)/([^/]+)", path):
            return self._api(handler, *match.groups(), body)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            return self._api(handler, match[1], "revision", "main", body)
        if re.fullmatch(r"/[^/]+/[^/]+\.git/info/lfs/objects/batch", path):  # large files: where each goes
            asked = json.loads(body)["objects"]
            upload = {"href": f"http://{handler.headers['Host']}/large"}
            wanted = [
                {**entry, **({} if entry["oid"] in self._large else {"actions": {"upload": upload}})} for entry in asked
            ]
            return self._json(handler, {"transfer": "basic", "objects": wanted})
        if path == "/large" and handler.command == "PUT":
            self._large[hashlib.sha256(body).hexdigest()] = body
            return send(handler, b"")
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            commit = self._at(match[1], match[2])
            if commit is None or match[3] not in commit[1]:
                return self._json(handler, {"error": "no such file"}, 404, X_Error_Code="EntryNotFound")
            content = commit[1][match[3]]
            return send(handler, content, X_Repo_Commit=commit[0], ETag=f'"{git_blob_id(content)}"')
        return self._json(handler, {"error": f"no route {path}"}, 404)

    def _api(self, handler: BaseHTTPRequestHandler, repo: str, verb: str, revision: str, body: bytes) -> None:
        if repo not in self.commits:
            return self._json(handler, {"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        if verb == "preupload":
            files = json.loads(body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"] in self.large_files else "regular",
                    "shouldIgnore": False,
                }
                for file in files
            ]
            return self._json(handler, {"files": modes})
        if verb == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            contents = {
                "file": lambda value: base64.b64decode(value["content"]),
                "lfsFile": lambda value: self._large[value["oid"]],
            }
            sha = self.commit(
                repo,
                {
                    line["value"]["path"]: contents[line["key"]](line["value"])
                    for line in lines
                    if line["key"] in contents
                },
            )
            url = f"http://{handler.headers['Host']}/{repo}/commit/{sha}"
            return self._json(handler, {"commitUrl": url, "commitOid": sha, "success": True})
        commit = self._at(repo, revision)
        if commit is None:
            return self._json(handler, {"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
        sha, files = commit
        if verb == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": git_blob_id(content)}
                for name, content in files.items()
            ]
            return self._json(handler, entries)
        siblings = [{"rfilename": name} for name in files]
        return self._json(handler, {"id": repo, "modelId": repo, "sha": sha, "siblings": siblings, "tags": []})

    @staticmethod
    def _json(handler: BaseHTTPRequestHandler, answer: Any, status: int = 200, **headers: str) -> None:
        send(handler, json.dumps(answer).encode(), status, content_type="application/json", **headers)


def go_offline(monkeypatch: pytest.MonkeyPatch, offline: bool = True) -> None:
    """Let ``huggingface_hub`` make no connection, as HF_HUB_OFFLINE=1 at its import does, or make them again."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    # Clients before 1.0 ask no more once they have a session.
    getattr(huggingface_hub.utils, "reset_sessions", lambda: None)()


@contextmanager
def hub_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, cache: Path, large_files: tuple[str, ...] = ()
) -> Iterator[Hub]:
    """``huggingface_hub`` talks to a hub on 127.0.0.1 and keeps its cache in ``cache``."""
    hub, constants = Hub(large_files), huggingface_hub.constants
    with Server(hub) as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        for module in (constants, huggingface_hub.file_download):  # older clients have their own copy there
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        go_offline(monkeypatch, False)
        # A protocol of its own, which needs the real hub; older clients have none.
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
        hub.server = server
        yield hub
