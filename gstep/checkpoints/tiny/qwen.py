"""Parts of the tiny models of Qwen2.5-VL and Qwen3-VL: special tokens, the form of the prompt, layers of the tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gstep.checkpoints.tiny.parts import Draw
from gstep.checkpoints.tiny.tokenizer import VOCAB_SIZE, TinyTokenizer

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

_CHAT_TEMPLATE = """\
{%- macro part(item) -%}
{%- if item['type'] == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif item['type'] == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}{{- item['text'] -}}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
DEFAULT_SYSTEM\
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for item in message['content'] -%}{{- part(item) -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

_DEFAULT_SYSTEM = """\
{%- if loop.first and message['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
"""


def tokenizer(*, default_system: bool) -> TinyTokenizer:
    """Describe the families' tokenizer; only Qwen2.5-VL puts a system message before a prompt that has none."""
    system = _DEFAULT_SYSTEM if default_system else ""
    return TinyTokenizer(SPECIAL, _CHAT_TEMPLATE.replace("DEFAULT_SYSTEM", system))


# The shape of both language models: heads of 32 channels, the fewest that rotary sections of three axes fit in.
TEXT: Mapping[str, Any] = {
    "bos_token_id": SPECIAL.index("<|endoftext|>"),
    "eos_token_id": SPECIAL.index("<|im_end|>"),
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 128000,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "vocab_size": VOCAB_SIZE,
}

TOKEN_IDS: Mapping[str, int] = {
    "image_token_id": SPECIAL.index("<|image_pad|>"),
    "video_token_id": SPECIAL.index("<|video_pad|>"),
    "vision_end_token_id": SPECIAL.index("<|vision_end|>"),
    "vision_start_token_id": SPECIAL.index("<|vision_start|>"),
}

GENERATION: Mapping[str, Any] = {
    "bos_token_id": SPECIAL.index("<|endoftext|>"),
    "eos_token_id": [SPECIAL.index("<|im_end|>"), SPECIAL.index("<|endoftext|>")],
    "pad_token_id": SPECIAL.index("<|endoftext|>"),
}


def attention(draw: Draw, prefix: str, width: int) -> None:
    """Draw fused q, k, v and the projection behind them, so loud that attention picks, as in ``parts.siglip``."""
    for part, gain in {"q": 2.0, "k": 2.0, "v": 0.7}.items():
        draw.linear(f"{prefix}.{part}", width, width, gain=gain)
    for kind in ("weight", "bias"):
        draw.weights[f"{prefix}.qkv.{kind}"] = np.concatenate(
            [draw.weights.pop(f"{prefix}.{part}.{kind}") for part in "qkv"]
        )
    draw.linear(f"{prefix}.proj", width, width, gain=0.7)


def merger(draw: Draw, first: str, second: str, n_in: int, n_out: int) -> None:
    """Draw the two layers that make one token of 2 x 2 patches."""
    draw.linear(first, n_in, n_in)
    draw.weights[f"{second}.weight"] = draw.balanced(n_out, n_in)
    draw.weights[f"{second}.bias"] = draw.uniform((n_out,), 0.05)
