"""The command line of vLLM's own server: what every server of this project adds to it, and its run in this process."""

from __future__ import annotations

import json
import math
import os
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gstep.serving.options import ENVIRONMENT
from pipeline.errors import UsageError
from pipeline.rows import JsonObject
from pipeline.serve.config import KEY, ServerOptions
from pipeline.serve.gate import RequestGate

_RUST = "VLLM_USE_RUST_FRONTEND"
_ENDS_S = 5  # seconds after the shutdown timeout that a process may take to end
#: Arguments of vLLM's server that no user may set.
RESERVED_ARGUMENTS = frozenset(
    (
        *("host", "port", "api_key", "served_model_name", "chat_template"),
        *("allowed_media_domains", "allowed_local_media_path"),
        "enable_scale_out",
        "grpc",  # another server, without the gate
        "middleware",
        "shutdown_timeout",
        "additional_config",
    )
)


def set_key(config: ServerOptions) -> None:
    """Put the key of ``--api-key`` into the environment, where the gate and vLLM's processes read it."""
    if config.api_key is not None:
        os.environ[KEY] = config.api_key


def whole_names(params: JsonObject) -> JsonObject:
    """Return arguments by their whole names: the command line also takes a part, as in compilation_config.mode=3."""
    return {name.partition(".")[0]: value for name, value in params.items()}


def server_words(config: ServerOptions, options: Mapping[str, Any], model_name: str) -> list[str]:
    """Return the words of vLLM's command line after ``vllm serve``, with what every server has: gate, host, port.

    If they will be printed, ends the process with 2 for arguments of the user that vLLM does not know.

    Args:
        options: the arguments of vLLM by name, with ``model``; those of the user win over them.
        model_name: the model's name or folder, for clients.

    Raises UsageError if the environment asks for vLLM's server in Rust.
    """
    if os.environ.get(_RUST, "0") != "0":
        raise UsageError(f"{_RUST}: vLLM's server in Rust asks for no key here and limits no request. Unset {_RUST}")
    options = {
        **options,
        "served_model_name": config.served_model_name or _make_public_name(model_name),
        "middleware": [f"{RequestGate.__module__}.{RequestGate.__name__}"],
        "host": config.host,
        "port": config.port,
        **config.engine_params(),
    }
    if options.get("api_server_count", options.get("data_parallel_size", 1)) != 1:
        # Each server process drains by itself; the parent kills a process that has not ended by then.
        options["shutdown_timeout"] = math.ceil(config.shutdown_timeout) + _ENDS_S
    model = str(options.pop("model"))
    words = [model, *(word for name, value in options.items() for word in _make_words(name, value))]
    if config.print_command and config.engine_param:
        parse_words(words)
    return words


def run_command(words: Sequence[str]) -> None:
    """Run vLLM's server in this process until it is told to stop."""
    from vllm.entrypoints.cli.serve import ServeSubcommand  # noqa: PLC0415 - tens of seconds to import

    namespace = parse_words(words)
    ServeSubcommand().validate(namespace)
    ServeSubcommand.cmd(namespace)


def parse_words(words: Sequence[str]) -> Namespace:
    """Parse the command line of ``vllm serve``."""
    from vllm.entrypoints.cli.serve import ServeSubcommand  # noqa: PLC0415 - tens of seconds to import
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    namespace: Namespace = parser.parse_args(words)
    return namespace


def command_line(words: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return the shell command by which vLLM's own ``vllm serve`` answers as ``jobs.serve`` does, without the key."""
    variables_here = {**{name: os.environ[name] for name in ENVIRONMENT if name in os.environ}, **variables}
    return shlex.join(["env", *(f"{name}={value}" for name, value in variables_here.items()), "vllm", "serve", *words])


def _make_public_name(model: str) -> str:
    """Return the model's name for clients: a Hub id, or the last part of a folder's path."""
    return Path(model).name if Path(model).exists() else model


def _make_words(name: str, value: Any) -> list[str]:
    """Return one option as words of vLLM's command line; None gives no words, and False ``--no-NAME``."""
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    return [f"{flag}={value}"]
