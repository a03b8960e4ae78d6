"""The flags of benchmarks on made-up videos: how large those are, and how often each measurement is repeated."""

from __future__ import annotations

import argparse
from pathlib import Path

from jobs.command import count
from jobs.frame.json_document import add_json


def add_sizes(parser: argparse.ArgumentParser, frames: list[int]) -> None:
    """Add the flags for the size of made-up videos and for repeats; ``frames`` is the default of --frames."""
    shown = " ".join(map(str, frames))
    parser.add_argument(
        "--frames", type=count, nargs="+", default=frames, metavar="T", help=f"frames, one video each [{shown}]"
    )
    parser.add_argument("--tokens-per-frame", type=count, default=196, metavar="N", help="[196]")
    parser.add_argument("--hidden", type=count, default=3584, metavar="D", help="numbers a token [3584]")
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="times each; medians are shown [3]")
    add_json(parser)


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Add --folder, for benchmarks that make files."""
    parser.add_argument(
        "--folder", type=folder, metavar="DIR", help="make the files below it, and remove them [a temporary folder]"
    )


def folder(text: str) -> Path:
    """Check that a folder exists, as a flag's type."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return Path(text)
