"""The tiny Qwen3-VL: the real patches with 64 channels, four layers and three deepstack levels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gstep.checkpoints.tiny.parts import Draw, TinyModel, Weights, decoder
from gstep.checkpoints.tiny.qwen import GENERATION, TEXT, TOKEN_IDS, attention, merger, tokenizer


def _weights(config: Mapping[str, Any]) -> Weights:
    """Draw the weights of the vision tower, its deepstack mergers and the language model."""
    draw = Draw()
    vision, visual = config["vision_config"], "model.visual"
    width, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    patch = vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"]
    draw.weights[f"{visual}.patch_embed.proj.weight"] = draw.patch_embedding(width, 3, *patch)
    draw.weights[f"{visual}.patch_embed.proj.bias"] = draw.uniform((width,), 0.05)
    draw.weights[f"{visual}.pos_embed.weight"] = draw.uniform((vision["num_position_embeddings"], width), 0.5)
    for block in (f"{visual}.blocks.{i}" for i in range(vision["depth"])):
        draw.norm(f"{block}.norm1", width, bias=True)
        draw.norm(f"{block}.norm2", width, bias=True)
        attention(draw, f"{block}.attn", width)
        draw.linear(f"{block}.mlp.linear_fc1", inner, width)
        draw.linear(f"{block}.mlp.linear_fc2", width, inner, gain=0.5)
    levels = [f"{visual}.deepstack_merger_list.{i}" for i in range(len(vision["deepstack_visual_indexes"]))]
    for part in (f"{visual}.merger", *levels):
        # The norm of a deepstack level comes after its 2 x 2 patches were laid side by side.
        draw.norm(f"{part}.norm", 4 * width if part in levels else width, bias=True)
        merger(draw, f"{part}.linear_fc1", f"{part}.linear_fc2", 4 * width, out)
    text = config["text_config"]
    decoder(draw, text, model="model.language_model", head="lm_head", bias=False, qk_norm=True)
    return draw.weights


_CONFIG = {
    **TOKEN_IDS,
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        **TEXT,
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

_PIXELS = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "processor_class": "Qwen3VLProcessor",
    "temporal_patch_size": 2,
}

MODEL = TinyModel(
    config=_CONFIG,
    weights=_weights,
    tokenizer=tokenizer(default_system=False),
    processor_files={
        "generation_config.json": GENERATION,
        "preprocessor_config.json": {
            **_PIXELS,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"longest_edge": 150 * 32 * 32, "shortest_edge": 65536},
        },
        "video_preprocessor_config.json": {
            **_PIXELS,
            # Of a whole video: 9 x 16 tokens of each of 32 frames of 16:9. On the hub 25165824.
            "size": {"longest_edge": 32 * 150 * 32 * 32, "shortest_edge": 4096},
            "video_processor_type": "Qwen3VLVideoProcessor",
        },
    },
)
