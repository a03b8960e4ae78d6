"""A real S3 API on this machine (moto), with one bucket, a record of every request and replies that fail on demand."""

from __future__ import annotations

import hashlib
import http.client
import itertools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import boto3
import pytest
from moto.server import ThreadedMotoServer

from pipeline.storage.s3 import Objects

_COUNT = itertools.count()  # all servers of a process share their buckets, so each gets one of its own
KEY, SECRET, TOKEN, REGION = "AKIADISTINCTKEY00001", "distinct-secret-XyZ12345", "distinct-session-T0k3n", "us-east-1"


class Request(NamedTuple):
    """One request as the server saw it; ``path`` is decoded and without the query."""

    method: str
    path: str
    status: int
    kind: str  # the method, or LIST


class S3Server:
    """Use it as a context manager. ``uri("a/b")`` is s3://<its bucket>/a/b."""

    def __init__(self, bucket: str = "videos") -> None:
        self.bucket = f"{bucket}-{next(_COUNT)}"
        self.requests: list[Request] = []
        self._failures: dict[tuple[str, str], tuple[int, str]] = {}

    def __enter__(self) -> S3Server:
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        wsgi: Any = self._server._server
        self._app, wsgi.app = wsgi.app, self._answer
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        self.client = boto3.client(
            "s3", endpoint_url=self.url, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name=REGION
        )
        self.client.create_bucket(Bucket=self.bucket)
        self.requests.clear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self._server.stop()

    def renew(self) -> S3Server:
        """Go on with an empty bucket and without failures."""
        self.bucket = f"{self.bucket.rpartition('-')[0]}-{next(_COUNT)}"
        self._failures.clear()
        self.client.create_bucket(Bucket=self.bucket)
        self.requests.clear()
        return self

    def environment(self) -> dict[str, str]:
        """Return the variables that lead to this server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_SESSION_TOKEN": TOKEN,
            "AWS_REGION": REGION,
        }

    def reach(self, patch: pytest.MonkeyPatch) -> None:
        """Let this process and its children reach the server by the environment."""
        for name, value in self.environment().items():
            patch.setenv(name, value)

    def objects(self) -> Objects:
        return Objects(endpoint_url=self.url, region_name=REGION, aws_access_key_id=KEY, aws_secret_access_key=SECRET)

    def uri(self, key: str = "") -> str:
        return f"s3://{self.bucket}/{key}"

    def upload(self, key: str, data: bytes = b"x") -> str:
        """Put an object, unrecorded; returns its URI."""
        self.client.put_object(Bucket=self.bucket, Key=key, Body=data)
        self.requests.clear()
        return self.uri(key)

    def fail(self, method: str, key: str, status: int, code: str = "AccessDenied") -> None:
        """Answer ``method`` (of this bucket's ``key``; "" for the bucket itself) with an error from now on.

        A key that ends with * stands for all keys that begin so.
        """
        self._failures[method, f"/{self.bucket}/{key}" if key else f"/{self.bucket}"] = (status, code)

    def counts(self) -> dict[str, int]:
        """Count requests by kind: GET, HEAD, PUT, LIST and so on."""
        return dict(Counter(request.kind for request in self.requests))

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"].encode("latin-1").decode("utf-8", "replace")
        kind = "LIST" if "list-type=" in environ.get("QUERY_STRING", "") else method

        def start(status: str, headers: Any, *more: Any) -> Any:
            self.requests.append(Request(method, path, int(status[:3]), kind))
            return start_response(status, headers, *more)

        failure = next((f for (m, p), f in self._failures.items() if m == method and _names(p, path)), None)
        if failure is None:
            return self._app(environ, start)
        status, code = failure
        start(f"{status} Failed", [("Content-Type", "application/xml")])
        body = f"<Error><Code>{code}</Code><Message>told to fail</Message></Error>"
        return [b"" if method == "HEAD" else body.encode()]


def _names(pattern: str, path: str) -> bool:
    return path.startswith(pattern[:-1]) if pattern.endswith("*") else path.rstrip("/") == pattern


_OWN_HEADERS = {"connection", "date", "expect", "server", "transfer-encoding"}  # of one connection, not of the request


ALWAYS = 1000  # times: of every object


@dataclass
class Fault:
    """What happens to requests of ``method`` for one object whose path has ``part``, the next ``times`` times.

    An object that meets a fault meets no other one. ``paths`` are those of the requests that failed.

    ``kind`` is a status to answer with, "lost" (the store does it, and the reply gets lost), "cut" (the connection ends
    in the middle of the body) or "stall" (nothing more is read, until the proxy ends).
    """

    method: str
    part: str
    kind: int | str
    times: int
    paths: list[str] = field(default_factory=list)
    first_at: float = 0.0  # when the first one failed, by the monotonic clock

    def takes(self, method: str, path: str) -> bool:
        mine = path in self.paths if self.paths and self.times < ALWAYS else True
        return mine and len(self.paths) < self.times and self.method == method and self.part in path


@contextmanager
def serving(server: HTTPServer) -> Iterator[str]:
    """Serve in a thread until the block ends, and give the server's URL."""
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()  # it ends as soon
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class FlakyProxy:
    """Use it as a context manager around a running server; ``url`` is what an endpoint is set to."""

    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.expired = ""  # the session token that is good no more
        self.away: dict[str, int | str] = {}  # part of a path -> what all requests for such paths meet: an outage
        self.n_away = 0  # the requests that met it, without those for the notes and records of runs
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self.stalled, self._ended = threading.Event(), threading.Event()

    def __enter__(self) -> FlakyProxy:
        http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        http.daemon_threads = True
        self._stack = ExitStack()
        self.url = self._stack.enter_context(serving(http))
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._stack.close()

    def fail(self, method: str, part: str, kind: int | str, times: int = 1) -> Fault:
        self._faults.append(Fault(method, part, kind, times))
        return self._faults[-1]

    def environment(self) -> dict[str, str]:
        """Return the variables that lead here."""
        return self.server.environment() | {"AWS_ENDPOINT_URL": self.url}

    def objects(self, patience: float = 1.0) -> Objects:
        keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
        return Objects(patience=patience, endpoint_url=self.url, region_name=REGION, **keys)

    def fault_for(self, method: str, path: str) -> int | str | None:
        """Return what is to happen to the request that just came, if anything."""
        path = unquote(path)
        if (kind := next((kind for part, kind in self.away.items() if part in path), None)) is not None:
            self.n_away += "/runs/" not in path
            return kind
        with self._lock:
            met = [fault for fault in self._faults if (fault.method, path) in {(method, p) for p in fault.paths}]
            for fault in met or self._faults:
                if fault.takes(method, path):
                    fault.first_at = fault.first_at or time.monotonic()
                    fault.paths.append(path)
                    return fault.kind
        return None

    def stall(self) -> None:
        self.stalled.set()
        self._ended.wait()


def _handler(proxy: FlakyProxy) -> type[BaseHTTPRequestHandler]:  # noqa: C901 - its methods are counted as one
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            kind = proxy.fault_for(self.command, self.path)
            length = int(self.headers.get("Content-Length") or 0)
            if kind in ("cut", "stall"):
                self.rfile.read(length // 2)
                if kind == "stall":
                    proxy.stall()
                self.close_connection = True
                return
            body = self.rfile.read(length)
            if proxy.expired and self.headers.get("X-Amz-Security-Token") == proxy.expired:
                self._refuse(400, "ExpiredToken", "The provided token has expired.")
                return
            if isinstance(kind, int):
                self._refuse(kind, f"Told{kind}", "told to fail")
                return
            status, headers, answer = self._run_forward(body)
            if kind == "lost":
                self.close_connection = True
                return
            self._answer(status, headers, answer)

        def _refuse(self, status: int, code: str, message: str) -> None:
            text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            self._answer(status, [("Content-Length", str(len(text)))], text)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815 - names of the base class

        def _run_forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection(urlsplit(proxy.server.url).netloc, timeout=60)
            kept = {name: value for name, value in self.headers.items() if name.lower() not in _OWN_HEADERS}
            connection.request(self.command, self.path, body, kept)
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            return answer.status, answer.getheaders(), data

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response(status)
            lengths = [value for name, value in headers if name.lower() == "content-length"]
            for name, value in headers:
                if name.lower() not in {*_OWN_HEADERS, "content-length"}:
                    self.send_header(name, value)
            self.send_header("Content-Length", lengths[0] if self.command == "HEAD" and lengths else str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler


REPO = "someone/clips"
COMMIT = "c" * 40
_API = re.compile(rf"/api/(?:datasets|models)/{REPO}(?:/(tree|revision|paths-info)/[^/]+(?:/(.*))?)?")
_FILE = re.compile(rf"/(?:datasets/)?{REPO}/resolve/[^/]+/(.*)")


def reach_hub(patch: pytest.MonkeyPatch, url: str, token: str = "") -> None:
    """Let huggingface_hub of this process ask the hub at an address, with this token."""
    from huggingface_hub import constants  # noqa: PLC0415 - loads slowly
    from huggingface_hub.hf_file_system import HfFileSystem  # noqa: PLC0415

    patch.setenv("HF_TOKEN", token)
    for name, value in {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        "HF_TOKEN_PATH": "/no/token",
        "HF_HUB_OFFLINE": False,
    }.items():
        patch.setattr(constants, name, value)
    HfFileSystem.clear_instance_cache()


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
        server = _Server(("127.0.0.1", 0), _Handler)
        server.hub = self
        self._stack = ExitStack()
        self.url = self._stack.enter_context(serving(server))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def reach(self, patch: pytest.MonkeyPatch) -> None:
        """Let huggingface_hub of this process ask this hub, without a token."""
        reach_hub(patch, self.url)

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


Answer = tuple[int, Iterable[tuple[str, str]], bytes | Iterator[bytes]]  # status, headers, body


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], Answer]) -> Iterator[str]:
    """Serve what ``answer`` says of each request, whatever its method; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, headers, body = answer(self)
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):  # the client has hung up
                for part in [body] if isinstance(body, bytes) else body:
                    self.wfile.write(part)

        do_HEAD = do_PUT = do_POST = do_GET  # noqa: N815

        def log_message(self, *arguments: Any) -> None:
            """Print nothing."""

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url
