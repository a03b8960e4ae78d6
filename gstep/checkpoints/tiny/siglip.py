"""The tiny SigLIP beside the tiny LLaVA-OneVision: its attention-pooling head and its text tower.

Of the vision tower there is nothing else: the tiny LLaVA-OneVision has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gstep.checkpoints.tiny import llava_onevision
from gstep.checkpoints.tiny.parts import Draw, TinyModel, Weights, siglip_layers
from gstep.checkpoints.tiny.tokenizer import VOCAB_SIZE, TinyTokenizer

TOKENIZER = TinyTokenizer(special=("</s>", "<unk>"), chat_template=None, end="</s>", max_length=16)


def _weights(config: Mapping[str, Any]) -> Weights:
    """Draw the weights of the pooling head and the text tower."""
    draw, head = Draw(), "vision_model.head"
    width, inner = config["vision_config"]["hidden_size"], config["vision_config"]["intermediate_size"]
    draw.norm("vision_model.post_layernorm", width, bias=True)
    # Large weights make the probe's attention sharp, as in ``parts.siglip``.
    draw.weights[f"{head}.probe"] = draw.uniform((1, 1, width), 1.0)
    draw.weights[f"{head}.attention.in_proj_weight"] = draw.uniform((3 * width, width), 2 / width**0.5)
    draw.weights[f"{head}.attention.in_proj_bias"] = draw.uniform((3 * width,), 0.05)
    draw.linear(f"{head}.attention.out_proj", width, width)
    draw.norm(f"{head}.layernorm", width, bias=True)
    draw.linear(f"{head}.mlp.fc1", inner, width)
    draw.linear(f"{head}.mlp.fc2", width, inner, gain=0.5)
    _text_tower(draw, "text_model", config["text_config"])
    return draw.weights


def _text_tower(draw: Draw, prefix: str, config: Mapping[str, Any]) -> None:
    """Draw the weights of SigLIP's text tower below ``prefix``."""
    width = config["hidden_size"]
    draw.weights[f"{prefix}.embeddings.token_embedding.weight"] = draw.uniform((config["vocab_size"], width), 1.0)
    positions = config["max_position_embeddings"]
    draw.weights[f"{prefix}.embeddings.position_embedding.weight"] = draw.uniform((positions, width), 0.5)
    siglip_layers(draw, prefix, config)
    draw.norm(f"{prefix}.final_layer_norm", width, bias=True)
    draw.linear(f"{prefix}.head", width, width)


_VISION = llava_onevision.MODEL.config["vision_config"]

MODEL = TinyModel(
    config={
        "architectures": ["SiglipModel"],
        "model_type": "siglip",
        "text_config": {
            "hidden_size": _VISION["hidden_size"],
            "intermediate_size": _VISION["intermediate_size"],
            "max_position_embeddings": TOKENIZER.max_length,
            "model_type": "siglip_text_model",
            "num_attention_heads": _VISION["num_attention_heads"],
            "num_hidden_layers": 2,
            "vocab_size": VOCAB_SIZE,
        },
        # One layer more than the tower of LLaVA-OneVision, which drops the last one of the real SigLIP too.
        "vision_config": {
            **{key: value for key, value in _VISION.items() if key != "vision_use_head"},
            "num_hidden_layers": _VISION["num_hidden_layers"] + 1,
        },
    },
    weights=_weights,
    tokenizer=TOKENIZER,
    processor_files={},
)
