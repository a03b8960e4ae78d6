"""A real S3 API on this machine (moto), with one bucket, a record of every request and replies that fail on demand."""

from __future__ import annotations

import itertools
from collections import Counter
from types import TracebackType
from typing import Any, NamedTuple

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
