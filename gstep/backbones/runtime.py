"""Device, dtype and attention implementation: the one place where they are chosen."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from gstep.errors import ModelError

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
