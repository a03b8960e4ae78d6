"""What the options of a server mean, of a cache and with live pruning, and which are refused before vLLM loads."""

import shlex
import socket

import pytest

from jobs.serve import LIVE_USUAL, main
from pipeline.errors import UsageError
from pipeline.serve.config import KEY, LiveConfig, ServeConfig, check_port
from pipeline.serve.server import check_live, make_server_words, serve
from tests.ports import free_ports

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


@pytest.mark.parametrize("key", [None, "  "])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "0", "192.0.2.77", "2001:db8::1", "no-such-host.invalid"])
def test_a_host_that_other_machines_reach_takes_a_key(monkeypatch, host, key):
    monkeypatch.delenv(KEY, raising=False)
    if key is not None:
        monkeypatch.setenv(KEY, key)
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
