"""A small server with the routes of a Hugging Face hub that datasets and models need, over a folder.

It is not the hub: it knows no accounts, no Xet storage and no history.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = "someone/clips"
COMMIT = "c" * 40
_API = re.compile(rf"/api/(?:datasets|models)/{REPO}(?:/(tree|revision|paths-info)/[^/]+(?:/(.*))?)?")
_FILE = re.compile(rf"/(?:datasets/)?{REPO}/resolve/[^/]+/(.*)")


class HubServer:
    """Use it as a context manager: a hub with a dataset and a model REPO, whose files are those of ``folder``.

    Attributes:
        requests: the (method, route) of each request.
        downloads: the file of each GET of one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[tuple[str, str]] = []  # method, route
        self.downloads: list[str] = []

    def __enter__(self) -> HubServer:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def count(self, route: str) -> int:
        """Count the requests for a route: info, tree, paths-info or resolve."""
        return sum(found == route for _, found in self.requests)

    def _make_entry(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.folder).as_posix()
        if path.is_dir():
            return {"type": "directory", "oid": "d" * 40, "size": 0, "path": name}
        digest = hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
        return {"type": "file", "oid": digest, "size": path.stat().st_size, "path": name}

    def answer(self, route: str, path: Path, body: dict[str, Any], recursive: bool) -> Any:
        """Return what a route of the API says, or None where it knows nothing."""
        if route == "info":
            files = [{"rfilename": self._make_entry(one)["path"]} for one in self.folder.rglob("*") if one.is_file()]
            facts = {"private": False, "tags": [], "downloads": 0, "likes": 0}
            return {"id": REPO, "sha": COMMIT, "siblings": files, **facts}
        if route == "paths-info":
            named = [self.folder / name for name in body.get("paths", ())]
            return [self._make_entry(one) for one in named if one.exists()]
        if not path.is_dir():
            return None
        return [self._make_entry(one) for one in sorted(path.rglob("*") if recursive else path.iterdir())]


class _Server(ThreadingHTTPServer):
    hub: HubServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        hub, where = self.server.hub, urlsplit(self.path)
        path = unquote(where.path)
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if found := _FILE.fullmatch(path):
            hub.requests.append((self.command, "resolve"))
            if self.command == "GET":
                hub.downloads.append(found[1])
            self._file(hub.folder / found[1])
        elif found := _API.fullmatch(path):
            route = {None: "info", "revision": "info"}.get(found[1], found[1])
            hub.requests.append((self.command, route))
            body = json.loads(raw) if raw[:1] == b"{" else {}
            told = hub.answer(route, hub.folder / (found[2] or ""), body, "recursive=true" in where.query.lower())
            self._send(
                404 if told is None else 200, json.dumps({"error": "not found"} if told is None else told).encode()
            )
        else:
            self._send(404, b"{}", "RepoNotFound")

    do_POST = do_GET  # noqa: N815
    do_HEAD = do_GET  # noqa: N815

    def _file(self, place: Path) -> None:
        if not place.is_file():
            return self._send(404, b"{}")
        data = place.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            return self._send(200, data)
        return self._send(206, data[int(wanted[1]) : int(wanted[2]) + 1])

    def _send(self, status: int, data: bytes, code: str = "EntryNotFound") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", hashlib.sha256(data).hexdigest())
        if status == 404:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""
