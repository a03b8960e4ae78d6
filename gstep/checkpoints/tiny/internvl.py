"""The tiny InternVL3.5: frames of 224 x 224 pixels, 64 tokens each, and a language model of Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gstep.checkpoints.tiny.parts import Draw, TinyModel, Weights, draw_decoder
from gstep.checkpoints.tiny.tokenizer import VOCAB_SIZE, TinyTokenizer

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>")

_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for item in message['content'] -%}
{%- if item['type'] == 'image' -%}{{- '<IMG_CONTEXT>\\n' -}}
{%- elif item['type'] == 'video' -%}{{- '<video>\\n' -}}
{%- else -%}{{- item['text'] -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def _draw_weights(config: Mapping[str, Any]) -> Weights:
    """Draw the weights of the vision tower, the projector and the language model."""
    draw, tower, vision = Draw(), "vision_tower", config["vision_config"]
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    (side, _), (patch, _) = vision["image_size"], vision["patch_size"]
    draw.weights[f"{tower}.embeddings.cls_token"] = draw.uniform((1, 1, width), 0.5)
    positions = (side // patch) ** 2 + 1
    draw.weights[f"{tower}.embeddings.position_embeddings"] = draw.uniform((1, positions, width), 0.5)
    projection = f"{tower}.embeddings.patch_embeddings.projection"
    draw.weights[f"{projection}.weight"] = draw.patch_embedding(width, 3, patch, patch)
    draw.weights[f"{projection}.bias"] = draw.uniform((width,), 0.05)
    for layer in (f"{tower}.encoder.layer.{i}" for i in range(vision["num_hidden_layers"])):
        for part, gain in {"q_proj": 2.0, "k_proj": 2.0, "v_proj": 0.7, "projection_layer": 0.7}.items():
            draw.linear(f"{layer}.attention.{part}", width, width, gain=gain)
        draw.linear(f"{layer}.mlp.fc1", inner, width)
        draw.linear(f"{layer}.mlp.fc2", width, inner, gain=0.5)
        for part in ("layernorm_before", "layernorm_after"):
            draw.norm(f"{layer}.{part}", width, bias=True)
        for part in ("lambda_1", "lambda_2"):
            draw.weights[f"{layer}.{part}"] = draw.uniform((width,), 0.05) + 1
    text = config["text_config"]
    draw.norm("multi_modal_projector.layer_norm", 4 * width, bias=True)
    draw.linear("multi_modal_projector.linear_1", text["hidden_size"], 4 * width)
    draw.weights["multi_modal_projector.linear_2.weight"] = draw.balanced(text["hidden_size"], text["hidden_size"])
    draw.weights["multi_modal_projector.linear_2.bias"] = draw.uniform((text["hidden_size"],), 0.05)
    draw_decoder(draw, text, model="language_model.model", head="language_model.lm_head", bias=False, qk_norm=True)
    return draw.weights


_PIXELS = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "processor_class": "InternVLProcessor",
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"height": 224, "width": 224},
}

INTERNVL = TinyModel(
    config={
        "architectures": ["InternVLForConditionalGeneration"],
        "downsample_ratio": 0.5,
        "image_seq_length": 64,
        "image_token_id": _SPECIAL.index("<IMG_CONTEXT>"),
        "model_type": "internvl",
        "projector_hidden_act": "gelu",
        "text_config": {
            "bos_token_id": _SPECIAL.index("<|endoftext|>"),
            "eos_token_id": _SPECIAL.index("<|im_end|>"),
            "head_dim": 32,
            "hidden_act": "silu",
            "hidden_size": 64,
            "intermediate_size": 128,
            "max_position_embeddings": 40960,
            "model_type": "qwen3",
            "num_attention_heads": 2,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000,
            "vocab_size": VOCAB_SIZE,
        },
        "tie_word_embeddings": False,
        "vision_config": {
            "attention_bias": True,
            "hidden_act": "gelu",
            "hidden_size": 64,
            "image_size": [224, 224],
            "intermediate_size": 128,
            "model_type": "internvl_vision",
            "norm_type": "layer_norm",
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "patch_size": [14, 14],
            "use_mean_pooling": True,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    },
    weights=_draw_weights,
    tokenizer=TinyTokenizer(
        _SPECIAL,
        _CHAT_TEMPLATE,
        roles={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    processor_files={
        "generation_config.json": {
            "eos_token_id": _SPECIAL.index("<|im_end|>"),
            "pad_token_id": _SPECIAL.index("<|endoftext|>"),
        },
        "preprocessor_config.json": {**_PIXELS, "image_processor_type": "GotOcr2ImageProcessorFast"},
        "video_preprocessor_config.json": {**_PIXELS, "video_processor_type": "InternVLVideoProcessor"},
        "processor_config.json": {"image_seq_length": 64, "processor_class": "InternVLProcessor"},
    },
)
