"""Time GSTEP's exact selection beside the paper's loop and whole methods, on the same tokens."""

from __future__ import annotations

import argparse

from jobs.benchmark.machine import machine, machine_line
from jobs.benchmark.shown import say
from jobs.benchmark.sizes import add_sizes
from jobs.command import count, share
from jobs.frame.flags import from_flags
from jobs.frame.json_document import Done

HELP = "GSTEP's selection beside the paper's loop"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add_sizes(parser, [8, 32, 128, 384])
    ratios, inputs = [0.25, 0.10], ["structured", "iid"]
    parser.add_argument(
        "--retention-ratios",
        dest="ratios",
        type=share,
        nargs="+",
        default=ratios,
        metavar="R",
        help="shares to keep [0.25 0.10]",
    )
    parser.add_argument("--inputs", nargs="+", choices=inputs, default=inputs, help="kinds of tokens [all]")
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="of the processor [1]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the tokens [cpu]")


def run(arguments: argparse.Namespace) -> Done:
    """Measure and show."""
    import torch  # noqa: PLC0415 - loads only after the flags are checked

    from gstep.backbones import choose_runtime  # noqa: PLC0415
    from jobs.benchmark.selection.times import Settings, as_table, measure  # noqa: PLC0415
    from pipeline.execution.request import refusing  # noqa: PLC0415

    with refusing():
        choose_runtime(arguments.device)
    torch.set_num_threads(arguments.threads)
    settings, times = from_flags(Settings, arguments), []
    for item in measure(settings):
        say(f"{item.input}, {item.n_tokens} tokens, {item.ratio:g}: done")
        times.append(item)
    title = f"Seconds of a selection, D = {settings.hidden}, on {machine_line(settings.device)}"
    record = {"machine": machine(settings.device), "settings": settings, "times": times}
    return Done(0, record, [as_table(times, title)])
