"""Seconds and bytes per video with the family generic, beside the model's own family."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gstep import VisualTokens, make_pruner
from gstep.backbones import Backbone, ModelSource, Runtime, SampledVideo, choose_runtime, family_of
from gstep.generic.family import GenericFamily, VideoReader
from jobs.benchmark.decode import FPS, Clip, make_clip
from jobs.benchmark.shared import add_flag, make_result, run_in_turn, say
from jobs.frame.json_document import CommandResult
from pipeline.errors import UsageError, convert_usage_errors
from pipeline.options import DEVICES, DTYPES
from pipeline.video.decode import DecodeRequest
from pipeline.video.sampling import Sampling
from pipeline.video.sandbox import DecodeSandbox

RATIO = 0.25
FAST, GENERIC = "own code", "generic"
_SECONDS, _GROUP = 4, 24  # of a clip, and from a keyframe to the next
HEIGHTS = (360, 720, 1080, 2160)


@dataclass(frozen=True)
class VideoCost:
    """The cost of one video with one family: median seconds of one thread, or of the GPU.

    Attributes:
        way: FAST (the model's own family) or GENERIC.
        frame_bytes: bytes of the frames on their way from the decoder to the encoder.
        decode_s: decoding in a child process, including the resizing of the model's own family.
        copy_s: one copy of the frames, as into the object store.
        same: True if both families give the same tokens, bit for bit.
        prepare_s: the checkpoint's processor, which is included in ``encode_s``; None for FAST.
    """

    model: str
    height: int
    way: str
    n_tokens: int
    frame_bytes: int
    decode_s: float
    copy_s: float
    encode_s: float
    prune_s: float
    same: bool
    prepare_s: float | None = None

    @property
    def total_s(self) -> float:
        """The seconds of all steps."""
        return self.decode_s + self.copy_s + self.encode_s + self.prune_s


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    models = (
        "Hugging Face ids or folders of families with code of their own; the defaults are random and small: only "
        "frames have real sizes"
    )
    add_flag(parser, "--model", ["tiny", "tiny-qwen3-vl"], models, "MODEL")
    add_flag(parser, "--height", [360, 1080, 2160], "sizes of clips", kind=int, choices=HEIGHTS)
    add_flag(parser, "--num-frames", 32, "frames per video", "T")
    add_flag(parser, "--device", "cpu", "device of the model", choices=DEVICES)
    add_flag(parser, "--dtype", "auto", "auto: bfloat16 on GPUs, else float32", choices=DTYPES)
    add_flag(parser, "--threads", 1, "threads of the encoder", "N")
    add_flag(parser, "--repeats", 3, "measure N times, and show medians", "N")


def run(arguments: argparse.Namespace) -> CommandResult:
    """Measure every model and size with both families, and return the table; sets torch's number of threads.

    Raises:
        UsageError: a model cannot be loaded with both families.
        ManifestError: the sample clips are not installed.
    """
    torch.set_num_threads(arguments.threads)
    with convert_usage_errors():
        runtime = choose_runtime(arguments.device, arguments.dtype)
        sources = [_resolve_ways(model) for model in arguments.model]
    costs = list[VideoCost]()
    with TemporaryDirectory() as folder:
        say("making the clips")
        paths = {h: make_clip(Path(folder), Clip("h264", h, _SECONDS, _GROUP)) for h in arguments.height}
        for ways, (height, path) in product(sources, paths.items()):
            costs += measure(ways, height, path, arguments.num_frames, runtime, arguments.repeats)
            say(f"{ways[FAST].name}, {height}p: done")
    same = "the same tokens both ways" if all(cost.same for cost in costs) else "tokens differ"
    return make_result(
        f"Seconds of a video of {arguments.num_frames} frames",
        ("way", "height", "tokens", "MB", "decode", "copy", "encode", "of it processor", "prune", "all", "ratio"),
        [
            format_row(cost, fast)
            for fast, generic in zip(costs[::2], costs[1::2], strict=True)
            for cost in (fast, generic)
        ],
        f"MB: of frames from the decoder to the encoder; {same}",
        device=runtime.device,
        runtime=runtime.describe(),
        repeats=arguments.repeats,
        num_frames=arguments.num_frames,
        videos=[{**asdict(cost), "total_s": cost.total_s} for cost in costs],
    )


def _resolve_ways(model: str) -> dict[str, ModelSource]:
    """Resolve a model with its own family (FAST) and with GENERIC; UsageError if it has no family of its own."""
    source = ModelSource.resolve(model, gate=False)
    if isinstance(family_of(source), GenericFamily):
        raise UsageError(f"--model: {model} has the family generic alone: there is nothing to compare")
    return {FAST: source, GENERIC: ModelSource.resolve(model, family="generic")}


def measure(
    ways: dict[str, ModelSource], height: int, path: Path, n_frames: int, runtime: Runtime, repeats: int
) -> list[VideoCost]:
    """Measure a clip with both families, which take turns; return the costs, FAST first.

    Loading the models is not measured.
    """
    steps: dict[tuple[str, str], Callable[[], Any]] = {}
    with DecodeSandbox(timeout_s=3600) as sandbox:
        for way, source in ways.items():
            backbone = family_of(source).load(runtime)
            request = DecodeRequest(path, Sampling(n_frames), backbone.preprocessor)
            decoded = sandbox.decode(request)
            frames, (_, h, w, _) = decoded.frames.copy(), decoded.frames.shape
            sampled = SampledVideo(h, w, decoded.timestamps.tolist(), None, FPS, decoded.record["clip_frames"])
            encode = partial(_encode, backbone, frames, sampled)
            steps[way, "decode_s"] = partial(sandbox.decode, request)
            steps[way, "copy_s"] = frames.copy
            steps[way, "encode_s"] = encode
            steps[way, "prune_s"] = partial(_prune, VisualTokens(encode()))
            if way == GENERIC:
                reader = VideoReader(source, None if runtime.device == "cpu" else runtime.device)
                pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)
                steps[way, "prepare_s"] = partial(reader.read, pixels, sampled)
        turns = run_in_turn(steps, repeats)
    same = torch.equal(turns[FAST, "encode_s"].result, turns[GENERIC, "encode_s"].result)
    return [
        VideoCost(
            model=source.name,
            height=height,
            way=way,
            n_tokens=turns[way, "encode_s"].result.shape[:2].numel(),
            frame_bytes=turns[way, "copy_s"].result.nbytes,
            same=same,
            **{step: runs.median_s for (step_way, step), runs in turns.items() if step_way == way},
        )
        for way, source in ways.items()
    ]


def _encode(backbone: Backbone, frames: NDArray[np.uint8], sampled: SampledVideo) -> Tensor:
    """Encode a video to tokens [T,N,D] on the CPU, which waits for a GPU to finish."""
    return backbone.encode(frames, video=sampled).tokens.cpu()


def _prune(visual: VisualTokens) -> Tensor:
    """Prune a video's tokens with gstep, and return the kept indices on the CPU."""
    return make_pruner("gstep").prune(visual, RATIO).index.cpu()


def format_row(cost: VideoCost, fast: VideoCost) -> tuple[str, ...]:
    """Format a row of the table; its last cell is the total relative to ``fast``, the model's own family."""
    steps = (cost.decode_s, cost.copy_s, cost.encode_s, cost.prepare_s, cost.prune_s, cost.total_s)
    seconds = ("" if value is None else f"{value:.3g}" for value in steps)
    about = (f"{cost.model}, {cost.way}", str(cost.height), f"{cost.n_tokens:,}", f"{cost.frame_bytes / 1e6:,.0f}")
    return (*about, *seconds, f"{cost.total_s / fast.total_s:.2f}")
