"""Density-guided farthest point sampling on a GPU.

It selects what ``gstep.selection.reference.density_guided_fps`` does.

``gstep.selection.gpu.gram`` is tried first, for videos of up to MAX_GRAM_TOKENS. ``gstep.selection.gpu.lazy`` serves
longer videos, and any video if memory does not suffice. The plain form of ``gstep.selection.reference`` serves if
neither can.

``gstep.selection.gpu.check`` compares both with the plain form before a process's first selection.

Shapes: M tokens, D hidden size, B budget.
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
_MIN_ALPHA = 0.05  # below it, keys tell fewer tokens apart than scores do

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
    """Select as ``density_guided_fps`` does, on a GPU: the same arguments, the same picks up to near-ties, [B] int64.

    The arguments are not checked, as there.

    Pass 16-bit tokens unconverted: tensor cores multiply them and accumulate in float32. Tokens of float32 are
    multiplied in float32, never TF32. Tokens of float64, alpha below 0.05 and extreme beta go to the plain form.

    If the kernels fail, a warning is issued once a process and the plain form selects instead. It also selects in all
    later calls of the process, unless the GPU only ran out of memory. Only an error that the GPU reports after the
    launches (a sticky CUDA error) is raised: no further work on that GPU would succeed.
    """
    if alpha >= _MIN_ALPHA and not _broken:
        device = tokens_MD.device
        try:
            with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                order_B = _select(tokens_MD, density_M, budget, alpha, beta, start)
            if order_B is not None:
                return order_B
        except Exception as error:  # noqa: BLE001 - the plain form selects instead
            _report(error)
    return density_guided_fps(tokens_MD, density_M, budget, alpha=alpha, beta=beta, start=start)


def _select(tokens_MD: Tensor, density_M: Tensor, budget: int, alpha: float, beta: float, start: str) -> Tensor | None:
    """Select by the GPU form that serves this video; None if neither form does."""
    from gstep.selection.gpu import check, gram, lazy  # noqa: PLC0415 - Triton may be missing

    task = gram.prepare_task(tokens_MD, density_M, budget, alpha=alpha, beta=beta, start=start)
    if task is None:
        return None
    if task.tokens.is_cuda:
        check.check_kernels(task.tokens.device, task.tokens.dtype, task.tokens.shape[1])
    width = gram.gram_width(len(task.tokens))
    if width <= MAX_GRAM_TOKENS and width * width * 12 <= _memory_for_distances(task.tokens.device):
        try:
            return gram.select_by_gram(task)
        except Exception as error:
            if not is_out_of_memory(error):  # another stream took the memory, and the lazy form needs little
                raise
    return lazy.LazyForm(task).select()


def _memory_for_distances(device: torch.device) -> float:
    """Return the bytes of GPU memory that the distance matrix may take; infinite on a CPU (Triton's interpreter).

    Unused blocks of torch's allocator do not count: they may belong to the stream on which another video is encoded.
    """
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return _MEMORY_SHARE * free


def _report(error: Exception) -> None:
    """Warn about a kernel failure once a process, and turn the kernels off unless the GPU only ran out of memory."""
    cause = f"{type(error).__name__}: {error}"
    if not is_out_of_memory(error):
        _broken.append(cause)
    if not _reported:
        _reported.append(cause)
        warnings.warn(
            f"the GPU kernels of GSTEP's sampling failed ({cause}). The slower plain form selects instead, with the "
            "same result",
            RuntimeWarning,
            stacklevel=3,
        )
