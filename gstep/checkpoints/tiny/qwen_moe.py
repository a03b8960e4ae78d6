"""The tiny Qwen3-VL-MoE, Qwen3.5 and Qwen3.5-MoE: the tower of the tiny Qwen3-VL with newer language models.

Experts are 48 channels wide, not half of a token's 64, so that transposed experts have another shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gstep.checkpoints.tiny.parts import Draw, TinyModel, Weights, draw_decoder
from gstep.checkpoints.tiny.qwen import (
    GENERATION,
    QWEN3,
    QWEN3_PIXEL_FILES,
    SPECIAL,
    draw_qwen3_tower,
    make_chat_tokenizer,
)

_EXPERTS: Mapping[str, Any] = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}


def _draw_experts(draw: Draw, layer: str, text: Mapping[str, Any]) -> dict[str, Any]:
    """Draw and store a layer's router; return its experts' tensors, name -> [E, ...], in transformers' layout.

    The caller stores the experts in the layout of its checkpoint.
    """
    width, inner, count = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    draw.linear(f"{layer}.mlp.gate", count, width, gain=2, bias=False)
    return {
        "gate_up_proj": draw.uniform((count, 2 * inner, width), width**-0.5),
        "down_proj": draw.uniform((count, width, inner), inner**-0.5),
    }


def _draw_qwen3_moe_weights(config: Mapping[str, Any]) -> Weights:
    """Draw the weights of the tiny Qwen3-VL-MoE; each expert's matrices are transposed, as in the published files."""
    draw, text, model = Draw(), config["text_config"], "model.language_model"
    draw_qwen3_tower(draw, config["vision_config"])
    draw_decoder(draw, text, model=model, head="lm_head", bias=False, qk_norm=True, mlp=False)
    for layer in (f"{model}.layers.{i}" for i in range(text["num_hidden_layers"])):
        for name, weight in _draw_experts(draw, layer, text).items():
            draw.weights[f"{layer}.mlp.experts.{name}"] = np.ascontiguousarray(weight.transpose(0, 2, 1))
    return draw.weights


def _draw_qwen3_5_weights(config: Mapping[str, Any]) -> Weights:
    """Draw the weights of a tiny Qwen3.5, dense or a mixture of experts by its config.

    Each matrix of each expert is a tensor of its own. There is a shared expert, too.
    """
    draw, text, model = Draw(), config["text_config"], "model.language_model"
    width, head_dim = text["hidden_size"], text["head_dim"]
    heads, keys = text["num_attention_heads"] * head_dim, text["num_key_value_heads"] * head_dim
    draw_qwen3_tower(draw, config["vision_config"])
    draw.weights[f"{model}.embed_tokens.weight"] = draw.uniform((text["vocab_size"], width), 0.7)
    for i, kind in enumerate(text["layer_types"]):
        layer = f"{model}.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            draw.weights[f"{layer}.{norm}.weight"] = draw.uniform((width,), 0.05)  # 1 is added to it
        if kind == "linear_attention":
            _draw_gated_delta_net(draw, f"{layer}.linear_attn", text)
        else:
            for part, size in {"q_proj": 2 * heads, "k_proj": keys, "v_proj": keys}.items():  # q and its gate
                draw.linear(f"{layer}.self_attn.{part}", size, width, bias=False)
            for part in ("q_norm", "k_norm"):
                draw.weights[f"{layer}.self_attn.{part}.weight"] = draw.uniform((head_dim,), 0.05)
            draw.linear(f"{layer}.self_attn.o_proj", width, heads, gain=2, bias=False)
        if "num_experts" in text:
            for name, weight in _draw_experts(draw, layer, text).items():
                for expert, matrix in enumerate(weight):
                    for part, rows in zip(
                        name.removesuffix("_proj").split("_"), _split_gate_and_up(name, matrix), strict=True
                    ):
                        draw.weights[f"{layer}.mlp.experts.{expert}.{part}_proj.weight"] = rows
            _draw_gated_mlp(draw, f"{layer}.mlp.shared_expert", width, text["shared_expert_intermediate_size"])
            draw.linear(f"{layer}.mlp.shared_expert_gate", 1, width, bias=False)
        else:
            _draw_gated_mlp(draw, f"{layer}.mlp", width, text["intermediate_size"])
    draw.weights[f"{model}.norm.weight"] = draw.uniform((width,), 0.05)
    draw.linear("lm_head", text["vocab_size"], width, gain=2, bias=False)
    # Otherwise some answers would end with their first token.
    draw.weights["lm_head.weight"][: len(SPECIAL)] *= np.float32(0.5)
    return draw.weights


def _split_gate_and_up(name: str, matrix: Any) -> list[Any]:
    """Split a ``gate_up_proj`` into its gate and its up projection; any other matrix is returned alone."""
    return [np.ascontiguousarray(rows) for rows in np.split(matrix, 2 if name == "gate_up_proj" else 1)]


def _draw_gated_mlp(draw: Draw, prefix: str, width: int, inner: int) -> None:
    """Draw and store an MLP whose first layer is gated."""
    for part in ("gate_proj", "up_proj"):
        draw.linear(f"{prefix}.{part}", inner, width, bias=False)
    draw.linear(f"{prefix}.down_proj", width, inner, bias=False)


def _draw_gated_delta_net(draw: Draw, prefix: str, text: Mapping[str, Any]) -> None:
    """Draw and store a layer of linear attention, whose state fades over tens of tokens."""
    width, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = heads * text["linear_value_head_dim"]
    for part, size in {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}.items():
        draw.linear(f"{prefix}.in_proj_{part}", size, width, bias=False)
    kernel = text["linear_conv_kernel_dim"]
    draw.weights[f"{prefix}.conv1d.weight"] = draw.uniform((2 * keys + values, 1, kernel), 0.7)
    draw.weights[f"{prefix}.dt_bias"] = draw.uniform((heads,), 0.05) - np.float32(2)
    draw.weights[f"{prefix}.A_log"] = draw.uniform((heads,), 0.5) - np.float32(1)
    draw.norm(f"{prefix}.norm", text["linear_value_head_dim"], bias=False)
    draw.linear(f"{prefix}.out_proj", width, values, gain=2, bias=False)


_THINKING = "assistant\\n<think>\\n' -}}"


def _make_model(name: str, architecture: str, weights: Any, text: Mapping[str, Any], *, thinks: bool) -> TinyModel:
    """Make a tiny model from its language model; all other parts are the tiny Qwen3-VL's.

    ``thinks`` is for Qwen3.5: its tower has no deepstack levels and its prompt opens a thinking block.
    """
    vision = {**QWEN3["vision_config"], "model_type": name}
    if thinks:
        vision["deepstack_visual_indexes"] = []  # as on the hub: the tower has no levels
    tokenizer = make_chat_tokenizer(default_system=False)
    if thinks:  # as Qwen3.5 does unless it is told not to
        template = str(tokenizer.chat_template).replace("assistant\\n' -}}", _THINKING)
        tokenizer = replace(tokenizer, chat_template=template)
    config = {
        **QWEN3,
        "architectures": [architecture],
        "model_type": name,
        "text_config": {**QWEN3["text_config"], **text, "model_type": f"{name}_text"},
        "vision_config": vision,
    }
    return TinyModel(
        config=config,
        weights=weights,
        tokenizer=tokenizer,
        processor_files={"generation_config.json": GENERATION, **QWEN3_PIXEL_FILES},
    )


_LINEAR: Mapping[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 64,
    "eos_token_id": SPECIAL.index("<|im_end|>"),
    "head_dim": 64,
    "rope_scaling": None,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [6, 5, 5],
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}

QWEN3_VL_MOE = _make_model(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    _draw_qwen3_moe_weights,
    {**_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    thinks=False,
)
QWEN3_5 = _make_model("qwen3_5", "Qwen3_5ForConditionalGeneration", _draw_qwen3_5_weights, _LINEAR, thinks=True)
QWEN3_5_MOE = _make_model(
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    _draw_qwen3_5_weights,
    {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 48},
    thinks=True,
)
