"""Density-guided farthest point sampling in the form that is fastest for these tokens on their device.

All forms select the same tokens. gstep.selection.reference defines the selection, gstep.selection.lazy is its fast form
on a CPU, gstep.selection.gpu.launch on a GPU.
"""

from __future__ import annotations

from torch import Tensor

from gstep.selection.gpu.launch import select_on_gpu
from gstep.selection.lazy import lazy_density_guided_fps
from gstep.selection.reference import density_guided_fps

#: Up to this many multiplications (M * D * B) the plain form is done before the lazy form has surveyed its tokens.
MAX_PLAIN_PRODUCTS = 2**26


def fast_density_guided_fps(
    tokens_MD: Tensor,
    density_M: Tensor,
    budget: int,
    *,
    alpha: float = 0.5,
    beta: float = 1e-6,
    start: str = "density",
) -> Tensor:
    """Select as gstep.selection.reference.density_guided_fps does, by the fastest form for the device.

    Takes tokens of any float dtype on any device; returns [B] int64 in order of selection.
    """
    if tokens_MD.is_cuda:
        select = select_on_gpu
    elif tokens_MD.is_cpu and tokens_MD.numel() * budget > MAX_PLAIN_PRODUCTS:
        select = lazy_density_guided_fps
    else:
        select = density_guided_fps
    return select(tokens_MD, density_M, budget, alpha=alpha, beta=beta, start=start)
