"""The whole job beside a plain DataLoader loop on the same videos, with an encoder that only sleeps.

Both run in turns as child processes, over few and over many videos. A figure is the cost of one more video, so that
the start cancels out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import av
import numpy as np
from rich.table import Table

from jobs.benchmark.pipeline_work import DRIVER, FRAME_BYTES, JOB, LOOP, SIDE, Work
from jobs.benchmark.shared import MAIN, ProcessTree, existing_folder, machine, machine_line, say
from jobs.command import count
from jobs.frame.json_document import CommandResult
from pipeline.errors import RunFailed, UsageError

#: Figures of a child process, or of each further video: "seconds", "peak MB", "store MB", "store objects" (objects
#: above 100 kB; smaller objects travel with their calls), and "CPU" seconds of each kind of process.
Figures = Mapping[str, float]
_CPU = "CPU "
_CHILD = "from jobs.benchmark.pipeline_work import main; main()"
_LOOK_S, _LOOKS_PER_MEMORY = 0.25, 8
_MIN_VIDEO_S = 0.03  # assumed minimum time of a video, to compute the number of videos from the seconds
_MIN_VIDEOS = 16  # fewer videos would not fill every stage


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``pipeline``."""
    for name, default, help_text in (
        ("--frames", [2, 32], "frames of a video, 0.44 MB each [2 32]"),
        ("--encode-ms", [15, 60, 250], "milliseconds that an encoder sleeps for a video [15 60 250]"),
        ("--nodes", [], "logical nodes; each has a worker of each kind, and a loop beside it"),
    ):
        parser.add_argument(name, type=count, nargs="+", default=default, metavar="N", help=help_text)
    parser.add_argument(
        "--driver",
        type=count,
        nargs=2,
        metavar="N",
        help="measure the driver instead, by the job over N and N videos with stages that do nothing",
    )
    parser.add_argument("--encoders", type=count, default=1, metavar="N", help="with --driver: number of encoders [1]")
    workers = max(1, (os.cpu_count() or 1) - 1)
    parser.add_argument(
        "--workers",
        type=count,
        default=workers,
        metavar="N",
        help="decode workers of the job and of the loop [the CPUs less one]",
    )
    parser.add_argument("--seconds", type=count, default=20, metavar="S", help="seconds of a measurement, about [20]")
    parser.add_argument("--repeats", type=count, default=1, metavar="N", help="measure N times, and show medians [1]")
    parser.add_argument("--folder", type=existing_folder, metavar="DIR", help="parent of temporary files [temporary]")


def run(arguments: argparse.Namespace) -> CommandResult:
    """Measure job and loop for every combination, or the driver; return the table. Raises RunFailed, UsageError."""
    about = {"machine": machine(), "cpus": os.cpu_count()}
    if arguments.driver is not None:
        return _measure_driver(arguments, about)
    cells: list[dict[str, float]] = []
    for frames, encode_ms in product(arguments.frames, arguments.encode_ms):
        first = None
        for nodes in sorted(arguments.nodes) or [0]:
            encoders, workers = nodes or 1, nodes or arguments.workers
            work = Work(JOB, frames, encode_ms / 1e3, workers, encoders, nodes, str(arguments.folder or ""))
            n_more = max(_MIN_VIDEOS, round(arguments.seconds * encoders / max(work.encode_s, _MIN_VIDEO_S)))
            n_few = max(_MIN_VIDEOS * encoders, n_more // 4)
            turns: dict[str, list[Figures]] = {LOOP: [], JOB: []}
            for turn in range(arguments.repeats):
                for kind, figures in turns.items():
                    say(f"{frames} frames, {encode_ms} ms, {encoders} nodes: {kind}, {turn + 1}")
                    figures.append(measure(replace(work, kind=kind), n_few, n_few + n_more))
            by_kind = {kind: medians(figures) for kind, figures in turns.items()}
            cells.append(compute_figures(work, by_kind, first))
            first = first or cells[-1]
    title = f"Encoders that sleep, on {os.cpu_count()} CPUs, {machine_line()}"
    return CommandResult(0, {**about, "cells": cells}, [as_table(cells, title)])


def _measure_driver(arguments: argparse.Namespace, about: Mapping[str, object]) -> CommandResult:
    """Measure the driver's CPU time for a video, and the videos a second on this machine, whose CPUs all share.

    The result has a line to print instead of a table. Raises UsageError if both numbers of ``--driver`` are equal, and
    RunFailed if they are too small.
    """
    n_few, n_many = sorted(arguments.driver)
    if n_few == n_many:
        raise UsageError("--driver takes two different numbers of videos: the difference is measured")
    encoders, place = arguments.encoders, str(arguments.folder or "")
    work = Work(DRIVER, min(arguments.frames), 0.0, arguments.workers, encoders, int(encoders > 1), place)
    growth = measure(work, n_few, n_many)
    driver_ms = 1e3 * growth[_CPU + MAIN]
    if driver_ms <= 0:
        raise RunFailed(f"{n_many - n_few} videos more took the driver no more of a CPU: give larger numbers")
    line = (
        f"{encoders} encoders, a video more from {n_few} to {n_many}: {1 / growth['seconds']:.0f} videos/s with all "
        f"processes on {os.cpu_count()} CPUs; {driver_ms:.2f} CPU ms of the driver, so {1e3 / driver_ms:.0f} videos/s "
        f"of one core; {growth['peak MB']:.0f} MB of all processes at most"
    )
    return CommandResult(0, {**about, "encoders": encoders, "a_video": growth}, [line])


def measure(work: Work, n_few: int, n_many: int) -> dict[str, float]:
    """Run a work over few and over many videos; return each figure's growth a video, and the larger run's memory.

    ``work.videos`` is not used. Raises RunFailed if a run fails, or if more videos took no more time.
    """
    short_run, long_run = (run_child(replace(work, videos=videos)) for videos in (n_few, n_many))
    growth = {
        name: (long_run.get(name, 0.0) - short_run.get(name, 0.0)) / (n_many - n_few)
        for name in {**short_run, **long_run}
    }
    if growth["seconds"] <= 0:
        raise RunFailed(f"{n_many - n_few} videos more took no longer: give more --seconds, or larger numbers")
    return {**growth, "peak MB": long_run["peak MB"]}


def medians(turns: Sequence[Figures]) -> dict[str, float]:
    """Compute the median of each figure over all turns; a figure that a turn lacks counts as 0."""
    return {
        name: median(turn.get(name, 0.0) for turn in turns) for name in {name: 0 for turn in turns for name in turn}
    }


def run_child(work: Work) -> dict[str, float]:
    """Run a work in a child process that starts its own Ray, and return its figures.

    The videos are made first, in a temporary folder below ``work.folder``. Raises RunFailed if the child fails.
    """
    private = TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)  # ending processes may still write there
    with TemporaryDirectory(dir=work.folder or None) as temporary, private as ray_folder:
        work = replace(work, folder=temporary)
        make_videos(work)
        command = [sys.executable, "-c", _CHILD, json.dumps(asdict(work))]
        with Path(temporary, "stdout").open("wb") as out, Path(temporary, "stderr").open("wb") as err:
            environment = _make_environment(ray_folder)
            child = subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)
            tree = _watch(child)
        if child.returncode:
            messages = ["it said nothing", *Path(temporary, "stderr").read_text(errors="replace").strip().splitlines()]
            raise RunFailed(f"the {work.kind} over {work.videos} videos failed: {messages[-1]}")
        answer: dict[str, float] = json.loads(Path(temporary, "stdout").read_text().splitlines()[-1])
    return {**answer, "peak MB": tree.peak_mb, **{f"{_CPU}{kind}": seconds for kind, seconds in tree.cpu_s().items()}}


def make_videos(work: Work) -> None:
    """Write the work's manifest and a still clip beside it, which all rows name; it decodes fast."""
    picture = np.full((SIDE, SIDE, 3), np.linspace(32, 224, SIDE, dtype=np.uint8)[:, None], dtype=np.uint8)
    with av.open(str(work.manifest.with_name("clip.mp4")), "w") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for _ in range(work.frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    rows = [{"video_id": f"video-{number:07d}", "uri": "clip.mp4"} for number in range(work.videos)]
    work.manifest.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _watch(child: subprocess.Popen[bytes]) -> ProcessTree:
    """Wait for a child process while sampling its process tree; then kill the remaining processes of the tree."""
    tree, looks = ProcessTree(child.pid), 0
    try:
        while child.poll() is None:
            tree.look(memory=looks < _LOOKS_PER_MEMORY or looks % _LOOKS_PER_MEMORY == 0)  # a short run is seen, too
            looks += 1
            time.sleep(_LOOK_S)
    finally:
        tree.end()
        child.wait()
    return tree


def _make_environment(ray_folder: str) -> dict[str, str]:
    """Make the child's environment: no inherited Ray, and Ray workers at the same priority as a DataLoader's."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ray = {"TMPDIR": ray_folder, "AUTH_MODE": "disabled", "USAGE_STATS_ENABLED": "0", "worker_niceness": "0"}
    return inherited | {f"RAY_{name}": value for name, value in ray.items()} | {"RAY_ENABLE_AUTO_CONNECT": "0"}


def compute_figures(work: Work, by_kind: Mapping[str, Figures], first: Figures | None = None) -> dict[str, float]:
    """Compute the table's figures of one combination of frames, encoder seconds and nodes: title of a row -> number.

    Args:
        by_kind: the growth a video of each kind of work; JOB and LOOP are needed.
        first: the result for the fewest nodes, the base of scaling; None computes no scaling.
    """
    row = {"MB": work.frames * FRAME_BYTES / 1e6, "encode ms": 1e3 * work.encode_s, "nodes": work.nodes or 1}
    speeds = {kind: 1 / figures["seconds"] for kind, figures in by_kind.items()}
    for kind, speed in speeds.items():
        row[f"{kind}, videos/s"] = speed
        row[f"{kind}, busy"] = speed * work.encode_s / work.encoders  # by the nominal time, not by a clock around it
    row[f"job / {LOOP}"] = speeds[JOB] / speeds[LOOP]
    if first:
        row["job / nodes x the first"] = speeds[JOB] / (first[f"{JOB}, videos/s"] * work.nodes / first["nodes"])
    for kind, figures in by_kind.items():
        by_process = {name: 1e3 * cpu_ms for name, cpu_ms in figures.items() if name.startswith(_CPU)}
        row[f"{kind}, peak MB (PSS)"] = figures["peak MB"]
        row[f"{kind}, CPU ms a video"] = sum(by_process.values())
        row |= {f"{kind}, CPU ms: {name.removeprefix(_CPU)}": cpu_ms for name, cpu_ms in by_process.items()}
    return row | {f"{name} a video": by_kind[JOB][name] for name in ("store MB", "store objects")}


def as_table(cells: Sequence[Figures], title: str) -> Table:
    """Make a table with a column for each combination."""
    table = Table(title=title, title_justify="left", show_edge=False, show_header=False)
    for name in dict.fromkeys(name for figures in cells for name in figures):
        values = [figures.get(name) for figures in cells]
        table.add_row(name, *("" if v is None else f"{v:,.{2 if abs(v) < 10 else 1}f}" for v in values))
    return table
