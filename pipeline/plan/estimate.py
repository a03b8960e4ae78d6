"""The forecast of a run in closed form: after the first videos, the slowest stage determines the pace."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

from pipeline.rows import Json


class Interval(NamedTuple):
    """An uncertain number: its expected value, and the ends of its range."""

    low: float
    expected: float
    high: float

    @classmethod
    def from_value(cls, value: float) -> Interval:
        """Return an interval without a range."""
        return cls(value, value, value)

    def scale_by(self, factor: float) -> Interval:
        """Multiply the interval by ``factor``, which must not be negative."""
        return Interval(*(factor * end for end in self))

    def inverse(self) -> Interval:
        """Return 1 divided by this interval, which must be above 0."""
        return Interval(*(1 / end for end in reversed(self)))


NONE = Interval.from_value(0.0)


def map_intervals(function: Callable[..., float], *parts: Interval) -> Interval:
    """Compute an increasing function of intervals at all low, all expected and all high values."""
    return Interval(*(function(*ends) for ends in zip(*parts, strict=True)))


def multiply_intervals(*parts: Interval) -> Interval:
    """Multiply intervals that are not negative."""
    return map_intervals(lambda *ends: math.prod(ends), *parts)


def add_intervals(*parts: Interval) -> Interval:
    """Add intervals."""
    return map_intervals(lambda *ends: math.fsum(ends), *parts)


def estimate_mean(values: Sequence[float], population: int) -> Interval:
    """Estimate the mean of a corpus from a sample: two standard errors to either side, but not below 0.

    A single value gives a range from half to twice that value; the whole corpus gives an exact mean.

    Args:
        values: the sample; at least one value.
        population: the number of values in the corpus.
    """
    mean = fmean(values)
    left_out = 1 - len(values) / population
    if len(values) == 1:
        factor = 2.0 if left_out > 0 else 1.0
        return Interval(mean / factor, mean, mean * factor)
    half = 2 * stdev(values) * math.sqrt(left_out / len(values))
    return Interval(max(mean - half, 0.0), mean, mean + half)


HOUR = 3600.0
# CPU seconds outside decoding in all processes, per video, byte of frames, and batch of videos. Then the seconds of the
# driver alone, a single process that reads all records. Measured on two cores (jobs/benchmark/README.md).
_HOST_S, _HOST_S_PER_BYTE, _HOST_S_PER_BUNDLE = 1.5e-3, 0.6e-9, 10e-3
_DRIVER_S, _DRIVER_S_PER_BUNDLE = 0.4e-3, 4.5e-3
_WAITING = Interval(0.7, 1.3, 3.0)  # factor on these seconds in a run, where stages wait for each other
#: Factors from the seconds of a sample to those of a run. The stages share the cores; a GPU has no other work.
CORE_FACTOR, GPU_FACTOR = Interval(0.7, 1.1, 3.0), Interval(0.9, 1.0, 1.1)
_CPU_PEAK = Interval(6e9, 20e9, 60e9)  # float32 operations per second of a core
# Seconds by which pruning a video delays the next one, which is encoded beside it. Measured on one H200.
_PRUNE_DELAY_S = Interval(1e-3, 4e-3, 8e-3)
_LOSS = Interval(1.0, 1.03, 1.12)  # factor on the wall time, since stages wait for each other
_START_S, _CLUSTER_START_S = Interval(5, 10, 40), Interval(15, 40, 180)
# Decoding costs time per pixel of each picture that must be decoded; the chosen frames are also
# converted and resized. Fitted to the table of jobs/benchmark/README.md: H.264, 720p and 1080p, 10 to 600 s.
_DECODE_S_PER_PIXEL, _CONVERT_S_PER_PIXEL = 1.65e-9, 3e-9
_KEYFRAME_DISTANCE = Interval(30, 120, 250)  # pictures from one keyframe to the next
_CODEC_FACTOR = Interval(0.8, 1.0, 1.6)  # cost of a codec or a slower core relative to that table
_VIDEO_FPS = 30.0


class GpuType(NamedTuple):
    """A type of GPU.

    Attributes:
        peak: operations per second in dense bfloat16.
        vcpus: the number of vCPUs that a cloud instance usually has per GPU.
    """

    peak: float
    vcpus: int


#: Peaks are from NVIDIA's data sheets (half of a peak with sparsity): A100 is SXM4, H100 and H200 are SXM5, B200 is an
#: eighth of a DGX, A10G is AWS's. The vCPUs are an AWS instance's divided by its GPUs: p4de, p4d, p5, p5en, p6-b200,
#: and of g6, g6e and g5 the size with four GPUs.
GPU_TYPES: Mapping[str, GpuType] = {
    "A100": GpuType(312e12, 12),
    "A100-40GB": GpuType(312e12, 12),
    "H100": GpuType(989e12, 24),
    "H200": GpuType(989e12, 24),
    "B200": GpuType(2250e12, 24),
    "L4": GpuType(121e12, 12),
    "L40S": GpuType(362e12, 12),
    "A10G": GpuType(70e12, 12),
}
#: Share of a GPU's peak that a vision tower reaches, by model family; ``ANY_TOWER`` stands in for other families. The
#: middle is measured on one H200: torch 2.11, November 2026, random weights, 32 frames of 1280 x 720. Other GPUs are
#: assumed to lie in the range.
ANY_TOWER = Interval(0.25, 0.40, 0.60)
UTILISATION: Mapping[str, Interval] = {
    "llava_onevision": Interval(0.30, 0.48, 0.60),
    "qwen2_5_vl": Interval(0.30, 0.50, 0.60),
    "qwen3_vl": Interval(0.28, 0.43, 0.60),
}


def find_gpu_type(name: str) -> str | None:
    """Return the key of GPU_TYPES for a device name such as "NVIDIA A100-SXM4-80GB", or None."""
    words = name.upper().replace("_", "-").replace(" ", "-").split("-")
    kinds = [kind for kind in GPU_TYPES if kind.split("-")[0] in words]
    if "A100" in kinds and any(word.startswith("40G") for word in words):
        return "A100-40GB"
    return kinds[0] if kinds else None


class Cluster(NamedTuple):
    """The machines of a run.

    Attributes:
        gpus: the number of GPUs; 0 if encoders run on cores.
        gpu_type: a key of GPU_TYPES; None without GPUs.
        cores: the number of vCPUs, all of which decode.
    """

    gpus: int
    gpu_type: str | None
    cores: float

    @property
    def start_s(self) -> Interval:
        """The seconds until the first worker takes a video; more for a cluster of above 8 GPUs or 256 cores."""
        return _CLUSTER_START_S if self.gpus > 8 or self.cores > 256 else _START_S

    def encode_s(self, flops: Interval, utilisation: Interval) -> Interval:
        """Return the seconds for encoding and pruning a video on one GPU, or for encoding it on a core without GPUs.

        Args:
            flops: floating-point operations for encoding the video.
            utilisation: share of a GPU's peak that the encoder reaches.
        """
        if self.gpu_type is None:
            return multiply_intervals(flops, _CPU_PEAK.inverse())
        per_operation = utilisation.scale_by(GPU_TYPES[self.gpu_type].peak).inverse()
        return add_intervals(multiply_intervals(flops, per_operation), _PRUNE_DELAY_S)


class Prices(NamedTuple):
    """Prices per hour of a GPU, per hour of a vCPU, and per GB (10^9 bytes) and month; None if not given."""

    gpu_hour: float | None = None
    core_hour: float | None = None
    gb_month: float | None = None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of a run. Seconds and bytes are means per readable video.

    Attributes:
        videos: the number of videos, unreadable ones included.
        failed: the share of videos that cannot be read.
        decode_s: core-seconds.
        encode_s: seconds of encoding and pruning, on a GPU or on a core; None if unknown.
        frame_bytes: bytes of the frames that the decode stage passes to the encode stage.
        output_bytes: stored bytes of the kept tokens with their columns.
        input_bytes: bytes of the file; None if unknown.
        video_s: seconds that the video plays; None if unknown.
        notes: sentences on what the numbers are based on.
    """

    videos: int
    failed: float = 0.0
    decode_s: Interval = NONE
    encode_s: Interval | None = NONE
    frame_bytes: Interval = NONE
    output_bytes: Interval = NONE
    input_bytes: Interval | None = None
    video_s: Interval | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunEstimate:
    """The forecast of a run. Seconds and bytes are totals of the run.

    Attributes:
        wall_s: the duration, 0 without videos. It does not include encoding if the work of the model is unknown.
        encode_core_s: core-seconds of encoding and pruning; 0 with GPUs, None if the work of the model is unknown.
        gpu_s: GPU-seconds of the same; 0 without GPUs, None if the work of the model is unknown.
        stage_s: stage -> seconds of wall time that it would take alone; None for unknown encoding. Without GPUs, "cpus"
            replaces "decode" and "encode", if both are known.
        bottleneck: the slowest known stage; "nothing" without videos.
        cost: "total", "per_1000_videos" and "storage_a_month", as far as prices are given; None without prices.
        notes: sentences on what the numbers are based on.
    """

    videos: int
    failed_share: float
    wall_s: Interval
    decode_core_s: Interval
    encode_core_s: Interval | None
    gpu_s: Interval | None
    output_bytes: Interval
    input_bytes: Interval | None
    video_s: Interval | None
    stage_s: Mapping[str, Interval | None]
    bottleneck: str
    remedy: str
    cost: Mapping[str, Interval] | None
    cluster: Cluster
    notes: tuple[str, ...]

    def as_record(self) -> dict[str, Json]:
        """Return the fields as a mapping for JSON; intervals and the cluster become mappings too."""

        def convert_value(value: object) -> Json:
            if isinstance(value, Interval | Cluster):
                value = value._asdict()
            if isinstance(value, Mapping):
                return {str(name): convert_value(item) for name, item in value.items()}
            return list(value) if isinstance(value, tuple) else value  # type: ignore[return-value]

        return {name: convert_value(value) for name, value in vars(self).items()}


def estimate_run(work: Workload, cluster: Cluster, prices: Prices, notes: tuple[str, ...] = ()) -> RunEstimate:
    """Estimate a run of this work on this cluster.

    Unreadable videos cost decoding, but no encoding or output. Without GPUs, encoding shares the cores with decoding.
    ``notes`` are added to those of ``work``, as is a note on prices that are missing.
    """
    n = work.videos
    n_good = work.videos * (1 - work.failed)
    # Videos per batch, as pipeline.prune.resources plans them.
    videos_per_batch = int(max(1.0, min(32.0, 64 * 2**20 / max(1.0, work.frame_bytes.expected))))
    host_s = map_intervals(
        lambda size: _HOST_S + _HOST_S_PER_BYTE * size + _HOST_S_PER_BUNDLE / videos_per_batch, work.frame_bytes
    )
    driver_s = _WAITING.scale_by(n * (_DRIVER_S + _DRIVER_S_PER_BUNDLE / videos_per_batch))
    cpus_s = add_intervals(work.decode_s, multiply_intervals(host_s, _WAITING)).scale_by(n / cluster.cores)
    encode_s = NONE if work.encode_s is None else work.encode_s
    encode = encode_s.scale_by(n_good)
    output = work.output_bytes.scale_by(n_good)
    known = work.encode_s is not None
    if cluster.gpus or not known:
        stages = {"decode": cpus_s, "encode": encode.scale_by(1 / (cluster.gpus or cluster.cores)), "driver": driver_s}
    else:  # decoders and encoders share the cores
        stages = {"cpus": add_intervals(cpus_s, encode.scale_by(1 / cluster.cores)), "driver": driver_s}
    running = multiply_intervals(map_intervals(max, *stages.values()), _LOSS)
    # No other video overlaps the first one.
    wall = add_intervals(cluster.start_s, work.decode_s, encode_s, running) if n else NONE
    slowest = max(stages, key=lambda name: stages[name].expected) if n else "nothing"
    cost = _compute_cost(n, prices, cluster, wall, output)
    if "total" not in cost:
        notes = (*notes, "the cost is not known: give --price gpu-hour=X, or core-hour=X for CPUs")
    elif cluster.gpus and prices.gpu_hour is None:
        notes = (*notes, "the cost includes only the CPUs: give --price gpu-hour=X, too")
    return RunEstimate(
        videos=n,
        failed_share=work.failed,
        wall_s=wall,
        decode_core_s=work.decode_s.scale_by(n),
        encode_core_s=NONE if cluster.gpus else encode if known else None,
        gpu_s=NONE if not cluster.gpus else encode if known else None,
        output_bytes=output,
        input_bytes=work.input_bytes and work.input_bytes.scale_by(n),
        video_s=work.video_s and work.video_s.scale_by(n_good),
        stage_s={name: None if name == "encode" and not known else interval for name, interval in stages.items()},
        bottleneck=slowest,
        remedy=_suggest_remedy(slowest, cluster, stages),
        cost=cost or None,
        cluster=cluster,
        notes=(*work.notes, *notes),
    )


def _suggest_remedy(slowest: str, cluster: Cluster, stages: Mapping[str, Interval]) -> str:
    """Describe how many more cores, GPUs or drivers would make the bottleneck as fast as the next slowest stage.

    For "cpus" it is "more cores, or a GPU", without a number.
    """
    if slowest == "nothing":
        return "nothing is left to do"
    if slowest == "cpus":
        return "more cores, or a GPU"
    other_stages = {name: interval.expected for name, interval in stages.items() if name != slowest}
    next_stage = max(other_stages, key=lambda name: other_stages[name])
    factor = stages[slowest].expected / max(other_stages[next_stage], 1e-9)
    until = f"until {next_stage} takes as long"
    if slowest == "decode":
        more = f"{math.ceil(cluster.cores * (factor - 1)):,} more decode cores, {until}"
        return f"{more}; --snap-to-keyframes for long videos{'; or --decoder nvdec' if cluster.gpus else ''}"
    if slowest == "encode":
        return f"{math.ceil(cluster.gpus * (factor - 1)):,} more GPUs, {until}"
    drivers = math.ceil(factor)
    return f"{drivers} drivers, each with --shard I/{drivers} --join, {until}"


def _compute_cost(
    videos: int, prices: Prices, cluster: Cluster, wall: Interval, output: Interval
) -> dict[str, Interval]:
    """Return "total", "per_1000_videos" and "storage_a_month", as far as prices are given.

    All GPUs and cores that have a price are paid for the whole wall time.
    """
    cost = {}
    prices_by_count = (cluster.gpus, prices.gpu_hour), (cluster.cores, prices.core_hour)
    if hourly := sum(number * price for number, price in prices_by_count if price is not None):
        cost["total"] = wall.scale_by(hourly / HOUR)
        cost["per_1000_videos"] = cost["total"].scale_by(1000 / max(1, videos))
    if prices.gb_month is not None:
        cost["storage_a_month"] = output.scale_by(prices.gb_month / 1e9)
    return cost


def estimate_decode_seconds(seconds: float, width: int, height: int, n_frames: int) -> Interval:
    """Estimate the core-seconds of decoding ``n_frames`` frames of an unknown video at 30 frames per second.

    The frames are evenly spread. Between two keyframes, pictures are decoded up to the last chosen frame.
    """
    pictures = max(float(n_frames), seconds * _VIDEO_FPS)
    distance = pictures / n_frames

    def compute_decode_s(keyframes: float, codec: float) -> float:
        n_decoded = pictures * (1 - distance / (2 * keyframes)) if distance < keyframes else n_frames * keyframes / 2
        return codec * width * height * (n_decoded * _DECODE_S_PER_PIXEL + n_frames * _CONVERT_S_PER_PIXEL)

    return map_intervals(compute_decode_s, _KEYFRAME_DISTANCE, _CODEC_FACTOR)
