"""The tiny Qwen2.5-VL: the real patches and windows with 64 channels, one windowed layer and one over whole frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gstep.checkpoints.tiny.parts import Draw, TinyModel, Weights, decoder
from gstep.checkpoints.tiny.qwen import GENERATION, TEXT, TOKEN_IDS, attention, merger, tokenizer


def _weights(config: Mapping[str, Any]) -> Weights:
    """Draw the weights of the vision tower and the language model."""
    draw = Draw()
    vision = config["vision_config"]
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    patch = vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"]
    draw.weights["visual.patch_embed.proj.weight"] = draw.patch_embedding(width, 3, *patch)
    for block in (f"visual.blocks.{i}" for i in range(vision["depth"])):
        draw.norm(f"{block}.norm1", width, bias=False)
        draw.norm(f"{block}.norm2", width, bias=False)
        attention(draw, f"{block}.attn", width)
        for part in ("gate_proj", "up_proj"):
            draw.linear(f"{block}.mlp.{part}", inner, width)
        draw.linear(f"{block}.mlp.down_proj", width, inner, gain=0.5)
    draw.norm("visual.merger.ln_q", width, bias=False)
    merger(draw, "visual.merger.mlp.0", "visual.merger.mlp.2", 4 * width, vision["out_hidden_size"])
    decoder(draw, config, model="model", head="lm_head")
    return draw.weights


_CONFIG = {  # flat, without text_config, as on the hub
    **TEXT,
    **TOKEN_IDS,
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

MODEL = TinyModel(
    config=_CONFIG,
    weights=_weights,
    tokenizer=tokenizer(default_system=True),
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
