"""Measure this package on this machine.

``methods``: the time of every pruning method beside GSTEP's. ``selection``: what the exact selection of GSTEP costs in
each of its forms, how that grows with the tokens, and whether all forms select the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from pipeline.selection_times import Agreement, FormTime, Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser("python -m jobs.benchmark", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True, metavar="methods|selection")
    _add_methods(commands.add_parser("methods", help="every pruning method beside GSTEP"))
    _add_selection(commands.add_parser("selection", help="every form of GSTEP's selection"))
    arguments = parser.parse_args(argv)
    for flag in ("json", "plot"):
        file = getattr(arguments, flag, None)
        if file is not None and not file.parent.is_dir():
            parser.error(f"--{flag} {file}: there is no folder {file.parent}")
    try:
        return _methods(arguments, parser) if arguments.what == "methods" else _selection(arguments, parser)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted", highlight=False)
        return 130


def _add_common(parser: argparse.ArgumentParser, frames: list[int]) -> None:
    shown = " ".join(map(str, frames))
    parser.add_argument("--frames", type=_count, nargs="+", default=frames, metavar="T", help=f"[{shown}]")
    parser.add_argument("--tokens-per-frame", type=_count, default=196, metavar="N", help="[196]")
    parser.add_argument("--hidden", type=_count, default=3584, metavar="D", help="[3584]")
    parser.add_argument("--repeats", type=_count, default=3, metavar="N", help="times each; medians are shown [3]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def _add_methods(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, [32, 128])
    parser.add_argument("--retention-ratio", type=_share, default=0.25, metavar="R", help="[0.25]")
    parser.add_argument("--device", default="cpu", help="cpu or cuda [cpu]")


def _add_selection(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, [8, 32, 128, 384])
    ratios, inputs = [0.25, 0.10], ["structured", "real", "iid"]
    parser.add_argument(
        "--retention-ratios", type=_share, nargs="+", default=ratios, metavar="R", help="the first is drawn [0.25 0.10]"
    )
    parser.add_argument("--inputs", nargs="+", choices=inputs, default=inputs, help="kinds of tokens [all]")
    parser.add_argument("--forms", nargs="+", metavar="FORM", help="plain, lazy, lazy+bound, cuda, prune:METHOD [all]")
    parser.add_argument("--threads", type=_count, default=1, metavar="N", help="of the processor [1]")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor time of one thread, for a machine that does other things; GPUs stay with wall [wall]",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw seconds over tokens (needs matplotlib)")


def _methods(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from gstep.backbones import choose_runtime  # noqa: PLC0415 - torch loads only after the flags are checked
    from pipeline.machine import machine, machine_line  # noqa: PLC0415
    from pipeline.method_times import as_record, as_table, measure  # noqa: PLC0415

    try:
        choose_runtime(arguments.device)
    except ValueError as error:
        parser.error(str(error))
    console = Console(stderr=True)
    times = []
    sizes = (arguments.frames, arguments.tokens_per_frame, arguments.hidden)
    for item in measure(*sizes, arguments.retention_ratio, arguments.repeats, arguments.device):
        console.print(f"{item.n_tokens} tokens, {item.method}: {item.seconds:.3f} s", style="dim", highlight=False)
        times.append(item)
    where = machine_line(arguments.device)
    title = f"seconds a video, D = {arguments.hidden}, r = {arguments.retention_ratio}, on {where}"
    Console().print(as_table(times, title))
    more = {"machine": machine(arguments.device), "hidden": arguments.hidden}
    _write_json(arguments.json, as_record(times, **more, retention_ratio=arguments.retention_ratio))
    return 0


def _selection(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    settings = _settings(arguments, parser)
    import torch  # noqa: PLC0415

    from pipeline.errors import VideoFault  # noqa: PLC0415
    from pipeline.machine import machine, stream_bandwidth  # noqa: PLC0415
    from pipeline.selection_times import CLOCKS  # noqa: PLC0415

    torch.set_num_threads(arguments.threads)
    about: dict[str, Any] = {"machine": machine("cpu"), "load_average": [_load()]}
    try:
        about["stream_gb_per_s"] = stream_bandwidth(CLOCKS[settings.clock]) / 1e9
        times, agreements, interrupted = _measure(settings)
    except VideoFault as error:
        Console(stderr=True).print(f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    about["load_average"].append(_load())
    about |= {"interrupted": interrupted, "settings": vars(settings)}
    if times:
        _show(arguments, about, times, agreements)
    return 130 if interrupted else 0
