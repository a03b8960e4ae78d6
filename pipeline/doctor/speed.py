"""The speed of decoding and encoding here, and whether CPU cores keep the encoders busy."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from statistics import median

import numpy as np
import pyarrow as pa
import torch

from gstep.backbones import SampledVideo
from pipeline.doctor.finding import Finding, run_guarded
from pipeline.errors import UsageError
from pipeline.inputs.indexes import Indexes
from pipeline.inputs.video_list import VideoList
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import DecodeSetup, decode_sample
from pipeline.prune.encode_stage import EncodeSetup
from pipeline.rows import ManifestRow, TodoRow
from pipeline.storage.s3 import Objects

_MAX_DECODE_S = 60.0  # for all videos together
_KERNEL_WIDTH = 3584  # the hidden size of a 7B model
_ROUNDS = 3


def read_first_videos(config: PruneConfig, objects: Objects, n_videos: int) -> list[TodoRow]:
    """Return the first videos that the options name, at most ``n_videos``; only as many archives are read as needed.

    Raises:
        UsageError: the videos cannot be listed, or there are none.
    """
    indexes = Indexes(config.make_archive_options())
    videos = VideoList.read(config.videos, config.video_root, objects, indexes, first="needed", is_limited=True)
    tables = [videos.known]
    n_missing = n_videos - len(videos.known)
    archives = videos.read_unindexed()
    while n_missing > 0 and (view := next(archives, None)) is not None:
        if view.is_whole or len(view.videos) >= n_missing:
            tables.append(view.videos)
            n_missing -= len(view.videos)
    archives.close()
    listed: list[ManifestRow] = pa.concat_tables(tables).slice(0, n_videos).to_pylist()
    rows: list[TodoRow] = [{**row, "attempts": 1} for row in listed]
    if not rows:
        raise UsageError(f"{config.named}: none of the archives holds a video")
    return rows


def check_decoding(setup: DecodeSetup, rows: Sequence[TodoRow]) -> tuple[list[Finding], float | None]:
    """Decode videos as a run does, until a minute has passed.

    Returns:
        A "wrong" finding per fault class with its number of videos and the first of them, then an "ok" one if any video
        decoded; and the median core-seconds per decoded video, None if there is none.
    """
    faults = Counter[str]()
    examples = dict[str, str]()
    codecs = Counter[str]()
    seconds = list[float]()
    start = time.perf_counter()
    with closing(decode_sample(setup, rows)) as sample:
        for record, frames, core_s in sample:
            if frames is None:
                faults[record["error_class"]] += 1
                examples.setdefault(record["error_class"], f"{record['video_id']}: {record['error_message']}")
            else:
                seconds.append(core_s)
                codecs[f"{record['codec']} {record['source_width']}x{record['source_height']}"] += 1
            if time.perf_counter() - start > _MAX_DECODE_S:
                break
    total = faults.total() + codecs.total()
    findings = [
        Finding("decoding", "wrong", f"{n} of {total} videos: {kind}, e.g. {examples[kind]}", "see the message")
        for kind, n in faults.items()
    ]
    if not seconds:
        return findings, None
    kinds = ", ".join(f"{n} {kind}" for kind, n in codecs.most_common(4))
    says = f"{median(seconds):.3f} core-seconds a video, median of the {len(seconds)} that decoded: {kinds}"
    return [*findings, Finding("decoding", "ok", says)], median(seconds)


def check_device(setup: EncodeSetup, shape: tuple[int, int, int]) -> tuple[list[Finding], float | None]:
    """Check the device that an encoder would use here, and encode a random video of ``shape`` on it.

    Returns:
        The findings, exceptions included as "wrong"; and the median seconds per video, None if encoding fails.
    """
    seconds: list[float] = []
    if torch.cuda.is_available() and setup.device != "cpu":
        findings = [*run_guarded("gpu", _check_gpu), *run_guarded("kernels", _check_kernels)]
    else:
        findings = [Finding("gpu", "unknown", "not checked: no GPU here")]
    findings += run_guarded("encode", partial(_check_encoding, setup, shape, seconds))
    return findings, median(seconds) if seconds else None


def _check_gpu() -> Iterator[Finding]:
    """Yield one finding on the first GPU: "slow" if it emulates bfloat16 (compute capability below 8.0)."""
    gpu = torch.cuda.get_device_properties(0)
    says = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, capability {gpu.major}.{gpu.minor}"
    remedy = "bfloat16 is emulated before capability 8.0: use --dtype float16"
    yield Finding.warn_if_slow(gpu.major < 8, "gpu", f"{says}, CUDA {torch.version.cuda}", remedy)


def _check_kernels() -> Iterator[Finding]:
    """Compile the selection kernels and compare them with the reference on random tokens.

    RuntimeError is raised if they select different tokens.
    """
    from gstep.selection.gpu.check import check_kernels  # noqa: PLC0415 - needs Triton, which only a GPU has

    start = time.perf_counter()
    check_kernels(torch.device("cuda"), torch.bfloat16, _KERNEL_WIDTH)
    compiled = f"compiled in {time.perf_counter() - start:.0f} s"
    yield Finding("kernels", "ok", f"they selected the tokens that the plain form selects of random ones; {compiled}")


def _check_encoding(setup: EncodeSetup, shape: tuple[int, int, int], seconds: list[float]) -> Iterator[Finding]:
    """Load the encoder, encode and prune a random video once to warm up and three times timed; yield an "ok" finding.

    The seconds of each timed round are appended to ``seconds``. Errors are raised, not yielded as findings.
    """
    start = time.perf_counter()
    encoder = setup.encoder()
    loaded_s = time.perf_counter() - start
    frames = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    times = [float(t) for t in range(shape[0])]
    video = SampledVideo(*shape[1:], timestamps=times, start_s=None, fps=1.0, clip_frames=shape[0])
    encoder.prune(encoder.encode_frames(frames, video))  # the first video pays for buffers and kernels
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        encoder.prune(encoder.encode_frames(frames, video))
        seconds.append(time.perf_counter() - start)
    size = f"{shape[0]} frames of {shape[2]}x{shape[1]}"
    duration = f"{median(seconds):.3f} s, median of {_ROUNDS}"
    yield Finding("encode", "ok", f"a made-up video of {size} took {duration}; the model loaded in {loaded_s:.1f} s")


def check_balance(decode_s: float | None, encode_s: float | None, cores: float, gpus: float) -> Finding:
    """Compare the decode cores that keep a GPU busy with the cores per GPU of the cluster; too few are "slow".

    The finding is "unknown" without GPUs, or without the core-seconds or GPU-seconds per video (``decode_s``,
    ``encode_s``).
    """
    if decode_s is None or encode_s is None:
        return Finding("balance", "unknown", "not checked: it needs a video that decodes and a model that encodes")
    if gpus < 1:
        factor = encode_s / decode_s
        says = f"not checked without a GPU: on CPUs encoding a video takes {factor:.1f} times as long as decoding it"
        return Finding("balance", "unknown", says, "run this where the GPUs are")
    needed_cores, cores_per_gpu = decode_s / encode_s, cores / gpus
    says = f"this model needs {needed_cores:.1f} decode cores a GPU; the cluster has {cores_per_gpu:.1f}"
    remedy = "add nodes with CPUs alone, or try --snap-to-keyframes and --decoder nvdec"
    return Finding.warn_if_slow(cores_per_gpu < needed_cores, "balance", says, remedy)
