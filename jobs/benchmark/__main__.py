"""Measure this package here: the whole job, decoding, selection, reading, answering, and the paper's Table 3."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import cast

from jobs.command import Parser, run_to_exit_code
from jobs.frame.json_document import CommandResult, add_json
from pipeline.console import CleanConsole
from pipeline.errors import ManifestError, RunFailed, VideoFault

#: A measurement's name -> its line of help. Its module, ``jobs.benchmark.NAME``, has ``add_flags`` and ``run``.
MEASUREMENTS = {
    "pipeline": "the whole job beside a plain DataLoader loop",
    "decode": "decoding alone, beside other libraries and the minimum of work",
    "generic": "a video by a model family's own code, and by the family generic",
    "selection": "GSTEP's selection beside the paper's loop",
    "read": "reading tokens out of a cache, beside plain pyarrow",
    "serving": "answering from a cache, by vLLM and by transformers, beside vLLM on the videos themselves",
    "efficiency": "the paper's Table 3: seconds and memory of an answer with each method, from videos and from a cache",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement that the first word names; return the exit code.

    The code is 1 for missing sample clips, a failed run and an unreadable video, and 2 for a UsageError.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser("python -m jobs.benchmark", description=__doc__)
    parsers = parser.add_subparsers(required=True, metavar="|".join(MEASUREMENTS))
    for name, line in MEASUREMENTS.items():
        flags = parsers.add_parser(name, help=line, description=line)
        if name in argv:  # only the requested one: most import torch, which takes seconds
            measurement = import_module(f"jobs.benchmark.{name}")
            measurement.add_flags(flags)
            add_json(flags)
            flags.set_defaults(run=measurement.run)
    arguments = parser.parse_args(argv)
    return run_to_exit_code(
        lambda: cast(CommandResult, arguments.run(arguments)),
        CleanConsole(stderr=True),
        failures=(ManifestError, RunFailed, VideoFault),
        document=arguments.json,
    )


if __name__ == "__main__":
    sys.exit(main())
