"""A real clip through the stages of a run, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gstep.backbones import ModelSource, family_of
from pipeline.cache.writer import PrunedVideo
from pipeline.prune.decode_stage import decoded_columns
from pipeline.prune.encode_stage import EncodeSetup, VideoEncoder
from pipeline.rows import VideoRecord
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling


def encode_clip(
    source: ModelSource, clip: Path, n_frames: int, method: str, ratio: float, video_id: str = "v", **params: Any
) -> tuple[NDArray[np.uint8], PrunedVideo]:
    """(the frames, the video as the encoder gives it)."""
    decoded = decode_video(DecodeRequest(clip, Sampling(n_frames), family_of(source).preprocessor()))
    begun: VideoRecord = {"video_id": video_id, "uri": str(clip), "manifest": "{}", "status": "ok"}
    encoder = VideoEncoder(EncodeSetup(source, method, ratio, pruner_params=params, device="cpu", dtype="float32"))
    return decoded.frames, encoder.encode_one({**begun, **decoded_columns(decoded, 1)}, decoded.frames)
