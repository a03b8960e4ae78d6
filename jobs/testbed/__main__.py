"""The testbed: synthetic videos with questions (the benchmark `shapes`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jobs.command import Parser, add_commands, run_to_exit_code
from jobs.testbed import make
from pipeline.console import CleanConsole

EPILOG = """\
examples:
  python -m jobs.testbed make shapes --videos 200
  python -m jobs.testbed make harder --videos 300 --hardness dim clutter pan --seed 1 --picture harder.png
  python -m jobs.evaluate --benchmark shapes --data shapes --model shapes --method gstep vidcom2 \\
      --retention-ratio .25 .10

The same command writes the same bytes. Exit code: 0 all is written; 1 a file could not be written; 2 the request was
refused; 130 interrupted (rerun the same command to resume).
"""
COMMANDS = {"make": make}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of the testbed; return the exit code."""
    parser = Parser("python -m jobs.testbed", description=__doc__, epilog=EPILOG)
    add_commands(parser, COMMANDS)
    arguments = parser.parse_args(argv)
    console = CleanConsole(stderr=True)
    return run_to_exit_code(lambda: arguments.run(arguments, console), console, failures=(OSError,))


if __name__ == "__main__":
    sys.exit(main())
