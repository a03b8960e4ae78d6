"""What every request passes before vLLM sees it: its key, its size, and whether the server still takes requests."""

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
from pipeline.serve.prompts import ServedCache, find_prompts

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset(("/health", "/ping"))  # routes that load balancers ask without a key, also while the server ends
RETRY_AFTER_S = 10
# A body that is too large is read up to this many times the limit, so that the client gets the error.
_MAX_SKIPPED_BODIES = 16
_HEADER = b"x-cached-videos"
# The answer of vLLM to a request that its engine ended. The engine does so if it lacks the rows of a video.
_ENGINE_ENDED = b'"Internal server error"'
_NO_FILES = "local files without `--allowed-local-media-path`"  # the end of vLLM's error for a file:// URL

#: The content names of the videos that this task's answer is made from.
VIDEOS: ContextVar[list[str] | None] = ContextVar("videos", default=None)


@dataclass(frozen=True)
class RequestLimits:
    """The settings of the gate, which travel in vLLM's configuration.

    Attributes:
        needs_key: True if the server must not start without a key.
        max_request_bytes: the largest body of a request.
        shutdown_timeout: seconds in which requests may end after SIGTERM.
    """

    needs_key: bool
    max_request_bytes: int
    shutdown_timeout: float


class RequestGate:
    """The outermost ASGI middleware: it asks for the key on every route, limits bodies, and names an answer's videos.

    vLLM's own check of the key leaves out some routes that answer and read. After SIGTERM the gate lets in no other
    request, where vLLM would answer with an empty text, and the server ends once the last has its answer or
    ``shutdown_timeout`` is over.
    """

    def __init__(self, app: App) -> None:
        """Take the key from the environment; caches, if any, are opened when the server starts."""
        self._app = app
        self._key = os.environ.get(KEY, "").encode()
        self._state: Any = None  # of vLLM's own application
        self._limits = RequestLimits(needs_key=True, max_request_bytes=0, shutdown_timeout=0.0)  # until the start
        self._is_live = False
        self._busy = 0
        self._draining: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the app, or refuse it: 401 without the key, 503 while the server drains.

        A request is busy until it has its answer. No key is needed if the server has none. Paths of ``OPEN_PATHS``
        always pass, without a key and while draining, and are never busy. A websocket needs the key too, but it passes
        while draining and is never busy. The start of the server (lifespan) opens the caches, if any.
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
        """Open the caches, if any, take over SIGTERM, and hide the model's path from clients.

        Raises UsageError if the server needs a key and has none, and as CachedPrompts.
        """
        self._state = state
        values = state.vllm_config.additional_config
        self._limits, self._is_live = RequestLimits(**values[LIMITS]), CONFIG not in values
        if self._limits.needs_key and not self._key.strip():  # a printed command may run in another environment
            raise UsageError(MISSING_KEY)
        if not self._is_live:
            find_prompts(ServedCache.from_config(state.vllm_config))
        for model in state.openai_serving_models.base_model_paths:
            model.model_path = model.name  # else /v1/models tells everybody where the model lies
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._drain)

    def _drain(self) -> None:
        """Begin to end the server: no more requests are admitted."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        """Wait until the running requests have ended, or the shutdown timeout is over, and tell the server to end."""
        deadline = time.monotonic() + self._limits.shutdown_timeout
        while self._busy and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._state.server.force_exit = self._busy > 0
        self._state.server.should_exit = True

    def _has_key(self, scope: Scope) -> bool:
        """Return True if a request carries the right key, compared in constant time."""
        scheme, _, sent = dict(scope.get("headers", ())).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(sent, self._key)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a request's body and pass the request on to vLLM; refuse a large body (413) before anything parses it.

        The answer gets a header for each cached video that it is made from, and "retry-after" if it is a 503. A request
        that vLLM's engine ended, since it lacked a video's rows, is passed on a second time. Nothing is sent to a
        client that left.
        """
        most, parts, size, more = self._limits.max_request_bytes, [], 0, True
        while more and size <= _MAX_SKIPPED_BODIES * most:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message.get("body", b""))
            parts += [message.get("body", b"")] if size <= most else []
            more = message.get("more_body", False)
        if size > most:
            await _refuse(send, 413, f"a request has at most {most:,} bytes here (--max-request-bytes)")
            return
        body, videos = b"".join(parts), list[str]()
        VIDEOS.set(videos)

        async def send_named(message: Message) -> None:
            """Send a message of the answer, with the headers that the gate adds."""
            if message["type"] == "http.response.start":
                names = [(_HEADER, name.encode()) for name in videos]
                retry = [(b"retry-after", str(RETRY_AFTER_S).encode())] if message["status"] == 503 else []
                message = {**message, "headers": [*message.get("headers", ()), *names, *retry]}
            await send(message)

        try:
            if not await self._try_answer(scope, _replay_body(body, receive), send_named, videos):
                # The engine lacked rows that vLLM had noted as sent. vLLM knows that now, and sends the rows this time.
                await self._app(scope, _replay_body(body, receive), send_named)
        except Exception as error:
            reason = _explain_no_media(error) if self._is_live else None
            if reason is None:
                raise
            await _refuse(send, 400, reason)

    async def _try_answer(self, scope: Scope, receive: Receive, send: Send, videos: list[str]) -> bool:
        """Pass a request on to vLLM; return False if its engine ended the request, and then send nothing.

        Only a request about cached ``videos`` can be ended so; ``videos`` is filled while vLLM makes the prompt.
        """
        is_ended = False
        kept_messages = list[Message]()

        async def send_unless_ended(message: Message) -> None:
            """Send a message, but keep back the start of a 500 until its body says if the engine ended it."""
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
    """Return why vLLM could not read a video that a request names; None for an error that is no fault of the request.

    vLLM itself would answer 500 and log a traceback.
    """
    if isinstance(error, RuntimeError) and _NO_FILES in str(error):
        return "this server reads no files: send the video as a data URL"
    if isinstance(error, FileNotFoundError | IsADirectoryError | PermissionError):
        return "the server has no such file, or may not read it"
    if type(error).__module__.startswith("aiohttp."):
        return f"the server cannot fetch the video: {error}"
    return None


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that first gives a body that was read already, and then the client's further messages."""
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return whole.pop() if whole else await receive()

    return replay


async def _refuse(send: Send, status: int, message: str) -> None:
    """Send a whole response: an error in the form of OpenAI's API.

    A 413 closes the connection, and a 503 says when to try again.
    """
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close")] if status == 413 else []
    headers += [(b"retry-after", str(RETRY_AFTER_S).encode())] if status == 503 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
