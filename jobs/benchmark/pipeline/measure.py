"""Run the job and the loops as child processes, each over few and over many videos: what a video more takes counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import av
import numpy as np

from jobs.benchmark.pipeline.forms import corpus
from jobs.benchmark.pipeline.processes import ProcessTree
from jobs.benchmark.pipeline.work import SIDE, Work
from jobs.benchmark.shown import say
from pipeline.errors import RunFailed

#: Of one child process, or of each video by which two differ: "seconds", "peak MB", "store MB", "store objects" (what
#: is larger than 100 kB; other things travel with their calls), and "CPU" seconds of each kind of process.
Figures = Mapping[str, float]
_LOOK_S, _LOOKS_A_MEMORY = 0.25, 8
_LEAST_S = 0.03  # shortest assumed time of a video, to work out how many fill the seconds
FEW = 16  # fewest videos: fewer would not fill every stage


def compare(
    works: Sequence[Work], folder: Path | None, measured: Callable[[Work], Figures], repeats: int
) -> dict[str, Figures]:
    """Measure works of several names in turns, with files below ``folder``; return each name's median figures."""
    found: dict[str, list[Figures]] = {work.name: [] for work in works}
    for turn in range(repeats):
        for work in works:
            say(f"{work.frames} frames, {work.work_s * 1e3:g} ms, {work.nodes or 1} nodes: {work.name}, {turn + 1}")
            found[work.name].append(measured(replace(work, folder=str(folder or ""))))
    return {name: medians(figures) for name, figures in found.items()}


def measure(work: Work, seconds: float) -> Figures:
    """Measure a work at two numbers of videos, ``seconds`` of encoding apart; return figures per extra video."""
    more = max(FEW, round(seconds * work.encoders / max(work.work_s, _LEAST_S)))
    few = max(FEW * work.encoders, more // 4)
    return of_a_video_more(work, few, few + more)


def of_a_video_more(work: Work, few: int, many: int) -> Figures:
    """Measure a work over few and over many videos; return figures per extra video. Raises RunFailed."""
    return slope(run_child(replace(work, videos=few)), run_child(replace(work, videos=many)), many - few)


def slope(few: Figures, many: Figures, more: int) -> Figures:
    """Return each figure's growth per extra video, and the larger run's memory.

    Raises RunFailed if no time was added.
    """
    found = {name: (many.get(name, 0.0) - few.get(name, 0.0)) / more for name in {**few, **many}}
    if found["seconds"] <= 0:
        raise RunFailed(f"{more} videos more took no longer: give more --seconds, or larger numbers")
    return {**found, "peak MB": many["peak MB"]}


def medians(figures: Sequence[Figures]) -> Figures:
    """Return the median of each figure."""
    return {name: median(one.get(name, 0.0) for one in figures) for name in {k: 0 for one in figures for k in one}}


def run_child(work: Work) -> Figures:
    """Run one work in a child process that starts its own Ray, and return its figures.

    Raises RunFailed where it fails.
    """
    below = work.folder or None
    private = TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)  # processes that are ending may write there
    with TemporaryDirectory(dir=below) as folder, private as ray_folder:
        work, logs = replace(work, folder=folder), Path(folder)
        make_videos(work)
        command = [sys.executable, "-m", "jobs.benchmark.pipeline.work", json.dumps(asdict(work))]
        with (
            (logs / "stdout").open("wb") as out,
            (logs / "stderr").open("wb") as err,
            corpus(work) as (variables, sent),
        ):
            env = {**_environment(ray_folder), **variables}
            child = subprocess.Popen(command, stdout=out, stderr=err, env=env, start_new_session=True)
            tree = _watched(child)
        if child.returncode:
            wrong = ["it said nothing", *(logs / "stderr").read_text(errors="replace").strip().splitlines()]
            raise RunFailed(f"the {work.kind} over {work.videos} videos failed: {wrong[-1]}")
        answer: dict[str, float] = json.loads((logs / "stdout").read_text().splitlines()[-1])
    cpu = {f"CPU {kind}": used for kind, used in tree.cpu_s().items()}
    return {**answer, **sent, "peak MB": tree.peak_mb, **cpu}


def make_videos(work: Work) -> None:
    """Write a manifest whose rows all name one still clip, which decodes fast."""
    picture = np.full((SIDE, SIDE, 3), np.linspace(32, 224, SIDE, dtype=np.uint8)[:, None], dtype=np.uint8)
    with av.open(str(work.manifest.with_name("clip.mp4")), "w") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for _ in range(work.frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    rows = [{"video_id": f"video-{number:07d}", "uri": "clip.mp4"} for number in range(work.videos)]
    work.manifest.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _watched(child: subprocess.Popen[bytes]) -> ProcessTree:
    """Wait for a child process while sampling its process tree; kill whatever of the tree is left."""
    tree, looks = ProcessTree(child.pid), 0
    try:
        while child.poll() is None:
            tree.look(memory=looks < _LOOKS_A_MEMORY or looks % _LOOKS_A_MEMORY == 0)  # a short run is seen, too
            looks += 1
            time.sleep(_LOOK_S)
    finally:
        tree.end()
        child.wait()
    return tree


def _environment(ray_folder: str) -> dict[str, str]:
    """Return the child's environment: no Ray of others, and Ray workers at the same priority as a DataLoader's."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ray = {"TMPDIR": ray_folder, "AUTH_MODE": "disabled", "USAGE_STATS_ENABLED": "0", "worker_niceness": "0"}
    return mine | {f"RAY_{name}": value for name, value in ray.items()} | {"RAY_ENABLE_AUTO_CONNECT": "0"}
