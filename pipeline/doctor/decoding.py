"""What decoding costs here: core-seconds a video, and so how many cores keep one encoder fed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from time import perf_counter

import pyarrow as pa

from pipeline.doctor.finding import Finding
from pipeline.errors import UsageError
from pipeline.inputs.container import Asked
from pipeline.inputs.discovery import Discovery
from pipeline.inputs.indexes import Indexing
from pipeline.inputs.manifest import read_manifest
from pipeline.inputs.named_videos import TODO_SCHEMA
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import DecodeSetup, VideoDecoder
from pipeline.rows import TodoRow
from pipeline.storage.s3 import Objects

_MOST_S = 60.0  # seconds that decoding may take in all


def first_videos(config: PruneConfig, objects: Objects, n_videos: int) -> list[TodoRow]:
    """Return the first videos that the options name; no more containers are opened than hold so many.

    Raises UsageError where there is none, RunFailed where a container cannot be indexed.
    """
    indexing = Indexing(Asked(config.column, config.clip_names()), later=True, limited=True)
    known = _todo(read_manifest(config.videos, config.video_root, objects, indexing)).slice(0, n_videos)
    with Discovery(indexing, objects, lambda videos: (videos, _todo(videos)), known, n_videos) as found:
        rows: list[TodoRow] = found.all().todo.to_pylist()
    if not rows:
        raise UsageError(f"{config.named}: none of the containers holds a video")
    return rows


def _todo(videos: pa.Table) -> pa.Table:
    """Return videos (MANIFEST_SCHEMA) as rows to process for the first time (TODO_SCHEMA)."""
    attempts = pa.array([1] * len(videos), pa.int32())
    return pa.Table.from_arrays([*videos.columns, attempts], schema=TODO_SCHEMA)


def check_decoding(setup: DecodeSetup, rows: Sequence[TodoRow], seconds: list[float]) -> Iterator[Finding]:
    """Decode sample videos as a run does, for a minute at most; yield findings.

    The core-seconds of each are added to ``seconds``; the decode process runs one thread.
    """
    decoder, faults, codecs = VideoDecoder(setup), Counter[str](), Counter[str]()
    started = perf_counter()
    try:
        for row in rows:
            with decoder.open(row) as source:
                record, frames = decoder.decode_one(row, source)
            if frames is None:
                faults[f"{record['error_class']}, e.g. {row['video_id']}: {record['error_message']}"] += 1
            else:
                seconds.append(record["decode_s"])
                codecs[f"{record['codec']} {record['source_width']}x{record['source_height']}"] += 1
            if perf_counter() - started > _MOST_S:
                break
    finally:
        decoder.close()
    for says, n in faults.items():
        many = f"{n} of {faults.total() + codecs.total()} videos"
        yield Finding("decoding", "wrong", f"{many}: {says}", "see the message")
    if seconds:
        kinds = ", ".join(f"{n} {kind}" for kind, n in codecs.most_common(4))
        cost = f"{median(seconds):.3f} core-seconds a video"
        yield Finding("decoding", "ok", f"{cost}, median of {codecs.total()}: {kinds}")


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
    remedy = "add nodes with CPUs alone, or try --snap-to-keyframes and --decoder nvdec"
    return Finding.slow_if(has < wanted, "balance", says, remedy)
