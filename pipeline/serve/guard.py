"""Who may ask: vLLM's own check of the key leaves out some of its routes that answer and read."""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY = "VLLM_API_KEY"
OPEN = frozenset(("/health", "/ping"))  # what a load balancer asks

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class KeyGuard:
    """ASGI middleware: where a key is set, everything but OPEN is for those who send it."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ.get(KEY, '')}".encode()
        self._asks = bool(os.environ.get(KEY))

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Answers 401, or passes on."""
        if not self._asks or scope["type"] == "lifespan" or scope.get("path") in OPEN or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = b'{"error": {"message": "Unauthorized", "type": "invalid_request_error", "code": 401}}'
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _knows(self, scope: Scope) -> bool:
        sent = dict(scope.get("headers", ())).get(b"authorization", b"")
        return secrets.compare_digest(sent, self._wanted)
