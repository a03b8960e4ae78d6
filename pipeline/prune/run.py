"""One prune run, on the driver: check everything, then stream, then commit shard by shard."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import pyarrow as pa
import ray
import torch
from rich.console import Console

from gstep.backbones import family_of
from pipeline.cache.header import fingerprint, header_bytes
from pipeline.cache.ledger import Ledger
from pipeline.cache.live_rows import VIDEOS
from pipeline.cache.reader import HEADER, read_header
from pipeline.cache.schema import SCHEMA_VERSION
from pipeline.cache.writer import commit
from pipeline.errors import RunFailed
from pipeline.execution.cluster import cause, connect, provenance, settle
from pipeline.execution.heartbeat import start_pulse
from pipeline.execution.progress import reporter
from pipeline.execution.request import refusing
from pipeline.execution.run_record import RunFile
from pipeline.execution.stream import stream
from pipeline.execution.watchdog import Watch
from pipeline.prune.config import PruneConfig
from pipeline.prune.graph import Resources, build_graph, plan_resources, videos_for
from pipeline.prune.request import Job, match_cache, prepare
from pipeline.prune.resume import remaining, said_of_the_rest, share_of
from pipeline.prune.summary import Summary, summarise
from pipeline.storage.lock import Lock, cache_lock

_RECORDED_VERSIONS = ("gstep-cache", "torch", "transformers", "ray", "pyarrow", "av", "decord")


def prune_videos(config: PruneConfig, console: Console) -> Summary:
    """Bring the cache ``config.out`` up to date with ``config.videos``.

    Raises UsageError (nothing was started) or RunFailed (the cache holds what was committed; a rerun goes on).
    """
    try:
        return _prune_videos(config, console)
    except OSError as error:  # the store failed; a video's own fault never gets here
        raise RunFailed(cause(error)) from error


def _prune_videos(config: PruneConfig, console: Console) -> Summary:
    job = prepare(config, console)
    shown = " ".join(f"{name}={value}" for name, value in config.as_record().items() if value not in (None, []))
    console.print(f"configuration: {shown}", style="dim", markup=False, highlight=False, soft_wrap=True)
    job.store.make()
    with cache_lock(job.store, job.run_id, partial(console.print, highlight=False, markup=False)) as lock:
        job = match_cache(job, console)  # again: another run may have written the header before the lock was ours
        started = time.monotonic()
        ledger = Ledger(job.store).refresh()
        todo, counts = remaining(job.manifest, ledger, config, job.objects)
        for line in said_of_the_rest(counts, config):
            console.print(line, highlight=False)
        todo, n_waiting = share_of(todo, config.limit)
        run_file, n_failed = _stream(job, todo, lock, console) if len(todo) else (None, 0)
        seconds = time.monotonic() - started
        levels = read_header(job.store).get("deepstack_levels", 0)
        summary = summarise(
            ledger.refresh(),
            job.manifest,
            levels,
            n_waiting=n_waiting,
            n_new=len(todo),
            n_new_failed=n_failed,
            wall_s=seconds,
        )
        if run_file is not None:
            run_file.save(summary=summary.as_record())
        return summary


def _stream(job: Job, todo: pa.Table, lock: Lock, console: Console) -> tuple[RunFile, int]:
    """Run the graph over ``todo`` and commit every shard it writes, under a record of the run."""
    cluster = connect()
    device, dtype = settle(cluster, job.config.device, job.dtype, job.config.attn)
    if not job.store.names(VIDEOS, ".parquet"):
        _write_header(job, dtype, lock)
    decode, encode = job.decode_setup(), job.encode_setup(device, dtype)
    shape = decode.largest_frames()
    wanted = _plan(job.config, cluster, device, len(todo), encode.bytes_per_video(*shape), shape[0])
    plan = wanted.fitting(cluster.get("object_store_memory", math.inf), encode.bytes_per_video(*shape))
    for note in _shortfalls(job.config, wanted, plan, len(todo)):
        console.print(f"note: {note}", highlight=False, markup=False)
    pulse = start_pulse()
    dataset = build_graph(todo, decode, encode, plan, store=job.store, run_id=job.run_id, pulse=pulse)
    run_file = RunFile(job.store, _run_record(job, device, dtype, plan, len(todo)))
    watch = partial(Watch, pulse, job.config.stall_timeout, plan, len(todo))
    bar = reporter(console, len(todo), job.config.log_interval)
    made_with = fingerprint(read_header(job.store)["identity"])
    with run_file:
        to_commit = partial(commit, job.store, job.run_id, made_with=made_with)
        n_failed = stream(dataset, to_commit, len(todo), "video", lock, watch, bar)
    return run_file, n_failed


def _plan(
    config: PruneConfig, cluster: dict[str, float], device: str, n_videos: int, token_bytes: int, n_frames: int
) -> Resources:
    """The shares of the cluster, for videos whose kept tokens take ``token_bytes``."""
    by_size = videos_for(config.target_shard_mb * 10**6, token_bytes, n_frames)
    return plan_resources(
        cluster["CPU"],
        cluster.get("GPU", 0.0) if device == "cuda" else 0.0,
        n_videos,
        videos_per_shard=config.videos_per_shard or by_size,
        decode_workers=config.decode_workers,
        encode_workers=config.encode_workers,
    )


def _shortfalls(config: PruneConfig, wanted: Resources, plan: Resources, n_videos: int) -> Iterator[str]:
    """What was asked for and is not to be had."""
    for name, asked, given in (
        ("decode-workers", config.decode_workers, plan.decode.workers),
        ("encode-workers", config.encode_workers, plan.encode.workers),
    ):
        if asked is not None and given < min(asked, n_videos):
            yield f"the cluster has room for {given} of --{name} {asked}"
    if plan.videos_per_shard < wanted.videos_per_shard:
        yield f"shards get {plan.videos_per_shard} videos: more would not fit Ray's object stores"


def _write_header(job: Job, dtype: str, lock: Lock) -> None:
    with refusing():
        static = family_of(job.source).static()
    newline = static.newline
    bits = None if newline is None else newline.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    header = {
        "schema_version": SCHEMA_VERSION,
        "identity": job.identity(dtype),
        "newline": None if bits is None else base64.b64encode(bits).decode(),
        "hidden_size": static.hidden_size,
        "deepstack_levels": static.deepstack_levels,
    }
    lock.check()  # starting Ray may have taken longer than a lease lasts
    job.store.put(HEADER, header_bytes(header))


def _run_record(job: Job, device: str, dtype: str, resources: Resources, n_videos: int) -> dict[str, Any]:
    """Provenance: recorded, never compared."""
    return {
        **provenance(job.run_id, _RECORDED_VERSIONS),
        "config": job.config.as_record(),
        "device": device,
        "dtype": dtype,
        "resources": {"cluster": dict(ray.cluster_resources()), "plan": asdict(resources)},
        "videos": n_videos,
    }
