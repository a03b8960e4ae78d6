"""Video files, and caches of them that live pruning is compared with."""

from __future__ import annotations

import shutil
import subprocess
import sys
from itertools import islice

import av

from tests.builders.clips import add_stream, sample
from tests.builders.runs import environment
from tests.paths import ROOT

N_FRAMES = 8
NAMES = ("bikes.mp4", "carphone_pristine.mp4")
SHORT = "short.mp4"  # has N_FRAMES frames, so that all of them are taken


def write_beginning(path, clip, count):
    """Write the first ``count`` frames of a clip."""
    with av.open(str(clip)) as source, av.open(str(path), "w") as out:
        (video,) = source.streams.video
        stream = add_stream(out, "libx264", (video.height, video.width), 25, 10, "yuv420p", None)
        for frame in islice(source.decode(video), count):
            frame.pts = None
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))


def pruned_cache(folder, model):
    """The folder with the videos, and the cache that jobs.prune makes of them."""
    videos, cache = folder / "videos", folder / "cache"
    videos.mkdir()
    for name in NAMES:
        shutil.copy(sample(name), videos)
    write_beginning(videos / SHORT, sample(NAMES[1]), N_FRAMES)
    command = [sys.executable, "-m", "jobs.prune", str(videos), "--out", str(cache), "--model", model]
    command += ["--num-frames", str(N_FRAMES), "--retention-ratio", "0.25", "--dtype", "float32"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return videos, cache
