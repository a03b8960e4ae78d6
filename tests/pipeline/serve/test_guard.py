"""The key is asked for whatever the route."""

import asyncio

import pytest

from pipeline.serve.guard import KEY, KeyGuard


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(KEY, "secret")


def answered(scope) -> list[dict]:
    """What a client is sent; by an app that says 200 to everything."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(message):
        sent.append(message)

    asyncio.run(KeyGuard(app)(scope, None, send))
    return sent


def status(path, key=None, kind="http"):
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    return answered({"type": kind, "path": path, "headers": headers})[0].get("status")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations", "/tokenize", "/metrics", "/", "/health/x"])
def test_a_stranger_gets_nowhere(path):
    assert status(path) == status(path, "other") == status(path, "secre") == 401
    assert status(path, "secret") == 200


@pytest.mark.parametrize("scheme", ["bearer", "Bearer", "BEARER"])
def test_the_scheme_is_read_in_any_case(scheme):
    headers = [(b"authorization", f"{scheme} secret".encode())]
    assert answered({"type": "http", "path": "/x", "headers": headers})[0]["status"] == 200
    headers = [(b"authorization", b"Basic secret")]
    assert answered({"type": "http", "path": "/x", "headers": headers})[0]["status"] == 401


def test_health_is_for_everybody():
    assert status("/health") == status("/ping") == status("/ready") == 200


def test_a_websocket_is_closed():
    assert answered({"type": "websocket", "path": "/v1/realtime", "headers": []}) == [
        {"type": "websocket.close", "code": 1008}
    ]


def test_without_a_key_nothing_is_asked(monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    assert status("/invocations") == 200
