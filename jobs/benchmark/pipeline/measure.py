"""Run the job and the loops as child processes, each over few and over many videos: what a video more takes counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from jobs.benchmark.pipeline.clips import make_videos
from jobs.benchmark.pipeline.processes import ProcessTree
from jobs.benchmark.pipeline.work import Answer, Work
from pipeline.errors import RunFailed

Say = Callable[[str], None]
LOOP, JOB, SINGLE, DECODE = "loop", "job", "single", "decode"
_MODULES = {LOOP: "loop", JOB: "job", SINGLE: "loop", DECODE: "stage"}
_LOOK_S, _LOOKS_A_MEMORY = 0.25, 8
_LEAST_S = 0.03  # a video takes, for how many make up so many seconds
_FEW = 16  # videos, at least: fewer would not fill every stage


@dataclass(frozen=True)
class Run:
    """What a child process took over so many videos."""

    videos: int
    answer: Answer
    cpu_s: dict[str, float]
    peak_bytes: int


@dataclass(frozen=True)
class Rates:
    """What a video more takes.

    Attributes:
        videos_per_s: that are done.
        cpu_ms: of the processor, a video, by kind of process.
        store_bytes: that are made in Ray's object stores, a video.
        store_objects: how many objects these are: what is larger than 100 kB, others travel with their calls.
        peak_mb: the most memory of all processes of the larger run, in MB (10^6 bytes) of proportional set size.
    """

    videos_per_s: float
    cpu_ms: dict[str, float]
    store_bytes: float
    store_objects: float
    peak_mb: float


@dataclass(frozen=True)
class Cell:
    """What was measured of videos of one size whose encoding takes so long, by what ran.

    Attributes:
        nodes: logical ones that the job ran on; 0 where it started Ray by itself.
    """

    frames: int
    work_s: float
    workers: int
    encoders: int
    nodes: int
    rates: dict[str, Rates]

    def busy(self, rates: Rates) -> float:
        """Return the share of the time in which an encoder works: by what it is to take, not by a clock around it."""
        return rates.videos_per_s * self.work_s / self.encoders

    @property
    def slowest_stage(self) -> float | None:
        """Videos a second of the job's slowest stage by itself; None where decoding was not measured."""
        decode = self.rates.get(DECODE)
        return min(self.encoders / self.work_s, decode.videos_per_s) if decode else None

    @property
    def job_of_loop(self) -> float | None:
        """Videos a second of the job over those of the loop."""
        return self.rates[JOB].videos_per_s / self.rates[LOOP].videos_per_s if LOOP in self.rates else None

    @property
    def job_of_stage(self) -> float | None:
        """Videos a second of the job over those of its slowest stage."""
        return self.rates[JOB].videos_per_s / self.slowest_stage if self.slowest_stage else None


def compare(works: Sequence[Work], seconds: float, repeats: int, say: Say) -> Cell:
    """Measure works of several kinds on the same videos, in turns."""
    rates: dict[str, list[Rates]] = {work.kind: [] for work in works}
    for turn in range(repeats):
        for work in works:
            say(f"{work.frames} frames, {work.work_s * 1e3:g} ms, {max(work.nodes, 1)} nodes: {work.kind}, {turn + 1}")
            rates[work.kind].append(measure(work, seconds))
    one = works[0]
    found = {kind: medians(of) for kind, of in rates.items()}
    return Cell(one.frames, one.work_s, one.workers, one.encoders, one.nodes, found)


def measure(work: Work, seconds: float) -> Rates:
    """Measure one kind of work over few and over many videos, which differ by about so many seconds of its encoders."""
    more = max(_FEW, round(seconds * work.encoders / max(work.work_s, _LEAST_S)))
    few = max(_FEW * work.encoders, more // 4)
    return slope(run_child(replace(work, videos=few)), run_child(replace(work, videos=few + more)))


def slope(few: Run, many: Run) -> Rates:
    """Return what each video took by which two runs differ. Raises RunFailed where the smaller took longer."""
    videos, seconds = many.videos - few.videos, many.answer.seconds - few.answer.seconds
    if seconds <= 0:
        raise RunFailed(f"{many.videos} videos took no longer than {few.videos}: give more --seconds")
    used = {kind: many.cpu_s.get(kind, 0.0) - few.cpu_s.get(kind, 0.0) for kind in {**few.cpu_s, **many.cpu_s}}
    return Rates(
        videos_per_s=videos / seconds,
        cpu_ms={kind: 1e3 * cpu_s / videos for kind, cpu_s in used.items()},
        store_bytes=(many.answer.store_bytes - few.answer.store_bytes) / videos,
        store_objects=(many.answer.store_objects - few.answer.store_objects) / videos,
        peak_mb=many.peak_bytes / 1e6,
    )


def medians(rates: Sequence[Rates]) -> Rates:
    """Return the median of each figure."""

    def middle(figures: Iterable[float]) -> float:
        return median(figures)

    kinds = {kind: None for one in rates for kind in one.cpu_ms}
    return Rates(
        middle(one.videos_per_s for one in rates),
        {kind: middle(one.cpu_ms.get(kind, 0.0) for one in rates) for kind in kinds},
        middle(one.store_bytes for one in rates),
        middle(one.store_objects for one in rates),
        middle(one.peak_mb for one in rates),
    )


def run_child(work: Work) -> Run:
    """Run one work in a process of its own, with a Ray of its own. Raises RunFailed where it fails."""
    with TemporaryDirectory(dir=work.folder or None) as folder, TemporaryDirectory(prefix="ray-") as ray_folder:
        work = replace(work, folder=folder)
        make_videos(work)
        module = f"jobs.benchmark.pipeline.{_MODULES[work.kind]}"
        with (Path(folder) / "stdout").open("w+") as out, (Path(folder) / "stderr").open("w+") as err:
            child = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(asdict(work))],
                stdout=out, stderr=err, env=_environment(ray_folder), start_new_session=True,
            )  # fmt: skip
            tree = _watched(child)
            out.seek(0)
            err.seek(0)
            said, wrong = out.read().splitlines(), err.read().strip().splitlines()
        if child.returncode:
            raise RunFailed(f"the {work.kind} over {work.videos} videos failed: {(wrong or ['it said nothing'])[-1]}")
    return Run(work.videos, Answer(**json.loads(said[-1])), tree.cpu_s(), tree.peak_bytes)


def _watched(child: subprocess.Popen[bytes] | subprocess.Popen[str]) -> ProcessTree:
    """Wait for a process, with a look at all it started every now and then; nothing of it is left."""
    tree, looks = ProcessTree(child.pid), 0
    try:
        while child.poll() is None:
            tree.look(memory=looks % _LOOKS_A_MEMORY == 0)
            looks += 1
            time.sleep(_LOOK_S)
    finally:
        tree.end()
        child.wait()
    return tree


def _environment(ray_folder: str) -> dict[str, str]:
    """Return what a child is started in: no Ray of others, and workers no less urgent than those of a loop."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ray = {"TMPDIR": ray_folder, "AUTH_MODE": "disabled", "USAGE_STATS_ENABLED": "0", "worker_niceness": "0"}
    return mine | {f"RAY_{name}": value for name, value in ray.items()} | {"RAY_ENABLE_AUTO_CONNECT": "0"}
