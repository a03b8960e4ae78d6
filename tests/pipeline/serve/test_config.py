"""What a server's options mean, and which make no sense."""

import shlex
import socket

import pytest

from pipeline.errors import UsageError
from pipeline.serve.config import ServeConfig, check_port
from pipeline.serve.server import serve


def test_the_printed_command_reaches_the_store_that_the_flags_name(monkeypatch, capsys):
    monkeypatch.setattr("pipeline.serve.server.server_arguments", lambda config: ["model"])
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


@pytest.mark.parametrize(
    ("options", "why"),
    [
        *(({"caches": caches}, "each NAME once, got") for caches in (["a"], ["=b"], ["a="], ["a=b", "a=c"])),
        ({"max_tokens_per_video": 0}, "--max-tokens-per-video must be at least 1"),
        ({"frame_times": "guessed"}, r"--frame-times must be one of \(.true., .stock.\)"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, why):
    with pytest.raises(UsageError, match=why):
        ServeConfig(cache="c", **options)


def test_a_cache_has_a_name_and_an_engine_argument_is_spelled_as_vllms_command_line_spells_it():
    assert ServeConfig(cache="c", caches=["a=b", "c=d=e"]).named_caches() == {"a": "b", "c": "d=e"}
    assert ServeConfig(cache="c", engine_param=["max-num-seqs=4"]).engine_params() == {"max_num_seqs": 4}
