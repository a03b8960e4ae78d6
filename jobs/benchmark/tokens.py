"""The tokens that benchmarks run on: made up with what encoders give, and the worst case.

All are seeded, [T,N,D] bfloat16, and made a frame at a time, so that making them takes little more than they do.
Shapes: T frames, N tokens a frame, D hidden size, k directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

DIRECTIONS = 64
_DECAY = 0.5  # the k-th direction has a share of k^-0.5 of the first one's spread
_STAYS = 0.98  # correlation of a place's content with that of the frame before
_CUT = 1 / 24  # how likely a frame starts a new scene
_NOISE = 0.3  # spread of the noise; that of the content is 1


class Input(NamedTuple):
    """A kind of made-up tokens: what makes [T,N,D] bfloat16 of T, N and D, and a description of a few words."""

    make: Callable[[int, int, int], Tensor]
    note: str


def structured_tokens(n_frames: int, per_frame: int, hidden: int) -> Tensor:
    """Make low-rank content plus noise, as encoders give: it changes slowly in time, with a cut now and then.

    The content of each place lies in 64 directions (in D where D is smaller) whose spread falls as k^-0.5, and follows
    an AR(1) process in time (correlation 0.98); one frame in 24 on average starts anew. White noise of 0.3 times the
    content's spread comes on top, so that 0.09 / 1.09 = 8 % of a token's squared length lie outside of them.
    """
    rng = torch.Generator().manual_seed(0)
    k = min(DIRECTIONS, hidden)
    spread_K = torch.arange(1, k + 1).float() ** -_DECAY
    basis_KD = torch.linalg.qr(torch.randn(hidden, k, generator=rng))[0].T
    basis_KD *= (spread_K * math.sqrt(hidden) / spread_K.norm())[:, None]
    tokens = torch.empty(n_frames, per_frame, hidden, dtype=torch.bfloat16)
    content_NK = torch.randn(per_frame, k, generator=rng)
    for frame_ND in tokens:
        fresh_NK = torch.randn(per_frame, k, generator=rng)
        cut = torch.rand((), generator=rng) < _CUT
        content_NK = fresh_NK if cut else _STAYS * content_NK + math.sqrt(1 - _STAYS**2) * fresh_NK
        noise_ND = torch.randn(per_frame, hidden, generator=rng)
        frame_ND.copy_((content_NK @ basis_KD).add_(noise_ND, alpha=_NOISE))
    return tokens


def iid_tokens(n_frames: int, per_frame: int, hidden: int) -> Tensor:
    """Draw standard normal numbers, all equally far apart, as no encoder gives: a lazy method's worst case."""
    rng = torch.Generator().manual_seed(0)
    tokens = torch.empty(n_frames, per_frame, hidden, dtype=torch.bfloat16)
    for frame_ND in tokens:
        frame_ND.copy_(torch.randn(per_frame, hidden, generator=rng))
    return tokens


INPUTS = {
    "structured": Input(structured_tokens, "low-rank content plus noise, made up"),
    "iid": Input(iid_tokens, "standard normal numbers, the worst case"),
}
