"""The tiny LLaVA-OneVision: the real geometry (27 x 27 patches, 196 tokens a frame) with 64 channels and two layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gstep.checkpoints.tiny.parts import Draw, TinyModel, Weights, decoder, siglip
from gstep.checkpoints.tiny.tokenizer import VOCAB_SIZE, TinyTokenizer

TOKENIZER = TinyTokenizer(
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


def _weights(config: Mapping[str, Any]) -> Weights:
    """Draw the weights of the vision tower, the projector, the newline and the language model."""
    draw = Draw()
    siglip(draw, "vision_tower.vision_model", config["vision_config"])
    vision, text = config["vision_config"]["hidden_size"], config["text_config"]["hidden_size"]
    draw.linear("multi_modal_projector.linear_1", text, vision)
    draw.linear("multi_modal_projector.linear_2", text, text)
    draw.weights["multi_modal_projector.linear_2.weight"] = draw.balanced(text, text)
    draw.weights["image_newline"] = draw.uniform((text,), 0.7)
    decoder(draw, config["text_config"], model="language_model.model", head="language_model.lm_head")
    return draw.weights


_CONFIG = {
    "architectures": ["LlavaOnevisionForConditionalGeneration"],
    "image_grid_pinpoints": [[384, 384], [384, 768], [768, 384], [768, 768]],
    "image_token_index": TOKENIZER.id_of("<image>"),
    "model_type": "llava_onevision",
    "projector_hidden_act": "gelu",
    "text_config": {
        "bos_token_id": TOKENIZER.id_of("<|endoftext|>"),
        "eos_token_id": TOKENIZER.id_of("<|im_end|>"),
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
    "video_token_index": TOKENIZER.id_of("<video>"),
    "vision_aspect_ratio": "anyres_max_9",
    "vision_config": {  # the geometry of the real one: 27 x 27 patches, 196 tokens a frame
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

PIXELS = {
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

MODEL = TinyModel(
    config=_CONFIG,
    weights=_weights,
    tokenizer=TOKENIZER,
    processor_files={
        "generation_config.json": {
            "eos_token_id": TOKENIZER.id_of("<|im_end|>"),
            "pad_token_id": TOKENIZER.id_of("<|endoftext|>"),
        },
        "preprocessor_config.json": {
            **PIXELS,
            "image_grid_pinpoints": _CONFIG["image_grid_pinpoints"],
            "image_processor_type": "LlavaOnevisionImageProcessor",
        },
        "video_preprocessor_config.json": {
            **PIXELS,
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
