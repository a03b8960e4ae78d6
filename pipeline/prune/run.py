"""One prune run, on the driver: check everything, then stream, then commit shard by shard."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

import pyarrow as pa
import ray
import torch
from rich.console import Console

from gstep.backbones import family_of
from pipeline.cache.header import CacheHeader, fingerprint, header_bytes
from pipeline.cache.ledger import Ledger
from pipeline.cache.live_rows import VIDEOS
from pipeline.cache.reader import HEADER, read_header
from pipeline.cache.schema import SCHEMA_VERSION
from pipeline.cache.writer import commit
from pipeline.execution.cluster import connect, provenance, settle
from pipeline.execution.request import refusing
from pipeline.execution.run import Run, Streamed
from pipeline.execution.run_record import RunFile, RunRecord
from pipeline.execution.stream import Graph, stream
from pipeline.prune.batches import written_records
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import DecodeSetup
from pipeline.prune.encode_stage import EncodeSetup
from pipeline.prune.graph import Resources, build_graph, plan_resources, videos_for
from pipeline.prune.request import PruneRequest, match_cache, prepare
from pipeline.prune.resume import remaining, said_of_the_rest, share_of
from pipeline.prune.summary import Summary, summarise
from pipeline.storage.lock import Lock

_RECORDED_VERSIONS = ("gstep-cache", "torch", "transformers", "ray", "pyarrow", "av", "decord")


def prune_videos(config: PruneConfig, console: Console) -> Summary:
    """Bring the cache ``config.out`` up to date with ``config.videos``.

    Raises UsageError (nothing was started) or RunFailed (the cache holds what was committed; a rerun goes on).
    """
    return PruneRun(config, console).carry_out()


@dataclass(frozen=True)
class Todo:
    """What is left to do.

    Attributes:
        videos: TODO_SCHEMA.
        n_waiting: videos without a row that ``--limit`` leaves for another run.
        ledger: what the cache holds.
    """

    videos: pa.Table
    n_waiting: int
    ledger: Ledger

    def __len__(self) -> int:
        return len(self.videos)


class PruneRun(Run[PruneConfig, PruneRequest, Todo, Summary]):
    """videos -> decode -> encode and prune -> write; the driver commits. ``pipeline.prune.graph`` has the stages."""

    def prepare(self) -> PruneRequest:
        return prepare(self.options, self.console)

    def match(self, request: PruneRequest) -> PruneRequest:
        return match_cache(request, self.console)

    def remaining(self, request: PruneRequest) -> Todo:
        ledger = Ledger(request.store).refresh()
        todo, counts = remaining(request.manifest, ledger, self.options, request.objects)
        for line in said_of_the_rest(counts, self.options):
            self.console.print(line, highlight=False)
        return Todo(*share_of(todo, self.options.limit), ledger)

    def stream(self, request: PruneRequest, todo: Todo, lock: Lock) -> Streamed:
        config, n_videos = self.options, len(todo)
        cluster = connect()
        device, dtype = settle(cluster, config.device, request.dtype, config.attn)
        if not request.store.names(VIDEOS, ".parquet"):
            _write_header(request, dtype, lock)
        decode, encode = request.decode_setup(), request.encode_setup(device, dtype)
        plan = self._planned(cluster, device, n_videos, decode, encode)
        made_with = fingerprint(read_header(request.store)["identity"])

        def write(number: int, rows: pa.Table) -> None:
            rows_of = written_records(rows)
            commit(request.store, request.run_id, number, rows_of, made_with=made_with, lock=lock)

        build = partial(build_graph, todo.videos, decode, encode, plan, request.store, request.run_id)
        run_file = RunFile(request.store, _run_record(request, device, dtype, plan, n_videos))
        with run_file:
            n_failed = stream(Graph(build, write, plan, n_videos), lock, self.console, config)
        return Streamed(run_file, n_failed)

    def summarise(self, request: PruneRequest, todo: Todo, n_failed: int, wall_s: float) -> Summary:
        return summarise(
            todo.ledger.refresh(),
            request.manifest,
            read_header(request.store).get("deepstack_levels", 0),
            n_waiting=todo.n_waiting,
            n_new=len(todo),
            n_new_failed=n_failed,
            wall_s=wall_s,
        )

    def _planned(
        self, cluster: dict[str, float], device: str, n_videos: int, decode: DecodeSetup, encode: EncodeSetup
    ) -> Resources:
        """The shares of the cluster; what was asked for and is not to be had is said."""
        shape = decode.largest_frames()
        token_bytes = encode.bytes_per_video(*shape)
        wanted = _plan(self.options, cluster, device, n_videos, token_bytes, shape[0])
        plan = wanted.fitting(cluster.get("object_store_memory", math.inf), token_bytes)
        for note in _shortfalls(self.options, wanted, plan, n_videos):
            self.console.print(f"note: {note}", highlight=False, markup=False)
        return plan


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


def _write_header(request: PruneRequest, dtype: str, lock: Lock) -> None:
    with refusing():
        static = family_of(request.source).static()
    newline = static.newline
    bits = None if newline is None else newline.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    header: CacheHeader = {
        "schema_version": SCHEMA_VERSION,
        "identity": request.identity(dtype),
        "newline": None if bits is None else base64.b64encode(bits).decode(),
        "hidden_size": static.hidden_size,
        "deepstack_levels": static.deepstack_levels,
    }
    lock.check()  # starting Ray may have taken longer than a lease lasts
    lock.put(HEADER, header_bytes(header))


def _run_record(request: PruneRequest, device: str, dtype: str, resources: Resources, n_videos: int) -> RunRecord:
    """Provenance: recorded, never compared."""
    return {
        **provenance(request.run_id, _RECORDED_VERSIONS),
        "config": request.config.as_record(),
        "device": device,
        "dtype": dtype,
        "resources": {"cluster": dict(ray.cluster_resources()), "plan": asdict(resources)},
        "videos": n_videos,
    }
