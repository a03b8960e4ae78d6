"""The command that jobs.serve prints leads vLLM's own server to the same store."""

import shlex

from pipeline.serve.config import ServeConfig
from pipeline.serve.server import serve


def test_the_printed_command_reaches_the_store_that_the_flags_name(monkeypatch, capsys):
    monkeypatch.setattr("pipeline.serve.server.server_arguments", lambda config: ["model"])
    place = {"s3_endpoint": "http://127.0.0.1:9000", "s3_region": "here"}
    serve(ServeConfig(cache="s3://bucket/cache", print_command=True, api_key="KEY", **place))
    env, *words = shlex.split(capsys.readouterr().out)
    assert (env, words[-3:]) == ("env", ["vllm", "serve", "model"]) and "KEY" not in "".join(words)
    assert {"AWS_ENDPOINT_URL=http://127.0.0.1:9000", "AWS_REGION=here"} <= set(words)
