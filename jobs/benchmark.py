"""Measure this package on this machine. ``methods``: the time of every pruning method beside GSTEP's."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser("python -m jobs.benchmark", description=__doc__)
    parser.add_argument("what", choices=("methods",))
    parser.add_argument("--frames", type=_count, nargs="+", default=[32, 128], metavar="T", help="[32 128]")
    parser.add_argument("--tokens-per-frame", type=_count, default=196, metavar="N", help="[196]")
    parser.add_argument("--hidden", type=_count, default=3584, metavar="D", help="[3584]")
    parser.add_argument("--retention-ratio", type=_share, default=0.25, metavar="R", help="[0.25]")
    parser.add_argument("--repeats", type=_count, default=3, metavar="N", help="times each; medians are shown [3]")
    parser.add_argument("--device", default="cpu", help="cpu or cuda [cpu]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args(argv)
    if arguments.json is not None and not arguments.json.parent.is_dir():
        parser.error(f"--json {arguments.json}: there is no folder {arguments.json.parent}")
    from gstep.backbones import choose_runtime  # noqa: PLC0415 - torch loads only after the flags are checked

    try:
        choose_runtime(arguments.device)
    except ValueError as error:
        parser.error(str(error))
    return _methods(arguments)


def _methods(arguments: argparse.Namespace) -> int:
    from pipeline.method_times import as_record, as_table, machine, measure  # noqa: PLC0415

    console = Console(stderr=True)
    times = []
    sizes = (arguments.frames, arguments.tokens_per_frame, arguments.hidden)
    for item in measure(*sizes, arguments.retention_ratio, arguments.repeats, arguments.device):
        console.print(f"{item.n_tokens} tokens, {item.method}: {item.seconds:.3f} s", style="dim", highlight=False)
        times.append(item)
    where = machine(arguments.device)
    title = f"seconds a video, D = {arguments.hidden}, r = {arguments.retention_ratio}, on {where}"
    Console().print(as_table(times, title))
    if arguments.json is not None:
        record = as_record(times, machine=where, hidden=arguments.hidden, retention_ratio=arguments.retention_ratio)
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
