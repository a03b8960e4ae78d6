"""What every request passes before vLLM sees it: whether the server takes it, its key and size, and its line of log."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from pipeline.serve.config import FIRST
from pipeline.serve.guard import App, KeyGuard, Message, Receive, Scope, Send, reply
from pipeline.serve.metrics import CacheMetrics
from pipeline.serve.prompts import CachedPrompts, ServedCache, prompts_of

RETRY_AFTER_S = 10
_SKIPPED = 16  # of a body that is too large, up to so many times the limit is read, so that the client gets the error
_HEADER = b"x-cached-videos"
_ENDED = b'"Internal server error"'  # what vLLM says of a request that its engine ended, as it does without its rows


@dataclass
class Request:
    """One request as its log line describes it; ``videos`` are the content names of the rows it is answered from."""

    method: str
    path: str
    id: str = field(default_factory=lambda: uuid4().hex)
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    videos: list[str] = field(default_factory=list)

    def line(self) -> bytes:
        """Return the request's log line as JSON."""
        about = {"method": self.method, "path": self.path, "status": self.status, "videos": self.videos}
        when = {"time": datetime.now(UTC).isoformat(), "seconds": round(time.monotonic() - self.started, 4)}
        return json.dumps({"event": "request", "id": self.id, **when, **about}).encode() + b"\n"


#: The request that this task works for.
REQUEST: ContextVar[Request | None] = ContextVar("request", default=None)


class RequestGate:
    """The outermost ASGI middleware: it admits requests, limits their size, logs them, and answers health checks.

    After SIGTERM it lets in no other, and the server ends once the last has its answer or ``shutdown_timeout`` is over.
    ``/health`` says whether the process lives and which store answers, ``/ready`` whether requests should be sent.
    """

    def __init__(self, app: App) -> None:
        self._app = KeyGuard(self._limited)
        self._inner = app
        self._state: Any = None  # of vLLM's own application
        self._prompts: CachedPrompts | None = None
        self._metrics: CacheMetrics | None = None
        self._busy = 0
        self._draining: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer and log one HTTP request, or pass it on; other ASGI events go straight on."""
        if scope["type"] == "lifespan":
            self._start(scope["app"].state)
        if scope["type"] != "http":
            await (self._inner if scope["type"] == "lifespan" else self._app)(scope, receive, send)
            return
        request = Request(scope["method"], scope["path"])
        REQUEST.set(request)
        self._count()
        self._busy += 1
        try:
            await self._answer(scope, receive, _recorded(request, send))
        finally:
            self._busy -= 1
            self._count()  # one of several processes answers /metrics for all
            if scope["path"] not in ("/health", "/ready", "/ping", "/metrics"):
                os.write(2, request.line())  # past vLLM's prefixes, so that every line is JSON

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer /health and /ready here, refuse other requests during shutdown, and pass the rest on."""
        draining = self._draining is not None
        if scope["path"] == "/health":
            await self._health(send)
        elif scope["path"] == "/ready":
            await reply(send, 503 if draining else 200, {"ready": not draining})
        elif draining:
            await _refuse(send, 503, "this server is shutting down; ask another one")
        else:
            await self._app(scope, receive, send)

    def _start(self, state: Any) -> None:
        """Open the caches, export their metrics, and take over SIGTERM. Raises as CachedPrompts."""
        self._state = state
        self._prompts = prompts_of(ServedCache.from_config(state.vllm_config))
        self._metrics = CacheMetrics(self._prompts.caches)
        for model in state.openai_serving_models.base_model_paths:
            model.model_path = model.name  # else /v1/models tells everybody where the model lies
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._drain)

    def _count(self) -> None:
        """Bring the metrics of the caches up to date."""
        if self._metrics is not None:
            self._metrics.update()

    def _drain(self) -> None:
        """Begin to end the server: no more requests are admitted."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        """Wait until the running requests have ended, or the shutdown timeout is over, and end the server."""
        assert self._prompts is not None
        deadline = time.monotonic() + self._prompts.served.shutdown_timeout
        while self._busy and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._state.server.force_exit = self._busy > 0
        self._state.server.should_exit = True

    async def _health(self, send: Send) -> None:
        """Send the state of each cache's store, and whether the process lives."""
        caches = {} if self._prompts is None else self._prompts.caches
        stores = {name or FIRST: "away" if videos.away else "ok" for name, videos in caches.items()}
        try:
            await self._state.engine_client.check_health()
            status, engine = 200, "ok"
        except Exception:  # noqa: BLE001 - whatever the engine says of itself
            status, engine = 503, "dead"
        await reply(send, status, {"engine": engine, "stores": stores, "draining": self._draining is not None})

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request's body, refuse one that is too large before anything parses it, and pass others to vLLM."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        most = self._prompts.served.max_request_bytes if self._prompts is not None else 0
        body, size, more = [], 0, True
        while more and size <= _SKIPPED * most:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message.get("body", b""))
            body += [message.get("body", b"")] if size <= most else []
            more = message.get("more_body", False)
        if size > most:
            said = f"a request has at most {most:,} bytes here (--max-request-bytes)"
            await _refuse(send, 413, said, [(b"connection", b"close")])
            return
        if await self._answered(scope, b"".join(body), receive, send):
            return
        # Workers found rows no longer that were there when the prompt was made: it is made again of those there are.
        assert self._prompts is not None
        await asyncio.gather(*(asyncio.to_thread(videos.refresh) for videos in self._prompts.caches.values()))
        if not await self._answered(scope, b"".join(body), receive, send):
            await _refuse(send, 503, "the rows of a video cannot be read now; ask again later")

    async def _answered(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> bool:
        """Return whether vLLM answered a request; nothing was sent where it failed on the rows of cached videos."""
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        failed, request = False, REQUEST.get()
        held: list[Message] = []  # the start of a 500, until its body says whether the engine ended the request
        if request is not None:
            request.videos = []

        async def replayed() -> Message:
            return whole.pop() if whole else await receive()

        async def watched(message: Message) -> None:
            nonlocal failed
            about_videos = request is not None and bool(request.videos)
            if message["type"] == "http.response.start" and message["status"] == 500 and about_videos:
                held.append(message)
                return
            failed = failed or (bool(held) and _ENDED in message.get("body", b""))
            if not failed:
                for late in (*held, message):
                    await send(late)
                held.clear()

        await self._inner(scope, replayed, watched)
        return not failed


def _recorded(request: Request, send: Send) -> Send:
    """Return a ``send`` that records the response's status, and adds the request's id and rows to the headers."""

    async def recording(message: Message) -> None:
        if message["type"] == "http.response.start":
            request.status = message["status"]
            more = [(b"x-request-id", request.id.encode())]
            more += [(_HEADER, name.encode()) for name in request.videos]
            more += [(b"retry-after", str(RETRY_AFTER_S).encode())] if request.status == 503 else []
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return recording


async def _refuse(send: Send, code: int, message: str, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Send an error in the form of OpenAI's API, with ``more`` headers."""
    kind = "server_error" if code >= 500 else "invalid_request"
    await reply(send, code, {"error": {"message": message, "type": kind, "code": code}}, more)
