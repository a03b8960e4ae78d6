"""The forecast of a run in closed form: the slowest stage sets the pace, once the first videos are through."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from pipeline.plan.gpus import GPU_TYPES, UTILISATION
from pipeline.plan.intervals import Interval, spread
from pipeline.plan.options import PlanOptions
from pipeline.plan.workload import Workload
from pipeline.rows import JsonObject

HOUR = 3600.0
# Measured on two cores by `python -m jobs.benchmark pipeline` (jobs/benchmark/README.md): the CPU time of a video
# outside its decoding in all processes, and in the driver alone, which is one process and reads the records of all.
_HOST_S, _HOST_S_A_BYTE = 4e-3, 1.8e-9
_DRIVER_S, _DRIVER_S_A_BYTE = 1e-3, 0.2e-9
_OFF = Interval(0.7, 1.0, 1.6)
# Operations a second of a core of a CPU in float32, from a favourable case to an unfavourable one.
_CPU_RATE = Interval(60e9, 20e9, 6e9)
# Seconds on a GPU of a step of selection, and of what else a video costs there. Not measured.
_STEP_S, _VIDEO_S = Interval(2e-6, 8e-6, 25e-6), Interval(1e-3, 3e-3, 8e-3)
_LOSS = Interval(1.0, 1.03, 1.12)  # time that stages lose by waiting for each other
_START_S, _CLUSTER_START_S = Interval(5, 10, 40), Interval(15, 40, 180)
_READ_BYTES_S = Interval(2e9, 5e8, 1e8)  # bytes a second at which a reader gets tokens of the cache
_CONTEXT_BYTES = 0.6e9  # of CUDA and its libraries
_LIVE_VECTORS = Interval(8, 14, 24)  # of each patch at the peak of a layer
DECODE, ENCODE, DRIVER, CPUS, NOTHING = "decode", "encode", "driver", "cpus", "nothing"


class Cluster(NamedTuple):
    """The machines of a run; ``cores`` are vCPUs, and all of them decode."""

    gpus: int
    gpu_type: str | None
    cores: float

    @property
    def several_nodes(self) -> bool:
        return self.gpus > 8 or self.cores > 256


class Prices(NamedTuple):
    """Prices of an hour of a GPU and of a vCPU, None where unknown; of a GB for a month; and the months."""

    gpu_hour: float | None = None
    core_hour: float | None = None
    gb_month: float = 0.023
    months: float = 1.0

    @classmethod
    def of(cls, options: PlanOptions) -> Prices:
        """Return the prices that options give."""
        return cls(options.gpu_hour, options.core_hour, options.gb_month, options.months)

    def per_hour(self, cluster: Cluster) -> float | None:
        """Return what the cluster costs an hour; None where no price is given for what it has."""
        parts = (cluster.gpus, self.gpu_hour), (cluster.cores, self.core_hour)
        known = [number * price for number, price in parts if number and price is not None]
        return sum(known) if known else None


@dataclass(frozen=True)
class Plan:
    """The forecast of a run; seconds and bytes are of the whole run.

    Attributes:
        stage_s: seconds of wall time that each stage alone would take.
        bottleneck: the stage that takes longest.
        remedy: what would remove it.
        cores_a_gpu: vCPUs that keep a GPU busy.
        encoder_busy: share of the wall time in which an encoder computes.
        break_even_questions: questions a video from which encoding once and storing costs less than encoding for each.
        cost: total, per 1,000 videos and per hour of video; None without a price.
        tiers: bytes that a reader reads of the whole cache at each smaller retention ratio.
    """

    videos: int
    wall_s: Interval
    decode_core_s: Interval
    gpu_s: Interval
    encode_core_s: Interval
    host_core_s: Interval
    output_bytes: Interval
    input_bytes: Interval | None
    video_s: Interval | None
    failed_share: Interval
    stage_s: dict[str, Interval]
    bottleneck: str
    remedy: str
    cores_a_gpu: Interval | None
    encoder_busy: Interval
    video_hours_per_day_per_gpu: Interval | None
    peak_gpu_bytes: Interval | None
    break_even_questions: Interval | None
    cost: dict[str, Interval] | None
    cluster: Cluster
    tiers: dict[str, Interval] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def as_record(self) -> JsonObject:
        """Return the plan as a JSON-able mapping."""
        return {**asdict(self), "cluster": self.cluster._asdict()}


class Seconds(NamedTuple):
    """Seconds of one video: cores that decode and that serve, of the driver, and of the encoder (a GPU, or cores)."""

    decode: Interval
    host: Interval
    driver: Interval
    encode: Interval


def seconds_of(work: Workload, cluster: Cluster) -> Seconds:
    """Estimate what one video takes at each stage of the cluster."""
    host = spread(lambda size, off: off * (_HOST_S + _HOST_S_A_BYTE * size), work.frame_bytes, _OFF)
    driver = spread(lambda size, off: off * (_DRIVER_S + _DRIVER_S_A_BYTE * size), work.frame_bytes, _OFF)
    if work.encode_s is not None:
        encode = work.encode_s
    elif cluster.gpus:
        peak = GPU_TYPES[cluster.gpu_type or "A100"].peak
        idle = Interval(1 / UTILISATION.high, 1 / UTILISATION.expected, 1 / UTILISATION.low)
        kept = work.tokens[1]
        encode = spread(
            lambda flops, over, kept, step, more: flops * over / peak + kept * step + more,
            *(work.flops, idle, kept, _STEP_S, _VIDEO_S),
        )
    else:
        slow = Interval(1 / _CPU_RATE.low, 1 / _CPU_RATE.expected, 1 / _CPU_RATE.high)
        encode = spread(lambda flops, over, select: flops * over + select, work.flops, slow, work.selection_s)
    return Seconds(work.decode_s, host, driver, encode)


def estimate(work: Workload, cluster: Cluster, prices: Prices, notes: tuple[str, ...] = ()) -> Plan:
    """Estimate a run of these videos on this cluster."""
    one = seconds_of(work, cluster)
    stages = _stages(work, cluster, one)
    slowest = max(stages, key=lambda name: stages[name].expected)
    start = _CLUSTER_START_S if cluster.several_nodes else _START_S
    running = spread(lambda *parts: max(parts[:-1]) * parts[-1], *stages.values(), _LOSS)
    first = spread(lambda decode, encode: decode + encode, one.decode, one.encode)  # no other video overlaps it
    wall = spread(lambda *parts: sum(parts) if work.videos else 0.0, start, first, running)
    encode = spread(lambda n, s: n * s, work.good, one.encode)
    encoders = float(cluster.gpus or max(1, int(cluster.cores // 4)))
    busy = Interval(*(_busy(encode.expected / encoders, seconds) for seconds in (wall.high, wall.expected, wall.low)))
    video = work.seconds and spread(lambda n, s: n * s, work.good, work.seconds)
    output, zero = spread(lambda n, size: n * size, work.good, work.output_bytes), Interval.exactly(0.0)
    return Plan(
        videos=work.videos,
        wall_s=wall,
        decode_core_s=work.decode_s.scaled(work.videos),
        gpu_s=encode if cluster.gpus else zero,
        encode_core_s=zero if cluster.gpus else encode,
        host_core_s=one.host.scaled(work.videos),
        output_bytes=output,
        input_bytes=work.input_bytes and work.input_bytes.scaled(work.videos),
        video_s=video,
        failed_share=work.failed,
        stage_s=stages,
        bottleneck=slowest if work.videos else NOTHING,
        remedy=_remedy(slowest, cluster, stages, one) if work.videos else "nothing is left to do",
        cores_a_gpu=_cores_a_gpu(one) if cluster.gpus else None,
        encoder_busy=busy,
        video_hours_per_day_per_gpu=_pace(video, wall, cluster),
        peak_gpu_bytes=_peak(work) if cluster.gpus else None,
        break_even_questions=_break_even(work, cluster, prices, running),
        cost=_cost(work.videos, prices, prices.per_hour(cluster), wall, video, output),
        cluster=cluster,
        tiers={f"{ratio:g}": output.scaled(share) for ratio, share in sorted(work.reads.items())},
        notes=(*work.notes, *notes, *_said(cluster, prices)),
    )


def _stages(work: Workload, cluster: Cluster, one: Seconds) -> dict[str, Interval]:
    """Return the wall time that each stage would take by itself."""
    n, good, cores = work.videos, work.good, cluster.cores
    driver = one.driver.scaled(n)
    if not cluster.gpus:  # decoders and encoders share the cores
        cpus = spread(lambda d, h, e, ok: (n * (d + h) + ok * e) / cores, one.decode, one.host, one.encode, good)
        return {CPUS: cpus, DRIVER: driver}
    decode = spread(lambda d, h: n * (d + h) / cores, one.decode, one.host)
    return {DECODE: decode, ENCODE: spread(lambda e, ok: ok * e / cluster.gpus, one.encode, good), DRIVER: driver}


def _cores_a_gpu(one: Seconds) -> Interval:
    """Return how many vCPUs keep one GPU busy: with cheap videos and a slow GPU fewer, with dear ones more."""
    cores = [part + host for part, host in zip(*(_ends(part) for part in (one.decode, one.host)), strict=True)]
    low, expected, high = _ends(one.encode)
    return Interval(cores[0] / high, cores[1] / expected, cores[2] / low)


def _ends(part: Interval) -> tuple[float, float, float]:
    return part.low, part.expected, part.high


def _busy(computing_s: float, wall_s: float) -> float:
    return min(1.0, computing_s / wall_s) if wall_s else 0.0


def _pace(video: Interval | None, wall: Interval, cluster: Cluster) -> Interval | None:
    if video is None or not cluster.gpus or not wall.high:
        return None
    days = 24 / cluster.gpus
    return Interval(*(days * video.expected / seconds for seconds in (wall.high, wall.expected, wall.low)))


def _peak(work: Workload) -> Interval:
    """Estimate the memory of a GPU: bfloat16 weights, vectors of the patches that are encoded at once, CUDA."""
    return Interval(*(2 * work.parameters + _CONTEXT_BYTES + n * work.patch_bytes for n in _ends(_LIVE_VECTORS)))


def _remedy(slowest: str, cluster: Cluster, stages: dict[str, Interval], one: Seconds) -> str:
    """Say what would remove the bottleneck, and what would be the next one."""
    others = {name: part.expected for name, part in stages.items() if name != slowest}
    next_one = max(others, key=lambda name: others[name])
    factor = stages[slowest].expected / others[next_one] if others[next_one] else math.inf
    if slowest == DECODE:
        more = math.ceil(cluster.cores * (factor - 1))
        return (
            f"{more:,} more decode cores, until {next_one} takes as long; --snap-to-keyframes for long videos; or "
            "--decoder nvdec, which no GPU has run yet"
        )
    if slowest == ENCODE:
        return f"{math.ceil(cluster.gpus * (factor - 1)):,} more GPUs, until {next_one} takes as long"
    if slowest == DRIVER:
        drivers = math.ceil(factor)
        return f"{drivers} drivers, each with --shard I/{drivers} --join, until {next_one} takes as long"
    dearer = "decoding" if one.decode.expected > one.encode.expected else "encoding"
    return f"more cores, or a GPU; most of their time is {dearer}"


def _cost(
    videos: int, prices: Prices, hourly: float | None, wall: Interval, video: Interval | None, output: Interval
) -> dict[str, Interval] | None:
    if hourly is None:
        return None
    total = wall.scaled(hourly / HOUR)
    found = {"total": total, "storage_a_month": output.scaled(prices.gb_month / 1e9)}
    if videos:
        found["per_1000_videos"] = total.scaled(1000 / videos)
    if video is not None and video.expected:
        found["per_video_hour"] = total.scaled(HOUR / video.expected)
    return found


def _break_even(work: Workload, cluster: Cluster, prices: Prices, running: Interval) -> Interval | None:
    """Return from how many questions a video on the cache pays: encode once and store, against encode for each.

    Without a price on the cluster the published range of the GPU's type stands in; where there is none either, time
    alone counts, and storage is free.
    """
    if not work.videos or not work.good.expected:
        return None
    hourly = prices.per_hour(cluster)
    published = GPU_TYPES[cluster.gpu_type].price if cluster.gpu_type and hourly is None else None
    machine = published.scaled(cluster.gpus) if published else Interval.exactly(hourly or HOUR)
    months_price = prices.gb_month * prices.months / 1e9 if hourly or published else 0.0

    def questions(running_s: float, an_hour: float, size: float, bytes_s: float) -> float:
        each = running_s / work.videos * an_hour / HOUR
        saved = each - size / bytes_s * an_hour / HOUR / max(1, cluster.gpus)
        return max(1.0, (each + size * months_price) / saved) if saved > 0 else math.inf

    size = work.output_bytes  # the dearer encoding is, the sooner the cache pays
    return Interval(
        questions(running.high, machine.high, size.low, _READ_BYTES_S.low),
        questions(running.expected, machine.expected, size.expected, _READ_BYTES_S.expected),
        questions(running.low, machine.low, size.high, _READ_BYTES_S.high),
    )


def _said(cluster: Cluster, prices: Prices) -> list[str]:
    """Return what a reader must know of prices and assumptions."""
    said = []
    if cluster.gpus:
        low, expected, high = (f"{100 * part:.0f}" for part in _ends(UTILISATION))
        peak = f"{expected} % ({low} to {high} %) of the GPU's peak"
        said.append(f"a vision tower is assumed to reach {peak}, and pruning some steps of 8 us: not measured")
    if prices.per_hour(cluster) is not None:
        return said
    said.append("no price is given (--gpu-hour, or --core-hour for CPUs), so no cost is told")
    if cluster.gpu_type and (published := GPU_TYPES[cluster.gpu_type].price):
        said.append(f"from which question it pays is told at {published.low} to {published.high} dollars a GPU-hour")
    else:
        said.append("from which question it pays is told by time alone, with storage for nothing")
    return said
