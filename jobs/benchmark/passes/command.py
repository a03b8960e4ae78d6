"""Time the encoding of short videos in one pass of the vision tower, and compare their tokens with those of one alone.

A job on a GPU does the second with --encode-batch-frames. On a CPU it encodes frame by frame whoever shares a pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jobs.benchmark.machine import machine, machine_line
from jobs.benchmark.shown import figure_table
from jobs.benchmark.timing import medians_in_turn
from jobs.command import count
from jobs.frame.json_document import Done, add_json

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
    add_json(parser)


def run(arguments: argparse.Namespace) -> Done:
    """Measure and show."""
    import torch  # noqa: PLC0415 - loads only after the flags are checked

    from gstep.backbones import ModelSource, choose_runtime, family_of  # noqa: PLC0415
    from pipeline.execution.request import refusing  # noqa: PLC0415

    with refusing():
        family = family_of(ModelSource.resolve(arguments.model))
        runtime = choose_runtime(arguments.device, arguments.dtype)
    most = max(arguments.videos)
    shape = (most, arguments.frames, *family.preprocessor().target_size(arguments.frames, 240, 320), 3)
    backbone = family.load(runtime, frame_batch=arguments.frames * most)
    frames = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    videos = [*frames.to(runtime.device)]
    cells = [measure(backbone, videos[:n], arguments.repeats) for n in arguments.videos]
    title = f"{arguments.model}, {arguments.frames} frames, {machine_line(runtime.device)}"
    table = figure_table(title, [*cells[0]], [[f"{value:.4g}" for value in cell.values()] for cell in cells])
    about = {"model": arguments.model, "frames": arguments.frames, "machine": machine(runtime.device)}
    return Done(0, {**about, "cells": cells}, [table])


def measure(backbone: Backbone, videos: Sequence[Tensor], repeats: int) -> dict[str, float]:
    """Return milliseconds a video of encoding each by itself and all in one pass, and the share of equal tokens."""
    import torch  # noqa: PLC0415

    alone = [backbone.encode(frames).tokens for frames in videos]
    with torch.no_grad():
        together = [visual.tokens for visual in backbone.encode_pass(videos, {})]
        pairs = [(a == b).all(dim=-1).float().mean() for a, b in zip(alone, together, strict=True)]
        ways: dict[str, Callable[[], list[VisualTokens]]] = {
            "alone, ms a video": lambda: [backbone.encode(frames) for frames in videos],
            "in one pass, ms a video": lambda: backbone.encode_pass(videos, {}),
        }
        found = medians_in_turn(ways, repeats, lambda encoded: encoded[-1].tokens[-1, -1, -1].item())
        return {
            "videos a pass": len(videos),
            **{way: 1e3 * seconds / len(videos) for way, (seconds, _) in found.items()},
            "tokens of the same bits": float(torch.stack(pairs).mean()),
        }
