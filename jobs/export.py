"""Copy a cache for other people, with a page that says what it is; or write its tokens as WebDataset."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.command import Parser
from jobs.frame.json_document import Done, add_json
from jobs.frame.stores import add_cache, run_on_stores, saying
from jobs.remove import read_ids
from pipeline.errors import UsageError
from pipeline.storage.hub import SCHEME

if TYPE_CHECKING:
    from pipeline.storage.s3 import Objects

EPILOG = """\
The copy is a cache that every command reads, without the records of runs (hosts, folders, flags); token shards are hard
links on one file system. Its README.md is a dataset card: fill in licence and origin.

With --to hf://datasets/OWNER/NAME the copy is made in --staging, a folder here, and uploaded from there to the Hugging
Face Hub: into a new private dataset, or one that holds such a cache. Files that are there are not sent again, those of
removed videos are deleted there, and a card that is there stays. HF_ENDPOINT, HF_TOKEN and the login of hf are used.

Exit code: 0 exported; 1 a file is damaged, or a store failed; 2 usage, no cache, or ids without a row;
130 interrupted: the same command goes on.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Export a cache; return the exit code."""
    parser = Parser("python -m jobs.export", description=__doc__, epilog=EPILOG)
    add_cache(parser)
    parser.add_argument(
        "--to", required=True, metavar="PLACE", help="a new folder, a prefix of a store, or a dataset of the hub"
    )
    parser.add_argument("--staging", metavar="FOLDER", help="with --to hf://: where the copy is made first")
    parser.add_argument("--ids", metavar="FILE", help="these videos alone: a video_id a line")
    parser.add_argument("--licence", default="", metavar="ID", help="for the card, such as cc-by-4.0")
    parser.add_argument(
        "--to-tar", action="store_true", help="write tars of .json, .tokens.npy and .index.npy instead (WebDataset)"
    )
    add_json(parser)
    return run_on_stores(parser, argv, _export, _wrong)


def _wrong(arguments: argparse.Namespace) -> str | None:
    """Return what is wrong with the flags, if anything."""
    to_hub = arguments.to.startswith(SCHEME)
    if to_hub and (arguments.to_tar or arguments.staging is None):
        return "--to hf:// goes with --staging FOLDER, and not with --to-tar"
    return "--staging goes with --to hf://" if arguments.staging is not None and not to_hub else None


def _export(arguments: argparse.Namespace, objects: Objects, console: Console) -> Done:
    """Export the cache, print what was written, and return the record."""
    from pipeline.sharing.export import export, export_tars  # noqa: PLC0415 - Arrow loads after the flags are checked
    from pipeline.sharing.publish import publish, repository_of  # noqa: PLC0415
    from pipeline.storage.stores import LocalStore, store_at  # noqa: PLC0415

    source, out = store_at(arguments.cache, objects), store_at(arguments.staging or arguments.to, objects)
    if arguments.staging is not None:
        repository_of(arguments.to)
        if not isinstance(out, LocalStore):
            raise UsageError(f"--staging {arguments.staging}: name a folder of this machine")
    say = saying(console)
    ids = None if arguments.ids is None else read_ids(arguments.ids)
    done = export_tars(source, out, say, ids) if arguments.to_tar else export(source, out, say, ids, arguments.licence)
    say(f"{done.videos:,} videos, {done.bytes:,} bytes of tokens in {done.files:,} files: {out}")
    record = {"cache": str(source), "to": arguments.to, **asdict(done)}
    if arguments.staging is not None:
        assert isinstance(out, LocalStore)
        sent = publish(out, arguments.to, say)
        say(f"{sent.sent:,} files sent, {sent.there:,} were there, {sent.deleted:,} deleted: {arguments.to}")
        record |= {"published": asdict(sent)}
    return Done(0, record)


if __name__ == "__main__":
    sys.exit(main())
