"""The tiny Qwen2.5-VL and Qwen3-VL: the real patches, windows and deepstack levels with 64 channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gstep.checkpoints.tiny.parts import Draw, TinyModel, Weights, draw_decoder
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


def make_chat_tokenizer(*, default_system: bool) -> TinyTokenizer:
    """Describe the families' tokenizer; only Qwen2.5-VL puts a system message before a prompt that has none."""
    system = _DEFAULT_SYSTEM if default_system else ""
    return TinyTokenizer(SPECIAL, _CHAT_TEMPLATE.replace("DEFAULT_SYSTEM", system))


# The shape of both language models: heads of 32 channels, the fewest that rotary sections of three axes fit in.
_TEXT: Mapping[str, Any] = {
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

_TOKEN_IDS: Mapping[str, int] = {
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


def _draw_attention(draw: Draw, prefix: str, width: int) -> None:
    """Draw and store fused q, k, v and the projection behind them; large weights make the attention sharp."""
    for part, gain in {"q": 2.0, "k": 2.0, "v": 0.7}.items():
        draw.linear(f"{prefix}.{part}", width, width, gain=gain)
    for kind in ("weight", "bias"):
        draw.weights[f"{prefix}.qkv.{kind}"] = np.concatenate(
            [draw.weights.pop(f"{prefix}.{part}.{kind}") for part in "qkv"]
        )
    draw.linear(f"{prefix}.proj", width, width, gain=0.7)


def _draw_merger(draw: Draw, first: str, second: str, n_in: int, n_out: int) -> None:
    """Draw and store the two layers that make one token of 2 x 2 patches; ``first`` and ``second`` are their names."""
    draw.linear(first, n_in, n_in)
    draw.weights[f"{second}.weight"] = draw.balanced(n_out, n_in)
    draw.weights[f"{second}.bias"] = draw.uniform((n_out,), 0.05)


def _draw_qwen2_5_weights(config: Mapping[str, Any]) -> Weights:
    """Draw the weights of the vision tower and the language model."""
    draw = Draw()
    vision = config["vision_config"]
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    patch = vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"]
    draw.weights["visual.patch_embed.proj.weight"] = draw.patch_embedding(width, 3, *patch)
    for block in (f"visual.blocks.{i}" for i in range(vision["depth"])):
        draw.norm(f"{block}.norm1", width, bias=False)
        draw.norm(f"{block}.norm2", width, bias=False)
        _draw_attention(draw, f"{block}.attn", width)
        for part in ("gate_proj", "up_proj"):
            draw.linear(f"{block}.mlp.{part}", inner, width)
        draw.linear(f"{block}.mlp.down_proj", width, inner, gain=0.5)
    draw.norm("visual.merger.ln_q", width, bias=False)
    _draw_merger(draw, "visual.merger.mlp.0", "visual.merger.mlp.2", 4 * width, vision["out_hidden_size"])
    draw_decoder(draw, config, model="model", head="lm_head")
    return draw.weights


def draw_qwen3_tower(draw: Draw, vision: Mapping[str, Any]) -> None:
    """Draw and store the weights of the vision tower and of as many deepstack mergers as it has levels."""
    visual = "model.visual"
    width, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    patch = vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"]
    draw.weights[f"{visual}.patch_embed.proj.weight"] = draw.patch_embedding(width, 3, *patch)
    draw.weights[f"{visual}.patch_embed.proj.bias"] = draw.uniform((width,), 0.05)
    draw.weights[f"{visual}.pos_embed.weight"] = draw.uniform((vision["num_position_embeddings"], width), 0.5)
    for block in (f"{visual}.blocks.{i}" for i in range(vision["depth"])):
        draw.norm(f"{block}.norm1", width, bias=True)
        draw.norm(f"{block}.norm2", width, bias=True)
        _draw_attention(draw, f"{block}.attn", width)
        draw.linear(f"{block}.mlp.linear_fc1", inner, width)
        draw.linear(f"{block}.mlp.linear_fc2", width, inner, gain=0.5)
    levels = [f"{visual}.deepstack_merger_list.{i}" for i in range(len(vision["deepstack_visual_indexes"]))]
    for part in (f"{visual}.merger", *levels):
        # The norm of a deepstack level comes after its 2 x 2 patches were laid side by side.
        draw.norm(f"{part}.norm", 4 * width if part in levels else width, bias=True)
        _draw_merger(draw, f"{part}.linear_fc1", f"{part}.linear_fc2", 4 * width, out)


def _draw_qwen3_weights(config: Mapping[str, Any]) -> Weights:
    """Draw the weights of the vision tower, its deepstack mergers and the language model."""
    draw = Draw()
    draw_qwen3_tower(draw, config["vision_config"])
    draw_decoder(draw, config["text_config"], model="model.language_model", head="lm_head", bias=False, qk_norm=True)
    return draw.weights


_QWEN2_5 = {  # flat, without text_config, as on the hub
    **_TEXT,
    **_TOKEN_IDS,
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_sliding_window": False,
    "vision_config": {
        "depth": 2,
        "fullatt_block_indexes": [1],
        "hidden_act": "silu",
        "hidden_size": 64,
        "in_chans": 3,
        "intermediate_size": 128,
        "model_type": "qwen2_5_vl",
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
    },
}

QWEN2_5_VL = TinyModel(
    config=_QWEN2_5,
    weights=_draw_qwen2_5_weights,
    tokenizer=make_chat_tokenizer(default_system=True),
    processor_files={
        "generation_config.json": GENERATION,
        "preprocessor_config.json": {  # the only one, as on the hub; there max_pixels is 12845056
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_processor_type": "Qwen2VLImageProcessor",
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "max_pixels": 150 * 28 * 28,  # 9 x 16 tokens of a frame of 16:9
            "merge_size": 2,
            "min_pixels": 3136,
            "patch_size": 14,
            "processor_class": "Qwen2_5_VLProcessor",
            "temporal_patch_size": 2,
        },
    },
)

QWEN3: Mapping[str, Any] = {
    **_TOKEN_IDS,
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        **_TEXT,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "head_dim": 32,
        "model_type": "qwen3_vl_text",
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
        "rope_theta": 5000000,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "deepstack_visual_indexes": [0, 1, 2],
        "depth": 4,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "in_channels": 3,
        "intermediate_size": 128,
        "model_type": "qwen3_vl",
        "num_heads": 2,
        "num_position_embeddings": 576,
        "out_hidden_size": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}

_QWEN3_PIXELS = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "processor_class": "Qwen3VLProcessor",
    "temporal_patch_size": 2,
}

QWEN3_PIXEL_FILES: Mapping[str, Mapping[str, Any]] = {
    "preprocessor_config.json": {
        **_QWEN3_PIXELS,
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"longest_edge": 150 * 32 * 32, "shortest_edge": 65536},
    },
    "video_preprocessor_config.json": {
        **_QWEN3_PIXELS,
        # Of a whole video: 9 x 16 tokens of each of 32 frames of 16:9. On the hub 25165824.
        "size": {"longest_edge": 32 * 150 * 32 * 32, "shortest_edge": 4096},
        "video_processor_type": "Qwen3VLVideoProcessor",
    },
}

QWEN3_VL = TinyModel(
    config=QWEN3,
    weights=_draw_qwen3_weights,
    tokenizer=make_chat_tokenizer(default_system=False),
    processor_files={"generation_config.json": GENERATION, **QWEN3_PIXEL_FILES},
)
