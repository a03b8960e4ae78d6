"""Measure this package on this machine.

``methods``: the time of every pruning method beside GSTEP's. ``selection``: what the exact selection of GSTEP costs in
each of its forms, how that grows with the tokens, and whether all forms select the same. ``resume``: what a driver
takes to find out what is left to do of millions of videos, and which limit comes first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jobs.command import count

if TYPE_CHECKING:
    from jobs.benchmark.selection_times import Agreement, FormTime, Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser("python -m jobs.benchmark", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True, metavar="methods|selection|resume")
    _add_methods(commands.add_parser("methods", help="every pruning method beside GSTEP"))
    _add_selection(commands.add_parser("selection", help="every form of GSTEP's selection"))
    _add_resume(commands.add_parser("resume", help="finding out what is left of millions of videos"))
    arguments = parser.parse_args(argv)
    for flag in ("json", "plot", "folder"):
        file = getattr(arguments, flag, None)
        if file is not None and not (folder := file if flag == "folder" else file.parent).is_dir():
            parser.error(f"--{flag} {file}: there is no folder {folder}")
    try:
        return {"methods": _methods, "selection": _selection, "resume": _resume}[arguments.what](arguments, parser)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted", highlight=False)
        return 130


def _add_common(parser: argparse.ArgumentParser, frames: list[int]) -> None:
    shown = " ".join(map(str, frames))
    parser.add_argument("--frames", type=count, nargs="+", default=frames, metavar="T", help=f"[{shown}]")
    parser.add_argument("--tokens-per-frame", type=count, default=196, metavar="N", help="[196]")
    parser.add_argument("--hidden", type=count, default=3584, metavar="D", help="[3584]")
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="times each; medians are shown [3]")
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
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="of the processor [1]")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw seconds over tokens (needs matplotlib)")


def _add_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--videos", type=count, default=1_000_000, metavar="N", help="rows of the manifest [1000000]")
    parser.add_argument("--videos-per-shard", type=count, default=22, metavar="N", help="of the cache [22]")
    parser.add_argument("--manifest", choices=("parquet", "jsonl", "csv"), default="parquet", help="its kind [parquet]")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="make the files below it, for a while [a temporary]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def _resume(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from jobs.benchmark.machine import machine, machine_line  # noqa: PLC0415
    from jobs.benchmark.resume_times import as_record, as_table, measure  # noqa: PLC0415

    console = Console(stderr=True)
    with TemporaryDirectory(dir=arguments.folder) as folder:
        found = measure(
            arguments.videos,
            arguments.videos_per_shard,
            arguments.manifest,
            Path(folder),
            lambda text: console.print(text, style="dim", highlight=False),
        )
    title = f"What is left of a {found.kind} manifest whose videos are nine tenths in a cache, {machine_line('cpu')}"
    _wide_console().print(as_table(found, title))
    _write_json(arguments.json, as_record(found, machine=machine("cpu")))
    return 0


def _methods(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from gstep.backbones import choose_runtime  # noqa: PLC0415 - torch loads only after the flags are checked
    from jobs.benchmark.machine import machine, machine_line  # noqa: PLC0415
    from jobs.benchmark.method_times import as_record, as_table, measure  # noqa: PLC0415

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
    if arguments.plot is not None and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib, or this package with its extra `benchmark`")
    import torch  # noqa: PLC0415

    from jobs.benchmark.machine import machine, machine_line, stream_bandwidth  # noqa: PLC0415
    from jobs.benchmark.selection_times import Settings  # noqa: PLC0415
    from pipeline.errors import ManifestError, VideoFault  # noqa: PLC0415

    settings = Settings(
        inputs=arguments.inputs,
        frames=arguments.frames,
        tokens_per_frame=arguments.tokens_per_frame,
        hidden=arguments.hidden,
        ratios=arguments.retention_ratios,
        forms=_forms(arguments.forms, parser),
        repeats=arguments.repeats,
    )
    torch.set_num_threads(arguments.threads)
    stream = stream_bandwidth() / 1e9
    where = f"{machine_line('cpu')}, stream {stream:.1f} GB/s"
    try:
        times, agreements, interrupted = _measure(settings)
    except (ManifestError, VideoFault) as error:
        Console(stderr=True).print(f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    about = {
        "machine": machine("cpu"),
        "stream_gb_per_s": stream,
        "settings": vars(settings),
        "interrupted": interrupted,
    }
    if times:
        _show(times, agreements, f"Selection of D = {settings.hidden}, on {where}", about, arguments)
    return 130 if interrupted else 0


def _forms(named: Sequence[str] | None, parser: argparse.ArgumentParser) -> list[str]:
    from jobs.benchmark.selection_forms import all_forms  # noqa: PLC0415

    known = list(all_forms())
    for name in named or ():
        if name not in known:
            parser.error(f"--forms {name}: not among {', '.join(known)}")
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


def _show(
    times: list[FormTime],
    agreements: list[Agreement],
    title: str,
    about: dict[str, Any],
    arguments: argparse.Namespace,
) -> None:
    from jobs.benchmark.selection_report import agreement_table, as_record, growth_table, growths, time_table  # noqa: PLC0415

    console = _wide_console()
    tables = [time_table(times, title)]
    if found := growths(times):
        tables.append(growth_table(found))
    if agreements:
        tables.append(agreement_table(agreements))
    for table in tables:
        console.print(table, "")
    _write_json(arguments.json, as_record(times, agreements, **about))
    if arguments.plot is not None:
        from jobs.benchmark.selection_plot import write_plot  # noqa: PLC0415

        write_plot(times, title, arguments.plot)


def _wide_console() -> Console:
    """Its lines are not cut to the window where nobody looks at one."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def _write_json(file: Path | None, record: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _share(text: str) -> float:
    value = float(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
