"""A store that fails for a moment: a proxy before the S3 server that fails when told to, and forwards the rest."""

from __future__ import annotations

import http.client
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from pipeline.storage.s3 import Objects
from tests.pipeline.s3 import KEY, REGION, SECRET, S3Server

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
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._http.shutdown()
        self._http.server_close()

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
