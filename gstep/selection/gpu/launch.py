"""Density-guided farthest point sampling on a GPU, with the picks of gstep.selection.reference.

``gram`` is tried first, for up to MAX_GRAM_TOKENS tokens. ``lazy`` serves longer videos, and any video for which memory
is short. If neither can serve, the reference selects. On a CUDA device, ``check`` first compares both forms with the
reference, once per process, device, dtype and hidden size.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import torch
from torch import Tensor

from gstep.errors import is_out_of_memory
from gstep.selection.reference import density_guided_fps

#: The maximum number of tokens whose distances a program holds in registers.
MAX_GRAM_TOKENS = 16384
_MEMORY_SHARE = 0.5  # share of the free GPU memory that the distances of all pairs may take
_MIN_ALPHA = 0.05  # below it, keys distinguish fewer tokens than scores do

_reported: list[str] = []  # the first failure of the kernels in this process
_broken: list[str] = []  # the failure after which they are not tried again


def select_on_gpu(
    tokens_MD: Tensor,
    density_M: Tensor,
    budget: int,
    *,
    alpha: float = 0.5,
    beta: float = 1e-6,
    start: str = "density",
) -> Tensor:
    """Select ``budget`` tokens by Eqs. (9)-(12) on a GPU: [B] int64 in order of selection.

    The arguments have the meaning that they have in gstep.selection.reference.density_guided_fps, and are not checked.
    The picks are the same up to near-ties. Pass 16-bit tokens unconverted, for tensor cores. float32 tokens are never
    multiplied in TF32. The reference serves float64 tokens, alpha below 0.05 and extreme values of beta.

    If the kernels fail, or Triton is missing, the reference selects instead; the first failure of a process issues a
    RuntimeWarning. Unless the GPU only ran out of memory, the kernels are not tried again in this process. Errors of
    the reference, and those that the GPU reports after the launches, are raised.
    """
    if alpha >= _MIN_ALPHA and not _broken:
        device = tokens_MD.device
        try:
            with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                order_B = _select_with_kernels(tokens_MD, density_M, budget, alpha, beta, start)
            if order_B is not None:
                return order_B
        except Exception as error:  # noqa: BLE001 - the reference selects instead
            _report_failure(error)
    return density_guided_fps(tokens_MD, density_M, budget, alpha=alpha, beta=beta, start=start)


def _select_with_kernels(
    tokens_MD: Tensor, density_M: Tensor, budget: int, alpha: float, beta: float, start: str
) -> Tensor | None:
    """Select with the GPU form that serves this video, [B] int64 in order of selection; None if neither form can.

    If ``gram`` runs out of memory, ``lazy`` selects. Other errors of the kernels or of their check are raised, as is an
    ImportError without Triton.
    """
    from gstep.selection.gpu import check, gram, lazy  # noqa: PLC0415 - Triton may be missing

    task = gram.prepare_task(tokens_MD, density_M, budget, alpha=alpha, beta=beta, start=start)
    if task is None:
        return None
    if task.tokens.is_cuda:
        check.check_kernels(task.tokens.device, task.tokens.dtype, task.tokens.shape[1])
    width = gram.compute_gram_width(len(task.tokens))
    if width <= MAX_GRAM_TOKENS and width * width * 12 <= _get_distance_memory(task.tokens.device):
        try:
            return gram.select_by_gram(task)
        except Exception as error:
            if not is_out_of_memory(error):  # another stream took the memory, and the lazy form needs little
                raise
    return lazy.LazyForm(task).select()


def _get_distance_memory(device: torch.device) -> float:
    """Return the bytes that the distance matrix may take: half of the free GPU memory, or infinity on a CPU.

    Unused blocks of torch's allocator are not counted as free.
    """
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return _MEMORY_SHARE * free


def _report_failure(error: Exception) -> None:
    """Disable the kernels unless the GPU only ran out of memory, and warn at the first call in a process."""
    cause = f"{type(error).__name__}: {error}"
    if not is_out_of_memory(error):
        _broken.append(cause)
    if not _reported:
        _reported.append(cause)
        warnings.warn(
            f"the GPU kernels of GSTEP's sampling failed ({cause}). The slower PyTorch implementation selects instead, "
            "with the same result",
            RuntimeWarning,
            stacklevel=3,
        )
