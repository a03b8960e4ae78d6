"""Prompts of cached visual tokens for vLLM, without a patch of it: its own classes take what was kept and where it was.

``models`` alone is imported only where vLLM is installed.
"""

from __future__ import annotations

from collections.abc import Mapping

#: ``model_type`` in config.json -> the class by which vLLM serves cached tokens, as ``hf_overrides`` name it. Where
#: there is none, vLLM's own class takes them as they are.
ARCHITECTURES: Mapping[str, str] = {
    "qwen2_5_vl": "CachedQwen2_5VL",
    "qwen3_vl": "CachedQwen3VL",
    "qwen3_vl_moe": "CachedQwen3VLMoe",
    "qwen3_5": "CachedQwen3_5",
    "qwen3_5_moe": "CachedQwen3_5Moe",
}


def register() -> None:
    """Register the classes of cached tokens: vLLM's entry point ``vllm.general_plugins``.

    Every process of vLLM calls it, often more than once.
    """
    from vllm import ModelRegistry  # noqa: PLC0415 - this package is imported without it, too

    for name in set(ARCHITECTURES.values()) - set(ModelRegistry.get_supported_archs()):
        ModelRegistry.register_model(name, f"gstep.serving.models:{name}")
