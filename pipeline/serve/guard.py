"""Who may ask: vLLM's own check of the key leaves out some of its routes that answer and read."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypedDict

KEY = "VLLM_API_KEY"
OPEN = frozenset(("/health", "/ping", "/ready"))  # routes that load balancers ask without a key


class Scope(TypedDict, total=False):
    """The ASGI description of a connection."""

    type: str
    method: str
    path: str
    headers: Iterable[tuple[bytes, bytes]]
    app: Any


class Message(TypedDict, total=False):
    """An ASGI event, received or sent."""

    type: str
    status: int
    headers: Iterable[tuple[bytes, bytes]]
    body: bytes
    more_body: bool
    code: int


Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class KeyGuard:
    """The ASGI middleware that answers requests without the API key with 401; routes in OPEN need none."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._wanted = os.environ.get(KEY, "").encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 to a request without the key, and pass others on."""
        if not self._wanted or scope["type"] == "lifespan" or scope.get("path") in OPEN or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = {"message": "Unauthorized", "type": "invalid_request_error", "code": 401}
            await reply(send, 401, {"error": error})

    def _knows(self, scope: Scope) -> bool:
        """Return whether a request carries the right key, compared in constant time."""
        scheme, _, sent = dict(scope.get("headers", ())).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(sent, self._wanted)


async def reply(send: Send, status: int, content: object, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Send a whole response of JSON, with ``more`` headers."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
