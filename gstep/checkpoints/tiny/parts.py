"""What tiny models of several families share: settings, chat templates, and tensor tables of the language models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gstep.checkpoints.tiny.tokenizer import VOCAB_SIZE, TinyTokenizer


@dataclass(frozen=True)
class TinyModel:
    """The recipe of a tiny model, from which every file in its folder is made.

    Attributes:
        tensors: name prefix -> table of tensors, in the notation of ``weights``.
        processor_files: file name -> content of its other JSON files.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, str]
    tokenizer: TinyTokenizer
    processor_files: Mapping[str, Mapping[str, Any]]


#: The first special tokens of every family that answers.
CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, _, END = range(3)

#: The shape of all language models: heads of 32 channels, the minimum for rotary sections of three axes.
TEXT: Mapping[str, Any] = {
    "bos_token_id": PAD,
    "eos_token_id": END,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "vocab_size": VOCAB_SIZE,
}
GENERATION: Mapping[str, Any] = {"eos_token_id": END, "pad_token_id": PAD}
PIXELS: Mapping[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
}

# Language models, without the head, which has another prefix, and without the MLPs, which mixtures of experts lack.
QWEN2 = """\
embed_tokens.weight vocab text
layers.{layers}.{input,post_attention}_layernorm.weight text
layers.{layers}.self_attn.q_proj.{weight,bias} queries text
layers.{layers}.self_attn.{k,v}_proj.{weight,bias} keys text
layers.{layers}.self_attn.o_proj.weight text queries
norm.weight text
"""
QWEN3 = """\
embed_tokens.weight vocab text
layers.{layers}.{input,post_attention}_layernorm.weight text
layers.{layers}.self_attn.q_proj.weight queries text
layers.{layers}.self_attn.{k,v}_proj.weight keys text
layers.{layers}.self_attn.{q,k}_norm.weight head
layers.{layers}.self_attn.o_proj.weight text queries
norm.weight text
"""
MLP = """\
layers.{layers}.mlp.{gate,up}_proj.weight text_inner text
layers.{layers}.mlp.down_proj.weight text text_inner
"""
HEAD = "lm_head.weight vocab text"

_CHAT_TEMPLATE = """\
{%- for message in messages -%}
SYSTEM\
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for item in message['content'] -%}
{%- if item['type'] == 'image' -%}{{- 'IMAGE' -}}
{%- elif item['type'] == 'video' -%}{{- 'VIDEO' -}}
{%- else -%}{{- item['text'] -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\nOPENING' -}}{%- endif -%}
"""


def make_chat_template(image: str, video: str, *, system: str = "", opening: str = "") -> str:
    """Make a chat template that writes ``image`` and ``video`` in place of each image and video.

    Args:
        system: Jinja code that runs before each message.
        opening: the beginning of the answer.
    """
    words = {"IMAGE": image, "VIDEO": video, "SYSTEM": system, "OPENING": opening}
    template = _CHAT_TEMPLATE
    for word, text in words.items():
        template = template.replace(word, text)
    return template
