"""What codecs of tokens cost in bytes and seconds, and with --whole and --questions what they do to answers."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from jobs.benchmark.machine import machine, machine_line
from jobs.command import count, file_in_folder, share
from jobs.frame.json_document import Done, add_json
from pipeline.errors import UsageError

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
    add_json(parser)


def run(arguments: argparse.Namespace) -> Done:
    """Measure and show."""
    if (arguments.whole is None) != (arguments.questions is None):
        raise UsageError("--whole and --questions go together")
    if arguments.plot is not None and (arguments.whole is None or find_spec("matplotlib") is None):
        raise UsageError("--plot draws what --whole and --questions measure, and needs matplotlib")
    from jobs.benchmark.codecs.cost import cost_table, costs  # noqa: PLC0415 - torch and Arrow load after the flags

    found = list(costs(arguments.tokens, arguments.hidden, arguments.repeats))
    title = f"{arguments.tokens} tokens of {arguments.hidden} numbers, {machine_line()}"
    table = cost_table(found, title)
    if arguments.whole is None:
        return Done(0, {"costs": found, "answers": [], "machine": machine("cpu")}, [table])
    from jobs.benchmark.codecs.answers import answer_table, measure  # noqa: PLC0415 - as above
    from pipeline.cache.reader import TokenCache  # noqa: PLC0415

    cells = measure(TokenCache(arguments.whole), arguments.questions, arguments.method, arguments.retention_ratio)
    if arguments.plot is not None:
        from jobs.benchmark.codecs.plot import write_plot  # noqa: PLC0415 - needs the extra benchmark

        write_plot(cells, "Right answers from tokens: how many, and in how many bits", arguments.plot)
    answers = answer_table(cells, f"questions of {arguments.questions}")
    return Done(0, {"costs": found, "answers": cells, "machine": machine("cpu")}, [table, answers])
