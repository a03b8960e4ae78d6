"""Time the encoding of short videos in one pass of the vision tower, and compare their tokens with those of one alone.

A job on a GPU does the second with --encode-batch-frames. On a CPU it encodes frame by frame whoever shares a pass.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table

from jobs.command import add_json_or_file, count, wide_console
from jobs.frame.json_document import Done

if TYPE_CHECKING:
    from torch import Tensor

    from gstep.backbones import Backbone
    from gstep.types import VisualTokens

HELP = "several short videos in one pass of the vision tower"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--model", default="tiny", metavar="MODEL", help="folder, id, tiny, tiny-qwen2-5-vl ... [tiny]")
    parser.add_argument("--videos", type=count, nargs="+", default=[1, 4, 16], metavar="N", help="a pass [1 4 16]")
    parser.add_argument("--frames", type=count, default=2, metavar="T", help="of a video of 320x240 [2]")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="that encodes [auto]")
    parser.add_argument("--dtype", default="auto", metavar="TYPE", help="of the tower [auto]")
    parser.add_argument("--repeats", type=count, default=5, metavar="N", help="times each; medians are shown [5]")
    add_json_or_file(parser)


def run(arguments: argparse.Namespace) -> Done:
    """Measure and show; returns the exit code and the figures."""
    import torch  # noqa: PLC0415 - loads only after the flags are checked

    from gstep.backbones import ModelSource, choose_runtime, family_of  # noqa: PLC0415
    from jobs.benchmark.machine import machine, machine_line  # noqa: PLC0415

    family, runtime = family_of(ModelSource.resolve(arguments.model)), choose_runtime(arguments.device, arguments.dtype)
    most = max(arguments.videos)
    shape = (most, arguments.frames, *family.preprocessor().target_size(arguments.frames, 240, 320), 3)
    backbone = family.load(runtime, frame_batch=arguments.frames * most)
    frames = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    videos = [*frames.to(runtime.device)]
    cells = [measure(backbone, videos[:n], arguments.repeats) for n in arguments.videos]
    table = Table(
        *cells[0],
        show_edge=False,
        title=f"{arguments.model}, {arguments.frames} frames, {machine_line(runtime.device)}",
    )
    for cell in cells:
        table.add_row(*(f"{value:.4g}" for value in cell.values()))
    wide_console().print(table)
    about = {"model": arguments.model, "frames": arguments.frames, "machine": machine(runtime.device)}
    return Done(0, {**about, "cells": cells})


def measure(backbone: Backbone, videos: Sequence[Tensor], repeats: int) -> dict[str, float]:
    """Return milliseconds a video of encoding each by itself and all in one pass, and the share of equal tokens."""
    import torch  # noqa: PLC0415

    alone = [backbone.encode(frames).tokens for frames in videos]
    with torch.no_grad():
        together = [visual.tokens for visual in backbone.encode_pass(videos, {})]
        pairs = [(a == b).all(dim=-1).float().mean() for a, b in zip(alone, together, strict=True)]
        return {
            "videos a pass": len(videos),
            "alone, ms a video": _ms(lambda: [backbone.encode(frames) for frames in videos], repeats) / len(videos),
            "in one pass, ms a video": _ms(lambda: backbone.encode_pass(videos, {}), repeats) / len(videos),
            "tokens of the same bits": float(torch.stack(pairs).mean()),
        }


def _ms(work: Callable[[], list[VisualTokens]], repeats: int) -> float:
    """Return the median milliseconds of encoding; reading a number of the last tokens waits for a GPU."""
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()[-1].tokens[-1, -1, -1].item()
        taken.append(time.perf_counter() - started)
    return 1e3 * median(taken)
