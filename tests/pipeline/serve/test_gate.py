"""What the options of a server mean, which are refused before vLLM loads, and what a request passes before vLLM.

An app of our own stands for vLLM's; everything else is real.
"""

import asyncio
import json
import os
import shlex
import signal
import socket
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from jobs.serve import LIVE_USUAL, main
from pipeline.errors import UsageError
from pipeline.serve import CONFIG, LIMITS
from pipeline.serve.config import KEY, LiveConfig, ServeConfig, check_port
from pipeline.serve.gate import VIDEOS, RequestGate
from pipeline.serve.prompts import ServedCache, get_cached_prompts
from pipeline.serve.server import check_live, make_server_words, serve
from tests.builders.answers import tiny_cache
from tests.ports import free_ports


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


@pytest.fixture(params=[None, " \n"])
def no_key(request, monkeypatch):
    """An environment without a key, or with one that is blank."""
    monkeypatch.delenv(KEY, raising=False)
    if request.param is not None:
        monkeypatch.setenv(KEY, request.param)


@pytest.mark.usefixtures("no_key")
def test_a_server_that_needs_a_key_does_not_start_without_one(cache):
    """A printed command may run where the variable is not set."""
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


MODEL = "tiny-qwen3-vl"


def test_the_printed_command_reaches_the_store_that_the_flags_name(monkeypatch, capsys):
    monkeypatch.setattr("pipeline.serve.server.make_server_arguments", lambda config: ["model"])
    place = {"s3_endpoint": "http://127.0.0.1:9000"}
    serve(ServeConfig(cache="s3://bucket/cache", print_command=True, api_key="KEY", **place))
    env, *words = shlex.split(capsys.readouterr().out)
    assert (env, words[-3:]) == ("env", ["vllm", "serve", "model"]) and "KEY" not in "".join(words)
    assert "AWS_ENDPOINT_URL=http://127.0.0.1:9000" in words


def test_an_address_that_is_taken_or_none_of_this_machine_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(UsageError, match="in use; name another"):
        check_port(*server.getsockname())
    with pytest.raises(UsageError, match=r"--host 192\.0\.2\.77 --port 8000: .*; name another --host or --port"):
        check_port("192.0.2.77", 8000)


@pytest.mark.usefixtures("no_key")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "0", "192.0.2.77", "2001:db8::1", "no-such-host.invalid"])
def test_a_host_that_other_machines_reach_takes_a_key(monkeypatch, host):
    with pytest.raises(UsageError, match=f"--host '{host}': other machines can reach .* Set {KEY} or --api-key; or"):
        ServeConfig(host=host)
    assert ServeConfig(host=host, api_key="k").needs_key  # so that a printed command takes one too
    assert not ServeConfig(host=host, no_key=True).needs_key
    monkeypatch.setenv(KEY, "k")
    assert ServeConfig(host=host).needs_key


def test_a_loopback_host_takes_no_key(monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    for host in ("127.0.0.1", "127.9.9.9", "127.1", "localhost", "::1"):
        assert not ServeConfig(host=host).needs_key, host


@pytest.mark.parametrize("flags", [[], ["--print-command"]])
def test_the_command_of_the_image_takes_a_key(monkeypatch, capsys, flags):
    """The Dockerfile's entry point: it ends before it looks for vLLM."""
    monkeypatch.delenv(KEY, raising=False)
    assert main(["--host", "0.0.0.0", "cache", *flags]) == 2
    assert "or give --no-key" in " ".join(capsys.readouterr().err.split())
    assert main(["--host", "0.0.0.0", "--no-key", "no-cache", "--port", str(*free_ports(1)), *flags]) == 2
    assert "--no-key" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        *(({"caches": caches}, "each NAME once, got") for caches in (["a"], ["=b"], ["a="], ["a=b", "a=c"])),
        ({"max_tokens_per_video": 0}, "--max-tokens-per-video must be at least 1"),
        ({"no_key": True, "api_key": "k"}, "--no-key and --api-key do not go together"),
        ({"frame_times": "guessed"}, r"--frame-times must be one of \(.true., .stock.\)"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, why):
    with pytest.raises(UsageError, match=why):
        ServeConfig(cache="c", **options)


def test_names_of_caches_engine_arguments_and_hosts_are_read_as_they_are_meant():
    assert ServeConfig(cache="c", caches=["a=b", "c=d=e"]).parse_named_caches() == {"a": "b", "c": "d=e"}
    assert ServeConfig(cache="c", engine_param=["max-num-seqs=4"]).engine_params() == {"max_num_seqs": 4}
    assert LiveConfig(model=MODEL, media_domain=["Videos.A.org", "b"]).list_media_hosts() == ["videos.a.org", "b"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"model": None}, "--model is missing"),
        ({"retention_ratio": 1.0}, "--retention-ratio must be below 1.*vllm serve MODEL alone"),
        ({"retention_ratio": 0.0}, r"--retention-ratio must be in \(0, 1\], got 0.0"),
        ({"retention_ratio": 25.0}, "did you mean 25%"),
        ({"num_frames": 1}, "--num-frames must be at least 2"),
        ({"seed": -1}, "--seed must be at least 0"),
        *(
            ({"media_domain": ["b.org", name]}, "--media-domain must be a host name without a port")
            for name in ("https://a.org", "a.org:80", "*.a.org", "a.org.", "")
        ),
        ({"media_path": "/nowhere"}, "there is no such folder"),
        ({"host": "0.0.0.0"}, "other machines can reach"),
        ({"port": 0}, "--port must be"),
        ({"tensor_parallel": 0}, "--tensor-parallel must be"),
        ({"engine_param": ["config=vllm.yaml"]}, "--engine-param config: vLLM would not read the file"),
        ({"model": "tiny"}, "vLLM has no pruning for llava_onevision"),
        ({"method": "evs"}, "--video-pruning-method evs --video-pruning-rate 0.75"),
        ({"method": "fastv"}, "looks at the question"),
        ({"method_param": ["alpha"]}, "--method-param takes NAME=VALUE"),
        ({"method_param": ["alph=1"]}, "did you mean alpha"),
        *(
            ({"engine_param": [f"{name}=x"]}, "it follows from the model and the other flags")
            for name in (
                "hf_overrides",
                "media-io-kwargs.video",
                "allowed_local_media_path",
                "model_impl",
                "middleware",
            )
        ),
        ({"engine_param": ['ec_transfer_config={"ec_connector": "A"}']}, "another server has pruned"),
        ({"engine_param": ["ec-transfer-config.ec_connector=A"]}, "another server has pruned"),
        ({"engine_param": ["kv_offloading_size=4"]}, "not tested"),
        ({"engine_param": ["pipeline_parallel_size=2"]}, "do not see the kept tokens"),
        ({"engine_param": ["enable_tower_connector_lora=true"]}, "enable_tower_connector_lora: "),
    ],
)
def test_what_makes_no_sense_or_vllm_would_not_prune_right_is_refused_before_it_loads(monkeypatch, options, why):
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(UsageError, match=why):
        check_live(LiveConfig(**{"model": MODEL, **options}))


def test_the_server_that_has_no_gate_is_refused(monkeypatch):
    config = LiveConfig(model=MODEL, port=8001)
    assert "--port=8001" in make_server_words(config, {"model": "m"}, "m")
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(UsageError, match="Unset VLLM_USE_RUST_FRONTEND"):
        make_server_words(config, {"model": "m"}, "m")


def test_a_good_request_is_resolved():
    source, live = check_live(LiveConfig(model=MODEL, method="novelty", retention_ratio=0.1, seed=3))
    assert (source.model_type, live.method, live.retention_ratio, live.seed) == ("qwen3_vl", "novelty", 0.1, 3)


def test_the_command_takes_options_of_its_own_behind_live(capsys):
    assert main(["--live", "--model", "tiny", "--port", str(*free_ports(1))]) == 2
    assert "vLLM has no pruning" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit, match="2"):
        main(["--live", "--refresh-seconds", "3"])
    with pytest.raises(UsageError, match="--live: write it on the command line"):
        ServeConfig(cache="c", live=True)


def test_help_is_a_screen(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--live", "--help"])
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 60
    assert all(f"--{name.replace('_', '-')}" in text for name in LIVE_USUAL)
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--live" in capsys.readouterr().out
