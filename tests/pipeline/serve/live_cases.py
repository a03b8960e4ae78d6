"""Video files, and caches of them that live pruning is compared with."""

from __future__ import annotations

import shutil
import subprocess
import sys

from tests.jobs.jobs import environment
from tests.paths import ROOT
from tests.pipeline.videos import sample

N_FRAMES = 8
NAMES = ("bikes.mp4", "carphone_pristine.mp4")


def pruned_cache(folder, model):
    """The folder with the videos, and the cache that jobs.prune makes of them."""
    videos, cache = folder / "videos", folder / "cache"
    videos.mkdir()
    for name in NAMES:
        shutil.copy(sample(name), videos)
    command = [sys.executable, "-m", "jobs.prune", str(videos), "--out", str(cache), "--model", model]
    command += ["--num-frames", str(N_FRAMES), "--retention-ratio", "0.25", "--dtype", "float32"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return videos, cache
