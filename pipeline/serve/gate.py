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
from typing import Any

from pipeline.serve.prompts import CachedPrompts, ServedCache, find_prompts

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY = "VLLM_API_KEY"
OPEN_PATHS = frozenset(("/health", "/ping"))  # routes that load balancers ask without a key, also while the server ends
RETRY_AFTER_S = 10
_MAX_SKIPPED_BODIES = (
    16  # of a body that is too large, up to so many times the limit is read, so that the client gets the error
)
_HEADER = b"x-cached-videos"
_ENGINE_ENDED = (
    b'"Internal server error"'  # what vLLM says of a request that its engine ended, as it does without its rows
)

#: The content names of the videos that this task's answer is made from.
VIDEOS: ContextVar[list[str] | None] = ContextVar("videos", default=None)


class RequestGate:
    """The outermost ASGI middleware: it asks for the key on every route, limits bodies, and names an answer's videos.

    vLLM's own check of the key leaves out some routes that answer and read. After SIGTERM the gate lets in no other
    request, where vLLM would answer with an empty text, and the server ends once the last has its answer or
    ``shutdown_timeout`` is over.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = os.environ.get(KEY, "").encode()
        self._state: Any = None  # of vLLM's own application
        self._prompts: CachedPrompts | None = None
        self._busy = 0
        self._draining: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request without the key (401) or while the server drains (503), else pass it on and count it.

        Paths of ``OPEN_PATHS`` need no key.
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
        """Open the caches, and take over SIGTERM. Raises as CachedPrompts."""
        self._state = state
        self._prompts = find_prompts(ServedCache.from_config(state.vllm_config))
        for model in state.openai_serving_models.base_model_paths:
            model.model_path = model.name  # else /v1/models tells everybody where the model lies
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._drain)

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

    def _has_key(self, scope: Scope) -> bool:
        """Return True if a request carries the right key, compared in constant time."""
        scheme, _, sent = dict(scope.get("headers", ())).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(sent, self._key)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request's body, refuse one that is too large before anything parses it, and pass others to vLLM."""
        most = self._prompts.served.max_request_bytes if self._prompts is not None else 0
        parts, size, more = [], 0, True
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

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = [(_HEADER, name.encode()) for name in videos]
                retry = [(b"retry-after", str(RETRY_AFTER_S).encode())] if message["status"] == 503 else []
                message = {**message, "headers": [*message.get("headers", ()), *names, *retry]}
            await send(message)

        if not await self._answered(scope, _replay_body(body, receive), named, videos):
            # The engine had let go of rows that vLLM took for sent: vLLM knows by now, and sends them this time.
            await self._app(scope, _replay_body(body, receive), named)

    async def _answered(self, scope: Scope, receive: Receive, send: Send, videos: list[str]) -> bool:
        """Return whether vLLM answered a request; nothing was sent where its engine ended one about cached videos."""
        failed = False
        held_messages: list[
            Message
        ] = []  # the start of a 500, until its body says whether the engine ended the request

        async def watched(message: Message) -> None:
            nonlocal failed
            if message["type"] == "http.response.start" and message["status"] == 500 and videos:
                held_messages.append(message)
                return
            failed = failed or (bool(held_messages) and _ENGINE_ENDED in message.get("body", b""))
            if not failed:
                for late in (*held_messages, message):
                    await send(late)
                held_messages.clear()

        await self._app(scope, receive, watched)
        return not failed


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives a body that was read already, and then what the client still says."""
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return whole.pop() if whole else await receive()

    return replayed


async def _refuse(send: Send, status: int, message: str) -> None:
    """Send an error in the form of OpenAI's API."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close")] if status == 413 else []
    headers += [(b"retry-after", str(RETRY_AFTER_S).encode())] if status == 503 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
