"""Prompts of cached visual tokens for an unpatched vLLM: its classes take the kept tokens and their positions.

Only the module ``models`` needs vLLM at import.
"""

from __future__ import annotations

from collections.abc import Mapping

#: ``model_type`` in config.json -> the class by which vLLM serves cached tokens, for ``hf_overrides``. vLLM's own class
#: serves other model types.
ARCHITECTURES: Mapping[str, str] = {
    "qwen2_5_vl": "CachedQwen2_5VL",
    "qwen3_vl": "CachedQwen3VL",
    "qwen3_vl_moe": "CachedQwen3VLMoe",
    "qwen3_5": "CachedQwen3_5",
    "qwen3_5_moe": "CachedQwen3_5Moe",
}


def register() -> None:
    """Register the classes of cached tokens in vLLM: its entry point ``vllm.general_plugins``.

    Every process of vLLM calls it, often more than once.
    """
    from vllm import ModelRegistry  # noqa: PLC0415 - this package is imported without it, too

    for name in set(ARCHITECTURES.values()) - set(ModelRegistry.get_supported_archs()):
        ModelRegistry.register_model(name, f"gstep.serving.models:{name}")
