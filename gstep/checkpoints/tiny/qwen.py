"""The tiny Qwen models: 64 channels, with the patches, windows and deepstack levels of the real ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gstep.checkpoints.tiny import parts
from gstep.checkpoints.tiny.parts import END, HEAD, MLP, PAD, QWEN2, QWEN3, TinyModel
from gstep.checkpoints.tiny.tokenizer import TinyTokenizer

_SPECIAL = (
    *parts.CHAT_TOKENS,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

_DEFAULT_SYSTEM = """\
{%- if loop.first and message['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
"""


def _make_tokenizer(**texts: str) -> TinyTokenizer:
    """Describe the tokenizer of the Qwen families; ``texts`` are passed to ``make_chat_template``."""
    image, video = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
    return TinyTokenizer(_SPECIAL, parts.make_chat_template(image, video, **texts))


_TEXT = {**parts.TEXT, "max_position_embeddings": 128000}

_TOKEN_IDS: Mapping[str, int] = {
    "image_token_id": _SPECIAL.index("<|image_pad|>"),
    "video_token_id": _SPECIAL.index("<|video_pad|>"),
    "vision_end_token_id": _SPECIAL.index("<|vision_end|>"),
    "vision_start_token_id": _SPECIAL.index("<|vision_start|>"),
}

_GENERATION = {**parts.GENERATION, "bos_token_id": PAD, "eos_token_id": [END, PAD]}


_QWEN2_5_TOWER = """\
patch_embed.proj.weight width 3 2 patch patch
merger.ln_q.weight width
merger.mlp.0.{weight,bias} 4*width 4*width
merger.mlp.2.{weight,bias} text 4*width
blocks.{blocks}.norm{1,2}.weight width
blocks.{blocks}.attn.qkv.{weight,bias} 3*width width
blocks.{blocks}.attn.proj.{weight,bias} width width
blocks.{blocks}.mlp.{gate,up}_proj.{weight,bias} inner width
blocks.{blocks}.mlp.down_proj.{weight,bias} width inner
"""
# The norm of a deepstack level comes after its 2 x 2 patches are concatenated.
_QWEN3_TOWER = """\
patch_embed.proj.{weight,bias} width 3 2 patch patch
pos_embed.weight positions width
merger.norm.{weight,bias} width
merger.linear_fc1.{weight,bias} 4*width 4*width
merger.linear_fc2.{weight,bias} text 4*width
deepstack_merger_list.{levels}.norm.{weight,bias} 4*width
deepstack_merger_list.{levels}.linear_fc1.{weight,bias} 4*width 4*width
deepstack_merger_list.{levels}.linear_fc2.{weight,bias} text 4*width
blocks.{blocks}.norm{1,2}.{weight,bias} width
blocks.{blocks}.attn.qkv.{weight,bias} 3*width width
blocks.{blocks}.attn.proj.{weight,bias} width width
blocks.{blocks}.mlp.linear_fc1.{weight,bias} inner width
blocks.{blocks}.mlp.linear_fc2.{weight,bias} width inner
"""
# Qwen3.5 adds 1 to the weights of most norms. The state of its linear attention fades over tens of tokens.
_QWEN3_5 = """\
embed_tokens.weight vocab text
norm.weight text @0
layers.{layers}.{input,post_attention}_layernorm.weight text @0
layers.3.self_attn.q_proj.weight 2*queries text
layers.3.self_attn.{k,v}_proj.weight keys text
layers.3.self_attn.{q,k}_norm.weight head @0
layers.3.self_attn.o_proj.weight text queries
layers.{0,1,2}.linear_attn.in_proj_qkv.weight 256 text
layers.{0,1,2}.linear_attn.in_proj_z.weight 128 text
layers.{0,1,2}.linear_attn.in_proj_{a,b}.weight 2 text
layers.{0,1,2}.linear_attn.conv1d.weight 256 1 4
layers.{0,1,2}.linear_attn.dt_bias 2 @-2
layers.{0,1,2}.linear_attn.A_log 2 @-1
layers.{0,1,2}.linear_attn.norm.weight 64
layers.{0,1,2}.linear_attn.out_proj.weight text 128
"""
# Experts are 48 channels wide, not half of a token's 64, so that transposed experts have another shape.
_TRANSPOSED_EXPERTS = """\
layers.{layers}.mlp.gate.weight 4 text
layers.{layers}.mlp.experts.gate_up_proj 4 text 96
layers.{layers}.mlp.experts.down_proj 4 48 text
"""
_SINGLE_EXPERTS = """\
layers.{layers}.mlp.gate.weight 4 text
layers.{layers}.mlp.experts.{0,1,2,3}.{gate,up}_proj.weight 48 text
layers.{layers}.mlp.experts.{0,1,2,3}.down_proj.weight text 48
layers.{layers}.mlp.shared_expert.{gate,up}_proj.weight 48 text
layers.{layers}.mlp.shared_expert.down_proj.weight text 48
layers.{layers}.mlp.shared_expert_gate.weight 1 text
"""

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
    tensors={"visual.": _QWEN2_5_TOWER, "model.": QWEN2 + MLP, "": HEAD},
    tokenizer=_make_tokenizer(system=_DEFAULT_SYSTEM),
    processor_files={
        "generation_config.json": _GENERATION,
        "preprocessor_config.json": {  # the only one, as on the hub; there max_pixels is 12845056
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_processor_type": "Qwen2VLImageProcessor",
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "max_pixels": 150 * 28 * 28,  # 9 x 16 tokens per frame of 16:9
            "merge_size": 2,
            "min_pixels": 3136,
            "patch_size": 14,
            "processor_class": "Qwen2_5_VLProcessor",
            "temporal_patch_size": 2,
        },
    },
)

_QWEN3_PIXELS = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "processor_class": "Qwen3VLProcessor",
    "temporal_patch_size": 2,
}


def _make_qwen3(
    name: str,
    architecture: str,
    language_model: str,
    text: Mapping[str, Any],
    *,
    levels: Sequence[int] = (0, 1, 2),
    opening: str = "",
) -> TinyModel:
    """Make a tiny model of Qwen3-VL or later, which share the tower and the processor.

    Args:
        name: the model type in config.json.
        architecture: the class name in config.json.
        language_model: the table of the language model's tensors, without its head.
        text: the settings of text_config that differ from those of Qwen3-VL.
        levels: the blocks of the tower from which deepstack levels are taken.
        opening: the beginning of the answer in the prompt.
    """
    config = {
        **_TOKEN_IDS,
        "architectures": [architecture],
        "model_type": name,
        "text_config": {
            **_TEXT,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": "float32",
            "head_dim": 32,
            "model_type": f"{name}_text",
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
            "rope_theta": 5000000,
            **text,
        },
        "tie_word_embeddings": False,
        "vision_config": {
            "deepstack_visual_indexes": list(levels),
            "depth": 4,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 64,
            "in_channels": 3,
            "intermediate_size": 128,
            "model_type": name,
            "num_heads": 2,
            "num_position_embeddings": 576,
            "out_hidden_size": 64,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }
    tensors = {"model.visual.": _QWEN3_TOWER, "model.language_model.": language_model, "": HEAD}
    files = {
        "generation_config.json": _GENERATION,
        "preprocessor_config.json": {
            **_QWEN3_PIXELS,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"longest_edge": 150 * 32 * 32, "shortest_edge": 65536},
        },
        "video_preprocessor_config.json": {
            **_QWEN3_PIXELS,
            # For a whole video: 9 x 16 tokens for each of 32 frames of 16:9. On the hub it is 25165824.
            "size": {"longest_edge": 32 * 150 * 32 * 32, "shortest_edge": 4096},
            "video_processor_type": "Qwen3VLVideoProcessor",
        },
    }
    return TinyModel(config, tensors, _make_tokenizer(opening=opening), files)


_EXPERTS: Mapping[str, Any] = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
_LINEAR: Mapping[str, Any] = {
    "head_dim": 64,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 64,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [6, 5, 5],
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "rope_scaling": None,
}

QWEN3_VL = _make_qwen3(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    QWEN3 + MLP,
    {},
)
QWEN3_VL_MOE = _make_qwen3(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    QWEN3 + _TRANSPOSED_EXPERTS,
    {**_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
)
# Qwen3.5 has no deepstack levels, and its prompt opens a thinking block, as the real one's does unless told not to.
QWEN3_5 = _make_qwen3(
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    _QWEN3_5 + MLP,
    _LINEAR,
    levels=(),
    opening="<think>\\n",
)
QWEN3_5_MOE = _make_qwen3(
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    _QWEN3_5 + _SINGLE_EXPERTS,
    {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 48},
    levels=(),
    opening="<think>\\n",
)
