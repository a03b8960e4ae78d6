"""The start of vLLM's own server in this process, for a checked request."""

from __future__ import annotations

import json
import math
import os
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gstep.backbones import choose_runtime
from gstep.language.weights import generation_config
from gstep.serving.options import (
    ENVIRONMENT,
    RESERVED_OPTIONS,
    check_arithmetic,
    check_connectors,
    check_generation_settings,
    check_video_fits,
    engine_options,
    prepare_process,
)
from pipeline.cache.header import read_header
from pipeline.errors import UsageError, store_usage_errors, usage_errors
from pipeline.generate.engines.vllm import check_installed, refuse_reserved
from pipeline.generate.model import choose_model, refuse_vllm
from pipeline.serve import CONFIG, MODE
from pipeline.serve.config import KEY, ServeConfig
from pipeline.serve.gate import RequestGate
from pipeline.serve.prompts import CachedPrompts, ServedCache
from pipeline.storage.stores import store_at

_ENDS_S = 5  # seconds after the shutdown timeout that a process may take to end
# Arguments that no user may set, together with the reserved options of the engine.
_RESERVED_ARGUMENTS = RESERVED_OPTIONS | {
    *("tokenizer_mode", "host", "port", "api_key", "served_model_name", "chat_template"),
    *(
        "allowed_media_domains",
        "allowed_local_media_path",
        "enable_scale_out",
        "grpc",  # another server, without the gate
        "middleware",
        "shutdown_timeout",
        "additional_config",
    ),
}


def serve(config: ServeConfig) -> None:
    """Run the server until the process is told to stop; ``print_command`` prints the command instead, and returns.

    Sets environment variables in this process. Raises UsageError before anything is loaded.
    """
    arguments = server_arguments(config)
    if config.print_command:
        print(command_line(arguments, _store_variables(config)))
        return
    from vllm.entrypoints.cli.serve import ServeSubcommand  # noqa: PLC0415 - tens of seconds to import

    namespace = _parse(arguments)
    ServeSubcommand().validate(namespace)
    ServeSubcommand.cmd(namespace)


def _parse(arguments: Sequence[str]) -> Namespace:
    """Parse the command line of ``vllm serve``."""
    from vllm.entrypoints.cli.serve import ServeSubcommand  # noqa: PLC0415 - as above
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    namespace: Namespace = parser.parse_args(arguments)
    return namespace


def server_arguments(config: ServeConfig) -> list[str]:
    """Return the command line of ``vllm serve``, after a check that cache, model and flags go together.

    Sets variables of the environment that vLLM's processes need: the store, the key, and vLLM's own. Raises UsageError.
    """
    os.environ.update(_store_variables(config))
    if config.api_key is not None:
        os.environ[KEY] = config.api_key
    served_config = served_cache(config)  # which refuses a cache that vLLM cannot serve at all
    check_installed("jobs.serve")
    with usage_errors(), store_usage_errors():
        prompts = CachedPrompts(served_config)
        prompts.close()
    if prompts.builder.axes == 1 and prompts.builder.policy.positions == "original":
        raise UsageError("--positions original: vLLM counts the positions of this model itself")
    with usage_errors():
        check_generation_settings(prompts.source.name, generation_config(prompts.source, prompts.builder.config))
    params = config.engine_params()
    # vLLM's command line also takes a part of an argument, as in compilation_config.mode=3.
    refuse_reserved({name.partition(".")[0]: value for name, value in params.items()}, _RESERVED_ARGUMENTS)
    with usage_errors():
        check_connectors(params)
        runtime = choose_runtime("auto", config.dtype)
        check_arithmetic(prompts.source, runtime)
        prepare_process(runtime.device, config.tensor_parallel, multiprocessing=True)
        largest = _largest_video(config, prompts)
        options = engine_options(prompts.source, runtime, largest, config.tensor_parallel)
    del options["disable_log_stats"]
    options |= {
        "generation_config": "auto",  # the checkpoint decides the settings that a request leaves open
        "served_model_name": config.served_model_name or _public_name(config.model or prompts.source.name),
        "tokenizer_mode": MODE,
        # If a route of vLLM fetched a media URL before the renderer sees it, no domain would be allowed.
        "allowed_media_domains": ["cached-videos.invalid"],
        "additional_config": {CONFIG: asdict(served_config)},
        # Rows go to the engine with the first question on a video; it keeps them for later ones.
        "mm_processor_cache_gb": config.held_bytes / 2**30,
        "middleware": [f"{RequestGate.__module__}.{RequestGate.__name__}"],
        "host": config.host,
        "port": config.port,
        **params,
    }
    if options.get("api_server_count", options.get("data_parallel_size", 1)) != 1:
        # Each server process drains by itself; the parent kills a process that has not ended by then.
        options["shutdown_timeout"] = math.ceil(config.shutdown_timeout) + _ENDS_S
    model = str(options.pop("model"))
    arguments = [model, *(word for name, value in options.items() for word in _flag(name, value))]
    if "max_num_batched_tokens" in params:
        from vllm import AsyncEngineArgs  # noqa: PLC0415 - as above

        namespace = _parse(arguments)
        namespace.model = model
        with usage_errors():
            check_video_fits(AsyncEngineArgs.from_cli_args(namespace), largest)
    return arguments


def _largest_video(config: ServeConfig, prompts: CachedPrompts) -> int:
    """Return the maximum number of tokens of a video for which memory is reserved, with the newline of the prompt.

    Raises UsageError if ``max_tokens_per_video`` is too few for a cached video.
    """
    most, newline = config.max_tokens_per_video, 1 if prompts.builder.needs_newline else 0
    if most is None:
        return prompts.largest_video
    if most + newline < prompts.largest_video:
        largest = prompts.largest_video - newline
        raise UsageError(f"--max-tokens-per-video {most}: the caches have a video of {largest}; give that or more")
    return most + newline


def command_line(arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return the shell command by which vLLM's own ``vllm serve`` answers as ``jobs.serve`` does, without the key."""
    variables_here = {**{name: os.environ[name] for name in ENVIRONMENT if name in os.environ}, **variables}
    return shlex.join(
        ["env", *(f"{name}={value}" for name, value in variables_here.items()), "vllm", "serve", *arguments]
    )


def _store_variables(config: ServeConfig) -> dict[str, str]:
    """Return the variables that lead vLLM's processes to the store that the flags name."""
    if config.s3_endpoint is None:
        return {}
    names = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
    return {**dict.fromkeys(names, config.s3_endpoint), "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "false"}


def served_cache(config: ServeConfig) -> ServedCache:
    """Return the renderer's settings, which travel in vLLM's configuration.

    Reads the first cache's header for the model. Raises UsageError.
    """
    with usage_errors(), store_usage_errors():
        for place in (config.cache, *config.named_caches().values()):
            refuse_vllm(read_header(store_at(place))["identity"]["model"])
        weights = read_header(store_at(config.cache))["identity"]["model"]["weights"]
        model, revision = choose_model(config.model, config.revision, weights)
    return ServedCache(
        cache=config.cache,
        model=model,
        revision=revision,
        others=tuple(config.named_caches().items()),
        retention_ratio=config.retention_ratio,
        positions=None if config.positions == "auto" else config.positions,
        rule=config.rule,
        frame_times=config.frame_times,
        refresh_seconds=config.refresh_seconds,
        held_bytes=config.held_bytes,
        max_request_bytes=config.max_request_bytes,
        shutdown_timeout=config.shutdown_timeout,
        needs_key=config.needs_key,
    )


def _public_name(model: str) -> str:
    """Return the model's name for clients: a Hub id, or the last part of a folder's path."""
    return Path(model).name if Path(model).exists() else model


def _flag(name: str, value: Any) -> list[str]:
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
