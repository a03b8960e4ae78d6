"""What a request passes before vLLM sees it: an app of our own stands for vLLM's, everything else is real."""

import asyncio
import json
import os
import signal
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from pipeline.errors import UsageError
from pipeline.serve import CONFIG, LIMITS
from pipeline.serve.config import KEY
from pipeline.serve.gate import VIDEOS, RequestGate
from pipeline.serve.prompts import ServedCache, get_cached_prompts
from tests.builders.answers import tiny_cache


class Server:
    """A gate before an app that waits until it is told to answer, of a server of ``cache``, or of live pruning.

    The app raises ``error`` where there is one.
    """

    def __init__(self, cache=None, error=None, **limits):
        self.seen, self.go, self.raises = [], asyncio.Event(), error
        self.about_videos, self.statuses = True, []
        limits = {"needs_key": False, "max_request_bytes": 2**20, "shutdown_timeout": 30.0, **limits}
        served = {CONFIG: json.loads(json.dumps(asdict(ServedCache(str(cache), "tiny"))))} if cache else {}
        self.state = SimpleNamespace(
            vllm_config=SimpleNamespace(additional_config={**served, LIMITS: limits}),
            openai_serving_models=SimpleNamespace(base_model_paths=[SimpleNamespace(name="m", model_path="/a/m")]),
            server=SimpleNamespace(should_exit=False, force_exit=False),
        )
        self.gate = RequestGate(self.app)

    #: As vLLM has it where its engine ended the request.
    error = b'{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}'

    async def app(self, scope, receive, send):
        if scope["type"] == "lifespan":
            return
        if self.raises:
            raise self.raises
        if scope["path"] not in ("/health", "/ping"):
            self.seen.append((await receive())["body"])
            VIDEOS.get()[:] = ["a=tokens/x.parquet:0:blake2b:1"] if self.about_videos else []
            await self.go.wait()
        status = self.statuses.pop(0) if self.statuses else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": self.error if status == 500 else b"answer"})

    async def ended(self):
        """Wait until the server may end."""
        async with asyncio.timeout(60):
            while not self.state.server.should_exit:
                await asyncio.sleep(0.01)

    async def ask(self, path="/v1/chat/completions", body=b"{}", key=None, kind="http"):
        """(status, headers, body)."""
        sent, parts = [], [body[i : i + 65536] for i in range(0, len(body), 65536)] or [b""]

        async def receive():
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message):
            sent.append(message)

        headers = [] if key is None else [(b"authorization", key.encode())]
        await self.gate({"type": kind, "method": "POST", "path": path, "headers": headers}, receive, send)
        if kind == "websocket":
            return sent
        return sent[0]["status"], dict(sent[0]["headers"]), b"".join(m.get("body", b"") for m in sent)


@pytest.fixture
def cache(tmp_path):
    tiny_cache(tmp_path / "c", ("a",))
    yield tmp_path / "c"
    get_cached_prompts.cache_clear()


def with_server(cache, use, **settings):
    async def main():
        server = Server(cache, **settings)
        await server.gate({"type": "lifespan", "app": SimpleNamespace(state=server.state)}, None, None)
        return await use(server)

    return asyncio.run(main())


@pytest.mark.parametrize("live", [False, True])
def test_a_large_body_is_refused_before_anything_looks_at_it_and_nobody_is_told_the_models_folder(cache, live):
    async def use(server):
        server.go.set()
        answers = await server.ask(body=b"x" * 5_000_000), await server.ask(body=b"x" * 2**20)
        return *answers, server.seen, server.state.openai_serving_models.base_model_paths[0].model_path

    large, fits, seen, path = with_server(None if live else cache, use)
    assert live or fits[1][b"x-cached-videos"] == b"a=tokens/x.parquet:0:blake2b:1"  # the rows it was made from
    assert large[0] == 413 and b"1,048,576 bytes" in large[2] and fits[0] == 200
    assert list(map(len, seen)) == [2**20] and path == "m"


def test_the_key_is_asked_for_whatever_the_route(cache, monkeypatch):
    async def use(server):
        server.go.set()
        found = {}
        for path in ("/v1/chat/completions", "/invocations", "/tokenize", "/metrics", "/", "/health/x"):
            keys = (None, "bearer other", "Bearer secre", "Basic secret", "bearer secret", "BEARER secret")
            found[path] = [(await server.ask(path, key=key))[0] for key in keys]
        opened = [(await server.ask(path))[0] for path in ("/health", "/ping")]
        return found, opened, await server.ask("/v1/realtime", kind="websocket"), server.seen

    monkeypatch.setenv(KEY, "secret")
    found, opened, websocket, seen = with_server(cache, use)
    assert set(map(tuple, found.values())) == {(401, 401, 401, 401, 200, 200)} and len(seen) == 2 * len(found)
    assert opened == [200, 200] and websocket == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize("key", [None, " \n"])
def test_a_server_that_needs_a_key_does_not_start_without_one(cache, monkeypatch, key):
    """A printed command may run where the variable is not set."""
    monkeypatch.delenv(KEY, raising=False)
    if key is not None:
        monkeypatch.setenv(KEY, key)
    for served in (cache, None):
        with pytest.raises(UsageError, match=f"it has no key. Set {KEY}"):
            with_server(served, Server.ended, needs_key=True)


@pytest.mark.parametrize(
    ("error", "statuses", "about_videos", "answered", "tries"),
    [
        (Server.error, [500], True, 200, 2),
        (Server.error, [500, 500], True, 500, 2),
        (Server.error, [500], False, 500, 1),
        (Server.error, [404], True, 404, 1),
        (b'{"error":{"message":"","type":"InternalServerError"}}', [500], True, 500, 1),  # as of top_k=10**30
    ],
)
def test_a_request_whose_rows_the_engine_let_go_of_is_asked_once_again(
    cache, error, statuses, about_videos, answered, tries
):
    async def use(server):
        server.go.set()
        server.error, server.about_videos, server.statuses = error, about_videos, list(statuses)
        return (await server.ask(body=b"{1}"))[0], server.seen

    assert with_server(cache, use) == (answered, [b"{1}"] * tries)


async def ask_and_stop(server):
    """Start a request, and send SIGTERM while the app has it."""
    running = asyncio.create_task(server.ask())
    while not server.seen:
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    return running


def test_sigterm_lets_requests_end_and_takes_no_other(cache):
    async def use(server):
        running = await ask_and_stop(server)
        while server.gate._draining is None:
            await asyncio.sleep(0.01)
        refused, health, still = await server.ask(), await server.ask("/health"), server.state.server.should_exit
        server.go.set()
        answered = await running
        await server.ended()
        return refused, health, still, answered, server.state.server

    refused, health, still, answered, server = with_server(cache, use)
    assert refused[0] == 503 and refused[1][b"retry-after"] == b"10" and health[0] == 200
    assert not still and answered[0] == 200
    assert (server.should_exit, server.force_exit) == (True, False)


def test_requests_that_do_not_end_are_cut_after_the_timeout(cache):
    async def use(server):
        running = await ask_and_stop(server)
        await server.ended()
        running.cancel()
        return server.state.server

    assert with_server(cache, use, shutdown_timeout=0.1).force_exit


def test_a_video_that_vllm_cannot_read_is_the_clients_fault():
    """By the errors of vLLM and aiohttp, which vLLM's server answers with 500."""
    aiohttp = pytest.importorskip("aiohttp")
    files = "Cannot load local files without `--allowed-local-media-path`."
    for error, reason in (
        (RuntimeError(files), "this server reads no files: send the video as a data URL"),
        (FileNotFoundError(2, "No such file", "/a/b.mp4"), "the server has no such file, or may not read it"),
        (aiohttp.ClientConnectionError("refused"), "the server cannot fetch the video: refused"),
    ):
        status, _, body = with_server(None, Server.ask, error=error)
        assert status == 400 and json.loads(body)["error"]["message"] == reason
    with pytest.raises(RuntimeError, match="other"):
        with_server(None, Server.ask, error=RuntimeError("other"))
