"""What decoding costs here: core-seconds a video, and so how many cores keep one encoder fed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from pipeline.doctor.finding import Finding
from pipeline.prune.decode_stage import DecodeSetup, VideoDecoder
from pipeline.rows import TodoRow

_MOST_S = 60.0  # seconds that decoding may take in all


@dataclass
class DecodeCost:
    """The core-seconds that each sample video took to decode; the decode process runs one thread."""

    seconds: list[float]

    @property
    def median_s(self) -> float | None:
        """The median core-seconds of decoding a video; None where none was decoded."""
        return median(self.seconds) if self.seconds else None


def check_decoding(setup: DecodeSetup, rows: Sequence[TodoRow], cost: DecodeCost) -> Iterator[Finding]:
    """Decode sample videos as a run does, for a minute at most, adding their seconds to ``cost``; yield findings."""
    decoder, faults, codecs = VideoDecoder(setup), Counter[str](), Counter[str]()
    started = perf_counter()
    try:
        for row in rows:
            with decoder.open(row) as source:
                record, frames = decoder.decode_one(row, source)
            if frames is None:
                faults[f"{record['error_class']}, e.g. {row['video_id']}: {record['error_message']}"] += 1
            else:
                cost.seconds.append(record["decode_s"])
                codecs[f"{record['codec']} {record['source_width']}x{record['source_height']}"] += 1
            if perf_counter() - started > _MOST_S:
                break
    finally:
        decoder.close()
    for says, n in faults.items():
        yield Finding(
            "decoding", "wrong", f"{n} of {faults.total() + codecs.total()} videos: {says}", "see the message"
        )
    if cost.median_s is not None:
        kinds = ", ".join(f"{n} {kind}" for kind, n in codecs.most_common(4))
        yield Finding(
            "decoding", "ok", f"{cost.median_s:.3f} core-seconds a video, median of {codecs.total()}: {kinds}"
        )


def check_balance(decode_s: float | None, encode_s: float | None, cores: float, gpus: float) -> Finding:
    """Return a finding that compares the decode cores an encoder needs with the cores that the cluster has."""
    if decode_s is None or encode_s is None:
        return Finding("balance", "unknown", "needs a video that decodes and a model that encodes")
    wanted = decode_s / encode_s
    if gpus < 1:
        says = f"without a GPU encoding takes {1 / wanted:.1f} times what decoding does; both share {cores:g} cores"
        return Finding("balance", "unknown", says, "run this where the GPUs are")
    has = cores / gpus
    says = f"this model wants {wanted:.1f} decode cores a GPU; the cluster has {has:.1f}"
    if has >= wanted:
        return Finding("balance", "ok", says)
    return Finding("balance", "slow", says, "add nodes with CPUs alone, or try --snap-to-keyframes and --decoder nvdec")
