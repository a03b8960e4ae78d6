"""What codecs of tokens cost in bytes and seconds, and with --whole and --questions what they do to answers."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec

from rich.console import Console

from jobs.command import add_json_or_file, count, file_in_folder, share, wide_console
from jobs.frame.json_document import Done
from pipeline.errors import UsageError
from pipeline.rows import JsonObject

HELP = "bytes, seconds and answers of int8 and int4 tokens"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--tokens", type=count, default=1568, metavar="K", help="of a made-up video [1568]")
    parser.add_argument("--hidden", type=count, default=3584, metavar="D", help="numbers a token [3584]")
    parser.add_argument("--repeats", type=count, default=5, metavar="N", help="rounds; medians are shown [5]")
    parser.add_argument("--whole", metavar="CACHE", help="a cache of all tokens (--pruner none) to ask about")
    parser.add_argument("--questions", metavar="FILE", help="with choices and answers, as jobs.evaluate takes them")
    parser.add_argument(
        "--method", nargs="+", default=["gstep"], metavar="METHOD", help="that need no evidence [gstep]"
    )
    parser.add_argument("--retention-ratio", type=share, nargs="+", default=[0.5, 0.25, 0.10, 0.05], metavar="R")
    parser.add_argument("--plot", type=file_in_folder, metavar="FILE.png", help="draw it (needs matplotlib)")
    add_json_or_file(parser)


def run(arguments: argparse.Namespace) -> Done:
    """Measure and show; return the exit code and the figures."""
    if (arguments.whole is None) != (arguments.questions is None):
        raise UsageError("--whole and --questions go together")
    if arguments.plot is not None and (arguments.whole is None or find_spec("matplotlib") is None):
        raise UsageError("--plot draws what --whole and --questions measure, and needs matplotlib")
    from jobs.benchmark.codecs.cost import cost_table, costs  # noqa: PLC0415 - torch and Arrow load after the flags
    from jobs.benchmark.machine import machine, machine_line  # noqa: PLC0415

    found = list(costs(arguments.tokens, arguments.hidden, arguments.repeats))
    title = f"{arguments.tokens} tokens of {arguments.hidden} numbers, {machine_line('cpu')}"
    wide_console().print(cost_table(found, title))
    cells = [] if arguments.whole is None else _answers(arguments)
    return Done(0, {"costs": list(map(asdict, found)), "answers": cells, "machine": machine("cpu")})


def _answers(arguments: argparse.Namespace) -> list[JsonObject]:
    from jobs.benchmark.codecs.answers import answer_table, measure  # noqa: PLC0415 - as above
    from pipeline.cache.reader import TokenCache  # noqa: PLC0415

    say = partial(Console(stderr=True).print, style="dim", highlight=False)
    cache = TokenCache(arguments.whole)
    cells = measure(cache, arguments.questions, arguments.method, arguments.retention_ratio, say)
    title = f"questions of {arguments.questions}"
    wide_console().print(answer_table(cells, title))
    if arguments.plot is not None:
        from jobs.benchmark.codecs.plot import write_plot  # noqa: PLC0415 - needs the extra benchmark

        write_plot(cells, "Right answers from tokens: how many, and in how many bits", arguments.plot)
    return list(map(asdict, cells))
