"""What opening a cache of millions of videos, finding one of them and resuming take with a compacted index."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from jobs.benchmark.sizes import add_folder
from jobs.command import add_json_or_file, count, wide_console
from jobs.json_document import Done

HELP = "opening a cache of millions of videos, and finding one"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--videos", type=count, default=35_000_000, metavar="N", help="of the cache [35000000]")
    parser.add_argument("--videos-per-shard", type=count, default=22, metavar="N", help="[22]")
    add_folder(parser)
    add_json_or_file(parser)


def run(arguments: argparse.Namespace) -> Done:
    """Measure and show; returns the exit code and the figures."""
    from jobs.benchmark.index.times import as_table, measure  # noqa: PLC0415 - torch and Arrow load after the flags
    from jobs.benchmark.machine import machine, machine_line  # noqa: PLC0415

    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    with TemporaryDirectory(dir=arguments.folder) as folder:
        found = measure(arguments.videos, arguments.videos_per_shard, Path(folder), say)
    wide_console().print(as_table(found, f"A compacted index of made-up videos, {machine_line('cpu')}"))
    return Done(0, {**found, "machine": machine("cpu")})
