"""How a vision tower is loaded and run: device, number format, attention kernel and weights."""

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

from gstep.checkpoints.experts import fuse_experts, fused_name
from gstep.checkpoints.random_weights import random_tensors
from gstep.checkpoints.tensors import TensorSource, read_tensors, refuse_stored
from gstep.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Each is a package of its own, and how it comes here.
FLASH = {
    "flash_attention_2": "the package flash-attn (2.3.3 or newer) is not installed: pip install -e '.[flash-attn]' in "
    "the clone (needs a CUDA toolchain)",
    "flash_attention_3": "the package flash-attn-3 is not installed: build it from the folder hopper of "
    "github.com/Dao-AILab/flash-attention (needs a CUDA toolchain and a Hopper GPU)",
    "flash_attention_4": "the package flash-attn-4 is not installed: pip install -e '.[flash-attn-4]' in the clone "
    "(wheels, which need no CUDA toolchain)",
}
ATTENTION = (*FLASH, "sdpa", "eager")
_SCALE = re.compile(r"_(scale|scale_inv|scale_2|zero_point)$")  # what follows the name of a quantized weight


@dataclass(frozen=True)
class Runtime:
    """The device, dtype and attention implementation of a model. Pickles.

    Attributes:
        device: "cpu", "cuda" or "cuda:<i>".
        dtype: of weights and activations.
        attn_implementation: in the words of transformers.
    """

    device: str
    dtype: torch.dtype
    attn_implementation: str

    @property
    def dtype_name(self) -> str:
        """The dtype's name on the command line, a key of DTYPES such as ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    def describe(self) -> dict[str, str]:
        """Describe the hardware and software that compute the tokens, JSON-able, for the provenance of a run."""
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
    """Return the runtime for these options, choosing what is "auto" by the machine this runs on.

    Args:
        device: "auto" (cuda where there is one), "cpu", "cuda" or "cuda:<i>".
        dtype: "auto" (bfloat16 on cuda, float32 on the CPU) or a name in DTYPES.
        attn: "auto" (flash_attention_2 where it is installed and can run, else sdpa) or a name in ATTENTION. The newer
            forms of flash attention are never chosen by themselves: torch's own choice was not slower where it was
            measured.

    Raises ModelError for a device, dtype or implementation that is unknown or not there.
    """
    device = _device(device)
    on_cuda = device.startswith("cuda")
    if dtype == "auto":
        dtype = "bfloat16" if on_cuda else "float32"
    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}; known: auto, {', '.join(DTYPES)}")
    return Runtime(device, DTYPES[dtype], _attention(attn, flash_can_run=on_cuda and dtype != "float32"))


def _device(device: str) -> str:
    """Choose or check the device. Raises ModelError for one that is unknown or missing."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and device.partition(":")[0] != "cuda":
        raise ModelError(f"unknown device {device!r}; known: auto, cpu, cuda, cuda:<i>")
    if device != "cpu" and not torch.cuda.is_available():
        raise ModelError(
            f"device {device!r} was asked for, but torch {torch.__version__} sees no CUDA device: "
            "use --device cpu, or install a CUDA build of torch and check the driver"
        )
    return device


def _attention(attn: str, *, flash_can_run: bool) -> str:
    """Choose or check the attention implementation. Raises ModelError for one that is unknown or cannot run."""
    if attn == "auto":
        return "flash_attention_2" if flash_can_run and _is_installed("flash_attention_2") else "sdpa"
    if attn not in ATTENTION:
        raise ModelError(f"unknown attention implementation {attn!r}; known: auto, {', '.join(ATTENTION)}")
    if attn in FLASH and not flash_can_run:
        raise ModelError(f"{attn} runs on cuda in bfloat16 or float16 only: use sdpa, or leave it on auto")
    if attn in FLASH and not _is_installed(attn):
        raise ModelError(f"{attn} was asked for, but {FLASH[attn]}, or use sdpa")
    return attn


def _is_installed(flash: str) -> bool:
    """Return whether a form of flash attention is installed and usable here, by transformers' own check."""
    from transformers import utils  # noqa: PLC0415 - seconds to import, rarely needed
    from transformers.utils import import_utils  # noqa: PLC0415

    name = f"is_flash_attn_{flash[-1]}_available"  # older versions do not know the newest
    check = getattr(utils, name, None) or getattr(import_utils, name, None)
    return check is not None and bool(check())


def observing(module: nn.Module, see: Callable[[Tensor, dict[str, Any]], None]) -> RemovableHandle:
    """Call ``see`` with the hidden states and keyword arguments of every call of ``module``.

    The handle that comes back is a context, which ends that.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        see(args[0] if args else kwargs["hidden_states"], kwargs)

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def split_heads(hidden_SC: Tensor, weight: Tensor, bias: Tensor | None, n_heads: int) -> Tensor:
    """Project hidden states in the precision of the model, and split them by head: [H,S,E] float32."""
    projected_SC = linear(hidden_SC, weight, bias)
    return projected_SC.view(len(hidden_SC), n_heads, -1).transpose(0, 1).float()


def attention_received(query_HSE: Tensor, key_HSE: Tensor) -> Tensor:
    """Return the softmax attention that each key receives, averaged over heads and queries: [S]."""
    return _weights(query_HSE, key_HSE).mean(dim=(0, 1))


def merged_attention(query_HSE: Tensor, key_HSE: Tensor, merged: int) -> Tensor:
    """Return the attention [S/merged] of the mean query to groups of ``merged`` successive keys, averaged over heads.

    A group's key is the mean of its keys.
    """
    n_heads, _, size = key_HSE.shape
    key_HNE = key_HSE.reshape(n_heads, -1, merged, size).mean(dim=2)
    return _weights(query_HSE.mean(dim=1, keepdim=True), key_HNE).mean(dim=(0, 1))


def rotated(vectors_HSE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Apply rotary positions as the vision towers do: channel e turns with channel e + E/2."""
    first, second = vectors_HSE.chunk(2, dim=-1)
    return vectors_HSE * cos_SE.float() + torch.cat([-second, first], dim=-1) * sin_SE.float()


def _weights(query_HSE: Tensor, key_HSE: Tensor) -> Tensor:
    """Return the softmax attention weights [H, queries, keys]."""
    return torch.softmax(query_HSE @ key_HSE.transpose(1, 2) / math.sqrt(key_HSE.shape[-1]), dim=-1)


def empty_model(config: PretrainedConfig, runtime: Runtime) -> PreTrainedModel:
    """Build the stock model of a configuration on the meta device: shapes, and no memory."""
    from transformers import AutoModel  # noqa: PLC0415 - seconds, and preprocessing needs none of it

    with torch.device("meta"):
        return AutoModel.from_config(config, attn_implementation=runtime.attn_implementation, dtype=runtime.dtype)


#: The name on disk -> the names that a tensor may have in memory, the first that exists being taken.
NameRule = Callable[[str], Sequence[str]]


def load_weights(module: nn.Module, source: TensorSource, names: NameRule, *, device: str, dtype: torch.dtype) -> None:
    """Give a module on the meta device those weights from disk that its state dict names, experts in its form.

    Of a source without weight files they are random (ModelSource.random).

    Raises ModelError, naming some, where weights are missing, quantized or of another shape.
    """
    expected = module.state_dict()
    if not source.weight_files:
        module.load_state_dict(random_tensors(expected, device, dtype), assign=True)
        return

    def wanted(key: str) -> str | None:
        return _name_in(expected, names, source.name, key)

    tensors = read_tensors(source, wanted, device=device, dtype=dtype)
    fuse_experts(tensors, expected)
    _refuse_missing(source.name, [name for name in expected if name not in tensors])
    wrong = [
        f"{name} {list(tensors[name].shape)} instead of {list(weight.shape)}"
        for name, weight in expected.items()
        if tensors[name].shape != weight.shape
    ]
    if wrong:
        raise ModelError(f"{source.name!r}: config.json does not fit the weights: {_first_few(wrong)}")
    module.load_state_dict(tensors, assign=True)


def check_names(name: str, module: nn.Module, names: NameRule, stored: Mapping[str, str | None]) -> None:
    """Raise ModelError where tensors on disk, name -> type (None where unknown), lack some of a module's.

    Raises ModelError too where one is quantized. ``name`` is the model's.
    """
    expected = module.state_dict()
    there = set()
    for key, kind in stored.items():
        if (found := _name_in(expected, names, name, key)) is not None:
            there |= {found, fused_name(found)}
            if kind is not None:
                refuse_stored(name, key, kind)
    _refuse_missing(name, [tensor for tensor in expected if tensor not in there])


def _name_in(expected: Mapping[str, Tensor], names: NameRule, model: str, key: str) -> str | None:
    """Return the name in memory of a tensor on disk; None for a tensor that no module takes.

    Raises ModelError where the tensor scales one that a module takes.
    """
    weight = _SCALE.sub("", key)
    if weight != key and any(name in expected for name in names(weight)):
        refuse_stored(model, weight, f"a product with {key}")
    return next((name for name in names(key) if name in expected or fused_name(name) in expected), None)


def _refuse_missing(model: str, missing: Sequence[str]) -> None:
    """Raise ModelError where tensors are missing."""
    if missing:
        raise ModelError(f"{model!r} has no {_first_few(missing)}: download the whole checkpoint")


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
