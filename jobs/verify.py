"""Check that every file of a cache holds what was committed, and list what lies about; nothing is changed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jobs.command import count, exit_code_of
from pipeline.errors import RunFailed

EPILOG = """\
Checked: the header; each videos shard against the hash in its name, and its rows; of each token shard that they name
the footer, the checksums of all pages, the layout, positions, ranks and the checksum of every video's tokens.

Exit code: 0 all is well (what merely lies about is a note); 1 something is wrong; 2 usage, or no cache;
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
    parser.add_argument("cache", metavar="CACHE", help="the folder or s3://bucket/prefix that jobs.prune wrote")
    parser.add_argument(
        "--jobs", type=count, default=min(8, os.cpu_count() or 1), metavar="N", help="files read at a time"
    )
    parser.add_argument(
        "--clean",
        action="store_true",
        help="remove token shards that no videos shard names and files of broken writes, and abort uploads that have "
        "been pending for an hour; under the cache's lock, so that no run writes meanwhile",
    )
    parser.add_argument(
        "--live", type=count, default=0, metavar="K", help="encode K random videos again from their sources"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="with --live: which videos [0]")
    parser.add_argument(
        "--model", metavar="MODEL", help="with --live: the model's folder or id, where it is another one than then"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report, every problem by name")
    parser.add_argument("--log-interval", type=float, default=30.0, metavar="S", help="seconds between progress lines")
    parser.add_argument("--s3-endpoint", metavar="URL", help="address of the S3 API, where it is not Amazon's")
    parser.add_argument("--s3-region", metavar="REGION", help="region of the bucket")
    arguments = parser.parse_args(argv)
    if arguments.model is not None and not arguments.live:
        parser.error("--model goes with --live")
    if arguments.log_interval <= 0:
        parser.error("--log-interval must be above 0")
    if arguments.json is not None and (arguments.json.is_dir() or not arguments.json.parent.is_dir()):
        parser.error(f"--json {arguments.json}: name a file in a folder that exists")
    return _verify(arguments)


def _verify(arguments: argparse.Namespace) -> int:
    from pipeline.storage.s3 import Objects  # noqa: PLC0415 - torch and Arrow load only after the flags are checked
    from pipeline.storage.stores import store_at  # noqa: PLC0415
    from pipeline.verify.report import render  # noqa: PLC0415
    from pipeline.verify.verify import Request, verify  # noqa: PLC0415

    errors = Console(stderr=True)
    names = ("jobs", "clean", "live", "seed", "model", "log_interval")
    request = Request(**{name: getattr(arguments, name) for name in names})

    def run() -> int:
        objects = Objects.from_environment(arguments.s3_endpoint, arguments.s3_region)
        report = verify(store_at(arguments.cache, objects), request, errors)
        console = Console()
        # Names of files are long; they are cut to the window only where somebody looks at one.
        (console if console.is_terminal else Console(width=200)).print(render(report))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report.as_record(), indent=2) + "\n", encoding="utf-8")
        return report.exit_code

    return exit_code_of(run, errors, (RunFailed, OSError), "interrupted: the cache was not read to its end")


if __name__ == "__main__":
    sys.exit(main())
