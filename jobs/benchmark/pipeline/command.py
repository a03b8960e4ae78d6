"""The whole job beside a plain DataLoader loop on the same videos, with an encoder that only sleeps.

Beside both: the job's slowest stage alone, and a loop that has one process. All run in turns as child processes, over
few and over many videos, and a figure is that of a video more, so that starting falls out.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.benchmark.pipeline.work import Work
from jobs.benchmark.sizes import add_folder
from jobs.command import add_json_or_file, count, file_in_folder, wide_console
from jobs.json_document import Done
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from jobs.benchmark.pipeline.measure import Cell

HELP = "the whole job beside a plain DataLoader loop"


def add_flags(parser: argparse.ArgumentParser) -> None:
    frames, sleeps = [2, 32], [15, 60, 250]
    parser.add_argument("--frames", type=count, nargs="+", default=frames, metavar="T", help="0.44 MB each [2 32]")
    parser.add_argument(
        "--encode-ms", type=count, nargs="+", default=sleeps, metavar="MS", help="encoders sleep a video [15 60 250]"
    )
    parser.add_argument("--workers", type=count, metavar="N", help="to decode, of job and loop [the CPUs less one]")
    parser.add_argument(
        "--nodes", type=count, nargs="+", metavar="N", help="the job alone, on logical nodes of two workers each"
    )
    parser.add_argument("--seconds", type=count, default=20, metavar="S", help="about, for one measurement [20]")
    parser.add_argument("--repeats", type=count, default=1, metavar="N", help="times each; medians are shown [1]")
    parser.add_argument("--plot", type=file_in_folder, metavar="FILE.png", help="draw it (needs matplotlib)")
    add_folder(parser)
    add_json_or_file(parser)


def run(arguments: argparse.Namespace) -> Done:
    """Measure and show; returns the exit code and the figures. Ctrl-C ends it with what was measured until then."""
    if arguments.plot is not None and find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")
    from jobs.benchmark.machine import machine, machine_line  # noqa: PLC0415 - torch loads after the flags
    from jobs.benchmark.pipeline.report import as_record, as_table  # noqa: PLC0415

    cells, interrupted = _measure(arguments)
    title = f"Encoders that sleep, {os.cpu_count()} CPUs, {machine_line('cpu')}"
    wide_console().print(as_table(cells, title))
    if arguments.plot is not None and cells:
        from jobs.benchmark.pipeline.plot import write_plot  # noqa: PLC0415 - needs the extra benchmark

        write_plot(cells, title, arguments.plot)
    record = {"machine": machine("cpu"), "cpus": os.cpu_count(), "seconds": arguments.seconds}
    return Done(130 if interrupted else 0, {**record, "repeats": arguments.repeats, "cells": as_record(cells)})


def _measure(arguments: argparse.Namespace) -> tuple[list[Cell], bool]:
    """Return what was measured, and whether it was interrupted."""
    from jobs.benchmark.pipeline.measure import compare  # noqa: PLC0415

    console = Console(stderr=True)
    cells: list[Cell] = []

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    try:
        # One by one into the list, which an interrupt leaves with what was measured.
        cells.extend(compare(works, arguments.seconds, arguments.repeats, say) for works in _works(arguments))
    except KeyboardInterrupt:
        return cells, True
    return cells, False


def _works(arguments: argparse.Namespace) -> Iterator[list[Work]]:
    """Yield what is measured in turns, for each row of the table."""
    workers = arguments.workers or max(1, (os.cpu_count() or 1) - 1)
    for frames, encode_ms in product(arguments.frames, arguments.encode_ms):
        work = Work("job", 0, frames, encode_ms / 1e3, workers, folder=str(arguments.folder or ""))
        for nodes in arguments.nodes or ():
            yield [replace(work, workers=nodes, encoders=nodes, nodes=nodes)]
        if not arguments.nodes:
            yield [replace(work, kind=kind) for kind in ("loop", "job", "single", "decode")]
