"""Cached videos as prompts take them, the last few kept in memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

import torch

from gstep.language import Visual
from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.reader import TokenCache, TokenOrder
from pipeline.execution.heartbeat import Heartbeat

_HELD_BYTES = 2**30  # of cached tokens that an actor keeps for the questions to come


class HeldVideos:
    """The last videos that were read, up to a number of bytes; a video is one Visual, which its questions share."""

    def __init__(
        self,
        cache: TokenCache,
        retention_ratio: float | None,
        order: TokenOrder = "index",
        limit: int = _HELD_BYTES,
        heartbeat: Heartbeat | None = None,
        evidence: Sequence[str] = (),
    ) -> None:
        self._cache = cache
        self._heartbeat = heartbeat or Heartbeat("answer")
        self._ratio = retention_ratio
        self._order: TokenOrder = order
        self._limit = limit
        self._evidence = evidence
        self._held: OrderedDict[str, tuple[Visual, float]] = OrderedDict()
        self._bytes = 0

    def get(self, video_id: str) -> tuple[Visual, float, float]:
        """The tokens, the nominal ratio they were read at, and the seconds that took. Raises as TokenCache.get."""
        started = time.perf_counter()
        if video_id in self._held:
            self._held.move_to_end(video_id)
            return *self._held[video_id], 0.0
        with self._heartbeat.busy(f"the tokens of {video_id}, being read"):
            video = self._cache.get(video_id, self._ratio, self._order, self._evidence)
        visual = to_visual(video, self._cache.newline)
        ratio = self._ratio if self._ratio is not None else float(video.metadata["retention_ratio"])
        self._held[video_id] = visual, ratio
        self._bytes += n_bytes(visual)
        while self._bytes > self._limit and len(self._held) > 1:
            _, (old, _) = self._held.popitem(last=False)
            self._bytes -= n_bytes(old)
        return visual, ratio, time.perf_counter() - started


def to_visual(video: CachedVideo, newline: torch.Tensor | None) -> Visual:
    """A cached video as prompts take it, in the order it was read in."""
    return Visual(
        tokens=video.tokens,
        index=video.index,
        n_frames=video.metadata["n_frames"],
        tokens_per_frame=video.metadata["tokens_per_frame"],
        extra=video.metadata["model_extra"] or {},
        deepstack=video.deepstack,
        newline=newline,
        evidence=video.evidence,
    )


def n_bytes(visual: Visual) -> int:
    """What a video takes in memory."""
    return sum(t.nbytes for t in (visual.tokens, visual.index, *visual.deepstack, *visual.evidence.values()))
