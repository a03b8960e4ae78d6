"""What merging two caches of made-up videos takes, by links and by copies, and saying where two caches differ."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from jobs.benchmark.machine import machine, machine_line
from jobs.benchmark.sizes import add_folder
from jobs.command import count
from jobs.frame.json_document import Done, add_json

HELP = "merging two large caches, and saying where two differ"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--videos", type=count, default=100_000, metavar="N", help="of each cache [100000]")
    parser.add_argument("--shard-kb", type=count, default=60, metavar="KB", help="of a token shard of 22 videos [60]")
    add_folder(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> Done:
    """Measure and show."""
    from jobs.benchmark.sharing.times import as_table, measure  # noqa: PLC0415 - Arrow loads after the flags

    with TemporaryDirectory(dir=arguments.folder) as folder:
        found = measure(arguments.videos, arguments.shard_kb * 1000, Path(folder))
    title = f"Two caches of {arguments.videos:,} made-up videos, a tenth of them in both, {machine_line()}"
    return Done(0, {**found, "machine": machine("cpu")}, [as_table(found, title)])
