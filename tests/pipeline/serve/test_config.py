"""What a server's options mean, and which make no sense."""

import shlex
import socket

import pytest

from jobs.serve import main
from pipeline.errors import UsageError
from pipeline.serve.config import KEY, ServeConfig, check_port
from pipeline.serve.server import serve
from tests.ports import free_ports


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


@pytest.mark.parametrize("key", [None, "", "  "])
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


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "127.1", "localhost", "::1"])
def test_a_loopback_host_takes_no_key(monkeypatch, host):
    monkeypatch.delenv(KEY, raising=False)
    assert not ServeConfig(host=host).needs_key


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


def test_a_cache_has_a_name_and_an_engine_argument_is_spelled_as_vllms_command_line_spells_it():
    assert ServeConfig(cache="c", caches=["a=b", "c=d=e"]).parse_named_caches() == {"a": "b", "c": "d=e"}
    assert ServeConfig(cache="c", engine_param=["max-num-seqs=4"]).engine_params() == {"max_num_seqs": 4}
