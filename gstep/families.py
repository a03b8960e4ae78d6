"""The table of model families: the class that makes visual tokens, and the class that puts them into prompts.

Classes are import paths, so that a checkpoint's type can be checked before any model code is imported. A family that is
not in the table is named by the import path ``package.module:Class`` of its ``ModelFamily``.
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
        usual_files: the files that these checkpoints or fine-tuned ones may lack. InternVL3, for example, has no
            video_preprocessor_config.json, and InternVL3.5 has one.
        language_model: the import path of the class that answers prompts.
        gate: the import path of a function that checks a resolved model before any work, and returns what it found as
            ``ModelSource.layout``; None for a family that is described by its own code.
        doctor: the import path of the function that makes the same check with the checkpoint's own weights, for
            ``jobs.doctor``; None without a gate.
    """

    backbone: str
    prompts: str | None
    published: str = ""
    files: tuple[str, ...] = ()
    usual_files: tuple[str, ...] = ()
    language_model: str = "gstep.language.model:LanguageModel"
    gate: str | None = None
    doctor: str | None = None


#: The family of every model type that has no line of its own below.
GENERIC = "generic"
_FILES = ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json")
_GENERATION, _VIDEO, _PROCESSOR = "generation_config.json", "video_preprocessor_config.json", "processor_config.json"


def describe_family(family: str, model_type: str | None) -> str:
    """Return the name of a family, with the model type where another family reads it than the one of its own."""
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
    """Return the family of a model type: the family of that name in the table, else GENERIC."""
    return model_type if model_type in FAMILIES else GENERIC
