"""Cached videos for users who run their own vLLM from Python."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from gstep.backbones import choose_runtime
from gstep.language import PromptBuilder, prompt_builder
from gstep.serving.options import check_connectors, check_cpu_support, make_engine_options, prepare_process
from gstep.serving.prompts import make_engine_input
from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.reader import TokenCache
from pipeline.generate.model import find_model, read_tower_hash, refuse_vllm


def vllm_options(cache: TokenCache, model: str | None = None, *, dtype: str = "auto", **more: Any) -> dict[str, Any]:
    """Return arguments for vLLM's ``EngineArgs`` or ``AsyncEngineArgs`` that serve a cache.

    Call it before vLLM is imported: it sets environment variables and registers model classes for vLLM in this process.

    Args:
        model: needed if the cache does not name the model; other weights with the cache's vision encoder fit too.
        dtype: "auto" is bfloat16 on GPUs and float32 on CPUs.
        more: further arguments of EngineArgs; they replace those made here.

    Raises:
        UsageError: the cache was made with another model, or vLLM does not support the model.
        ModelError: there is no such checkpoint, this CPU cannot run it, a KV connector (``kv_transfer_config``) cannot
            tell videos apart, or several GPUs are used and this package is not installed.
    """
    check_connectors(more)
    runtime = choose_runtime("auto", dtype)
    tower = partial(read_tower_hash, cache.store, cache.header)
    source = find_model("the cache", cache.identity["model"], model, read_tower=tower)
    check_cpu_support(source, runtime)
    parallel = int(more.get("tensor_parallel_size", 1))
    prepare_process(runtime.device, parallel)
    return {**make_engine_options(source, runtime, cache.max_tokens + 1, parallel), **more}


def vllm_input(
    video: CachedVideo | Sequence[CachedVideo],
    prompt: str,
    *,
    model: str | None = None,
    system: str | None = None,
    positions: str | None = None,
    rule: str = "transformers-5",
    frame_times: str = "true",
) -> Any:
    """Return the input of ``add_request`` (``LLMEngine``, ``AsyncLLM``) for a question about cached videos.

    Args:
        video: from :meth:`TokenCache.get`; several videos appear in the prompt in this order.
        model: needed if the cache does not name the model.
        system: a system message; None leaves it to the chat template.
        positions, rule, frame_times: the arguments of :func:`gstep.language.prompt_builder`.

    Raises:
        UsageError: the cache was made with another model, or vLLM does not support the model.
        ModelError: there is no such checkpoint, or it cannot be used.
        ValueError: there is no video, the videos come from caches of different models, a text has a placeholder of the
            model, or the positions are not supported.
    """
    videos = [video] if isinstance(video, CachedVideo) else list(video)
    if not videos or any(video.header is None for video in videos):
        raise ValueError("videos must come from TokenCache.get, at least one of them")
    identity, *other_identities = [video.header["identity"]["model"] for video in videos if video.header is not None]
    if any(other != identity for other in other_identities):
        raise ValueError("the videos come from caches of different models")
    refuse_vllm(identity)
    made_with = identity["type"], identity["weights"], videos[0].metadata.get("tower_hash")
    builder = _find_prompt_builder(model, *made_with, positions, rule, frame_times)
    builder.refuse_placeholders((prompt, system or ""))
    built = builder.build(prompt, [video.visual for video in videos], system)
    return make_engine_input(built, builder.placeholder_id)


@lru_cache(maxsize=8)
def _find_prompt_builder(
    model: str | None,
    model_type: str,
    weights: str,
    tower: str | None,
    positions: str | None,
    rule: str,
    frame_times: str,
) -> PromptBuilder:
    """Return the prompt builder of a cache's model; the last eight are kept for later calls.

    Raises:
        IdentityMismatch: ``model`` has another vision encoder.
        ModelError: there is no such checkpoint, or it cannot be used.
    """
    source = find_model("the cache", {"type": model_type, "weights": weights}, model, read_tower=lambda: tower)
    return prompt_builder(source, positions, rule, frame_times)
