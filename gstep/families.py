"""The model families, a line each: the class that makes visual tokens, and the one that puts them into prompts.

Strings, so that a checkpoint's type is known before any model code is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Family(NamedTuple):
    """The import paths of the two classes of a family: ``package.module:Class``."""

    backbone: str
    prompts: str


#: ``model_type`` in config.json -> the family.
FAMILIES: Mapping[str, Family] = {
    "llava_onevision": Family(
        "gstep.backbones.llava_onevision:LlavaOnevision", "gstep.language.llava_onevision:LlavaOnevisionPrompts"
    ),
    "internvl": Family("gstep.backbones.internvl:InternVL", "gstep.language.internvl:InternVLPrompts"),
    "qwen2_5_vl": Family("gstep.backbones.qwen2_5_vl:Qwen2_5VL", "gstep.language.qwen_vl:Qwen2_5Prompts"),
    "qwen3_vl": Family("gstep.backbones.qwen3_vl:Qwen3VL", "gstep.language.qwen_vl:Qwen3Prompts"),
    "qwen3_vl_moe": Family("gstep.backbones.qwen3_vl:Qwen3VLMoe", "gstep.language.qwen_vl:Qwen3Prompts"),
    "qwen3_5": Family("gstep.backbones.qwen3_vl:Qwen3_5", "gstep.language.qwen_vl:Qwen3Prompts"),
    "qwen3_5_moe": Family("gstep.backbones.qwen3_vl:Qwen3_5Moe", "gstep.language.qwen_vl:Qwen3Prompts"),
}
