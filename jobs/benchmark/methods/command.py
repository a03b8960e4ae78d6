"""The time of every pruning method beside GSTEP's, on the same made-up tokens."""

from __future__ import annotations

import argparse

from gstep.methods import METHODS
from jobs.benchmark.machine import machine, machine_line
from jobs.benchmark.shown import say
from jobs.benchmark.sizes import add_sizes
from jobs.command import share
from jobs.frame.json_document import Done

HELP = "every pruning method beside GSTEP"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add_sizes(parser, [32, 128])
    parser.add_argument("--retention-ratio", type=share, default=0.25, metavar="R", help="[0.25]")
    parser.add_argument(
        "--method", nargs="+", choices=[name for name in METHODS if name != "none"], help="beside GSTEP [all]"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda [cpu]")


def run(arguments: argparse.Namespace) -> Done:
    """Measure and show."""
    from gstep.backbones import choose_runtime  # noqa: PLC0415 - torch loads only after the flags are checked
    from jobs.benchmark.methods.times import as_table, measure  # noqa: PLC0415
    from pipeline.execution.request import refusing  # noqa: PLC0415

    with refusing():
        device = choose_runtime(arguments.device).device
    times = []
    sizes = (arguments.frames, arguments.tokens_per_frame, arguments.hidden)
    for item in measure(*sizes, arguments.retention_ratio, arguments.repeats, device, arguments.method):
        say(f"{item.n_tokens} tokens, {item.method}: {item.seconds:.3f} s")
        times.append(item)
    where = machine_line(device)
    title = f"seconds a video, D = {arguments.hidden}, r = {arguments.retention_ratio}, on {where}"
    about = {"machine": machine(device), "hidden": arguments.hidden}
    return Done(0, {**about, "retention_ratio": arguments.retention_ratio, "times": times}, [as_table(times, title)])
