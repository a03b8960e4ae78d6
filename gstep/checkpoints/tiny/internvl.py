"""The tiny InternVL3.5: frames of 224 x 224 pixels, 64 tokens each, and a language model of Qwen3."""

from __future__ import annotations

from gstep.checkpoints.tiny import parts
from gstep.checkpoints.tiny.parts import GENERATION, HEAD, MLP, QWEN3, TinyModel
from gstep.checkpoints.tiny.tokenizer import TinyTokenizer

_SPECIAL = (*parts.CHAT_TOKENS, "<img>", "</img>", "<IMG_CONTEXT>", "<video>")
_TOWER = """\
embeddings.cls_token 1 1 width
embeddings.position_embeddings 1 positions+1 width
embeddings.patch_embeddings.projection.{weight,bias} width 3 patch patch
encoder.layer.{blocks}.attention.{q_proj,k_proj,v_proj,projection_layer}.{weight,bias} width width
encoder.layer.{blocks}.mlp.fc1.{weight,bias} inner width
encoder.layer.{blocks}.mlp.fc2.{weight,bias} width inner
encoder.layer.{blocks}.layernorm_{before,after}.{weight,bias} width
encoder.layer.{blocks}.lambda_{1,2} width
"""
_PROJECTOR = """\
layer_norm.{weight,bias} 4*width
linear_1.{weight,bias} text 4*width
linear_2.{weight,bias} text text
"""
_PIXELS = {
    **parts.PIXELS,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "processor_class": "InternVLProcessor",
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
            **parts.TEXT,
            "head_dim": 32,
            "max_position_embeddings": 40960,
            "model_type": "qwen3",
            "rope_theta": 1000000,
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
    tensors={
        "vision_tower.": _TOWER,
        "multi_modal_projector.": _PROJECTOR,
        "language_model.model.": QWEN3 + MLP,
        "language_model.": HEAD,
    },
    tokenizer=TinyTokenizer(
        _SPECIAL,
        parts.make_chat_template("<IMG_CONTEXT>\\n", "<video>\\n"),
        roles={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    processor_files={
        "generation_config.json": GENERATION,
        "preprocessor_config.json": {**_PIXELS, "image_processor_type": "GotOcr2ImageProcessorFast"},
        "video_preprocessor_config.json": {**_PIXELS, "video_processor_type": "InternVLVideoProcessor"},
        "processor_config.json": {"image_seq_length": 64, "processor_class": "InternVLProcessor"},
    },
)
