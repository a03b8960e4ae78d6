"""Density-guided farthest point sampling in the form that is fastest for these tokens on their device."""

from __future__ import annotations

from torch import Tensor

from gstep.selection.gpu.launch import select_on_gpu
from gstep.selection.lazy import lazy_density_guided_fps
from gstep.selection.reference import density_guided_fps

#: Up to this many multiplications (M * D * B), the reference finishes before the lazy form has surveyed its tokens.
MAX_PLAIN_PRODUCTS = 2**26


def select_fastest(
    tokens_MD: Tensor,
    density_M: Tensor,
    budget: int,
    *,
    alpha: float = 0.5,
    beta: float = 1e-6,
    start: str = "density",
) -> Tensor:
    """Select ``budget`` tokens by Eqs. (9)-(12), with the fastest form for the device: [B] int64 in order of selection.

    The arguments have the meaning that they have in gstep.selection.reference.density_guided_fps, and are not checked.
    The picks are the same up to near-ties: distances differ by rounding, about 1e-7 on a CPU and up to 1e-5 on a GPU.
    The reference serves selections on a CPU with M * D * B up to 2^26, devices that are neither, and GPUs whose kernels
    fail; the first failure in a process issues a warning.
    """
    if tokens_MD.is_cuda:
        select = select_on_gpu
    elif tokens_MD.is_cpu and tokens_MD.numel() * budget > MAX_PLAIN_PRODUCTS:
        select = lazy_density_guided_fps
    else:
        select = density_guided_fps
    return select(tokens_MD, density_M, budget, alpha=alpha, beta=beta, start=start)
