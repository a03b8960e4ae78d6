"""Videos of known seeds, for tests; made once each."""

from functools import cache

from pipeline.evaluate.shapes.hardness import HARDNESS
from pipeline.evaluate.shapes.making import make_video
from pipeline.evaluate.shapes.seeds import SEEDS
from pipeline.evaluate.shapes.world import FRAMES


@cache
def videos(count, hardness="plain", split="train"):
    """Make so many videos, of all lengths in turn."""
    return [
        make_video(seed, split=split, n_frames=FRAMES[i % 3], hardness=HARDNESS[hardness])
        for i, seed in enumerate(SEEDS[split][:count])
    ]
