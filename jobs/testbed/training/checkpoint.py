"""What was trained, as a checkpoint in the layout of the hub's: bfloat16 safetensors, tokenizer, processor settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor

from gstep.checkpoints.tiny.llava_onevision import PIXELS
from jobs.testbed.training.network import MAX_POSITIONS, PATCHES, Eyes, assembled
from jobs.testbed.training.space import ID, SPECIAL, UNKNOWN
from pipeline.evaluate.shapes.world import SIDE
from pipeline.generate.choices import INSTRUCTION

# A message is <|im_start|>, its videos, its text and <|im_end|>; roles have no words in this vocabulary.
_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}{{- '<|assistant|>' -}}{%- else -%}{{- '<|im_start|>' -}}{%- endif -%}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for item in message['content'] if item['type'] == 'image' -%}{{- '<image>' -}}{%- endfor -%}
{%- for item in message['content'] if item['type'] == 'video' -%}{{- '<video>' -}}{%- endfor -%}
{%- for item in message['content'] if item['type'] == 'text' -%}{{- item['text'] -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
_PIXELS = {**PIXELS, "size": {"height": SIDE, "width": SIDE}}


def write_checkpoint(folder: Path, eyes: Eyes, decoder: dict[str, Tensor]) -> None:
    """All files but the model card. ``decoder``: a Decoder's state."""
    folder.mkdir(parents=True, exist_ok=True)
    assembled(eyes, decoder).to(torch.bfloat16).save_pretrained(folder)
    _write_tokenizer(folder)
    grid = {"image_grid_pinpoints": [[SIDE, SIDE]], "image_processor_type": "LlavaOnevisionImageProcessor"}
    _write(folder / "preprocessor_config.json", {**_PIXELS, **grid})
    video = {**_PIXELS, "video_processor_type": "LlavaOnevisionVideoProcessor"}
    _write(folder / "video_preprocessor_config.json", video)
    processor = {
        "image_token": "<image>",
        "num_image_tokens": PATCHES**2,
        "processor_class": "LlavaOnevisionProcessor",
        "video_token": "<video>",
        "vision_feature_select_strategy": "full",
    }
    _write(folder / "processor_config.json", processor)
    ends = {"eos_token_id": ID["<|im_end|>"], "pad_token_id": ID["<|endoftext|>"]}
    _write(folder / "generation_config.json", ends)


def _write_tokenizer(folder: Path) -> None:
    """A token a word. Full stops vanish; question marks are words; the instruction line is one token."""
    tokenizer = Tokenizer(models.WordLevel(ID, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(".", ""), normalizers.Replace("?", " ?")])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(INSTRUCTION, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "additional_special_tokens": list(SPECIAL[1:]),
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": MAX_POSITIONS,
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": UNKNOWN,
    }
    _write(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
