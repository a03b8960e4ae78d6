"""What reading a cache costs beside plain pyarrow, and on S3 beside plain GETs of the same bytes."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from jobs.benchmark.machine import machine, machine_line
from jobs.benchmark.sizes import folder
from jobs.command import count
from jobs.frame.flags import from_flags
from jobs.frame.json_document import Done, add_json

HELP = "reading tokens out of a cache, beside plain pyarrow"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--videos", type=count, default=66, metavar="N", help="made-up videos [66]")
    parser.add_argument("--tokens", type=count, default=1568, metavar="K", help="stored of each, a quarter [1568]")
    parser.add_argument("--hidden", type=count, default=3584, metavar="D", help="numbers a token [3584]")
    parser.add_argument("--videos-per-shard", type=count, default=22, metavar="N", help="[22]")
    parser.add_argument("--repeats", type=count, default=5, metavar="N", help="rounds; medians are shown [5]")
    parser.add_argument(
        "--folder", type=folder, metavar="DIR", help="make the cache below it, and remove it [a temporary folder]"
    )
    parser.add_argument("--s3", action="store_true", help="from a server of moto's in a process of its own, too")
    add_json(parser)


def run(arguments: argparse.Namespace) -> Done:
    """Measure and show."""
    from jobs.benchmark.read.cache import ReadJob  # noqa: PLC0415 - torch and Arrow load after the flags
    from jobs.benchmark.read.times import as_table, measure  # noqa: PLC0415

    job = from_flags(ReadJob, arguments)
    with TemporaryDirectory(dir=arguments.folder) as made:
        found = measure(job, Path(made), s3=arguments.s3)
    video_mb = 2e-6 * job.tokens * job.hidden
    title = f"Reading {job.videos} videos of {video_mb:.1f} MB of tokens each, in memory already, {machine_line()}"
    ways = [{name: value for name, value in vars(way).items() if name != "read"} for way in found]
    return Done(0, {"machine": machine("cpu"), "job": job, "ways": ways}, [as_table(found, title)])
