"""What opening a cache of millions of made-up videos, finding one, resuming and merging take."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from jobs.benchmark.machine import machine, machine_line
from jobs.benchmark.sizes import add_folder
from jobs.command import count
from jobs.frame.json_document import Done, add_json

HELP = "opening a cache of millions of videos, finding one, resuming, merging"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--videos", type=count, default=1_000_000, metavar="N", help="of the cache [1000000]")
    parser.add_argument("--request-ms", type=float, default=30.0, metavar="MS", help="of a store that is far away [30]")
    add_folder(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> Done:
    """Measure and show."""
    from jobs.benchmark.table.times import as_table, measure  # noqa: PLC0415 - Arrow loads after the flags

    with TemporaryDirectory(dir=arguments.folder) as folder:
        found = measure(arguments.videos, arguments.request_ms / 1e3, Path(folder))
    title = f"The table of {arguments.videos:,} made-up videos, {machine_line()}"
    figures = {name: value for step in found for name, value in step.figures.items()}
    return Done(0, {"videos": arguments.videos, **figures, "machine": machine("cpu")}, [as_table(found, title)])
