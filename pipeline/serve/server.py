"""The start of vLLM's server in this process, after checks of the options."""

from __future__ import annotations

import json
import math
import os
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from gstep.backbones import ModelSource, Runtime, choose_runtime
from gstep.language.weights import read_generation_config
from gstep.serving.live import LivePruning
from gstep.serving.options import (
    ENVIRONMENT,
    LIVE_RESERVED_OPTIONS,
    RESERVED_OPTIONS,
    check_connectors,
    check_cpu_support,
    check_generation_settings,
    check_live_engine,
    check_video_fits,
    make_engine_options,
    make_live_engine_options,
    prepare_process,
)
from pipeline.cache.header import read_header
from pipeline.errors import UsageError, convert_store_usage_errors, convert_usage_errors
from pipeline.generate.engines.vllm import check_installed, refuse_reserved
from pipeline.generate.model import choose_model, refuse_vllm
from pipeline.rows import JsonObject
from pipeline.serve import CONFIG, LIMITS, MODE
from pipeline.serve.config import KEY, LiveConfig, ServeConfig, ServerOptions
from pipeline.serve.gate import RequestGate, RequestLimits
from pipeline.serve.prompts import CachedPrompts, ServedCache
from pipeline.storage.stores import store_at

# Arguments that users may not set: on any server, on cached videos, and with live pruning.
_RESERVED = frozenset(
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
_CACHE_RESERVED = RESERVED_OPTIONS | _RESERVED | {"tokenizer_mode"}
# Arguments that only a server of cached videos sets; with live pruning, users may.
_LIVE_FREE = frozenset(("limit_mm_per_prompt", "mm_processor_cache_gb", "generation_config", "disable_log_stats"))
_LIVE_RESERVED = (RESERVED_OPTIONS - _LIVE_FREE) | LIVE_RESERVED_OPTIONS | _RESERVED
_NO_HOST = "no-host.invalid"  # an empty list would allow every host
_REDIRECTS = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"
_RUST = "VLLM_USE_RUST_FRONTEND"
_ENDS_S = 5  # seconds that a process may take to exit after the shutdown timeout


def serve(config: ServeConfig | LiveConfig) -> None:
    """Run the server until the process is told to stop.

    With ``print_command``, only print the equivalent ``vllm serve`` command, without the key. Sets environment
    variables in this process.

    Raises:
        UsageError: the options, the model or a cache do not fit together; nothing was loaded.
        CorruptShard: a file of a cache's table is damaged.
        SystemExit: vLLM does not know an argument of the user (code 2).
    """
    arguments = make_server_arguments(config)
    if config.print_command:
        variables = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | _list_variables(config)
        print(shlex.join(["env", *map("=".join, variables.items()), "vllm", "serve", *arguments]))
        return
    from vllm.entrypoints.cli.serve import ServeSubcommand  # noqa: PLC0415 - tens of seconds to import

    namespace = parse_words(arguments)
    ServeSubcommand().validate(namespace)
    ServeSubcommand.cmd(namespace)


def make_server_arguments(config: ServeConfig | LiveConfig) -> list[str]:
    """Check the options, the model and the caches, and return the arguments of ``vllm serve``.

    Sets environment variables in this process: the store, the key, and vLLM's.

    Raises:
        UsageError: they do not fit together, or vLLM is missing or not a tested version.
        CorruptShard: a file of a cache's table is damaged.
    """
    os.environ.update(_list_variables(config))
    if config.api_key is not None:
        os.environ[KEY] = config.api_key  # the gate and vLLM's processes read it there
    return _make_live_arguments(config) if isinstance(config, LiveConfig) else _make_cache_arguments(config)


def _list_variables(config: ServeConfig | LiveConfig) -> dict[str, str]:
    """Return the environment variables that vLLM's processes need to read what the flags name.

    On a cache these are the variables of ``--s3-endpoint``, or none without it. With live pruning it is the one that
    forbids redirections of media URLs, unless the environment sets it.
    """
    if isinstance(config, LiveConfig):  # otherwise vLLM follows redirections from an allowed host to any other
        return {_REDIRECTS: os.environ.get(_REDIRECTS, "0")}
    if config.s3_endpoint is None:
        return {}
    names = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
    return {**dict.fromkeys(names, config.s3_endpoint), "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "false"}


def _prepare(config: ServeConfig | LiveConfig, source: ModelSource) -> Runtime:
    """Choose the device and dtype, check that vLLM can compute with them, and set vLLM's environment variables.

    Raises:
        UsageError: they are not available, this CPU cannot run the model, or this package is not installed.
    """
    with convert_usage_errors():
        runtime = choose_runtime("auto", config.dtype)
        check_cpu_support(source, runtime)
        prepare_process(runtime.device, config.tensor_parallel, multiprocessing=True)
    return runtime


def _make_live_arguments(config: LiveConfig) -> list[str]:
    """Return the arguments of ``vllm serve`` for live pruning."""
    source, live = check_live(config)
    check_installed("jobs.serve --live")
    runtime = _prepare(config, source)
    options: dict[str, Any] = {
        **make_live_engine_options(source, runtime, live, config.num_frames, config.tensor_parallel),
        "allowed_media_domains": config.list_media_hosts() or [_NO_HOST],
        "allowed_local_media_path": config.media_path,
    }
    return make_server_words(config, options, source.name)


def check_live(config: LiveConfig) -> tuple[ModelSource, LivePruning]:
    """Check that model, method and engine arguments fit together; return the checkpoint and the pruning.

    Does not need vLLM.

    Raises:
        UsageError: they do not fit together, or an engine argument is reserved.
    """
    assert config.model is not None
    params = strip_suboptions(config.engine_params())
    refuse_reserved(params, _LIVE_RESERVED, "the model and the other flags")
    with convert_usage_errors():
        check_live_engine(params)
        source = ModelSource.resolve(config.model, config.revision, quantized=True, gate=False)
        live = LivePruning.from_texts(
            source, config.method, config.parse_method_params(), config.retention_ratio, config.seed
        )
    return source, live


def _make_cache_arguments(config: ServeConfig) -> list[str]:
    """Return the arguments of ``vllm serve`` for cached videos; the caches are opened for checks, and closed.

    Raises:
        UsageError: options, caches and model do not fit together, vLLM is missing, or the largest video does not fit
            (checked, by importing vLLM, only with ``max_num_batched_tokens``).
        CorruptShard: a file of a cache's table is damaged.
    """
    served_config = make_served_cache(config)  # raises for a cache that vLLM cannot serve at all
    check_installed("jobs.serve")
    with convert_usage_errors(), convert_store_usage_errors():
        prompts = CachedPrompts(served_config)
        prompts.close()
    if prompts.builder.axes == 1 and prompts.builder.policy.positions == "original":
        raise UsageError("--positions original: vLLM counts the positions of this model itself")
    params = config.engine_params()
    with convert_usage_errors():
        check_generation_settings(prompts.source.name, read_generation_config(prompts.source, prompts.builder.config))
        refuse_reserved(strip_suboptions(params), _CACHE_RESERVED)
        check_connectors(params)
    runtime = _prepare(config, prompts.source)
    largest = _choose_largest_video(config, prompts)
    with convert_usage_errors():
        options = make_engine_options(prompts.source, runtime, largest, config.tensor_parallel)
    del options["disable_log_stats"]
    options |= {
        "generation_config": "auto",  # the checkpoint sets what a request leaves open
        "tokenizer_mode": MODE,
        # In case a route of vLLM fetches a media URL before the renderer sees it: no domain is allowed.
        "allowed_media_domains": ["cached-videos.invalid"],
        "additional_config": {CONFIG: asdict(served_config)},
        # The engine gets a video's rows with the first question, and keeps them for later ones.
        "mm_processor_cache_gb": config.held_bytes / 2**30,
    }
    arguments = make_server_words(config, options, config.model or prompts.source.name)
    if "max_num_batched_tokens" in params:
        from vllm import AsyncEngineArgs  # noqa: PLC0415 - tens of seconds to import

        namespace = parse_words(arguments)
        namespace.model = arguments[0]
        with convert_usage_errors():
            check_video_fits(AsyncEngineArgs.from_cli_args(namespace), largest)
    return arguments


def _choose_largest_video(config: ServeConfig, prompts: CachedPrompts) -> int:
    """Return the number of visual tokens per video, newline included, for which memory is reserved.

    Raises:
        UsageError: ``max_tokens_per_video`` is too small for a cached video.
    """
    max_tokens = config.max_tokens_per_video
    newline = 1 if prompts.builder.needs_newline else 0
    if max_tokens is None:
        return prompts.largest_video
    if max_tokens + newline < prompts.largest_video:
        largest = prompts.largest_video - newline
        raise UsageError(
            f"--max-tokens-per-video {max_tokens}: the caches have a video of {largest}; give that or more"
        )
    return max_tokens + newline


def make_served_cache(config: ServeConfig) -> ServedCache:
    """Return the settings for vLLM's configuration; the header of the first cache names the model.

    Raises:
        UsageError: a cache cannot be read, vLLM does not support its model, or no model is named.
    """
    with convert_usage_errors(), convert_store_usage_errors():
        places = (config.cache, *config.parse_named_caches().values())
        identities = [read_header(store_at(place))["identity"]["model"] for place in places]
        for identity in identities:
            refuse_vllm(identity)
        model, revision = choose_model(config.model, config.revision, identities[0]["weights"])
    return ServedCache(
        cache=config.cache,
        model=model,
        revision=revision,
        others=tuple(config.parse_named_caches().items()),
        retention_ratio=config.retention_ratio,
        positions=None if config.positions == "auto" else config.positions,
        rule=config.rule,
        frame_times=config.frame_times,
        refresh_seconds=config.refresh_seconds,
        held_bytes=config.held_bytes,
    )


def strip_suboptions(params: JsonObject) -> JsonObject:
    """Cut the names of arguments at the first dot, as in compilation_config.mode."""
    return {name.partition(".")[0]: value for name, value in params.items()}


def make_server_words(config: ServerOptions, options: Mapping[str, Any], model_name: str) -> list[str]:
    """Return the arguments of ``vllm serve``, with what every server has: gate, limits, name, host and port.

    Args:
        options: the arguments of vLLM by name, with ``model``; ``engine_params`` of the user replace them.
        model_name: the model's id or folder, from which the name for clients is made.

    Raises:
        UsageError: the environment selects vLLM's server in Rust.
        SystemExit: with ``print_command``, vLLM does not know an argument of the user (code 2).
    """
    if os.environ.get(_RUST, "0") != "0":
        raise UsageError(f"{_RUST}: vLLM's server in Rust asks for no key here and limits no request. Unset {_RUST}")
    limits = {item.name: getattr(config, item.name) for item in fields(RequestLimits)}
    options = {
        **options,
        "additional_config": {**options.get("additional_config", {}), LIMITS: limits},
        # Clients see a Hub id, or only the last component of a folder's path.
        "served_model_name": config.served_model_name
        or (Path(model_name).name if Path(model_name).exists() else model_name),
        "middleware": [f"{RequestGate.__module__}.{RequestGate.__name__}"],
        "host": config.host,
        "port": config.port,
        **config.engine_params(),
    }
    if options.get("api_server_count", options.get("data_parallel_size", 1)) != 1:
        # Each server process shuts down by itself; the parent kills those that have not exited by then.
        options["shutdown_timeout"] = math.ceil(config.shutdown_timeout) + _ENDS_S
    model = str(options.pop("model"))
    words = [model, *(word for name, value in options.items() for word in _make_words(name, value))]
    if config.print_command and config.engine_param:
        parse_words(words)
    return words


def parse_words(words: Sequence[str]) -> Namespace:
    """Parse the arguments of ``vllm serve``; an unknown one ends the process with code 2. Imports vLLM."""
    from vllm.entrypoints.cli.serve import ServeSubcommand  # noqa: PLC0415 - tens of seconds to import
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    namespace: Namespace = parser.parse_args(words)
    return namespace


def _make_words(name: str, value: Any) -> list[str]:
    """Return one option as command-line arguments of vLLM.

    None gives no arguments, True ``--NAME``, False ``--no-NAME``, a list the flag and its values, a dict the flag and
    JSON, and any other value ``--NAME=VALUE``. Underscores in the name become hyphens.
    """
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
