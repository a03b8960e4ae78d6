"""The start of vLLM's own server with live pruning, in this process, after a check of the request."""

from __future__ import annotations

import os
from typing import Any

from gstep.backbones import ModelSource, choose_runtime
from gstep.serving.live import LivePruning
from gstep.serving.options import (
    LIVE_RESERVED_OPTIONS,
    RESERVED_OPTIONS,
    check_arithmetic,
    check_live_engine,
    live_engine_options,
    prepare_process,
)
from pipeline.errors import usage_errors
from pipeline.generate.engines.vllm import check_installed, refuse_reserved
from pipeline.serve import LIMITS
from pipeline.serve.command import RESERVED_ARGUMENTS, command_line, run_command, server_words, set_key, whole_names
from pipeline.serve.live_config import LiveConfig

# vLLM would otherwise follow a redirection from a host that is allowed to any other.
_VARIABLES = {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}
_NO_HOST = "no-host.invalid"  # an empty list would allow every host
# Arguments that only a server of cached videos sets.
_FREE_OPTIONS = frozenset(("limit_mm_per_prompt", "mm_processor_cache_gb", "generation_config", "disable_log_stats"))
_RESERVED_ARGUMENTS = (RESERVED_OPTIONS - _FREE_OPTIONS) | LIVE_RESERVED_OPTIONS | RESERVED_ARGUMENTS


def serve_live(config: LiveConfig) -> None:
    """Run the server until the process is told to stop; ``print_command`` prints the command instead, and returns.

    Sets environment variables in this process. Raises UsageError before vLLM is loaded.
    """
    source, live = check_live(config)
    check_installed("jobs.serve --live")
    set_key(config)
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    words = live_words(config, source, live)
    if config.print_command:
        print(command_line(words, {name: os.environ[name] for name in _VARIABLES}))
        return
    run_command(words)


def check_live(config: LiveConfig) -> tuple[ModelSource, LivePruning]:
    """Check that model, method and arguments go together. Reads small files of the model, and needs no vLLM.

    Raises UsageError.
    """
    assert config.model is not None
    params = whole_names(config.engine_params())
    refuse_reserved(params, _RESERVED_ARGUMENTS, "the model and the other flags")
    with usage_errors():
        check_live_engine(params)
        source = ModelSource.resolve(config.model, config.revision, quantized=True, gate=False)
        live = LivePruning.from_texts(
            source, config.method, config.method_params(), config.retention_ratio, config.seed
        )
    return source, live


def live_words(config: LiveConfig, source: ModelSource, live: LivePruning) -> list[str]:
    """Return the words of vLLM's command line after ``vllm serve``.

    Sets environment variables that vLLM's processes need. Raises UsageError.
    """
    with usage_errors():
        runtime = choose_runtime("auto", config.dtype)
        check_arithmetic(source, runtime)
        prepare_process(runtime.device, config.tensor_parallel, multiprocessing=True)
    limits = {name: getattr(config, name) for name in ("needs_key", "max_request_bytes", "shutdown_timeout")}
    options: dict[str, Any] = {
        **live_engine_options(source, runtime, live, config.num_frames, config.tensor_parallel),
        "allowed_media_domains": config.media_hosts() or [_NO_HOST],
        "allowed_local_media_path": config.media_path,
        "additional_config": {LIMITS: limits},
    }
    return server_words(config, options, source.name)
