"""Servers on 127.0.0.1 for the tests of checkpoints: one that misbehaves on request, one that acts as a model hub."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


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


def send_and_drop(handler: BaseHTTPRequestHandler, body: bytes, after: int, ranges: bool = True) -> None:
    """Send ``after`` bytes of what is asked for, then drop the connection."""
    asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", "")) if ranges else None
    start = int(asked[1]) if asked else 0
    part = {"Content_Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if asked else {}
    send(handler, body[start : start + after], 206 if asked else 200, length=len(body) - start, **part)


class Hub:
    """The routes of a model hub that ``snapshot_download`` and ``push_to_hub`` use, over files in memory."""

    def __init__(self) -> None:
        #: repository -> commits, oldest first; each commit has all its files
        self.commits: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.tags: dict[tuple[str, str], str] = {}

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
        if revision == "main" and history:
            return history[-1]
        sha = self.tags.get((repo, revision), revision)
        return next((commit for commit in history if commit[0] == sha), None)

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path)
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        if path == "/api/repos/create":
            wanted = json.loads(body)
            repo = f"{wanted['organization']}/{wanted['name']}"
            self.commits.setdefault(repo, [])
            return self._json(handler, {"url": f"http://{handler.headers['Host']}/{repo}", "id": repo})
        if path == "/api/validate-yaml":
            return self._json(handler, {"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit|revision|tree)/([^/]+)", path):
            return self._api(handler, *match.groups(), body)
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
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            return self._json(handler, {"files": modes})
        if verb == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            sha = self.commit(
                repo,
                {
                    line["value"]["path"]: base64.b64decode(line["value"]["content"])
                    for line in lines
                    if line["key"] == "file"
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
