"""Seconds and bytes of a video by the family generic, beside the family with code of its own.

The two differ in where frames are resized: in the decoder, or by the checkpoint's own processor in the encoder. Frames
travel to that processor in their source size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

from gstep import VisualTokens, make_pruner
from gstep.backbones import Backbone, ModelSource, Runtime, SampledVideo, choose_runtime, family_of
from gstep.generic.family import GenericFamily, VideoReader
from jobs.benchmark.decode import FPS, Clip, make_clips
from jobs.benchmark.shared import figure_table, machine, machine_line, medians_in_turn, say
from jobs.command import count
from jobs.frame.json_document import CommandResult
from pipeline.errors import UsageError, usage_errors
from pipeline.options import DEVICES, DTYPES
from pipeline.video.decode import DecodeRequest
from pipeline.video.sampling import Sampling
from pipeline.video.sandbox import DecodeSandbox

RATIO = 0.25
FAST, GENERIC = "own code", "generic"
_SECONDS, _GROUP = 4, 24  # of a clip, and from a keyframe to the next
_WIDTHS = {360: 640, 720: 1280, 1080: 1920, 2160: 3840}


@dataclass(frozen=True)
class VideoCost:
    """The cost of one video by one way: median seconds of one thread, or of the GPU.

    Attributes:
        way: FAST or GENERIC.
        frame_bytes: bytes of the frames on their way from the decoder to the encoder.
        decode_s: decoding in a child process, with the resizing of the family with code of its own.
        copy_s: a copy of the frames into the object store.
        prepare_s: the checkpoint's own processor, a part of ``encode_s``; None for the family with code of its own.
        same: whether both ways give the same tokens, bit for bit.
    """

    model: str
    height: int
    way: str
    n_tokens: int
    frame_bytes: int
    decode_s: float
    copy_s: float
    prepare_s: float | None
    encode_s: float
    prune_s: float
    same: bool

    @property
    def total_s(self) -> float:
        """All seconds of a video."""
        return self.decode_s + self.copy_s + self.encode_s + self.prune_s


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``generic``."""
    models = ["tiny", "tiny-qwen3-vl"]
    parser.add_argument(
        "--model",
        nargs="+",
        default=models,
        metavar="MODEL",
        help=f"Hugging Face ids or folders of families with code of their own [{' '.join(models)}, random and small: "
        "only frames have real sizes]",
    )
    parser.add_argument(
        "--height",
        type=int,
        nargs="+",
        choices=_WIDTHS,
        default=[360, 1080, 2160],
        help="sizes of clips [360 1080 2160]",
    )
    parser.add_argument("--num-frames", type=count, default=32, metavar="T", help="frames a video [32]")
    parser.add_argument("--device", default="cpu", choices=DEVICES, help="device of the model [cpu]")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="auto: bfloat16 on GPUs, else float32 [auto]")
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="threads of the encoder [1]")
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="measure N times, and show medians [3]")


def run(arguments: argparse.Namespace) -> CommandResult:
    """Measure every model and size both ways; return the table. Sets torch's number of threads for the process.

    Raises UsageError for a model that cannot be used both ways, ManifestError if the sample clips are not installed.
    """
    torch.set_num_threads(arguments.threads)
    with usage_errors():
        runtime = choose_runtime(arguments.device, arguments.dtype)
        sources = [_resolve_ways(model) for model in arguments.model]
    clips = {f"h264-{h}p": Clip("libx264", _WIDTHS[h], h, _SECONDS, _GROUP) for h in arguments.height}
    costs = []
    with TemporaryDirectory() as folder:
        say("making the clips")
        paths = make_clips(Path(folder), [*clips], clips)
        for ways in sources:
            for name, path in paths.items():
                costs += measure(ways, clips[name].height, path, arguments.num_frames, runtime, arguments.repeats)
                say(f"{ways[FAST].name}, {name}: done")
    title = f"Seconds of a video of {arguments.num_frames} frames, {machine_line(runtime.device)}"
    about = {"machine": machine(runtime.device), "runtime": runtime.describe(), "repeats": arguments.repeats}
    record = [{**asdict(cost), "total_s": cost.total_s} for cost in costs]
    return CommandResult(0, {**about, "num_frames": arguments.num_frames, "videos": record}, [as_table(costs, title)])


def _resolve_ways(model: str) -> dict[str, ModelSource]:
    """Resolve a model in both families.

    Raises UsageError for a model that has no family with code of its own, ModelError if it cannot be used.
    """
    source = ModelSource.resolve(model, gate=False)
    if isinstance(family_of(source), GenericFamily):
        raise UsageError(f"--model: {model} has the family generic alone: there is nothing to compare")
    return {FAST: source, GENERIC: ModelSource.resolve(model, family="generic")}


def measure(
    ways: dict[str, ModelSource], height: int, path: Path, n_frames: int, runtime: Runtime, repeats: int
) -> list[VideoCost]:
    """Measure a clip both ways, in turns, so that disturbances affect both alike."""
    forms: dict[str, Callable[[], Any]] = {}
    with DecodeSandbox(timeout_s=3600) as sandbox:
        for way, source in ways.items():
            backbone = family_of(source).load(runtime)
            request = DecodeRequest(path, Sampling(n_frames), backbone.preprocessor)
            decoded = sandbox.decode(request)
            frames, (_, h, w, _) = decoded.frames.copy(), decoded.frames.shape
            sampled = SampledVideo(h, w, decoded.timestamps.tolist(), None, FPS, decoded.record["clip_frames"])
            encode = partial(_encode, backbone, frames, sampled)
            visual = VisualTokens(encode())
            forms |= {
                f"{way}.decode_s": partial(sandbox.decode, request),
                f"{way}.copy_s": frames.copy,
                f"{way}.encode_s": encode,
                f"{way}.prune_s": partial(_prune, visual),
            }
            if way == GENERIC:
                reader = VideoReader(source, None if runtime.device == "cpu" else runtime.device)
                pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)
                forms[f"{way}.prepare_s"] = partial(reader.read, pixels, sampled)
        timed = medians_in_turn(forms, repeats)
    seconds = {form: elapsed_s for form, (elapsed_s, _) in timed.items()}
    tokens = {way: timed[f"{way}.encode_s"][1] for way in ways}
    same = torch.equal(tokens[FAST], tokens[GENERIC])
    return [
        VideoCost(
            model=source.name,
            height=height,
            way=way,
            n_tokens=tokens[way].shape[:2].numel(),
            frame_bytes=timed[f"{way}.copy_s"][1].nbytes,
            prepare_s=seconds.get(f"{way}.prepare_s"),
            same=same,
            **{step: seconds[f"{way}.{step}"] for step in ("decode_s", "copy_s", "encode_s", "prune_s")},
        )
        for way, source in ways.items()
    ]


def _encode(backbone: Backbone, frames: NDArray[np.uint8], sampled: SampledVideo) -> Tensor:
    """Encode a video to tokens [T,N,D] on the CPU: a GPU queues its work."""
    return backbone.encode(frames, video=sampled).tokens.cpu()


def _prune(visual: VisualTokens) -> Tensor:
    """Prune a video's tokens, and return the kept index on the CPU."""
    return make_pruner("gstep").prune(visual, RATIO).index.cpu()


def as_table(costs: Sequence[VideoCost], title: str) -> Table:
    """Make a table with a row for each model, size and way."""
    titles = ("way", "height", "tokens", "MB", "decode", "copy", "encode", "of it processor", "prune", "all", "ratio")
    rows = []
    for fast, generic in zip(costs[::2], costs[1::2], strict=True):
        for cost in (fast, generic):
            prepare = "" if cost.prepare_s is None else f"{cost.prepare_s:.3g}"
            seconds = (f"{value:.3g}" for value in (cost.decode_s, cost.copy_s, cost.encode_s))
            about = (
                f"{cost.model}, {cost.way}",
                str(cost.height),
                f"{cost.n_tokens:,}",
                f"{cost.frame_bytes / 1e6:,.0f}",
            )
            ratio = f"{cost.total_s / fast.total_s:.2f}"
            rows.append((*about, *seconds, prepare, f"{cost.prune_s:.3g}", f"{cost.total_s:.3g}", ratio))
    same = "the same tokens both ways" if all(cost.same for cost in costs) else "tokens differ"
    return figure_table(title, titles, rows, f"MB: of frames from the decoder to the encoder; {same}")
