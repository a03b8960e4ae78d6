"""Choosing the device, dtype and attention implementation of a model, and loading weights into it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle

from gstep.checkpoints.experts import fuse_experts, map_fused_name
from gstep.checkpoints.random_weights import draw_tensors
from gstep.checkpoints.tensors import TensorSource, read_tensors, refuse_quantized_tensor
from gstep.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Attention implementations that need another package -> how to install it.
FLASH = {
    "flash_attention_2": "the package flash-attn (2.3.3 or newer) is not installed: pip install -e '.[flash-attn]' in "
    "the clone (needs a CUDA toolchain)",
    "flash_attention_3": "the package flash-attn-3 is not installed: build it from the folder hopper of "
    "github.com/Dao-AILab/flash-attention (needs a CUDA toolchain and a Hopper GPU)",
    "flash_attention_4": "the package flash-attn-4 is not installed: pip install -e '.[flash-attn-4]' in the clone "
    "(wheels, which need no CUDA toolchain)",
}
ATTENTION = (*FLASH, "sdpa", "eager")
_SCALE = re.compile(r"_(scale|scale_inv|scale_2|zero_point)$")  # suffixes to the name of a quantized weight


@dataclass(frozen=True)
class Runtime:
    """The device, dtype and attention implementation of a model. Picklable.

    Attributes:
        device: "cpu", "cuda" or "cuda:<i>".
        dtype: dtype of weights and activations.
        attn_implementation: a name of transformers, such as "sdpa".
    """

    device: str
    dtype: torch.dtype
    attn_implementation: str

    @property
    def dtype_name(self) -> str:
        """The dtype's name on the command line, a key of DTYPES such as ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    def describe(self) -> dict[str, str]:
        """Describe the hardware and software that compute the tokens, as JSON values."""
        on_cuda = self.device.startswith("cuda")
        return {
            "device": self.device,
            "device_name": torch.cuda.get_device_name(self.device) if on_cuda else f"cpu, {os.cpu_count()} cores",
            "dtype": self.dtype_name,
            "attn_implementation": self.attn_implementation,
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
        }


def choose_runtime(device: str = "auto", dtype: str = "auto", attn: str = "auto") -> Runtime:
    """Choose the runtime for these options; "auto" depends on this machine's hardware and packages.

    Args:
        device: "auto" (cuda if available, otherwise cpu), "cpu", "cuda" or "cuda:<i>"; ``<i>`` is not checked.
        dtype: "auto" (bfloat16 on cuda, float32 on the CPU) or a key of DTYPES.
        attn: "auto" (flash_attention_2 if it is installed and can run, otherwise sdpa) or a name in ATTENTION.

    Raises:
        ModelError: the device, dtype or attention implementation is unknown, not available, or cannot run with the
            others.
    """
    device = _choose_device(device)
    on_cuda = device.startswith("cuda")
    if dtype == "auto":
        dtype = "bfloat16" if on_cuda else "float32"
    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}; known: auto, {', '.join(DTYPES)}")
    return Runtime(device, DTYPES[dtype], _choose_attention(attn, flash_can_run=on_cuda and dtype != "float32"))


def _choose_device(device: str) -> str:
    """Resolve "auto"; raise ModelError if the device is unknown, or is "cuda" and torch sees no CUDA device."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and device.partition(":")[0] != "cuda":
        raise ModelError(f"unknown device {device!r}; known: auto, cpu, cuda, cuda:<i>")
    if device != "cpu" and not torch.cuda.is_available():
        raise ModelError(
            f"device {device!r} is not available: torch {torch.__version__} sees no CUDA device. "
            "Use --device cpu, or install a CUDA build of torch and check the driver"
        )
    return device


def _choose_attention(attn: str, *, flash_can_run: bool) -> str:
    """Resolve "auto"; raise ModelError if the attention implementation is unknown, cannot run or is not installed."""
    if attn == "auto":
        return "flash_attention_2" if flash_can_run and _is_installed("flash_attention_2") else "sdpa"
    if attn not in ATTENTION:
        raise ModelError(f"unknown attention implementation {attn!r}; known: auto, {', '.join(ATTENTION)}")
    if attn in FLASH and not flash_can_run:
        raise ModelError(f"{attn} runs on cuda in bfloat16 or float16 only: use sdpa, or leave it on auto")
    if attn in FLASH and not _is_installed(attn):
        raise ModelError(f"{attn} is not available: {FLASH[attn]}, or use sdpa")
    return attn


def _is_installed(flash: str) -> bool:
    """Return True if transformers finds this version of flash attention (a key of FLASH) installed and usable."""
    from transformers import utils  # noqa: PLC0415 - seconds to import, rarely needed
    from transformers.utils import import_utils  # noqa: PLC0415

    name = f"is_flash_attn_{flash[-1]}_available"  # missing in versions of transformers that are older than it
    check = getattr(utils, name, None) or getattr(import_utils, name, None)
    return check is not None and bool(check())


def observe_inputs(module: nn.Module, observe: Callable[[Tensor, dict[str, Any]], None]) -> RemovableHandle:
    """Call ``observe(hidden_states, kwargs)`` before every call of ``module``.

    ``hidden_states`` is the first positional argument or the keyword argument of that name, ``kwargs`` all keyword
    arguments. The returned handle is a context manager; leaving it removes the hook.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        observe(args[0] if args else kwargs["hidden_states"], kwargs)

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def split_heads(hidden_SC: Tensor, weight: Tensor, bias: Tensor | None, n_heads: int) -> Tensor:
    """Apply a linear layer to hidden states in the model's dtype, and split the result by head: [H,S,E] float32."""
    projected_SC = linear(hidden_SC, weight, bias)
    return projected_SC.view(len(hidden_SC), n_heads, -1).transpose(0, 1).float()


def compute_received_attention(query_HSE: Tensor, key_HSE: Tensor) -> Tensor:
    """Compute the softmax attention that each key receives, averaged over heads and queries: [S]."""
    return _compute_attention_weights(query_HSE, key_HSE).mean(dim=(0, 1))


def compute_merged_attention(query_HSE: Tensor, key_HSE: Tensor, group: int) -> Tensor:
    """Compute the attention of the mean query to the mean key of each group, averaged over heads: [S/group].

    A group is ``group`` successive keys; S must be a multiple of it.
    """
    n_heads, _, size = key_HSE.shape
    key_HNE = key_HSE.reshape(n_heads, -1, group, size).mean(dim=2)
    return _compute_attention_weights(query_HSE.mean(dim=1, keepdim=True), key_HNE).mean(dim=(0, 1))


def apply_rotary_positions(vectors_HSE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Apply rotary positions as in the vision towers, where channels e and e + E/2 rotate together."""
    first, second = vectors_HSE.chunk(2, dim=-1)
    return vectors_HSE * cos_SE.float() + torch.cat([-second, first], dim=-1) * sin_SE.float()


def _compute_attention_weights(query_HSE: Tensor, key_HSE: Tensor) -> Tensor:
    """Compute the softmax attention weights [H, queries, keys], scaled by 1/sqrt(E)."""
    return torch.softmax(query_HSE @ key_HSE.transpose(1, 2) / math.sqrt(key_HSE.shape[-1]), dim=-1)


def build_empty_model(config: PretrainedConfig, runtime: Runtime) -> PreTrainedModel:
    """Build the stock model of a configuration on the meta device, which allocates no memory."""
    from transformers import AutoModel  # noqa: PLC0415 - seconds, and preprocessing needs none of it

    with torch.device("meta"):
        return AutoModel.from_config(config, attn_implementation=runtime.attn_implementation, dtype=runtime.dtype)


#: Maps a name on disk to the names that the tensor may have in memory; the first that the module has is used.
NameRule = Callable[[str], Sequence[str]]


def load_weights(module: nn.Module, source: TensorSource, names: NameRule, *, device: str, dtype: torch.dtype) -> None:
    """Load a checkpoint's weights into a module on the meta device, in place.

    Experts that the checkpoint stores one by one are fused into the module's layout. A source without weight files gets
    seeded random weights. Buffers that checkpoints do not store stay on the meta device, for the caller to set.

    Args:
        names: the rule from a name on disk to names in the module; tensors that it does not map are not read.

    Raises:
        ModelError: weights are missing, quantized or of another shape.
    """
    expected = module.state_dict()
    if not source.weight_files:
        module.load_state_dict(draw_tensors(expected, device, dtype), assign=True)
        return

    def find_name(key: str) -> str | None:
        return _find_name(expected, names, source.name, key)

    tensors = read_tensors(source, find_name, device=device, dtype=dtype)
    fuse_experts(tensors, expected)
    _refuse_missing(source.name, [name for name in expected if name not in tensors])
    mismatches = [
        f"{name} {list(tensors[name].shape)} instead of {list(weight.shape)}"
        for name, weight in expected.items()
        if tensors[name].shape != weight.shape
    ]
    if mismatches:
        raise ModelError(f"{source.name!r}: config.json does not fit the weights: {_join_first(mismatches)}")
    module.load_state_dict(tensors, assign=True)


def check_names(name: str, module: nn.Module, names: NameRule, types: Mapping[str, str | None]) -> None:
    """Raise ModelError if a checkpoint lacks a tensor of a module, or a tensor is quantized; shapes are not checked.

    Args:
        name: the model's name, for messages.
        names: the rule from a name on disk to names in the module.
        types: name on disk -> safetensors type, None if unknown.
    """
    expected = module.state_dict()
    names_in_memory = set()
    for key, kind in types.items():
        if (tensor := _find_name(expected, names, name, key)) is not None:
            names_in_memory |= {tensor, map_fused_name(tensor)}
            if kind is not None:
                refuse_quantized_tensor(name, key, kind)
    _refuse_missing(name, [tensor for tensor in expected if tensor not in names_in_memory])


def _find_name(expected: Mapping[str, Tensor], names: NameRule, model: str, key: str) -> str | None:
    """Map a tensor's name on disk to its name in the module; None if the module does not have it.

    The name of one expert's matrix is not changed to that of the fused experts.

    Raises:
        ModelError: the tensor is the scale of a quantized weight that the module has.
    """
    weight = _SCALE.sub("", key)
    if weight != key and any(name in expected for name in names(weight)):
        refuse_quantized_tensor(model, weight, f"a product with {key}")
    return next((name for name in names(key) if name in expected or map_fused_name(name) in expected), None)


def _refuse_missing(model: str, missing: Sequence[str]) -> None:
    """Raise ModelError if ``missing`` is not empty."""
    if missing:
        raise ModelError(f"{model!r} has no {_join_first(missing)}: download the whole checkpoint")


def rebuild_position_ids(module: nn.Module, device: str) -> None:
    """Set the position ids of a SigLIP module loaded from the meta device; checkpoints do not store this buffer.

    Asserts that nothing else is still on the meta device.
    """
    for part in module.modules():
        ids = getattr(part, "position_ids", None)
        if isinstance(ids, Tensor) and ids.is_meta:
            part.position_ids = torch.arange(ids.shape[-1], device=device)[None]
    check_loaded(module)


def check_loaded(module: nn.Module) -> None:
    """Assert that no weight or buffer of the module is still on the meta device."""
    missing = [name for name, tensor in (*module.named_buffers(), *module.named_parameters()) if tensor.is_meta]
    assert not missing, f"no values for {missing}"


def _join_first(items: Sequence[str], limit: int = 5) -> str:
    """Join at most ``limit`` items for an error message, followed by the number of further items."""
    suffix = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + suffix
