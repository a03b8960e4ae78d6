"""The start of vLLM's own server on a cache, in this process, after a check of the request."""

from __future__ import annotations

import os
from dataclasses import asdict

from gstep.backbones import choose_runtime
from gstep.language.weights import generation_config
from gstep.serving.options import (
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
from pipeline.serve.command import (
    RESERVED_ARGUMENTS,
    command_line,
    parse_words,
    run_command,
    server_words,
    set_key,
    whole_names,
)
from pipeline.serve.config import ServeConfig
from pipeline.serve.prompts import CachedPrompts, ServedCache
from pipeline.storage.stores import store_at

# Arguments that no user may set.
_RESERVED_ARGUMENTS = RESERVED_OPTIONS | RESERVED_ARGUMENTS | {"tokenizer_mode"}


def serve(config: ServeConfig) -> None:
    """Run the server until the process is told to stop; ``print_command`` prints the command instead, and returns.

    Sets environment variables in this process. Raises UsageError before anything is loaded.
    """
    arguments = server_arguments(config)
    if config.print_command:
        print(command_line(arguments, _store_variables(config)))
        return
    run_command(arguments)


def server_arguments(config: ServeConfig) -> list[str]:
    """Return the command line of ``vllm serve``, after a check that cache, model and flags go together.

    Sets variables of the environment that vLLM's processes need: the store, the key, and vLLM's own. Raises UsageError.
    """
    os.environ.update(_store_variables(config))
    set_key(config)
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
    refuse_reserved(whole_names(params), _RESERVED_ARGUMENTS)
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
        "tokenizer_mode": MODE,
        # If a route of vLLM fetched a media URL before the renderer sees it, no domain would be allowed.
        "allowed_media_domains": ["cached-videos.invalid"],
        "additional_config": {CONFIG: asdict(served_config)},
        # Rows go to the engine with the first question on a video; it keeps them for later ones.
        "mm_processor_cache_gb": config.held_bytes / 2**30,
    }
    arguments = server_words(config, options, config.model or prompts.source.name)
    if "max_num_batched_tokens" in params:
        from vllm import AsyncEngineArgs  # noqa: PLC0415 - as above

        namespace = parse_words(arguments)
        namespace.model = arguments[0]
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
