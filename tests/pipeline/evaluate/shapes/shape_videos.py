"""Videos of known seeds, for tests; made once each."""

import io
from functools import cache

from pipeline.evaluate.shapes.layout import read_mp4, write_mp4
from pipeline.evaluate.shapes.making import make_video
from pipeline.evaluate.shapes.world import FRAMES, HARDNESS, SEEDS


@cache
def videos(count, hardness="plain", split="train"):
    """Make so many videos, of all lengths in turn."""
    return [
        make_video(seed, split=split, n_frames=FRAMES[i % 3], hardness=HARDNESS[hardness])
        for i, seed in enumerate(SEEDS[split][:count])
    ]


def through_h264(frames):
    """Encode frames to H.264 in memory and decode them, so that they have its losses."""
    file = io.BytesIO()
    write_mp4(file, frames)
    file.seek(0)
    return read_mp4(file)
