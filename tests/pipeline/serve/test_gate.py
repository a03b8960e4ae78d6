"""What a request passes before vLLM sees it: an app of our own stands for vLLM's, everything else is real."""

import asyncio
import json
import os
import signal
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest

from pipeline.serve import CONFIG
from pipeline.serve.gate import REQUEST, RequestGate
from pipeline.serve.guard import KEY
from pipeline.serve.links import CacheLink
from pipeline.serve.prompts import ServedCache, prompts_of
from tests.pipeline.asking import tiny_cache


class Server:
    """A gate before an app that waits until it is told to answer."""

    def __init__(self, cache, **limits):
        self.seen, self.go = [], asyncio.Event()
        self.about_videos, self.statuses = True, []
        self.served = ServedCache(str(cache), "tiny", **limits)
        engine = SimpleNamespace(check_health=self.healthy)
        self.state = SimpleNamespace(
            vllm_config=SimpleNamespace(
                ec_transfer_config=SimpleNamespace(
                    ec_connector_extra_config={CONFIG: json.loads(json.dumps(asdict(self.served)))}
                )
            ),
            openai_serving_models=SimpleNamespace(base_model_paths=[SimpleNamespace(name="m", model_path="/a/m")]),
            engine_client=engine,
            server=SimpleNamespace(should_exit=False, force_exit=False),
        )
        self.gate = RequestGate(self.app)

    #: As vLLM has it where its engine ended the request.
    error = b'{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}'

    async def healthy(self):
        """As an engine that lives."""

    async def app(self, scope, receive, send):
        if scope["type"] == "lifespan":
            return
        self.seen.append((await receive())["body"])
        REQUEST.get().videos = ["a=tokens/x.parquet:0:blake2b:1"] if self.about_videos else []
        await self.go.wait()
        status = self.statuses.pop(0) if self.statuses else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": self.error if status == 500 else b"answer"})

    async def start(self):
        await self.gate({"type": "lifespan", "app": SimpleNamespace(state=self.state)}, None, None)

    async def ready(self):
        """Whether requests should be sent."""
        return (await self.ask("/ready"))[0] == 200

    async def ended(self):
        """Wait until the server may end."""
        async with asyncio.timeout(60):
            while not self.state.server.should_exit:
                await asyncio.sleep(0.01)

    async def ask(self, path="/v1/chat/completions", body=b"{}", headers=()):
        """(status, headers, body)."""
        sent, parts = [], [body[i : i + 65536] for i in range(0, len(body), 65536)] or [b""]

        async def receive():
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
        await self.gate(scope, receive, send)
        return sent[0]["status"], dict(sent[0]["headers"]), b"".join(m.get("body", b"") for m in sent)


@pytest.fixture
def cache(tmp_path):
    tiny_cache(tmp_path / "c", ("a",))
    yield tmp_path / "c"
    prompts_of.cache_clear()


def with_server(cache, use, **limits):
    async def main():
        server = Server(cache, **limits)
        await server.start()
        return await use(server)

    return asyncio.run(main())


def test_an_answer_names_the_rows_it_was_made_from(cache, capfd):
    async def use(server):
        server.go.set()
        return await server.ask()

    status, headers, body = with_server(cache, use)
    assert (status, body) == (200, b"answer")
    assert headers[b"x-cached-videos"] == b"a=tokens/x.parquet:0:blake2b:1"
    (line,) = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert line["id"].encode() == headers[b"x-request-id"]
    assert (line["event"], line["path"], line["status"]) == ("request", "/v1/chat/completions", 200)
    assert line["videos"] == ["a=tokens/x.parquet:0:blake2b:1"]


def test_a_large_body_is_refused_before_anything_looks_at_it(cache, monkeypatch):
    async def use(server):
        server.go.set()
        large = await server.ask(body=b"x" * 5_000_000)
        fits = await server.ask(body=b"x" * 2**20)
        stranger = await server.ask(body=b"x" * 10, headers=[(b"authorization", b"bearer other")])
        return large, fits, stranger, server.seen

    monkeypatch.setenv(KEY, "")
    large, fits, _, seen = with_server(cache, use)
    assert large[0] == 413 and b"1,048,576 bytes" in large[2] and fits[0] == 200
    assert list(map(len, seen)) == [2**20, 10]
    monkeypatch.setenv(KEY, "secret")
    prompts_of.cache_clear()
    *_, stranger, seen = with_server(cache, use)
    assert stranger[0] == 401 and seen == []


@pytest.mark.parametrize(
    ("statuses", "about_videos", "answered", "tries"),
    [([500], True, 200, 2), ([500, 500], True, 503, 2), ([500], False, 500, 1), ([404], True, 404, 1)],
)
def test_a_prompt_whose_rows_are_gone_is_made_once_again(cache, statuses, about_videos, answered, tries):
    async def use(server):
        server.go.set()
        server.about_videos, server.statuses = about_videos, list(statuses)
        return await server.ask(body=b"{1}"), server.seen

    (status, headers, _), seen = with_server(cache, use)
    assert (status, seen) == (answered, [b"{1}"] * tries)
    assert (b"retry-after" in headers) == (answered == 503)


def test_what_vllm_cannot_take_of_a_request_is_no_matter_of_rows(cache):
    async def use(server):
        server.go.set()
        server.statuses, server.error = (
            [500],
            b'{"error":{"message":"","type":"InternalServerError"}}',
        )  # as of top_k=10**30
        return await server.ask(), server.seen

    (status, headers, body), seen = with_server(cache, use)
    assert (status, len(seen), b"InternalServerError" in body) == (500, 1, True)
    assert b"retry-after" not in headers and headers[b"x-cached-videos"]


def test_sigterm_lets_requests_end_and_takes_no_other(cache):
    async def use(server):
        running = asyncio.create_task(server.ask())
        while not server.seen:
            await asyncio.sleep(0)
        before = await server.ask("/ready")
        os.kill(os.getpid(), signal.SIGTERM)
        while await server.ready():
            await asyncio.sleep(0.01)
        refused, ready, health = await server.ask(), await server.ask("/ready"), await server.ask("/health")
        still = server.state.server.should_exit
        server.go.set()
        answered = await running
        await server.ended()
        return before, refused, ready, health, still, answered, server.state.server

    before, refused, ready, health, still, answered, server = with_server(cache, use)
    assert (before[0], ready[0], health[0]) == (200, 503, 200)
    assert refused[0] == 503 and refused[1][b"retry-after"] == b"10"
    assert not still and answered[0] == 200
    assert (server.should_exit, server.force_exit) == (True, False)


def test_requests_that_do_not_end_are_cut_after_the_timeout(cache):
    async def use(server):
        running = asyncio.create_task(server.ask())
        while not server.seen:
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        while await server.ready():
            await asyncio.sleep(0.01)
        await server.ended()
        running.cancel()
        return server.state.server

    assert with_server(cache, use, shutdown_timeout=0.1).force_exit


def test_health_tells_of_the_stores_and_stays_alive_without_them(cache):
    async def use(server):
        well = await server.ask("/health")
        cache.rename(cache.with_name("away"))
        prompts_of(server.served).caches[""].refresh()
        return well, await server.ask("/health")

    well, away = with_server(cache, use)
    assert (well[0], json.loads(well[2])["stores"]) == (200, {"default": "ok"})
    assert (away[0], json.loads(away[2])["stores"]) == (200, {"default": "away"})


def test_no_path_of_the_model_is_told(cache):
    async def use(server):
        return server.state.openai_serving_models.base_model_paths[0].model_path

    assert with_server(cache, use) == "m"


def test_the_metrics_have_the_caches(cache):
    async def use(server):
        prompts = prompts_of(server.served)
        for name in ("a", "a", "nope"):
            prompts.find(CacheLink(name)).exception()
        server.go.set()
        await server.ask("/metrics")

    with_server(cache, use)
    text = generate_latest().decode()
    assert 'gstep_cache_hits_total{cache="default"} 1.0' in text
    assert 'gstep_cache_misses_total{cache="default"} 2.0' in text
    assert 'gstep_cache_errors_total{cache="default",kind="unknown-video"} 1.0' in text
    assert 'gstep_cache_load_seconds_total{cache="default"}' in text
    assert 'gstep_cache_held_bytes{cache="default"} 392.0' in text
