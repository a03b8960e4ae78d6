"""The whole job beside a plain DataLoader loop on the same videos, with an encoder that only sleeps.

Beside both: the job's slowest stage alone, and a loop that has one process. All run in turns as child processes, over
few and over many videos, and a figure is that of a video more, so that starting falls out.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product

from jobs.benchmark.machine import machine, machine_line
from jobs.benchmark.pipeline.work import (
    COLUMN,
    DECODE,
    DRIVER,
    FOLDER,
    JOB,
    LOOP,
    SIMULATION,
    SINGLE,
    TAR,
    TARS,
    Work,
)
from jobs.benchmark.shown import say
from jobs.benchmark.sizes import add_folder
from jobs.command import count, file_in_folder
from jobs.frame.json_document import Done, add_json
from pipeline.errors import RunFailed, UsageError
from pipeline.rows import JsonObject

HELP = "the whole job beside a plain DataLoader loop"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    for name, default, unit, what in (
        ("--frames", [2, 32], "T", "of a video, 0.44 MB each [2 32]"),
        ("--encode-ms", [15, 60, 250], "MS", "that encoders sleep for a video [15 60 250]"),
        (
            "--nodes",
            [],
            "N",
            "instead: the job on logical nodes, with a worker of each kind a node, beside a loop a node",
        ),
    ):
        parser.add_argument(name, type=count, nargs="+", default=default, metavar=unit, help=what)
    for name, what in (
        ("--driver", "by stages that do nothing"),
        ("--forms", "of 1 MiB as files, in tars and in a Parquet column"),
    ):
        parser.add_argument(name, type=count, nargs=2, metavar="N", help=f"instead: the job over N and N videos {what}")
    parser.add_argument("--s3", action="store_true", help="with --forms: from a server of moto's as well")
    parser.add_argument(
        "--simulate",
        type=count,
        nargs="+",
        metavar="N",
        help="instead: the driver alone, with N simulated encoders of the longest --encode-ms and videos of the most "
        "--frames",
    )
    for name, value, unit, what in (
        ("--encoders", 1, "N", "with --driver [1]"),
        ("--workers", max(1, (os.cpu_count() or 1) - 1), "N", "that decode, in job and loop [the CPUs less one]"),
        ("--request-ms", 0, "MS", "with --simulate: that each request to the store takes [0]"),
        ("--seconds", 20, "S", "about, of one measurement [20]"),
        ("--repeats", 1, "N", "times each; medians are shown [1]"),
    ):
        parser.add_argument(name, type=count, default=value, metavar=unit, help=what)
    parser.add_argument("--plot", type=file_in_folder, metavar="FILE.png", help="draw it (needs matplotlib)")
    add_folder(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> Done:
    """Measure and show."""
    if arguments.plot is not None and find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")
    if arguments.s3 and arguments.forms is None:
        raise UsageError("--s3 goes with --forms")
    about = {"machine": machine("cpu"), "cpus": os.cpu_count()}
    if arguments.driver is not None:
        return _driver(arguments, about)
    if arguments.forms is not None:
        return _forms(arguments, about)
    return _measured(arguments, about) if arguments.simulate is None else _simulated(arguments, about)


def _measured(arguments: argparse.Namespace, about: JsonObject) -> Done:
    """Measure every combination of frames, encoder seconds and nodes."""
    from jobs.benchmark.pipeline.measure import compare, measure  # noqa: PLC0415 - NumPy loads after the flags
    from jobs.benchmark.pipeline.report import as_table, cell  # noqa: PLC0415

    cells: list[dict[str, float]] = []
    for frames, encode_ms in product(arguments.frames, arguments.encode_ms):
        first = None
        for nodes in sorted(arguments.nodes) or [0]:
            work = Work(JOB, frames, encode_ms / 1e3, nodes or arguments.workers, nodes or 1, nodes)
            works = [replace(work, kind=kind) for kind in ((LOOP, JOB) if nodes else (LOOP, JOB, SINGLE, DECODE))]
            measured = partial(measure, seconds=arguments.seconds)
            found = compare(works, arguments.folder, measured, arguments.repeats)
            cells.append(cell(work, found, first))
            first = first or cells[-1]
    title = f"Encoders that sleep, on {os.cpu_count()} CPUs, {machine_line()}"
    if arguments.plot is not None:
        from jobs.benchmark.pipeline.plot import write_plot  # noqa: PLC0415 - needs the extra benchmark

        write_plot(cells, title, arguments.plot)
    return Done(0, {**about, "cells": cells}, [as_table(cells, title)])


def _driver(arguments: argparse.Namespace, about: JsonObject) -> Done:
    """Measure what the driver takes for a video, and how many videos come out here, where processes share the CPUs."""
    from jobs.benchmark.pipeline.measure import of_a_video_more  # noqa: PLC0415 - NumPy loads after the flags

    few, many = _few_and_many(arguments.driver, "--driver")
    encoders = arguments.encoders
    work = Work(DRIVER, min(arguments.frames), 0.0, arguments.workers, encoders, nodes=int(encoders > 1))
    found = of_a_video_more(replace(work, folder=str(arguments.folder or "")), few, many)
    driver_ms = 1e3 * found["CPU main process"]
    if driver_ms <= 0:
        raise RunFailed(f"{many - few} videos more took the driver no more of a CPU: give larger numbers")
    line = (
        f"{encoders} encoders, a video more from {few} to {many}: {1 / found['seconds']:.0f} videos/s with all "
        f"processes on {os.cpu_count()} CPUs; {driver_ms:.2f} CPU ms of the driver, so {1e3 / driver_ms:.0f} videos/s "
        f"of one core; {found['peak MB']:.0f} MB of all processes at most"
    )
    return Done(0, {**about, "encoders": encoders, "a_video": found}, [line])


def _few_and_many(numbers: Sequence[int], flag: str) -> tuple[int, int]:
    """Return two numbers of videos in ascending order. Raises UsageError where they are equal."""
    few, many = sorted(numbers)
    if few == many:
        raise UsageError(f"{flag} takes two different numbers of videos: what a video more takes counts")
    return few, many


def _forms(arguments: argparse.Namespace, about: JsonObject) -> Done:
    """Measure what a video more takes the job, and its store, where the same videos lie in several forms."""
    from jobs.benchmark.pipeline.measure import compare, run_child, slope  # noqa: PLC0415 - NumPy loads after the flags
    from jobs.benchmark.pipeline.report import form_line  # noqa: PLC0415

    few, many = _few_and_many(arguments.forms, "--forms")
    work = Work(JOB, min(arguments.frames), min(arguments.encode_ms) / 1e3, arguments.workers)
    works = [replace(work, form=form) for form in (FOLDER, TAR, TARS, COLUMN)]
    works += [replace(work, form=form, on_s3=True) for form in (FOLDER, TARS) if arguments.s3]
    runs = []
    for videos in (few, many):  # medians first: starting takes longer than some hundred videos
        sized = [replace(one, videos=videos) for one in works]
        runs.append(compare(sized, arguments.folder, run_child, arguments.repeats))
    found = {one.name: slope(runs[0][one.name], runs[1][one.name], many - few) for one in works}
    lines = [f"{name}: {form_line(figures, found[FOLDER])}" for name, figures in found.items()]
    return Done(0, {**about, "a_video": found}, lines)


def _simulated(arguments: argparse.Namespace, about: JsonObject) -> Done:
    """Measure what the driver reaches with each number of simulated encoders, and where its time goes."""
    from jobs.benchmark.pipeline.measure import FEW, run_child  # noqa: PLC0415 - NumPy loads after the flags
    from jobs.benchmark.pipeline.report import simulation_line  # noqa: PLC0415

    frames, encode_s, found = max(arguments.frames), max(arguments.encode_ms) / 1e3, []
    for encoders in arguments.simulate:
        work = Work(SIMULATION, frames, encode_s, 1, encoders, folder=str(arguments.folder or ""))
        videos = max(FEW, round(arguments.seconds * encoders / encode_s))
        one = run_child(replace(work, videos=videos, request_s=arguments.request_ms / 1e3))
        found.append({"encoders": encoders, **one})
        say(f"{encoders} encoders: done")
    return Done(0, {**about, "simulated": found}, list(map(simulation_line, found)))
