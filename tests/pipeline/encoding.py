"""A real clip through the stages of a run, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gstep.backbones import ModelSource, family_of
from pipeline.cache.writer import VideoItem
from pipeline.prune.decode_stage import make_decoding_columns
from pipeline.prune.encode_stage import EncodeSetup, VideoEncoder
from pipeline.rows import VideoRecord
from pipeline.storage.stores import Store
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.pipeline.caches import make_identity, write_header, write_shard


def encode_clip(
    source: ModelSource,
    clip: Path,
    n_frames: int,
    method: str,
    ratio: float,
    video_id: str = "v",
    start_s: float | None = None,
    **params: Any,
) -> tuple[NDArray[np.uint8], VideoItem]:
    """Return the frames of a clip and the video as the encoder gives it."""
    decoded = decode_video(DecodeRequest(clip, Sampling(n_frames), family_of(source).preprocessor(), start_s))
    begun: VideoRecord = {"video_id": video_id, "uri": str(clip), "manifest": "{}", "status": "ok", "attempts": 1}
    if start_s is not None:
        begun["start_s"] = start_s
    encoder = VideoEncoder(EncodeSetup(source, method, ratio, pruner_params=params, device="cpu", dtype="float32"))
    return decoded.frames, encoder.encode_video_alone({**begun, **make_decoding_columns(decoded, 1)}, decoded.frames)


def cache_of(
    out: Path, source: ModelSource, *videos: VideoItem, method: str = "none", ratio: float = 1.0, **header: Any
) -> Store:
    """Write a cache of videos, by default of all their tokens, which says that it is of ``source``."""
    identity = make_identity(ratio, method, source=source)
    levels = family_of(source).static().deepstack_levels
    store = write_header(out, identity=identity, deepstack_levels=levels, **header)
    write_shard(store, "run", *videos)
    return store
