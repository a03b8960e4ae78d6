"""Whether the model's positions in time can tell the times of the frames that the options take."""

from __future__ import annotations

from collections.abc import Iterator

from gstep.backbones import ModelSource
from pipeline.doctor.finding import Finding
from pipeline.video.sampling import Sampling


def check_positions(source: ModelSource, sampling: Sampling) -> Iterator[Finding]:
    """Yield a finding for a model whose positions count evenly in time (Qwen2.5-VL), by the options of sampling alone.

    The values are those of the model's own loader in any case, so that nothing here is wrong.
    """
    vision = source.stock_config().vision_config
    per_second = getattr(vision, "tokens_per_second", None)
    if per_second is None:
        return
    says, remedies = [], []
    if sampling.snap_to_keyframes_s is not None:
        says.append("frames that move to keyframes get positions in time as if they were evenly spaced")
        remedies.append("leave --snap-to-keyframes out")
    densest = per_second * vision.temporal_patch_size  # frames a second: a position for each patch
    if sampling.fps is not None and sampling.fps > densest:
        says.append(f"at --fps {sampling.fps:g} patches share positions, of which a second has {per_second}")
        remedies.append(f"take at most --fps {densest:g}")
    if sampling.num_frames is not None:
        shortest = sampling.num_frames / densest
        says.append(
            f"positions are as if frames were even, which --num-frames is not at a variable rate; in videos under "
            f"{shortest:g} s patches share positions"
        )
    yield Finding(
        "positions", "ok", "; ".join(says) or "frames are even in time, as positions are", "; ".join(remedies)
    )
