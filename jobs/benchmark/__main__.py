"""Measure this package here: the whole job, decoding, methods, selection, the table, reading, serving, efficiency."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

from rich.console import Console

from jobs.benchmark.codecs import command as codecs
from jobs.benchmark.decode import command as decode
from jobs.benchmark.efficiency import command as efficiency
from jobs.benchmark.methods import command as methods
from jobs.benchmark.passes import command as passes
from jobs.benchmark.pipeline import command as whole_job
from jobs.benchmark.read import command as read
from jobs.benchmark.selection import command as selection
from jobs.benchmark.serving import command as serving
from jobs.benchmark.table import command as table
from jobs.command import Parser, add_commands, exit_code_of
from jobs.frame.json_document import Done
from pipeline.errors import ManifestError, RunFailed, VideoFault

_COMMANDS = {
    "pipeline": whole_job,
    "decode": decode,
    "passes": passes,
    "methods": methods,
    "selection": selection,
    "table": table,
    "read": read,
    "codecs": codecs,
    "serving": serving,
    "efficiency": efficiency,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = Parser("python -m jobs.benchmark", description=__doc__)
    add_commands(parser, _COMMANDS)
    arguments = parser.parse_args(argv)
    # The sample clips are read by the selection's benchmark: where they are missing or damaged, it failed.
    return exit_code_of(
        lambda: cast(Done, arguments.run(arguments)),
        Console(stderr=True),
        failed=(ManifestError, RunFailed, VideoFault),
        document=arguments.json,
    )


if __name__ == "__main__":
    sys.exit(main())
