"""The table of model families: which class makes visual tokens, and which class inserts them into prompts.

Import paths let a checkpoint's type be checked before any model code is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Family(NamedTuple):
    """An entry of the table of model families; classes and functions are given by import paths ``package.module:Name``.

    Attributes:
        backbone: The ``ModelFamily`` class, which makes visual tokens.
        prompts: The class that builds prompts. None for a family that can be encoded and cached, but that cannot answer
            questions.
        published: The names of the family's published checkpoints.
        files: The files that every published checkpoint has, besides config.json, the weights and the chat template.
        usual_files: Files that a published or fine-tuned checkpoint may lack.
        language_model: The class that generates answers.
        gate: A function that checks a resolved model before any work and returns its findings, which become
            ``ModelSource.layout``. None if the family needs no check.
        doctor: A function that runs the same check with the checkpoint's real weights, for ``jobs.doctor``.
    """

    backbone: str
    prompts: str | None
    published: str = ""
    files: tuple[str, ...] = ()
    usual_files: tuple[str, ...] = ()
    language_model: str = "gstep.language.model:LanguageModel"
    gate: str | None = None
    doctor: str | None = None


#: The family of every model type that is not in the table below.
GENERIC = "generic"
_FILES = ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json")
_GENERATION = "generation_config.json"
_VIDEO = "video_preprocessor_config.json"
_PROCESSOR = "processor_config.json"


def describe_family(family: str, model_type: str | None) -> str:
    """Return the family's name for a message; for a model type of another name, "gemma4 by the family generic"."""
    return family if model_type in (None, family) else f"{model_type} by the family {family}"


#: ``model_type`` in config.json -> the family; ``GENERIC`` stands for all other types.
FAMILIES: Mapping[str, Family] = {
    "llava_onevision": Family(
        "gstep.backbones.llava_onevision:LlavaOnevision",
        "gstep.language.llava_onevision:LlavaOnevisionPrompts",
        "llava-hf/llava-onevision-*-hf",
        (*_FILES, _PROCESSOR),
        (_GENERATION, _VIDEO),
    ),
    "internvl": Family(
        "gstep.backbones.internvl:InternVL",
        "gstep.language.internvl:InternVLPrompts",
        "OpenGVLab/InternVL3-*-hf and InternVL3_5-*-HF",
        (*_FILES, _PROCESSOR),
        (_GENERATION, _VIDEO),
    ),
    "qwen2_5_vl": Family(
        "gstep.backbones.qwen2_5_vl:Qwen2_5VL",
        "gstep.language.qwen_vl:Qwen2_5Prompts",
        "Qwen/Qwen2.5-VL-3B, -7B, -32B and -72B-Instruct",
        _FILES,
        (_GENERATION,),
    ),
    "qwen3_vl": Family(
        "gstep.backbones.qwen3_vl:Qwen3VL",
        "gstep.language.qwen_vl:Qwen3Prompts",
        "Qwen/Qwen3-VL-2B, -4B, -8B and -32B, -Instruct and -Thinking",
        (*_FILES, _VIDEO),
        (_GENERATION,),
    ),
    "qwen3_vl_moe": Family(
        "gstep.backbones.qwen3_vl:Qwen3VLMoe",
        "gstep.language.qwen_vl:Qwen3Prompts",
        "Qwen/Qwen3-VL-30B-A3B and -235B-A22B, -Instruct and -Thinking",
        (*_FILES, _VIDEO),
        (_GENERATION,),
    ),
    "qwen3_5": Family(
        "gstep.backbones.qwen3_vl:Qwen3_5",
        "gstep.language.qwen_vl:Qwen3Prompts",
        "Qwen/Qwen3.5-* and Qwen3.6-*, dense",
        (*_FILES, _VIDEO),
        (_GENERATION,),
    ),
    "qwen3_5_moe": Family(
        "gstep.backbones.qwen3_vl:Qwen3_5Moe",
        "gstep.language.qwen_vl:Qwen3Prompts",
        "Qwen/Qwen3.5-* and Qwen3.6-*, mixtures of experts such as 35B-A3B",
        (*_FILES, _VIDEO),
        (_GENERATION,),
    ),
    "qwen4_exp": Family(
        "gstep.backbones.qwen3_vl:Qwen4Exp",
        None,
        "Qwen/Qwen4-Exp",
        _FILES,
        (_GENERATION, _VIDEO),
    ),
    GENERIC: Family(
        "gstep.generic.family:GenericFamily",
        "gstep.generic.prompts:GenericPrompts",
        usual_files=(*_FILES, _PROCESSOR, _GENERATION, _VIDEO),
        language_model="gstep.generic.model:GenericLanguageModel",
        gate="gstep.generic.gate:check_model",
        doctor="gstep.generic.gate:check_weights",
    ),
}


def choose_family(model_type: str) -> str:
    """Return the family for a model type: the type itself if it is in the table, otherwise ``GENERIC``."""
    return model_type if model_type in FAMILIES else GENERIC
