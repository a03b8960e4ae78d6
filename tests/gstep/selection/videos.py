"""Videos of every kind that the bound of the lazy selection may meet."""

import torch
from torch import Tensor

from gstep.density import spatio_temporal_density

KINDS = ["low rank", "scenes", "random"]


def video(kind: str, n_frames: int = 12, per_frame: int = 49, hidden: int = 384, seed: int = 0) -> Tensor:
    """Draw [T,N,D] bfloat16 that change slowly and cut once.

    They are of low rank (a bound tells much), scenes in directions of their own (it tells which picks are likeliest) or
    random (it tells nothing).
    """
    rng = torch.Generator().manual_seed(seed)
    if kind == "random":
        return torch.randn(n_frames, per_frame, hidden, generator=rng).bfloat16()
    rank = 24 if kind == "low rank" else hidden
    content, change = torch.randn(2, 2, per_frame, rank, generator=rng)
    time = torch.linspace(0, 1, n_frames)[:, None, None]
    place = torch.where(time < 0.6, content[0] + time * change[0], content[1] + time * change[1])
    basis = torch.linalg.qr(torch.randn(hidden, rank, generator=rng))[0].T * (hidden / rank) ** 0.5
    return (place @ basis + 0.3 * torch.randn(n_frames, per_frame, hidden, generator=rng)).bfloat16()


def density(tokens_TND: Tensor) -> Tensor:
    return spatio_temporal_density(tokens_TND)[0].flatten()
