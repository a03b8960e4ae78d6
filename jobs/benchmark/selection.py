"""What the exact selection of GSTEP costs in each of its forms, how that grows, and whether all select the same."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.benchmark.sizes import add_sizes
from jobs.command import count, file_in_folder, share, wide_console
from jobs.json_document import Done
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from jobs.benchmark.selection_times import Agreement, FormTime, Settings

HELP = "every form of GSTEP's selection"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, [8, 32, 128, 384])
    ratios, inputs = [0.25, 0.10], ["structured", "real", "iid"]
    parser.add_argument(
        "--retention-ratios", type=share, nargs="+", default=ratios, metavar="R", help="the first is drawn [0.25 0.10]"
    )
    parser.add_argument("--inputs", nargs="+", choices=inputs, default=inputs, help="kinds of tokens [all]")
    parser.add_argument("--forms", nargs="+", metavar="FORM", help="plain, lazy, lazy+bound, cuda, prune:METHOD [all]")
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="of the processor [1]")
    parser.add_argument(
        "--plot", type=file_in_folder, metavar="FILE.png", help="draw seconds over tokens (needs matplotlib)"
    )


def run(arguments: argparse.Namespace) -> int | Done:
    """Measure and show; returns the exit code and the figures. Ctrl-C ends it with what was measured until then."""
    if arguments.plot is not None and find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")
    import torch  # noqa: PLC0415 - loads only after the flags are checked

    from jobs.benchmark.machine import machine, machine_line, stream_bandwidth  # noqa: PLC0415
    from jobs.benchmark.selection_report import as_record  # noqa: PLC0415
    from jobs.benchmark.selection_times import Settings  # noqa: PLC0415

    settings = Settings(
        inputs=arguments.inputs,
        frames=arguments.frames,
        tokens_per_frame=arguments.tokens_per_frame,
        hidden=arguments.hidden,
        ratios=arguments.retention_ratios,
        forms=_forms(arguments.forms),
        repeats=arguments.repeats,
    )
    torch.set_num_threads(arguments.threads)
    stream = stream_bandwidth() / 1e9
    title = f"Selection of D = {settings.hidden}, on {machine_line('cpu')}, stream {stream:.1f} GB/s"
    times, agreements, interrupted = _measure(settings)
    about = {"machine": machine("cpu"), "stream_gb_per_s": stream, "settings": vars(settings)}
    code = 130 if interrupted else 0
    if not times:
        return code
    _show(times, agreements, title, arguments.plot)
    return Done(code, as_record(times, agreements, **about, interrupted=interrupted))


def _forms(named: Sequence[str] | None) -> list[str]:
    from jobs.benchmark.selection_forms import all_forms  # noqa: PLC0415

    known = list(all_forms())
    for name in named or ():
        if name not in known:
            raise UsageError(f"--forms {name}: not among {', '.join(known)}")
    return list(named or known)


def _measure(settings: Settings) -> tuple[list[FormTime], list[Agreement], bool]:
    """The times, whether the forms agree, and whether Ctrl-C ended it before the end."""
    from jobs.benchmark.selection_report import time_line  # noqa: PLC0415
    from jobs.benchmark.selection_times import measure  # noqa: PLC0415

    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    times: list[FormTime] = []
    agreements: list[Agreement] = []
    try:
        for part in measure(settings, say):
            for item in part.times:
                say(time_line(item))
            times += part.times
            agreements += part.agreements
    except KeyboardInterrupt:
        say("interrupted; what follows is what was measured until then")
        return times, agreements, True
    return times, agreements, False


def _show(times: list[FormTime], agreements: list[Agreement], title: str, plot: Path | None) -> None:
    from jobs.benchmark.selection_report import agreement_table, growth_table, growths, time_table  # noqa: PLC0415

    console = wide_console()
    tables = [time_table(times, title)]
    if found := growths(times):
        tables.append(growth_table(found))
    if agreements:
        tables.append(agreement_table(agreements))
    for table in tables:
        console.print(table, "")
    if plot is not None:
        from jobs.benchmark.selection_plot import write_plot  # noqa: PLC0415

        write_plot(times, title, plot)
