"""Time GSTEP's exact selection beside the paper's loop and whole methods, on the same tokens."""

from __future__ import annotations

import argparse

from rich.console import Console

from jobs.benchmark.sizes import add_sizes
from jobs.command import count, share, wide_console
from jobs.frame.json_document import Done

HELP = "GSTEP's selection beside the paper's loop"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add_sizes(parser, [8, 32, 128, 384])
    ratios, inputs = [0.25, 0.10], ["structured", "iid"]
    parser.add_argument(
        "--retention-ratios", type=share, nargs="+", default=ratios, metavar="R", help="shares to keep [0.25 0.10]"
    )
    parser.add_argument("--inputs", nargs="+", choices=inputs, default=inputs, help="kinds of tokens [all]")
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="of the processor [1]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the tokens [cpu]")


def run(arguments: argparse.Namespace) -> Done:
    """Measure and show; returns the exit code and the figures."""
    import torch  # noqa: PLC0415 - loads only after the flags are checked

    from jobs.benchmark.machine import machine, machine_line  # noqa: PLC0415
    from jobs.benchmark.selection.times import Settings, as_record, as_table, measure  # noqa: PLC0415

    torch.set_num_threads(arguments.threads)
    settings = Settings(
        inputs=arguments.inputs,
        frames=arguments.frames,
        tokens_per_frame=arguments.tokens_per_frame,
        hidden=arguments.hidden,
        ratios=arguments.retention_ratios,
        repeats=arguments.repeats,
        device=arguments.device,
    )
    console, times = Console(stderr=True), []
    for item in measure(settings):
        console.print(f"{item.input}, {item.n_tokens} tokens, {item.ratio:g}: done", style="dim", highlight=False)
        times.append(item)
    title = f"Seconds of a selection, D = {settings.hidden}, on {machine_line(settings.device)}"
    wide_console().print(as_table(times, title))
    return Done(0, as_record(times, machine=machine(settings.device), settings=vars(settings)))
