"""The work of a run, a video at a time: what was measured, counted from a config, or assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.plan.gpus import UTILISATION
from pipeline.plan.intervals import NONE, Interval, spread

# Decoding from packets takes as long as there are pixels in the pictures that must be decoded, and the chosen frames
# are converted and resized besides. Fitted to the table of jobs/benchmark/README.md: H.264, 720p and 1080p, 10 to
# 600 s.
_S_A_PIXEL, _S_A_FRAME_PIXEL = 1.65e-9, 3e-9
# Pictures from a keyframe to the next, and how much dearer a codec or a slower core is than those of that table.
_KEYFRAMES = Interval(30, 120, 250)
_DEARER = Interval(0.8, 1.0, 1.6)
_FPS = 30.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What the videos of a run take; a video stands for the mean of those that can be read.

    Attributes:
        videos: of the run, unreadable ones too.
        tokens: (all, kept) of a video.
        failed: share of them that cannot be read.
        decode_s: core-seconds of decoding a video.
        flops: operations of encoding a video.
        utilisation: share of a GPU's peak that the encoder reaches.
        parameters: weights of the encoder.
        patch_bytes: bytes of one vector for each patch that is encoded at once, which sets the memory of a GPU.
        frame_bytes: of the frames that pass from decoding to encoding.
        output_bytes: of the kept tokens of a video with their columns.
        selection_s: of pruning, on one CPU core.
        reads: smaller retention ratio -> share of the output that a reader of it reads; empty for methods without.
        encode_s: seconds of encoding and pruning a video that an earlier run took; None where they are to be counted.
        input_bytes: of the file of a video; None where they are not known.
        seconds: of video; None where they are not known.
        notes: what the numbers rest on, a sentence each.
    """

    videos: int
    tokens: tuple[Interval, Interval]
    failed: Interval = NONE
    decode_s: Interval = NONE
    flops: Interval = NONE
    utilisation: Interval = UTILISATION
    parameters: int = 0
    patch_bytes: float = 0.0
    frame_bytes: Interval = NONE
    output_bytes: Interval = NONE
    selection_s: Interval = NONE
    encode_s: Interval | None = None
    input_bytes: Interval | None = None
    seconds: Interval | None = None
    reads: Mapping[float, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def good(self) -> Interval:
        """Videos of the run that can be read."""
        return Interval(*(self.videos * (1 - share) for share in reversed(self.failed)))

    @property
    def bundle(self) -> int:
        """Videos that travel together, as pipeline.prune.graph bundles them."""
        return int(max(1.0, min(32.0, 64 * 2**20 / max(1.0, self.frame_bytes.expected))))


def decoding(seconds: float, width: int, height: int, n_frames: int) -> Interval:
    """Estimate the core-seconds of decoding ``n_frames`` of a video that nobody has looked at, at 30 frames a second.

    Of the pictures between two keyframes those up to the last chosen one are decoded.
    """
    pictures = max(float(n_frames), seconds * _FPS)
    apart = pictures / n_frames

    def taken(keyframes: float, dearer: float) -> float:
        needed = pictures * (1 - apart / (2 * keyframes)) if apart < keyframes else n_frames * keyframes / 2
        return dearer * width * height * (needed * _S_A_PIXEL + n_frames * _S_A_FRAME_PIXEL)

    return spread(taken, _KEYFRAMES, _DEARER)


# Seconds on one core of GSTEP at 6,272 tokens of 3,584 numbers, and of other methods in units of it; time grows as the
# number of tokens to the power of 1.15 (jobs/benchmark/README.md, random numbers at the upper end).
_GSTEP_S = Interval(0.2, 0.3, 0.6)
_METHODS = {
    "none": 0.02,
    "uniform": 0.02,
    "random": 0.02,
    "topk": 0.3,
    "visionzip": 0.3,
    "fastvid": 8.0,
    "cdpruner": 34.0,
}


def selecting(method: str, n_tokens: float, width: int) -> Interval:
    """Estimate the seconds of pruning a video's tokens of ``width`` numbers on one core, by the measured form."""
    factor = (n_tokens / 6272) ** 1.15 * width / 3584
    return _GSTEP_S.scaled(factor * _METHODS.get(method, 1.0))
