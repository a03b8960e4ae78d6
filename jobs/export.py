"""Copy a cache for other people, with a page that says what it is; or write its tokens as WebDataset."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from rich.console import Console

from jobs.command import LogConsole, Parser, exit_code_of
from jobs.frame.flags import add_flags, from_flags
from jobs.frame.json_document import Done, add_json
from jobs.remove import read_ids
from pipeline.errors import CorruptShard, RunFailed, UsageError
from pipeline.options import S3Options

EPILOG = """\
The copy is a cache that every command reads, without the records of runs (hosts, folders, flags); token shards are hard
links on one file system. Its README.md is a dataset card: fill in licence and origin. To publish it on the Hugging Face
Hub, whose client resumes uploads:

  hf upload-large-folder OWNER/NAME FOLDER --repo-type dataset

Exit code: 0 exported; 1 a file is damaged, or a store failed; 2 usage, no cache, or ids without a row;
130 interrupted: the same command goes on.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Export a cache; return the exit code."""
    parser = Parser(
        "python -m jobs.export",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "cache", metavar="CACHE", help="the folder, or the s3://, gs:// or az:// prefix, that jobs.prune wrote"
    )
    parser.add_argument("--to", required=True, metavar="PLACE", help="a new folder, or prefix of a store")
    parser.add_argument("--ids", metavar="FILE", help="these videos alone: a video_id a line")
    parser.add_argument("--licence", default="", metavar="ID", help="for the card, such as cc-by-4.0")
    parser.add_argument(
        "--to-tar", action="store_true", help="write tars of .json, .tokens.npy and .index.npy instead (WebDataset)"
    )
    add_json(parser)
    add_flags(parser, S3Options)
    arguments = parser.parse_args(argv)
    console = LogConsole()
    return exit_code_of(
        lambda: _export(arguments, console),
        console,
        failed=(CorruptShard, RunFailed, OSError),
        interrupted="interrupted: the same command goes on",
        document=arguments.json,
    )


def _export(arguments: argparse.Namespace, console: Console) -> Done:
    """Export the cache, print what was written, and return the record."""
    from pipeline.sharing.export import export, export_tars  # noqa: PLC0415 - Arrow loads after the flags are checked
    from pipeline.storage.s3 import Objects  # noqa: PLC0415
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    if arguments.to.startswith("hf://"):
        raise UsageError(f"{arguments.to}: export to a folder, then publish that one with hf upload-large-folder")
    s3 = from_flags(S3Options, arguments)
    objects = Objects.from_environment(s3.s3_endpoint, s3.s3_region)
    source, out = store_at(arguments.cache, objects), store_at(arguments.to, objects)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    ids = None if arguments.ids is None else read_ids(arguments.ids)
    done = export_tars(source, out, say, ids) if arguments.to_tar else export(source, out, say, ids, arguments.licence)
    say(f"{done.videos:,} videos, {done.bytes:,} bytes of tokens in {done.files:,} files: {out}")
    return Done(0, {"cache": str(source), "to": str(out), **asdict(done)})


if __name__ == "__main__":
    sys.exit(main())
