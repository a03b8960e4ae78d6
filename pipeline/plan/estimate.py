"""The forecast of a run in closed form: the slowest stage sets the pace, once the first videos are through."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.plan.gpus import GPU_TYPES, UTILISATION
from pipeline.plan.intervals import NONE, Interval, as_json, product, spread, total
from pipeline.plan.options import PlanOptions
from pipeline.plan.workload import Workload
from pipeline.rows import Json

HOUR = 3600.0
PAYS = "from which question it pays is told"  # begins a note on ``Plan.break_even_questions``
# Measured on two cores by `python -m jobs.benchmark pipeline` (jobs/benchmark/README.md): CPU seconds outside decoding
# a video, of a byte of its frames and of a bundle of videos, in all processes; and of these two in the driver alone,
# which is one process and reads the records of all.
_HOST_S, _HOST_S_A_BYTE, _HOST_S_A_BUNDLE = 1.5e-3, 0.6e-9, 10e-3
_DRIVER_S, _DRIVER_S_A_BUNDLE = 0.4e-3, 4.5e-3
_OFF = Interval(0.7, 1.3, 3.0)  # what a core takes for it in a run, where stages wait for each other
# Operations a second of a core of a CPU in float32.
_CPU_RATE = Interval(6e9, 20e9, 60e9)
# Seconds on a GPU of a step of selection, of what else pruning a video costs there, and by how much it delays the next
# video, which is encoded beside it. Measured on one H200: 2.5 and 3.8 us a step at 6,272 and 11,520 tokens, 15 us above
# 16,384 (jobs/benchmark/README.md).
STEP_S, _PRUNE_S = Interval(2e-6, 3.5e-6, 15e-6), Interval(2e-3, 4e-3, 8e-3)
_DELAY_S = Interval(1e-3, 4e-3, 8e-3)
LOSS = Interval(1.0, 1.03, 1.12)  # time that stages lose by waiting for each other
_START_S, _CLUSTER_START_S = Interval(5, 10, 40), Interval(15, 40, 180)
_READ_BYTES_S = Interval(1e8, 5e8, 2e9)  # bytes a second at which a reader gets tokens of the cache
_CONTEXT_BYTES = 0.6e9  # of CUDA and its libraries
_LIVE_VECTORS = Interval(8, 14, 24)  # of each patch at the peak of a layer
DECODE, ENCODE, DRIVER, CPUS, NOTHING = "decode", "encode", "driver", "cpus", "nothing"


class Cluster(NamedTuple):
    """The machines of a run; ``cores`` are vCPUs, and all of them decode.

    Encoders that share a GPU share its time, and each has a vision tower and a CUDA context of its own.
    """

    gpus: int
    gpu_type: str | None
    cores: float
    encoders_per_gpu: int = 1

    @property
    def start_s(self) -> Interval:
        """Seconds until the first worker takes a video; a cluster of many nodes loads the model over a network."""
        return _CLUSTER_START_S if self.gpus > 8 or self.cores > 256 else _START_S

    def seconds_an_operation(self, utilisation: Interval = UTILISATION) -> Interval:
        """Return the seconds that one floating-point operation of a model takes on a GPU, or on a core without any.

        ``utilisation`` is the share of the GPU's peak that the model reaches.
        """
        peak = utilisation.scaled(GPU_TYPES[self.gpu_type or "A100"].peak)
        return (peak if self.gpus else _CPU_RATE).inverse()


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
        simulated_wall_s: what the simulation gives; None unless it was asked for.
        parts_s: of an evaluation the seconds of encoding, pruning and answering, on GPUs or else on cores.
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
    stage_s: Mapping[str, Interval]
    bottleneck: str
    remedy: str
    cores_a_gpu: Interval | None
    encoder_busy: Interval
    video_hours_per_day_per_gpu: Interval | None
    peak_gpu_bytes: Interval | None
    break_even_questions: Interval | None
    cost: Mapping[str, Interval] | None
    cluster: Cluster
    tiers: Mapping[str, Interval] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    simulated_wall_s: float | None = None
    parts_s: Mapping[str, Interval] = field(default_factory=dict)

    def as_record(self) -> dict[str, Json]:
        """Return the plan as a JSON-able mapping."""
        return {name: as_json(value) for name, value in vars(self).items()}


class Seconds(NamedTuple):
    """Seconds of one video: cores that decode and that serve, of the driver, and of the encoder (a GPU, or cores)."""

    decode: Interval
    host: Interval
    driver: Interval
    encode: Interval


def seconds_of(work: Workload, cluster: Cluster) -> Seconds:
    """Estimate what one video takes at each stage of the cluster."""
    bundle = work.bundle
    host = spread(lambda n: _HOST_S + _HOST_S_A_BYTE * n + _HOST_S_A_BUNDLE / bundle, work.frame_bytes)
    driver = _OFF.scaled(_DRIVER_S + _DRIVER_S_A_BUNDLE / bundle)
    model = product(work.flops, cluster.seconds_an_operation(work.utilisation))
    if cluster.gpus:
        pruning = spread(lambda kept, step, more: kept * step + more, work.tokens[1], STEP_S, _PRUNE_S)
        encode = total(spread(max, model, pruning), _DELAY_S)
    else:
        encode = total(model, work.selection_s)
    return Seconds(work.decode_s, product(host, _OFF), driver, work.encode_s or encode)


def estimate(work: Workload, cluster: Cluster, prices: Prices, notes: tuple[str, ...] = ()) -> Plan:
    """Estimate a run of these videos on this cluster."""
    one, stages = seconds_of(work, cluster), _stages(work, cluster)
    running = spread(lambda *parts: max(parts[:-1]) * parts[-1], *stages.values(), LOSS)
    # The first video passes all stages while no other one overlaps it.
    wall = total(cluster.start_s, one.decode, one.encode, running) if work.videos else NONE
    encode, output = product(work.good, one.encode), product(work.good, work.output_bytes)
    video = work.seconds and product(work.good, work.seconds)
    slowest = max(stages, key=lambda name: stages[name].expected) if work.videos else NOTHING
    per_wall = wall.inverse() if work.videos else NONE
    encoders = cluster.gpus or max(1, int(cluster.cores // 4))
    return Plan(
        videos=work.videos,
        wall_s=wall,
        decode_core_s=work.decode_s.scaled(work.videos),
        gpu_s=encode if cluster.gpus else NONE,
        encode_core_s=NONE if cluster.gpus else encode,
        host_core_s=one.host.scaled(work.videos),
        output_bytes=output,
        input_bytes=work.input_bytes and work.input_bytes.scaled(work.videos),
        video_s=video,
        failed_share=work.failed,
        stage_s=stages,
        bottleneck=slowest,
        remedy=_remedy(slowest, cluster, stages, one),
        cores_a_gpu=spread(lambda d, h, e: (d + h) * e, one.decode, one.host, one.encode.inverse())
        if cluster.gpus
        else None,
        encoder_busy=Interval(*(min(1.0, encode.expected / encoders * end) for end in per_wall)),
        video_hours_per_day_per_gpu=per_wall.scaled(24 * video.expected / cluster.gpus)
        if video and cluster.gpus
        else None,
        peak_gpu_bytes=_peak(work).scaled(cluster.encoders_per_gpu) if cluster.gpus else None,
        break_even_questions=_break_even(work, cluster, prices, running),
        cost=_cost(work.videos, prices, prices.per_hour(cluster), wall, video, output),
        cluster=cluster,
        tiers={f"{ratio:g}": output.scaled(share) for ratio, share in sorted(work.reads.items())},
        notes=(*work.notes, *notes, *_said(work, cluster, prices)),
    )


def _stages(work: Workload, cluster: Cluster) -> dict[str, Interval]:
    """Return the wall time that each stage would take by itself."""
    one, n = seconds_of(work, cluster), work.videos
    encode, driver = product(work.good, one.encode), one.driver.scaled(n)
    host = spread(lambda d, h: n * (d + h) / cluster.cores, one.decode, one.host)
    if cluster.gpus:
        return {DECODE: host, ENCODE: encode.scaled(1 / cluster.gpus), DRIVER: driver}
    # Decoders and encoders share the cores.
    return {CPUS: total(host, encode.scaled(1 / cluster.cores)), DRIVER: driver}


def _peak(work: Workload) -> Interval:
    """Estimate the memory of an encoder on a GPU: bfloat16 weights, vectors of the patches encoded at once, CUDA."""
    return Interval(*(2 * work.parameters + _CONTEXT_BYTES + number * work.patch_bytes for number in _LIVE_VECTORS))


def _remedy(slowest: str, cluster: Cluster, stages: Mapping[str, Interval], one: Seconds) -> str:
    """Return what would remove the bottleneck, and what would be the next one."""
    if slowest == NOTHING:
        return "nothing is left to do"
    others = {name: part.expected for name, part in stages.items() if name != slowest}
    next_one = max(others, key=lambda name: others[name])
    factor, until = stages[slowest].expected / max(others[next_one], 1e-9), f"until {next_one} takes as long"
    if slowest == DECODE:
        more = f"{math.ceil(cluster.cores * (factor - 1)):,} more decode cores, {until}"
        return f"{more}; --snap-to-keyframes for long videos; or --decoder nvdec"
    if slowest == ENCODE:
        return f"{math.ceil(cluster.gpus * (factor - 1)):,} more GPUs, {until}"
    if slowest == DRIVER:
        return f"{math.ceil(factor)} drivers, each with --shard I/{math.ceil(factor)} --join, {until}"
    dearer = "decoding" if one.decode.expected > one.encode.expected else "encoding"
    return f"more cores, or a GPU; most of their time is {dearer}"


def _cost(
    videos: int, prices: Prices, hourly: float | None, wall: Interval, video: Interval | None, output: Interval
) -> dict[str, Interval] | None:
    """Return what the run costs, in all and by its videos, and what keeping the cache costs; None without a price."""
    if hourly is None:
        return None
    whole = wall.scaled(hourly / HOUR)
    found = {"total": whole, "storage_a_month": output.scaled(prices.gb_month / 1e9)}
    if videos:
        found["per_1000_videos"] = whole.scaled(1000 / videos)
    if video is not None and video.expected:
        found["per_video_hour"] = whole.scaled(HOUR / video.expected)
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

    # The dearer encoding is, the sooner the cache pays.
    cases = zip(reversed(running), reversed(machine), work.output_bytes, reversed(_READ_BYTES_S), strict=True)
    return Interval(*(questions(*case) for case in cases))


def _said(work: Workload, cluster: Cluster, prices: Prices) -> list[str]:
    """Return what a reader must know of prices and assumptions."""
    said = []
    if cluster.gpus:
        low, expected, high = (f"{100 * end:.0f}" for end in work.utilisation)
        peak = f"{expected} % ({low} to {high} %) of the GPU's peak"
        said.append(f"a vision tower is assumed to reach {peak}, as one H200 did with random weights")
    if prices.per_hour(cluster) is not None:
        return said
    said.append("no price is given (--gpu-hour, or --core-hour for CPUs), so no cost is told")
    if cluster.gpu_type and (published := GPU_TYPES[cluster.gpu_type].price):
        said.append(f"{PAYS} at {published.low} to {published.high} dollars a GPU-hour")
    else:
        said.append(f"{PAYS} by time alone, with storage for nothing")
    return said
