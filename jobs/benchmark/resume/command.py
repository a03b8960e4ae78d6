"""What a driver takes to find out what is left to do of millions of videos, and which limit comes first."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from jobs.benchmark.sizes import add_folder
from jobs.command import add_json_or_file, count, wide_console
from jobs.json_document import Done

HELP = "finding out what is left of millions of videos"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--videos", type=count, default=1_000_000, metavar="N", help="rows of the manifest [1000000]")
    parser.add_argument("--videos-per-shard", type=count, default=22, metavar="N", help="of the cache [22]")
    parser.add_argument("--manifest", choices=("parquet", "jsonl", "csv"), default="parquet", help="its kind [parquet]")
    add_folder(parser)
    add_json_or_file(parser)


def run(arguments: argparse.Namespace) -> Done:
    """Measure and show; returns the exit code and the figures."""
    from jobs.benchmark.machine import machine, machine_line  # noqa: PLC0415 - torch and Arrow load after the flags
    from jobs.benchmark.resume.times import as_record, as_table, measure  # noqa: PLC0415

    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    with TemporaryDirectory(dir=arguments.folder) as folder:
        found = measure(arguments.videos, arguments.videos_per_shard, arguments.manifest, Path(folder), say)
    title = f"What is left of a {found.kind} manifest whose videos are nine tenths in a cache, {machine_line('cpu')}"
    wide_console().print(as_table(found, title))
    return Done(0, as_record(found, machine=machine("cpu")))
