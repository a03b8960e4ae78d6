"""The gate that every request passes before vLLM: it checks the key and the size, and ends the server."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pipeline.errors import UsageError
from pipeline.serve import CONFIG, LIMITS
from pipeline.serve.config import KEY, MISSING_KEY
from pipeline.serve.prompts import ServedCache, get_cached_prompts

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset(("/health", "/ping"))  # routes for load balancers: no key, open during the shutdown
RETRY_AFTER_S = 10
# A body that is too large is read up to this multiple of the limit, so that the client receives the error.
_MAX_SKIPPED_BODIES = 16
_HEADER = b"x-cached-videos"
# In vLLM's answer to a request that its engine ended, which it does if it lacks the rows of a video.
_ENGINE_ENDED = b'"Internal server error"'
_NO_FILES = "local files without `--allowed-local-media-path`"  # the end of vLLM's error for a file:// URL

#: The content names of the videos from which the answer to this task's request is made.
VIDEOS: ContextVar[list[str] | None] = ContextVar("videos", default=None)


@dataclass(frozen=True)
class RequestLimits:
    """The settings of the gate, which are passed in vLLM's configuration.

    Attributes:
        needs_key: True if the server must not start without a key.
        shutdown_timeout: the seconds that running requests have after SIGTERM.
    """

    needs_key: bool
    max_request_bytes: int
    shutdown_timeout: float


class RequestGate:
    """The outermost ASGI middleware: it requires the key, limits bodies, and names an answer's videos in its headers.

    After SIGTERM, it refuses new requests, and ends the server once the running requests have their answers or
    ``shutdown_timeout`` is over.
    """

    def __init__(self, app: App) -> None:
        """Read the key from the environment."""
        self._app = app
        self._key = os.environ.get(KEY, "").encode()
        self._state: Any = None  # the state of vLLM's application
        self._limits = RequestLimits(needs_key=True, max_request_bytes=0, shutdown_timeout=0.0)  # until the start
        self._is_live = False
        self._busy = 0
        self._draining: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the app, or refuse it: 401 without the key, 503 while the server shuts down.

        No key is required if the server has none. OPEN_PATHS always pass. A websocket needs the key (it is closed with
        1008 otherwise), but passes during the shutdown, which does not wait for it. The ASGI lifespan event starts the
        gate, and opens the caches, if any.
        """
        if scope["type"] == "lifespan":
            self._start(scope["app"].state)
            await self._app(scope, receive, send)
        elif scope.get("path") in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif self._key and not self._has_key(scope):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await _refuse(send, 401, "Unauthorized")
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._draining is not None:
            await _refuse(send, 503, "this server is shutting down; ask another one")
        else:
            self._busy += 1
            try:
                await self._answer(scope, receive, send)
            finally:
                self._busy -= 1

    def _start(self, state: Any) -> None:
        """Read the limits, open the caches, handle SIGTERM, and hide the model's path from clients.

        Raises:
            UsageError: the server needs a key and has none, or a cache does not fit the model.
            ModelError: the model of the caches cannot be used.
        """
        self._state = state
        values = state.vllm_config.additional_config
        self._limits = RequestLimits(**values[LIMITS])
        self._is_live = CONFIG not in values
        if self._limits.needs_key and not self._key.strip():  # a printed command may run where the variable is not set
            raise UsageError(MISSING_KEY)
        if not self._is_live:
            get_cached_prompts(ServedCache.from_config(state.vllm_config))
        for model in state.openai_serving_models.base_model_paths:
            model.model_path = model.name  # otherwise /v1/models would reveal the path of the model
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._begin_shutdown)

    def _begin_shutdown(self) -> None:
        """Begin the shutdown, in which new requests are refused; later calls do nothing."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        """Wait until no request is running or the shutdown timeout is over, then tell vLLM's server to exit."""
        deadline = time.monotonic() + self._limits.shutdown_timeout
        while self._busy and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._state.server.force_exit = self._busy > 0
        self._state.server.should_exit = True

    def _has_key(self, scope: Scope) -> bool:
        """Return True if the header is ``Authorization: Bearer KEY``."""
        scheme, _, client_key = dict(scope.get("headers", ())).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(client_key, self._key)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a request's body, and pass the request on to vLLM; refuse one that is too large (413).

        A body that is too large is first read to its end, or to _MAX_SKIPPED_BODIES times the limit. The answer gets a
        header for each cached video that it was made from, and "retry-after" if it is a 503. A request that vLLM's
        engine ended because it lacked a video's rows is passed on a second time. On a live server, a video that cannot
        be read gets a 400. If the client disconnects while it sends the body, nothing is sent.
        """
        max_bytes = self._limits.max_request_bytes
        parts = []
        size = 0
        has_more = True
        while has_more and size <= _MAX_SKIPPED_BODIES * max_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message.get("body", b""))
            parts += [message.get("body", b"")] if size <= max_bytes else []
            has_more = message.get("more_body", False)
        if size > max_bytes:
            await _refuse(send, 413, f"a request has at most {max_bytes:,} bytes here (--max-request-bytes)")
            return
        body = b"".join(parts)
        videos = list[str]()
        VIDEOS.set(videos)

        async def send_named(message: Message) -> None:
            """Send a message, with the headers that the gate adds."""
            if message["type"] == "http.response.start":
                names = [(_HEADER, name.encode()) for name in videos]
                retry = [(b"retry-after", str(RETRY_AFTER_S).encode())] if message["status"] == 503 else []
                message = {**message, "headers": [*message.get("headers", ()), *names, *retry]}
            await send(message)

        try:
            if not await self._try_answer(scope, _replay_body(body, receive), send_named, videos):
                # The engine lacked rows that vLLM had recorded as sent. vLLM knows that now, and sends them this time.
                await self._app(scope, _replay_body(body, receive), send_named)
        except Exception as error:
            reason = _explain_no_media(error) if self._is_live else None
            if reason is None:
                raise
            await _refuse(send, 400, reason)

    async def _try_answer(self, scope: Scope, receive: Receive, send: Send, videos: list[str]) -> bool:
        """Pass a request on to vLLM; return False, with nothing sent, if its engine ended the request.

        Only a request about cached videos can be ended this way. The start of a 500 is held back until its body shows
        whether it was.
        """
        is_ended = False
        kept_messages = list[Message]()

        async def send_unless_ended(message: Message) -> None:
            """Send a message, but keep back the start of a 500 until its body shows the cause."""
            nonlocal is_ended
            if message["type"] == "http.response.start" and message["status"] == 500 and videos:
                kept_messages.append(message)
                return
            is_ended = is_ended or (bool(kept_messages) and _ENGINE_ENDED in message.get("body", b""))
            if not is_ended:
                for part in (*kept_messages, message):
                    await send(part)
                kept_messages.clear()

        await self._app(scope, receive, send_unless_ended)
        return not is_ended


def _explain_no_media(error: Exception) -> str | None:
    """Return why a video that a request names cannot be read; None for errors that are not the request's fault.

    The reasons are a file that is not allowed, is missing or cannot be opened, and a URL that cannot be fetched.
    """
    if isinstance(error, RuntimeError) and _NO_FILES in str(error):
        return "this server reads no files: send the video as a data URL"
    if isinstance(error, FileNotFoundError | IsADirectoryError | PermissionError):
        return "the server has no such file, or may not read it"
    if type(error).__module__.startswith("aiohttp."):
        return f"the server cannot fetch the video: {error}"
    return None


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that returns ``body`` first, then the client's further messages."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


async def _refuse(send: Send, status: int, message: str) -> None:
    """Send a complete error response in the form of OpenAI's API.

    A 413 closes the connection, and a 503 has a "retry-after" header.
    """
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close")] if status == 413 else []
    headers += [(b"retry-after", str(RETRY_AFTER_S).encode())] if status == 503 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
