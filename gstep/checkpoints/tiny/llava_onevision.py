"""The tiny LLaVA-OneVision and the tiny SigLIP that belongs to it, in the geometry of the real models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gstep.checkpoints.tiny import parts
from gstep.checkpoints.tiny.parts import GENERATION, HEAD, MLP, QWEN2, TinyModel
from gstep.checkpoints.tiny.tokenizer import VOCAB_SIZE, TinyTokenizer

_TOKENIZER = TinyTokenizer(
    special=(*parts.CHAT_TOKENS, "<image>", "<video>"),
    # One line per message, as in the checkpoints on the hub: images, then videos, then text.
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


_TOWER = """\
embeddings.patch_embedding.{weight,bias} width 3 patch patch
embeddings.position_embedding.weight positions width
post_layernorm.{weight,bias} width
"""
_LAYER = """\
layer_norm{1,2}.{weight,bias} width
self_attn.{q,k,v,out}_proj.{weight,bias} width width
mlp.fc1.{weight,bias} inner width
mlp.fc2.{weight,bias} width inner
"""
_PROJECTOR = """\
multi_modal_projector.linear_1.{weight,bias} text width
multi_modal_projector.linear_2.{weight,bias} text text
image_newline text
"""

_LLAVA: Mapping[str, Any] = {
    "architectures": ["LlavaOnevisionForConditionalGeneration"],
    "image_grid_pinpoints": [[384, 384], [384, 768], [768, 384], [768, 768]],
    "image_token_index": _TOKENIZER.find_token_id("<image>"),
    "model_type": "llava_onevision",
    "projector_hidden_act": "gelu",
    "text_config": {
        **parts.TEXT,
        "max_position_embeddings": 32768,
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "rope_theta": 1000000.0,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_image_newline_parameter": True,
    "video_token_index": _TOKENIZER.find_token_id("<video>"),
    "vision_aspect_ratio": "anyres_max_9",
    "vision_config": {  # the real geometry: 27 x 27 patches, 196 tokens per frame
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
    **parts.PIXELS,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "LlavaOnevisionProcessor",
    "size": {"height": 384, "width": 384},
}

LLAVA_ONEVISION = TinyModel(
    config=_LLAVA,
    tensors={
        "vision_tower.vision_model.": _TOWER,
        "vision_tower.vision_model.encoder.layers.{blocks}.": _LAYER,
        "": _PROJECTOR,
        "language_model.model.": QWEN2 + MLP,
        "language_model.": HEAD,
    },
    tokenizer=_TOKENIZER,
    processor_files={
        "generation_config.json": GENERATION,
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

_POOLING_HEAD = """\
post_layernorm.{weight,bias} width
head.probe 1 1 width
head.attention.in_proj_{weight,bias} 3*width width
head.attention.out_proj.{weight,bias} width width
head.layernorm.{weight,bias} width
head.mlp.fc1.{weight,bias} inner width
head.mlp.fc2.{weight,bias} width inner
"""
_TEXT_TOWER = """\
embeddings.token_embedding.weight vocab width
embeddings.position_embedding.weight 16 width
final_layer_norm.{weight,bias} width
head.{weight,bias} width width
"""
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
        # One layer more than the tower of LLaVA-OneVision, which also lacks the last layer of the real SigLIP.
        "vision_config": {
            **{key: value for key, value in _VISION.items() if key != "vision_use_head"},
            "num_hidden_layers": _VISION["num_hidden_layers"] + 1,
        },
    },
    tensors={
        "vision_model.": _POOLING_HEAD,
        "text_model.": _TEXT_TOWER,
        "text_model.encoder.layers.{layers}.": _LAYER,
    },
    tokenizer=_TEXT_TOKENIZER,
    processor_files={},
)
