"""Density-guided farthest point sampling in the form that is fastest for the tokens and where they are.

All forms select the same tokens: gstep.selection.reference says which, gstep.selection.lazy does it on a CPU,
gstep.selection.gpu.launch on a GPU.
"""

from __future__ import annotations

from torch import Tensor

from gstep.selection.gpu.launch import select_on_gpu
from gstep.selection.lazy import lazy_density_guided_fps
from gstep.selection.reference import density_guided_fps

#: Multiplications below which the plain form ends before the lazy one has looked at its tokens.
SMALL = 2**26


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

    Takes tokens as they came, on any device; returns [B] int64 in order of selection.
    """
    if tokens_MD.is_cuda:
        form = select_on_gpu
    elif tokens_MD.is_cpu and tokens_MD.numel() * budget > SMALL:
        form = lazy_density_guided_fps
    else:
        form = density_guided_fps
    return form(tokens_MD, density_M, budget, alpha=alpha, beta=beta, start=start)
