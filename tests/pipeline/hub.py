"""A small server with the routes of a Hugging Face hub that datasets and models need, over a folder.

It is not the hub: it knows no accounts, no Xet storage and no history, and checks less of what it is sent.
"""

from __future__ import annotations

import base64
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
_API = re.compile(rf"/api/(?:datasets|models)/{REPO}(?:/(tree|revision|paths-info|preupload|commit)/[^/]+(?:/(.*))?)?")
_FILE = re.compile(rf"/(?:datasets/)?{REPO}/resolve/[^/]+/(.*)")
_BATCH = f"/datasets/{REPO}.git/info/lfs/objects/batch"
_LFS = ".parquet"  # how names of large files end


class HubServer:
    """Use it as a context manager: a hub with a dataset and a model REPO, whose files are those of ``folder``.

    Attributes:
        requests: the (method, route) of each request.
        downloads: the file of each GET of one.
        fail: (route, how many more such requests are answered before one fails with 500), or None.
        refuse: the status with which every request that writes is refused, or None.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[str, bytes] = {}  # uploaded large files by their sha256
        self.taken: list[str] = []  # the sha256 of each upload that was taken
        self.requests: list[tuple[str, str]] = []  # method, route
        self.downloads: list[str] = []
        self.commits: list[list[tuple[str, str]]] = []  # of each: (key, path)
        self.fail: tuple[str, int] | None = None
        self.refuse: int | None = None

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
        """Count the requests for a route: info, tree, paths-info, resolve, preupload, batch, upload or commit."""
        return sum(found == route for _, found in self.requests)

    def failing(self, route: str) -> bool:
        """Return whether this request fails, and count it."""
        if self.fail is None or self.fail[0] != route:
            return False
        self.fail = (route, self.fail[1] - 1)
        return self.fail[1] < 0

    def _entry(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.folder).as_posix()
        if path.is_dir():
            return {"type": "directory", "oid": "d" * 40, "size": 0, "path": name}
        digest = hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
        return {"type": "file", "oid": digest, "size": path.stat().st_size, "path": name}

    def answer(self, route: str, path: Path, body: dict[str, Any], recursive: bool) -> Any:
        """Return what a route of the API says, or None where it knows nothing."""
        if route == "info":
            files = [{"rfilename": self._entry(one)["path"]} for one in self.folder.rglob("*") if one.is_file()]
            facts = {"private": False, "tags": [], "downloads": 0, "likes": 0}
            return {"id": REPO, "sha": COMMIT, "siblings": files, **facts}
        if route == "paths-info":
            named = [self.folder / name for name in body.get("paths", ())]
            return [self._entry(one) for one in named if one.exists()]
        if route == "preupload":
            modes = {name: "lfs" if name.endswith(_LFS) else "regular" for name in (f["path"] for f in body["files"])}
            return {"files": [{"path": n, "uploadMode": mode, "shouldIgnore": False} for n, mode in modes.items()]}
        if not path.is_dir():
            return None
        return [self._entry(one) for one in sorted(path.rglob("*") if recursive else path.iterdir())]

    def take(self, data: bytes) -> dict[str, Any]:
        """Keep a large file."""
        self.taken.append(hashlib.sha256(data).hexdigest())
        self.objects[self.taken[-1]] = data
        return {}

    def batch(self, body: dict[str, Any]) -> dict[str, Any]:
        """Say where large files go that are not here yet."""
        objects = []
        for one in body["objects"]:
            there = one["oid"] in self.objects
            action = (
                {} if there else {"actions": {"upload": {"href": f"{self.url}/objects/{one['oid']}", "header": {}}}}
            )
            objects.append({**one, **action})
        return {"transfer": "basic", "objects": objects}

    def commit(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Write and delete files; all of a commit, or (a large file was never uploaded) nothing of it."""
        files: dict[str, bytes | None] = {}
        for line in lines[1:]:
            value, key = line["value"], line["key"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
                assert len(self.objects[value["oid"]]) == value["size"]
            else:
                assert key == "deletedFile" and (self.folder / value["path"]).is_file()
                files[value["path"]] = None
        for name, data in files.items():
            place = self.folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink() if data is None else place.write_bytes(data)
        self.commits.append([(line["key"], line["value"]["path"]) for line in lines[1:]])
        return {
            "commitUrl": f"{self.url}/datasets/{REPO}/commit/{len(self.commits):040d}",
            "commitOid": f"{len(self.commits):040d}",
            "success": True,
        }


class _Server(ThreadingHTTPServer):
    hub: HubServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        hub, where = self.server.hub, urlsplit(self.path)
        path = unquote(where.path)
        raw = self._body()
        if found := _FILE.fullmatch(path):
            hub.requests.append((self.command, "resolve"))
            if self.command == "GET":
                hub.downloads.append(found[1])
            self._file(hub.folder / found[1])
        elif path == "/api/repos/create":
            self._write("create", lambda: {"url": f"{hub.url}/datasets/{REPO}"}, exists=(hub.folder / "there").exists())
        elif path == "/api/validate-yaml":
            self._write("validate", lambda: {"errors": [], "warnings": []})
        elif path == _BATCH:
            self._write("batch", lambda: hub.batch(json.loads(raw)))
        elif path.startswith("/objects/"):
            self._write("upload", lambda: hub.take(raw))
        elif (found := _API.fullmatch(path)) and found[1] == "commit":
            self._write("commit", lambda: hub.commit([json.loads(line) for line in raw.splitlines()]))
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
    do_PUT = do_GET  # noqa: N815

    def _body(self) -> bytes:
        """Read what was sent, in one piece or in chunks."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _write(self, route: str, work: Any, *, exists: bool = False) -> None:
        """Answer a request that writes, unless such requests are refused or this one fails."""
        hub = self.server.hub
        hub.requests.append((self.command, route))
        if hub.refuse is not None:
            self._send(hub.refuse, b'{"error": "no"}')
        elif hub.failing(route):
            self._send(400, b'{"error": "lost"}')
        elif exists:
            self._send(409, json.dumps({"url": f"{hub.url}/datasets/{REPO}", "error": "exists"}).encode())
        else:
            self._send(200, json.dumps(work()).encode())

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
