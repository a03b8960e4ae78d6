"""Synthetic tokens for benchmarks, seeded, [T,N,D] bfloat16.

Shapes: T frames, N tokens per frame, D hidden size, k directions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

DIRECTIONS = 64
_DECAY = 0.5  # the k-th direction has k^-0.5 of the first direction's spread
_CORRELATION = 0.98  # correlation of a position's content with its content in the frame before
_CUT = 1 / 24  # probability that a frame starts a new scene
_NOISE = 0.3  # spread of the noise; the spread of the content is 1


def make_structured_tokens(n_frames: int, per_frame: int, hidden: int) -> Tensor:
    """Make tokens that resemble an encoder's: low-rank content that changes slowly in time, with cuts, plus noise.

    The content of each position lies in min(64, D) directions whose spread falls as k^-0.5. It follows an AR(1) process
    in time (correlation 0.98); on average one frame in 24 starts a new scene. White noise of 0.3 times the content's
    spread is added.
    """
    rng = torch.Generator().manual_seed(0)
    k = min(DIRECTIONS, hidden)
    spread_K = torch.arange(1, k + 1).float() ** -_DECAY
    basis_KD = torch.linalg.qr(torch.randn(hidden, k, generator=rng))[0].T
    basis_KD *= (spread_K * math.sqrt(hidden) / spread_K.norm())[:, None]
    tokens = torch.empty(n_frames, per_frame, hidden, dtype=torch.bfloat16)
    content_NK = torch.randn(per_frame, k, generator=rng)
    for frame_ND in tokens:
        new_NK = torch.randn(per_frame, k, generator=rng)
        is_cut = torch.rand((), generator=rng) < _CUT
        content_NK = new_NK if is_cut else _CORRELATION * content_NK + math.sqrt(1 - _CORRELATION**2) * new_NK
        noise_ND = torch.randn(per_frame, hidden, generator=rng)
        frame_ND.copy_((content_NK @ basis_KD).add_(noise_ND, alpha=_NOISE))
    return tokens


def make_iid_tokens(n_frames: int, per_frame: int, hidden: int) -> Tensor:
    """Make standard normal tokens, which are all equally far apart: the worst case of a lazy selection."""
    rng = torch.Generator().manual_seed(0)
    tokens = torch.empty(n_frames, per_frame, hidden, dtype=torch.bfloat16)
    for frame_ND in tokens:
        frame_ND.copy_(torch.randn(per_frame, hidden, generator=rng))
    return tokens


INPUTS = {"structured": make_structured_tokens, "iid": make_iid_tokens}
