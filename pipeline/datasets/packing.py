"""Several cached videos as one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from pipeline.cache.cached_video import CachedVideo
from pipeline.rows import VideoRow


@dataclass(frozen=True)
class Packed:
    """A batch of videos whose tokens are concatenated, without padding.

    Attributes:
        video_ids: of the n videos.
        tokens: [sum K,D] bfloat16.
        cu_seqlens: [n+1] int32, where each video begins, and the end: what attention over packed sequences takes.
        index: [sum K] int64, flat position t*N + i in each one's video.
        frame: [sum K] int64, t.
        deepstack: [sum K,D] bfloat16 each.
        metadata: each one's row of the videos table.
        evidence: each one's, as it was asked for.
    """

    video_ids: tuple[str, ...]
    tokens: Tensor
    cu_seqlens: Tensor
    index: Tensor
    frame: Tensor
    deepstack: tuple[Tensor, ...]
    metadata: tuple[VideoRow, ...]
    evidence: dict[str, tuple[Tensor, ...]]

    def pin_memory(self) -> Packed:
        """Return the batch with its tensors in pinned memory, for DataLoader's ``pin_memory=True``."""
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            cu_seqlens=self.cu_seqlens.pin_memory(),
            index=self.index.pin_memory(),
            frame=self.frame.pin_memory(),
            deepstack=tuple(level.pin_memory() for level in self.deepstack),
            evidence={name: tuple(part.pin_memory() for part in parts) for name, parts in self.evidence.items()},
        )


def pack(videos: Sequence[CachedVideo]) -> Packed:
    """Concatenate the tokens of a batch of one or more videos without padding: a ``collate_fn`` for DataLoader."""
    lengths = [len(video.index) for video in videos]
    return Packed(
        video_ids=tuple(video.video_id for video in videos),
        tokens=_joined([video.tokens for video in videos]),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        index=_joined([video.index for video in videos]),
        frame=_joined([video.frame for video in videos]),
        deepstack=tuple(_joined(level) for level in zip(*(video.deepstack for video in videos), strict=True)),
        metadata=tuple(video.metadata for video in videos),
        evidence={name: tuple(video.evidence[name] for video in videos) for name in videos[0].evidence},
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors; in a worker into shared memory, which saves the copy to the main process."""
    first, shape = parts[0], (sum(len(part) for part in parts), *parts[0].shape[1:])
    n_bytes = math.prod(shape) * first.itemsize
    if get_worker_info() is None:  # numpy asks for huge pages, which torch does not: a quarter of the time
        out = torch.from_numpy(np.empty(n_bytes, np.uint8)).view(first.dtype)
    else:
        out = first.new(first.untyped_storage()._new_shared(n_bytes, device=first.device))  # type: ignore[no-untyped-call]
    return torch.cat(list(parts), out=out.view(shape))
