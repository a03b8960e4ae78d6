"""A real clip through the stages of a run, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gstep.backbones import ModelSource, preprocessor_for
from pipeline.prune.decode_stage import decoded_columns
from pipeline.prune.encode_stage import Encoder, EncodeSetup
from pipeline.rows import DECODED, one_row
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling


def encode_clip(
    source: ModelSource, clip: Path, n_frames: int, method: str, ratio: float, video_id: str = "v", **params: Any
) -> tuple[np.ndarray, pa.Table]:
    """(the frames, the row of the video as the encoder gives it)."""
    decoded = decode_video(DecodeRequest(clip, Sampling(n_frames), preprocessor_for(source)))
    record = {
        "video_id": video_id,
        "uri": str(clip),
        "start_s": None,
        "end_s": None,
        "manifest": "{}",
        "status": "ok",
        **decoded_columns(decoded, 1),
    }
    encoder = Encoder(EncodeSetup(source, method, ratio, pruner_params=params, device="cpu", dtype="float32"))
    (row,) = encoder(one_row(DECODED, record, {"frames": decoded.frames}))
    return decoded.frames, row
