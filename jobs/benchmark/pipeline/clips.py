"""Make the videos: one still clip that decodes fast, named by as many rows of a manifest as are wanted."""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np

from jobs.benchmark.pipeline.work import SIDE, Work


def make_videos(work: Work) -> None:
    """Write the manifest of a work and, where it is not there yet, the clip that all of its rows name."""
    clip = work.manifest.with_name(f"{work.frames}.mp4")
    if not clip.exists():
        _make_clip(clip, work.frames)
    rows = [{"video_id": f"video-{number:07d}", "uri": clip.name} for number in range(work.videos)]
    work.manifest.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _make_clip(path: Path, frames: int) -> None:
    picture = np.full((SIDE, SIDE, 3), np.linspace(32, 224, SIDE, dtype=np.uint8)[:, None], dtype=np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for _ in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
