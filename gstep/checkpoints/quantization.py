"""Quantized checkpoints: no model here applies the scales without which their weights mean nothing, but vLLM does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gstep.errors import ModelError

_USE = (
    "its scales would be dropped here. Use the unquantized checkpoint that it was made from, in bfloat16, float16 or "
    "float32 (often the same name without -FP8, -AWQ, -GPTQ-Int4 or -bnb-4bit); it may answer from a cache of that one "
    "by vLLM (jobs.generate --engine vllm, jobs.serve)"
)
#: Methods by which vLLM reads a language model's weights; the vision tower is stored as it was.
SERVED = ("awq", "compressed-tensors", "fp8", "gptq")
_PLAIN = frozenset({"BF16", "F16", "F32", "F64"})


def refuse_quantized(name: str, config: Mapping[str, Any], served: Collection[str] = ()) -> None:
    """Raise ModelError where config.json, or a part of it such as text_config, has a ``quantization_config``.

    Methods in ``served`` are let through.
    """
    for part, settings in {"": config, **config}.items():
        found = settings.get("quantization_config") if isinstance(settings, dict) else None
        method = found.get("quant_method") if isinstance(found, dict) else None
        if found and method not in served:
            where = f"{part}.quantization_config" if part else "quantization_config"
            raise ModelError(f"{name!r} is quantized ({where} in config.json: {method or 'an unnamed method'}): {_USE}")


def refuse_stored(name: str, tensor: str, dtype: str) -> None:
    """Raise ModelError where a needed tensor is stored in another ``dtype`` than a float of 16 bits or more.

    ``dtype`` is in the words of safetensors: "BF16", "F8_E4M3", "I8".
    """
    if dtype not in _PLAIN:
        raise ModelError(f"{name!r} is quantized ({tensor} is stored as {dtype}): {_USE}")
