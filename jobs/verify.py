"""Check that every file of a cache holds what was committed, and list files left behind; nothing is changed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from jobs.command import count, exit_code_of, file_in_folder, wide_console, write_json
from jobs.flags import add_flags, from_flags
from pipeline.errors import RunFailed
from pipeline.options import S3Options

EPILOG = """\
Checked: the header; each videos shard against the hash in its name, and its rows; of each token shard that they name
the footer, the checksums of all pages, the layout, positions, ranks and the checksum of every video's tokens.

Exit code: 0 all is well (files left behind are a note); 1 something is wrong; 2 usage, or no cache;
130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m jobs.verify",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_flags(parser)
    arguments = parser.parse_args(argv)
    if arguments.model is not None and not arguments.live:
        parser.error("--model goes with --live")
    if arguments.log_interval <= 0:
        parser.error("--log-interval must be above 0")
    console = Console(stderr=True)
    return exit_code_of(
        lambda: _verify(arguments, console),
        console,
        failed=(RunFailed, OSError),
        interrupted="interrupted: the cache was not read to its end",
    )


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cache", metavar="CACHE", help="the folder or s3://bucket/prefix that jobs.prune wrote")
    parser.add_argument(
        "--jobs", type=count, default=min(8, os.cpu_count() or 1), metavar="N", help="files read at a time"
    )
    parser.add_argument(
        "--clean",
        action="store_true",
        help="remove token shards that no videos shard names (on S3 once they are a day old) and files of broken "
        "writes, and abort uploads that have been pending for an hour; under the cache's lock, so that no run writes "
        "meanwhile",
    )
    parser.add_argument(
        "--live", type=count, default=0, metavar="K", help="encode K random videos again from their sources"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="with --live: which videos [0]")
    parser.add_argument(
        "--model", metavar="MODEL", help="with --live: the model's id or folder, where it has changed since"
    )
    parser.add_argument(
        "--json", type=file_in_folder, metavar="FILE", help="write the whole report, every problem by name"
    )
    parser.add_argument("--log-interval", type=float, default=30.0, metavar="S", help="seconds between progress lines")
    add_flags(parser, S3Options)


def _verify(arguments: argparse.Namespace, console: Console) -> int:
    from pipeline.storage.s3 import Objects  # noqa: PLC0415 - torch and Arrow load only after the flags are checked
    from pipeline.storage.stores import store_at  # noqa: PLC0415
    from pipeline.verify.report import render  # noqa: PLC0415
    from pipeline.verify.verify import Request, verify  # noqa: PLC0415

    names = ("jobs", "clean", "live", "seed", "model", "log_interval")
    request = Request(**{name: getattr(arguments, name) for name in names})
    s3 = from_flags(S3Options, arguments)
    objects = Objects.from_environment(s3.s3_endpoint, s3.s3_region)
    report = verify(store_at(arguments.cache, objects), request, console)
    wide_console().print(render(report))
    write_json(arguments.json, report.as_record())
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
