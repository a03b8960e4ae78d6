"""Converting the weights of mixtures of experts from the layouts on disk to the layout of transformers' modules.

A module has two tensors for all experts of a layer: ``experts.gate_up_proj`` [E, 2I, D] and ``experts.down_proj`` [E,
D, I]. A checkpoint has them with each matrix transposed (Qwen3-VL-MoE), or a tensor for each matrix of each expert
(``experts.3.gate_proj.weight``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_FUSED = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


def map_fused_name(name: str) -> str | None:
    """Map the name of one expert's matrix to that of the fused tensor; None for others."""
    match = _EXPERT.fullmatch(name)
    return f"{match[1]}.{_FUSED[match[3]]}" if match else None


def fuse_experts(tensors: dict[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Convert the experts among ``tensors`` to the layout of ``expected``, in place.

    Every name must be in ``expected``, or belong to a fused tensor there. If experts of a layer are missing, its fused
    tensor is left out or too small, for a later check of names and shapes to report.
    """
    parts: dict[str, dict[tuple[int, str], str]] = {}
    for name in tensors:
        if (match := _EXPERT.fullmatch(name)) and (fused := map_fused_name(name)) in expected and fused is not None:
            parts.setdefault(fused, {})[int(match[2]), match[3]] = name
    for fused, names in parts.items():
        matrices = {key: tensors.pop(name) for key, name in names.items()}
        if (stack := _stack_experts(matrices, expected[fused].shape[0])) is not None:
            tensors[fused] = stack
    for name, weight in tensors.items():
        shape = expected[name].shape
        if ".experts." in name and weight.shape != shape and weight.mT.shape == shape:
            tensors[name] = weight.mT.contiguous()


def _stack_experts(matrices: Mapping[tuple[int, str], Tensor], n_experts: int) -> Tensor | None:
    """Stack the matrices of a layer's experts, (expert, "gate" | "up" | "down") -> matrix; None if any is missing."""
    kinds = [kind for kind in ("gate", "up", "down") if (0, kind) in matrices]
    keys: Collection[tuple[int, str]] = [(expert, kind) for expert in range(n_experts) for kind in kinds]
    if not keys or matrices.keys() != {*keys}:
        return None
    return torch.stack([torch.cat([matrices[expert, kind] for kind in kinds]) for expert in range(n_experts)])
