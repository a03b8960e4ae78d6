"""Video files, and caches of them that live pruning is compared with."""

from __future__ import annotations

import shutil

from tests.builders.clips import sample, write_clip
from tests.builders.runs import run

N_FRAMES = 8
NAMES = ("bikes.mp4", "carphone_pristine.mp4")
SHORT = "short.mp4"  # has N_FRAMES frames, so that all of them are taken


def pruned_cache(folder, model):
    """The folder with the videos, and the cache that jobs.prune makes of them."""
    videos, cache = folder / "videos", folder / "cache"
    videos.mkdir()
    for name in NAMES:
        shutil.copy(sample(name), videos)
    write_clip(videos / SHORT, count=N_FRAMES, size=(144, 176))
    settings = ("--num-frames", str(N_FRAMES), "--retention-ratio", "0.25", "--dtype", "float32")
    done = run("jobs.prune", str(videos), "--out", str(cache), "--model", model, *settings)
    assert done.returncode == 0, done.stdout
    return videos, cache
