"""Tiny checkpoints whose language model is quantized, in the layouts of the hub's; the vision part stays as it was."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gstep.checkpoints import tiny

_LEFT = ("visual", "vision_tower", "multi_modal_projector", "lm_head", "embed_tokens")
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head", "visual", "model.visual", "vision_tower", "multi_modal_projector"],
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
                "input_activations": {
                    "num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True,
                },
            }
        },
        "ignore": ["lm_head", "re:.*visual.*", "re:.*vision_tower.*", "re:.*multi_modal_projector.*"],
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False},
    "awq": {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["visual", "vision_tower", "multi_modal_projector"],
    },
}  # fmt: skip


def quantize(model: str, method: str, folder: Path) -> Path:
    """Write the tiny model ``model`` to ``folder``, its language model quantized by ``method``."""
    shutil.copytree(tiny.build(model), folder)
    tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        linear = name.endswith(".weight") and values.ndim == 2 and not any(part in name for part in _LEFT)
        tensors |= _PACK[method](name.removesuffix(".weight"), values) if linear else {name: values}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIGS[method]}))
    return folder


def _fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    scale = weight.float().abs().max() / 448
    return {f"{name}.weight": (weight.float() / scale).to(torch.float8_e4m3fn), f"{name}.weight_scale": scale}


def _int8(name: str, weight: Tensor) -> dict[str, Tensor]:
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return {f"{name}.weight": (weight.float() / scale).round().to(torch.int8), f"{name}.weight_scale": scale}


def _in_four_bits(weight: Tensor, *shape: int) -> tuple[Tensor, Tensor]:
    """Return numbers in [0, 15], reshaped, and the scales of groups of 32 inputs."""
    grouped = weight.float().T.reshape(-1, 32, len(weight))  # [groups,32,out]
    scales = grouped.abs().amax(1) / 7
    return ((grouped / scales[:, None]).round() + 8).clamp(0, 15).to(torch.int32).reshape(shape), scales


def _gptq(name: str, weight: Tensor) -> dict[str, Tensor]:
    numbers, scales = _in_four_bits(weight, -1, 8, len(weight))
    packed = sum((numbers[:, i] << (4 * i) for i in range(8)), torch.zeros_like(numbers[:, 0]))
    return {
        f"{name}.qweight": packed.contiguous(),
        f"{name}.qzeros": torch.full((len(scales), len(weight) // 8), 0x77777777, dtype=torch.int32),
        f"{name}.scales": scales.to(torch.float16),
        f"{name}.g_idx": (torch.arange(weight.shape[1]) // 32).to(torch.int32),
    }


def _awq(name: str, weight: Tensor) -> dict[str, Tensor]:
    numbers, scales = _in_four_bits(weight, -1, len(weight) // 8, 8)
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight neighbouring outputs in an integer
    packed = sum((numbers[..., k] << (4 * i) for i, k in enumerate(order)), torch.zeros_like(numbers[..., 0]))
    zeros = torch.full((len(scales), len(weight) // 8), 0x88888888 - 2**32, dtype=torch.int64).to(torch.int32)
    return {f"{name}.qweight": packed.contiguous(), f"{name}.qzeros": zeros, f"{name}.scales": scales.to(torch.float16)}


_PACK = {"fp8": _fp8, "compressed-tensors": _int8, "gptq": _gptq, "awq": _awq}
