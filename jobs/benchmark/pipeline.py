"""The whole job beside a plain DataLoader loop on the same videos, with an encoder that only sleeps.

A figure is the cost per further video, so that the time to start cancels out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from statistics import median
from tempfile import TemporaryDirectory

import av
import numpy as np

from jobs.benchmark.pipeline_work import FRAME_BYTES, JOB, LOOP, SIDE, PipelineWork
from jobs.benchmark.shared import (
    MAIN,
    add_flag,
    describe_machine,
    format_figure_rows,
    make_result,
    parse_existing_folder,
    run_watched,
    say,
)
from jobs.command import count
from jobs.frame.json_document import CommandResult
from pipeline.errors import RunFailed, UsageError

#: Figures of a child process, or growth per further video: "seconds", "peak MB", "store MB", "store objects" (objects
#: above 100 kB; smaller objects travel with their calls), and CPU milliseconds of each kind of process.
Figures = Mapping[str, float]
_CPU = "CPU ms: "  # beginning of a figure's name, before the kind of process
_CHILD = "from jobs.benchmark.pipeline_work import run_child_work; run_child_work()"
_MIN_VIDEO_S = 0.03  # assumed minimum time per video, to compute the number of videos from the seconds
_MIN_VIDEOS = 16  # fewer videos would not fill every stage


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    add_flag(parser, "--frames", [2, 32], "frames of a video, 0.44 MB each", "N")
    add_flag(parser, "--encode-ms", [15, 60, 250], "milliseconds that an encoder sleeps for a video", "N")
    add_flag(parser, "--nodes", [], "logical nodes; each has a worker of each kind, and a loop beside it", "N")
    parser.add_argument(
        "--driver",
        type=count,
        nargs=2,
        metavar="N",
        help="measure the driver instead, by the job over N and N videos of the fewest --frames, which are not encoded",
    )
    add_flag(parser, "--encoders", 1, "with --driver: number of encoders", "N")
    workers = max(1, (os.cpu_count() or 1) - 1)
    add_flag(parser, "--workers", workers, "decode workers of the job and of the loop; the CPUs less one", "N")
    add_flag(parser, "--seconds", 20, "seconds of a measurement, about", "S")
    add_flag(parser, "--repeats", 1, "measure N times, and show medians", "N")
    place = "parent of temporary files (default: the system's)"
    add_flag(parser, "--folder", None, place, "DIR", parse_existing_folder)


def run(arguments: argparse.Namespace) -> CommandResult:
    """Measure the job and the loop for every combination of flags, or the driver with ``--driver``; return the table.

    Raises:
        RunFailed: a run fails, or more videos took no more time.
        UsageError: the flags of ``--driver`` cannot be used.
    """
    if arguments.driver is not None:
        return _measure_driver(arguments)
    cells: dict[str, dict[str, float]] = {}
    for frames, encode_ms in product(arguments.frames, arguments.encode_ms):
        first = None
        for nodes in sorted(arguments.nodes) or [0]:
            encoders, workers = nodes or 1, nodes or arguments.workers
            work = PipelineWork(JOB, frames, encode_ms / 1e3, workers, encoders, nodes, str(arguments.folder or ""))
            n_more = max(_MIN_VIDEOS, round(arguments.seconds * encoders / max(work.encode_s, _MIN_VIDEO_S)))
            n_few = max(_MIN_VIDEOS * encoders, n_more // 4)
            title = f"{frames} frames, {encode_ms} ms" + f", {nodes} nodes" * bool(nodes)
            turns: dict[str, list[Figures]] = {LOOP: [], JOB: []}
            for turn in range(arguments.repeats):
                for kind, figures in turns.items():
                    say(f"{title}: {kind}, {turn + 1}")
                    figures.append(measure_growth(replace(work, kind=kind), n_few, n_few + n_more))
            cells[title] = compute_figures(
                work, {kind: compute_medians(figures) for kind, figures in turns.items()}, first
            )
            first = first or cells[title]
    title = f"Encoders that sleep, on {os.cpu_count()} CPUs"
    rows = format_figure_rows(cells.values())
    return make_result(title, ["", *cells], rows, cpus=os.cpu_count(), cells=[*cells.values()])


def _measure_driver(arguments: argparse.Namespace) -> CommandResult:
    """Measure the driver's CPU time per video, and this machine's videos per second with shared CPUs.

    The encoders do not sleep. The result has a line to print instead of a table.

    Raises:
        UsageError: both numbers of ``--driver`` are equal.
        RunFailed: a run fails, or the numbers are too close to measure a difference.
    """
    n_few, n_many = sorted(arguments.driver)
    if n_few == n_many:
        raise UsageError("--driver takes two different numbers of videos: the difference is measured")
    encoders = arguments.encoders
    place = str(arguments.folder or "")
    work = PipelineWork(JOB, min(arguments.frames), 0.0, arguments.workers, encoders, int(encoders > 1), place)
    growth = measure_growth(work, n_few, n_many)
    driver_ms = growth[_CPU + MAIN]
    if driver_ms <= 0:
        raise RunFailed(f"{n_many - n_few} more videos took the driver no more CPU time: give larger numbers")
    line = (
        f"{encoders} encoders, a video more from {n_few} to {n_many}: {1 / growth['seconds']:.0f} videos/s with all "
        f"processes on {os.cpu_count()} CPUs; {driver_ms:.2f} CPU ms of the driver, so {1e3 / driver_ms:.0f} videos/s "
        f"of one core; {growth['peak MB']:.0f} MB of all processes at most"
    )
    about = {"machine": describe_machine(), "cpus": os.cpu_count(), "encoders": encoders}
    return CommandResult(0, {**about, "a_video": growth}, [line])


def measure_growth(work: PipelineWork, n_few: int, n_many: int) -> dict[str, float]:
    """Run the work over few and over many videos; return the growth of each figure per video.

    "peak MB" is instead the memory of the run over many videos. ``work.videos`` is ignored.

    Raises:
        RunFailed: a run fails, or more videos took no more time.
    """
    short_run, long_run = (run_child(replace(work, videos=videos)) for videos in (n_few, n_many))
    growth = {
        name: (long_run.get(name, 0.0) - short_run.get(name, 0.0)) / (n_many - n_few)
        for name in {**short_run, **long_run}
    }
    if growth["seconds"] <= 0:
        raise RunFailed(f"{n_many - n_few} more videos took no more time: give more --seconds, or larger numbers")
    return {**growth, "peak MB": long_run["peak MB"]}


def compute_medians(turns: Sequence[Figures]) -> dict[str, float]:
    """Return the median of each figure over all turns; a figure that is missing from a turn counts as 0."""
    return {
        name: median(turn.get(name, 0.0) for turn in turns) for name in {name: 0 for turn in turns for name in turn}
    }


def run_child(work: PipelineWork) -> dict[str, float]:
    """Run a work in a child process that starts its own Ray; return its figures, memory and CPU time.

    The videos are made first, in a temporary folder below ``work.folder``.

    Raises:
        RunFailed: the child fails.
    """
    private = TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)  # ending processes may still write there
    with TemporaryDirectory(dir=work.folder or None) as temporary, private as ray_folder:
        work = replace(work, folder=temporary)
        make_videos(work)
        command = [sys.executable, "-c", _CHILD, json.dumps(asdict(work))]
        try:
            stdout, tree = run_watched(command, _make_environment(ray_folder))
        except RunFailed as error:
            raise RunFailed(f"the {work.kind} over {work.videos} videos failed: {error}") from None
    cpu_ms = {_CPU + kind: 1e3 * seconds for kind, seconds in tree.cpu_s().items()}
    return {**json.loads(stdout.splitlines()[-1]), "peak MB": tree.peak_mb, **cpu_ms}


def _make_environment(ray_folder: str) -> dict[str, str]:
    """Return the child's environment: without this process's RAY_ variables, and with settings of Ray."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ray = {"TMPDIR": ray_folder, "AUTH_MODE": "disabled", "USAGE_STATS_ENABLED": "0", "worker_niceness": "0"}
    return inherited | {f"RAY_{name}": value for name, value in ray.items()} | {"RAY_ENABLE_AUTO_CONNECT": "0"}


def make_videos(work: PipelineWork) -> None:
    """Write the work's manifest, and one still clip beside it that all rows name."""
    picture = np.full((SIDE, SIDE, 3), np.linspace(32, 224, SIDE, dtype=np.uint8)[:, None], dtype=np.uint8)
    with av.open(str(work.manifest.with_name("clip.mp4")), "w") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for _ in range(work.frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    rows = [{"video_id": f"video-{number:07d}", "uri": "clip.mp4"} for number in range(work.videos)]
    work.manifest.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def compute_figures(
    work: PipelineWork, by_kind: Mapping[str, Figures], first: Figures | None = None
) -> dict[str, float]:
    """Compute the figures of one combination of frames, encoder seconds and nodes: title of a row -> number.

    They are the combination itself, videos per second and busy share per kind of work, the job's seconds relative to
    LOOP, its scaling, memory and CPU per kind, and the job's use of the object store.

    Args:
        by_kind: the growth per video of each kind of work; must have JOB and LOOP.
        first: the result for the fewest nodes, the base of scaling; None to leave out scaling.
    """
    row = {"MB": work.frames * FRAME_BYTES / 1e6, "encode ms": 1e3 * work.encode_s, "nodes": work.nodes or 1}
    for kind, figures in by_kind.items():
        row[f"{kind}, videos/s"] = 1 / figures["seconds"]
        # By the nominal time, not by a clock around it.
        row[f"{kind}, busy"] = work.encode_s / work.encoders / figures["seconds"]
    row[f"job / {LOOP}"] = by_kind[LOOP]["seconds"] / by_kind[JOB]["seconds"]
    if first:
        row["job / nodes x the first"] = row["job, videos/s"] * first["nodes"] / (first["job, videos/s"] * row["nodes"])
    for kind, figures in by_kind.items():
        cpu_ms = {f"{kind}, {name}": value for name, value in figures.items() if name.startswith(_CPU)}
        row |= {f"{kind}, peak MB (PSS)": figures["peak MB"], f"{kind}, CPU ms a video": sum(cpu_ms.values()), **cpu_ms}
    return row | {f"{name} a video": by_kind[JOB][name] for name in ("store MB", "store objects")}
