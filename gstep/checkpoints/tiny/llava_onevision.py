"""The tiny LLaVA-OneVision and the tiny SigLIP beside it, with 64 channels and two layers.

The geometry is the real geometry: 27 x 27 patches, 196 tokens a frame. SigLIP has the parts that LLaVA-OneVision lacks:
the attention-pooling head and the text tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gstep.checkpoints.tiny.parts import Draw, TinyModel, Weights, draw_decoder
from gstep.checkpoints.tiny.tokenizer import VOCAB_SIZE, TinyTokenizer

_TOKENIZER = TinyTokenizer(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"),
    # One line a message, as the checkpoints on the hub are prompted: images, then videos, then text.
    chat_template="""\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] -}}
{%- if message['content'] is string -%}
{{- '\\n' + message['content'] -}}
{%- else -%}
{{- ' ' -}}
{%- for item in message['content'] if item['type'] == 'image' -%}{{- '<image>' -}}{%- endfor -%}
{%- for item in message['content'] if item['type'] == 'video' -%}{{- '<video>' -}}{%- endfor -%}
{%- for item in message['content'] if item['type'] == 'text' -%}{{- '\\n' + item['text'] -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""",
)


def _draw_vision_tower(draw: Draw, prefix: str, config: Mapping[str, Any]) -> None:
    """Draw and store the weights of a SigLIP vision tower below ``prefix``."""
    width, patch = config["hidden_size"], config["patch_size"]
    draw.weights[f"{prefix}.embeddings.patch_embedding.weight"] = draw.patch_embedding(width, 3, patch, patch)
    draw.weights[f"{prefix}.embeddings.patch_embedding.bias"] = draw.uniform((width,), 0.05)
    positions = (config["image_size"] // patch) ** 2
    draw.weights[f"{prefix}.embeddings.position_embedding.weight"] = draw.uniform((positions, width), 0.5)
    _draw_layers(draw, prefix, config)
    draw.norm(f"{prefix}.post_layernorm", width, bias=True)


def _draw_layers(draw: Draw, prefix: str, config: Mapping[str, Any]) -> None:
    """Draw and store the layers of SigLIP's vision or text tower below ``prefix``."""
    width = config["hidden_size"]
    for layer in (f"{prefix}.encoder.layers.{i}" for i in range(config["num_hidden_layers"])):
        draw.norm(f"{layer}.layer_norm1", width, bias=True)
        draw.norm(f"{layer}.layer_norm2", width, bias=True)
        # Sharp attention: if it averaged, a frame's mean would be added to all its tokens and make them alike.
        for part, gain in {"q_proj": 2.0, "k_proj": 2.0, "v_proj": 0.7, "out_proj": 0.7}.items():
            draw.linear(f"{layer}.self_attn.{part}", width, width, gain=gain)
        draw.linear(f"{layer}.mlp.fc1", config["intermediate_size"], width)
        draw.linear(f"{layer}.mlp.fc2", width, config["intermediate_size"], gain=0.5)


def _draw_llava_weights(config: Mapping[str, Any]) -> Weights:
    """Draw the weights of the vision tower, the projector, the newline and the language model."""
    draw = Draw()
    _draw_vision_tower(draw, "vision_tower.vision_model", config["vision_config"])
    vision, text = config["vision_config"]["hidden_size"], config["text_config"]["hidden_size"]
    draw.linear("multi_modal_projector.linear_1", text, vision)
    draw.linear("multi_modal_projector.linear_2", text, text)
    draw.weights["multi_modal_projector.linear_2.weight"] = draw.balanced(text, text)
    draw.weights["image_newline"] = draw.uniform((text,), 0.7)
    draw_decoder(draw, config["text_config"], model="language_model.model", head="language_model.lm_head")
    return draw.weights


_LLAVA: Mapping[str, Any] = {
    "architectures": ["LlavaOnevisionForConditionalGeneration"],
    "image_grid_pinpoints": [[384, 384], [384, 768], [768, 384], [768, 768]],
    "image_token_index": _TOKENIZER.id_of("<image>"),
    "model_type": "llava_onevision",
    "projector_hidden_act": "gelu",
    "text_config": {
        "bos_token_id": _TOKENIZER.id_of("<|endoftext|>"),
        "eos_token_id": _TOKENIZER.id_of("<|im_end|>"),
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 32768,
        "model_type": "qwen2",
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "rope_theta": 1000000.0,
        "vocab_size": VOCAB_SIZE,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_image_newline_parameter": True,
    "video_token_index": _TOKENIZER.id_of("<video>"),
    "vision_aspect_ratio": "anyres_max_9",
    "vision_config": {  # the real geometry: 27 x 27 patches, 196 tokens a frame
        "hidden_size": 64,
        "image_size": 384,
        "intermediate_size": 128,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "patch_size": 14,
        "vision_use_head": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}

_PIXELS = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "LlavaOnevisionProcessor",
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"height": 384, "width": 384},
}

LLAVA_ONEVISION = TinyModel(
    config=_LLAVA,
    weights=_draw_llava_weights,
    tokenizer=_TOKENIZER,
    processor_files={
        "generation_config.json": {
            "eos_token_id": _TOKENIZER.id_of("<|im_end|>"),
            "pad_token_id": _TOKENIZER.id_of("<|endoftext|>"),
        },
        "preprocessor_config.json": {
            **_PIXELS,
            "image_grid_pinpoints": _LLAVA["image_grid_pinpoints"],
            "image_processor_type": "LlavaOnevisionImageProcessor",
        },
        "video_preprocessor_config.json": {
            **_PIXELS,
            "video_processor_type": "LlavaOnevisionVideoProcessor",
        },
        "processor_config.json": {
            "image_token": "<image>",
            "num_image_tokens": 729,
            "processor_class": "LlavaOnevisionProcessor",
            "video_token": "<video>",
            "vision_feature_select_strategy": "full",
        },
    },
)


def _draw_siglip_weights(config: Mapping[str, Any]) -> Weights:
    """Draw the weights of the pooling head and the text tower."""
    draw, head = Draw(), "vision_model.head"
    width, inner = config["vision_config"]["hidden_size"], config["vision_config"]["intermediate_size"]
    draw.norm("vision_model.post_layernorm", width, bias=True)
    # Large weights make the probe's attention sharp, as in ``_draw_layers``.
    draw.weights[f"{head}.probe"] = draw.uniform((1, 1, width), 1.0)
    draw.weights[f"{head}.attention.in_proj_weight"] = draw.uniform((3 * width, width), 2 / width**0.5)
    draw.weights[f"{head}.attention.in_proj_bias"] = draw.uniform((3 * width,), 0.05)
    draw.linear(f"{head}.attention.out_proj", width, width)
    draw.norm(f"{head}.layernorm", width, bias=True)
    draw.linear(f"{head}.mlp.fc1", inner, width)
    draw.linear(f"{head}.mlp.fc2", width, inner, gain=0.5)
    _draw_text_tower(draw, "text_model", config["text_config"])
    return draw.weights


def _draw_text_tower(draw: Draw, prefix: str, config: Mapping[str, Any]) -> None:
    """Draw and store the weights of SigLIP's text tower below ``prefix``."""
    width = config["hidden_size"]
    draw.weights[f"{prefix}.embeddings.token_embedding.weight"] = draw.uniform((config["vocab_size"], width), 1.0)
    positions = config["max_position_embeddings"]
    draw.weights[f"{prefix}.embeddings.position_embedding.weight"] = draw.uniform((positions, width), 0.5)
    _draw_layers(draw, prefix, config)
    draw.norm(f"{prefix}.final_layer_norm", width, bias=True)
    draw.linear(f"{prefix}.head", width, width)


_VISION = _LLAVA["vision_config"]
_TEXT_TOKENIZER = TinyTokenizer(special=("</s>", "<unk>"), chat_template=None, end="</s>", max_length=16)

SIGLIP = TinyModel(
    config={
        "architectures": ["SiglipModel"],
        "model_type": "siglip",
        "text_config": {
            "hidden_size": _VISION["hidden_size"],
            "intermediate_size": _VISION["intermediate_size"],
            "max_position_embeddings": _TEXT_TOKENIZER.max_length,
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
    weights=_draw_siglip_weights,
    tokenizer=_TEXT_TOKENIZER,
    processor_files={},
)
