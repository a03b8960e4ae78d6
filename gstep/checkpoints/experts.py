"""The weights of mixtures of experts, which checkpoints hold in other forms than the modules of transformers.

A module has two tensors for all experts of a layer: ``experts.gate_up_proj`` [E,2I,D] and ``experts.down_proj``
[E,D,I]. Checkpoints hold them so, each matrix transposed (Qwen3-VL-MoE), or in a tensor for each matrix of each expert
(``experts.3.gate_proj.weight``). Follows "qwen2_moe" and "qwen3_vl_moe" in conversion_mapping.py of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

_ONE = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_FUSED = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


def fused_name(name: str) -> str | None:
    """Return the name of the tensor that holds this matrix of one expert in memory; None for any other tensor."""
    found = _ONE.fullmatch(name)
    return f"{found[1]}.{_FUSED[found[3]]}" if found else None


def fuse_experts(tensors: dict[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Put the experts among ``tensors`` into the form of ``expected``, in place, a layer at a time.

    Where experts are missing, the fused tensor is left out or too small, so that a check of names and shapes tells.
    """
    parts: dict[str, dict[tuple[int, str], str]] = {}
    for name in tensors:
        if (found := _ONE.fullmatch(name)) and (fused := fused_name(name)) in expected and fused is not None:
            parts.setdefault(fused, {})[int(found[2]), found[3]] = name
    for fused, names in parts.items():
        matrices = {place: tensors.pop(name) for place, name in names.items()}
        if (whole := _stacked(matrices, expected[fused].shape[0])) is not None:
            tensors[fused] = whole
    for name, weight in tensors.items():
        shape = expected[name].shape
        if ".experts." in name and weight.shape != shape and weight.mT.shape == shape:
            tensors[name] = weight.mT.contiguous()


def _stacked(matrices: Mapping[tuple[int, str], Tensor], n_experts: int) -> Tensor | None:
    """Stack the matrices of a layer's experts; None where any is missing."""
    kinds = [kind for kind in ("gate", "up", "down") if (0, kind) in matrices]
    places: Collection[tuple[int, str]] = [(expert, kind) for expert in range(n_experts) for kind in kinds]
    if not places or matrices.keys() != {*places}:
        return None
    return torch.stack([torch.cat([matrices[expert, kind] for kind in kinds]) for expert in range(n_experts)])
