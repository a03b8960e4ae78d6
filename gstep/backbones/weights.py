"""Weights from disk into a module that was built on the meta device: shapes first, memory only for what is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gstep.checkpoints.random_weights import random_tensors
from gstep.checkpoints.tensors import TensorSource, read_tensors
from gstep.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from gstep.backbones.runtime import Runtime


def empty_model(config: PretrainedConfig, runtime: Runtime) -> PreTrainedModel:
    """Build the stock model of a configuration on the meta device: shapes, and no memory."""
    from transformers import AutoModel  # noqa: PLC0415 - seconds, and preprocessing needs none of it

    with torch.device("meta"):
        return AutoModel.from_config(config, attn_implementation=runtime.attn_implementation, dtype=runtime.dtype)


def load_weights(
    module: nn.Module,
    source: TensorSource,
    names: Callable[[str], Sequence[str]],
    *,
    device: str,
    dtype: torch.dtype,
) -> None:
    """Give a module on the meta device those weights from disk that its state dict names.

    Of a source without weight files they are random (ModelSource.random).

    Args:
        names: the name on disk -> the names it may have in memory, the first that exists being taken.

    Raises ModelError, naming some, where weights are missing or have another shape.
    """
    expected = module.state_dict()
    if not source.weight_files:
        module.load_state_dict(random_tensors(expected, device, dtype), assign=True)
        return

    def wanted(key: str) -> str | None:
        return next((name for name in names(key) if name in expected), None)

    tensors = read_tensors(source, wanted, device=device, dtype=dtype)
    if missing := [name for name in expected if name not in tensors]:
        raise ModelError(f"{source.name!r} has no {_first_few(missing)}: download the whole checkpoint")
    wrong = [
        f"{name} {list(tensors[name].shape)} instead of {list(weight.shape)}"
        for name, weight in expected.items()
        if tensors[name].shape != weight.shape
    ]
    if wrong:
        raise ModelError(f"{source.name!r}: config.json does not fit the weights: {_first_few(wrong)}")
    module.load_state_dict(tensors, assign=True)


def rebuild_position_ids(module: nn.Module, device: str) -> None:
    """Compute SigLIP's position ids, which are never stored and the one buffer that is still on the meta device."""
    for part in module.modules():
        ids = getattr(part, "position_ids", None)
        if isinstance(ids, Tensor) and ids.is_meta:
            part.position_ids = torch.arange(ids.shape[-1], device=device)[None]
    check_loaded(module)


def check_loaded(module: nn.Module) -> None:
    """Assert that nothing is left on the meta device: no weight, and no buffer that is computed rather than stored."""
    left = [name for name, tensor in (*module.named_buffers(), *module.named_parameters()) if tensor.is_meta]
    assert not left, f"no values for {left}"


def _first_few(items: Sequence[str], limit: int = 5) -> str:
    """Join at most ``limit`` items for an error message, and say how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
