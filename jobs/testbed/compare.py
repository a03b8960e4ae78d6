"""Hold one method against others, question by question, at every ratio, in one family of tests.

The parts of the videos are compared one by one.

Reads what python -m jobs.evaluate left. In each part (of the benchmark shapes: each kind of hardness) whole videos are
drawn anew, and p is adjusted for all comparisons together (Holm): a part, a ratio and a rival each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from jobs.command import count, file_in_folder
from jobs.frame.stores import saying
from pipeline.errors import UsageError

HELP = "one method against others, in each part of the videos, with Holm's rule over all"
_DRAWS = (
    100_000  # draws; the smallest p, 2 in 100,001, must stay below 0.05 after adjustment for hundreds of comparisons
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("results", type=Path, metavar="RESULTS", help="a folder of python -m jobs.evaluate")
    parser.add_argument("--method", required=True, metavar="METHOD", help="as it was given to jobs.evaluate")
    parser.add_argument("--against", nargs="+", metavar="METHOD", help="[every other method there]")
    parser.add_argument(
        "--split", default="domain", metavar="NAME", help="what parts the videos [domain: the hardness]"
    )
    parser.add_argument(
        "--draws", type=count, default=_DRAWS, metavar="N", help=f"of whole videos, a part [{_DRAWS:,}]"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws [0]")
    parser.add_argument("--out", type=file_in_folder, metavar="FILE", help="the tables as Markdown")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Compare the methods, print and write the tables; return the exit code."""
    from jobs.testbed.comparing import compare, markdown  # noqa: PLC0415 - not for --help
    from pipeline.evaluate.results import read_scores  # noqa: PLC0415
    from pipeline.evaluate.scores import SCORES  # noqa: PLC0415
    from pipeline.storage.stores import LocalStore  # noqa: PLC0415

    if not (arguments.results / SCORES).is_file():
        raise UsageError(f"{arguments.results} holds no {SCORES}: name the folder that jobs.evaluate --out wrote")
    if arguments.seed < 0:
        raise UsageError(f"--seed must be at least 0, got {arguments.seed}")
    scores = read_scores(str(arguments.results), LocalStore(arguments.results), published=False)
    found = compare(scores, arguments.method, arguments.against, arguments.split, arguments.draws, arguments.seed)
    text = markdown(found)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")
    saying(Console())(text)
    return 0
