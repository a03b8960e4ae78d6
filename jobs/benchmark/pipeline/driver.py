"""Run the job with stages that do next to nothing, so that what its driver costs for a video is seen."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from ray.actor import ActorHandle

from jobs.benchmark.pipeline import job
from jobs.benchmark.pipeline.work import SIDE, Work
from pipeline.inputs.forms import Containers
from pipeline.prune import graph
from pipeline.prune.decode_stage import Decoder, DecodeSetup, VideoDecoder
from pipeline.rows import TodoRow, VideoRecord
from pipeline.video.source import Source

_SIDE = 4  # pixels of the frames that stand for decoded ones


class IdleVideoDecoder(VideoDecoder):
    """Opens no file and starts no child: gives the same few bytes for each video, with a whole record."""

    def __init__(self, setup: DecodeSetup) -> None:
        self._setup = setup
        self._frames = np.zeros((setup.sampling.num_frames or 1, _SIDE, _SIDE, 3), np.uint8)

    def close(self) -> None:
        """Close nothing: there is no child."""

    def open(self, row: TodoRow, containers: Containers | None = None) -> Source:
        """Return the source without a look at it."""
        return Source(row["uri"])

    def decode_one(self, row: TodoRow, source: Source) -> tuple[VideoRecord, NDArray[np.uint8] | None]:
        """Return the record of a still video of a second, and frames of zeros."""
        n_frames, height, width, _ = self._frames.shape
        record: VideoRecord = {
            "status": "ok",
            "video_id": row["video_id"],
            "uri": row["uri"],
            "attempts": row["attempts"],
            "fps": float(n_frames),
            "duration_s": 1.0,
            "source_frames": n_frames,
            "clip_frames": n_frames,
            "n_repeated": 0,
            "source_width": SIDE,
            "source_height": SIDE,
            "codec": "h264",
            "backend": "none",
            "decode_warnings": 0,
            "source_size": 1,
            "frame_indices": list(range(n_frames)),
            "timestamps": [place / n_frames for place in range(n_frames)],
            "height": height,
            "width": width,
            "decode_s": 0.0,
        }
        return record, self._frames


class IdleDecoder(Decoder):
    """The decode actor of the job, heartbeat and bundles included, around an IdleVideoDecoder."""

    def __init__(self, setup: DecodeSetup, heartbeats: ActorHandle | None = None, videos_per_bundle: int = 1) -> None:
        super().__init__(setup, heartbeats, videos_per_bundle)
        self._decoder = IdleVideoDecoder(setup)


def run(work: Work) -> dict[str, float]:
    """Prune the videos by stages that do nothing; return the seconds and what went through the object stores."""
    vars(graph)["Decoder"] = IdleDecoder
    return job.run(work)
