"""The table of model families: the class that makes visual tokens, and the class that puts them into prompts.

Classes are import paths, so that a checkpoint's type can be checked before any model code is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Family(NamedTuple):
    """A model family.

    Attributes:
        backbone: the import path ``package.module:Class`` of the class that makes visual tokens.
        prompts: the import path of the class that builds prompts; None for a family that can be encoded and cached,
            but cannot answer questions.
        published: the names of the family's published checkpoints.
        files: the files, besides config.json, weights and chat template, that all of these checkpoints have.
    """

    backbone: str
    prompts: str | None
    published: str = ""
    files: tuple[str, ...] = ()


# Qwen2.5-VL has these; the other families have the settings of videos in a file of their own as well.
_FILES = ("preprocessor_config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_VIDEO_FILES = (*_FILES, "video_preprocessor_config.json")


#: ``model_type`` in config.json -> the family.
FAMILIES: Mapping[str, Family] = {
    "llava_onevision": Family(
        "gstep.backbones.llava_onevision:LlavaOnevision",
        "gstep.language.llava_onevision:LlavaOnevisionPrompts",
        "llava-hf/llava-onevision-*-hf",
        (*_VIDEO_FILES, "processor_config.json"),
    ),
    "internvl": Family(
        "gstep.backbones.internvl:InternVL",
        "gstep.language.internvl:InternVLPrompts",
        "OpenGVLab/InternVL3-*-hf and InternVL3_5-*-HF",
        (*_VIDEO_FILES, "processor_config.json"),
    ),
    "qwen2_5_vl": Family(
        "gstep.backbones.qwen2_5_vl:Qwen2_5VL",
        "gstep.language.qwen_vl:Qwen2_5Prompts",
        "Qwen/Qwen2.5-VL-3B, -7B, -32B and -72B-Instruct",
        _FILES,
    ),
    "qwen3_vl": Family(
        "gstep.backbones.qwen3_vl:Qwen3VL",
        "gstep.language.qwen_vl:Qwen3Prompts",
        "Qwen/Qwen3-VL-2B, -4B, -8B and -32B, -Instruct and -Thinking",
        _VIDEO_FILES,
    ),
    "qwen3_vl_moe": Family(
        "gstep.backbones.qwen3_vl:Qwen3VLMoe",
        "gstep.language.qwen_vl:Qwen3Prompts",
        "Qwen/Qwen3-VL-30B-A3B and -235B-A22B, -Instruct and -Thinking",
        _VIDEO_FILES,
    ),
    "qwen3_5": Family(
        "gstep.backbones.qwen3_vl:Qwen3_5",
        "gstep.language.qwen_vl:Qwen3Prompts",
        "Qwen/Qwen3.5-* and Qwen3.6-*, dense",
        _VIDEO_FILES,
    ),
    "qwen3_5_moe": Family(
        "gstep.backbones.qwen3_vl:Qwen3_5Moe",
        "gstep.language.qwen_vl:Qwen3Prompts",
        "Qwen/Qwen3.5-* and Qwen3.6-*, mixtures of experts such as 35B-A3B",
        _VIDEO_FILES,
    ),
    "qwen4_exp": Family("gstep.backbones.qwen3_vl:Qwen4Exp", None, "Qwen/Qwen4-Exp", _VIDEO_FILES),
}
