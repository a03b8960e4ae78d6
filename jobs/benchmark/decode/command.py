"""The cost of decoding: CPU seconds a clip beside other libraries, and beside the least that its frames need."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.table import Table

from jobs.benchmark.machine import machine, machine_line
from jobs.benchmark.shown import figure_table, say
from jobs.command import count
from jobs.frame.json_document import Done, add_json
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from jobs.benchmark.decode.measure import Times

HELP = "decoding alone, beside other libraries and the least that is possible"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--clips", nargs="+", metavar="NAME", help="some of them only, by what their names hold [all]")
    parser.add_argument("--long", action="store_true", help="longer clips of 1080p and 2160p too, which take minutes")
    parser.add_argument("--frames", type=count, default=32, metavar="T", help="frames a clip [32]")
    parser.add_argument("--fps", type=_positive, metavar="F", help="so many frames a second instead")
    parser.add_argument("--snap", type=_positive, default=5.0, metavar="S", help="seconds to keyframes [5]")
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="rounds; the best is shown [3]")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="make the clips there, and keep them")
    parser.add_argument(
        "--loop", nargs=2, type=count, metavar="N", help="the whole job too, and DataLoader loops, over N and N videos"
    )
    parser.add_argument("--workers", type=count, default=2, metavar="N", help="decode workers of these loops [2]")
    add_json(parser)


def _positive(text: str) -> float:
    """Parse a finite number above 0, as a flag's type."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return number


def run(arguments: argparse.Namespace) -> Done:
    """Time the decoding of each clip. Raises UsageError for an unknown clip name."""
    import torch  # noqa: PLC0415 - loads after the flags

    from jobs.benchmark.decode.clips import CLIPS, LONG_CLIPS, make_clips  # noqa: PLC0415
    from jobs.benchmark.decode.loop import videos_per_second  # noqa: PLC0415
    from jobs.benchmark.decode.measure import measure  # noqa: PLC0415
    from pipeline.video.sampling import Sampling  # noqa: PLC0415

    clips = [*CLIPS, *LONG_CLIPS] if arguments.long else [*CLIPS]
    names = [name for name in clips if any(part in name for part in arguments.clips or [""])]
    if not names:
        raise UsageError(f"--clips: no name holds {' or '.join(arguments.clips)}; there are {', '.join(clips)}")
    if arguments.loop and len({*arguments.loop}) == 1:
        raise UsageError("--loop takes two different numbers of videos: what a video more takes counts")
    sampling = Sampling(None if arguments.fps else arguments.frames, arguments.fps)
    torch.set_num_threads(1)
    found = []
    with TemporaryDirectory() as temporary:
        say("making the clips")
        for name, path in make_clips(arguments.folder or Path(temporary), names).items():
            say(f"decoding {name}")
            one = measure(name, path, sampling, arguments.repeats, arguments.snap)
            if arguments.loop:
                one.per_second = videos_per_second(path, one.chosen, arguments.loop, arguments.workers)
            found.append(one)
    frames = f"{arguments.fps:g} frames a second" if arguments.fps else f"{arguments.frames} frames"
    title = f"CPU seconds for {frames} of a clip at 384 x 384, best of {arguments.repeats}, {machine_line()}"
    record = [
        {"clip": one.clip, "bytes": one.n_bytes, "cpu_s": one.ways, "videos_per_s": one.per_second} for one in found
    ]
    return Done(0, {"machine": machine("cpu"), "clips": record}, [as_table(found, title)])


def as_table(found: Sequence[Times], title: str) -> Table:
    """Lay out a row a decoding way and a column a clip; the last rows are our ways over the floor."""
    from jobs.benchmark.decode.measure import CHILD, FLOOR, HERE  # noqa: PLC0415

    table = figure_table(title, ["", *(one.clip for one in found)], [])
    ways = [FLOOR, *(way for way in found[0].ways if way != FLOOR)]
    for way in ways:
        table.add_row(way, *(_shown(one.ways.get(way)) for one in found))
    for way in (HERE, CHILD, "decord", "torchcodec"):
        table.add_row(f"{way} / {FLOOR}", *(_shown(one.over_floor(way)) for one in found))
    for way in found[0].per_second:
        table.add_row(f"{way}, videos/s", *(_shown(one.per_second[way]) for one in found))
    table.add_row("MB through the object store", *(f"{one.n_bytes / 1e6:.1f}" for one in found))
    return table


def _shown(value: float | None) -> str:
    """Format CPU seconds with two or three decimals, "-" for None."""
    return "-" if value is None else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"
