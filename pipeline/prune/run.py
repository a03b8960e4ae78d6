"""One prune run, on the driver: check everything, then stream, then commit shard by shard."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

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
from pipeline.errors import FAULTS, FaultClass
from pipeline.execution.cluster import connect, provenance, settle
from pipeline.execution.heartbeat import Reading
from pipeline.execution.nodes import resources_without, troubled
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
from pipeline.prune.resume import another_attempt, remaining, said_of_the_rest, share_of
from pipeline.prune.summary import Summary, summarise
from pipeline.rows import failed_from_outside, may_succeed_elsewhere
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


# Fewer failures than these never stop a run: a folder that is missing may be as large.
ALIKE = 50


class Setups(NamedTuple):
    """What workers need to know."""

    decode: DecodeSetup
    encode: EncodeSetup


class Commits:
    """Makes the shards of a run visible, over all its passes.

    Attributes:
        retryable: of the videos that failed by what may be the fault of a machine, the attempts that each has had.
    """

    def __init__(self, request: PruneRequest, made_with: str, lock: Lock, limit: int) -> None:
        """``limit``: of failures alike from outside the videos."""
        self.request = request
        self.lock = lock
        self.retryable: dict[str, int] = {}
        self._made_with = made_with
        self._count = 0
        self._limit = max(limit, ALIKE)
        self._outside: Counter[FaultClass] = Counter()
        self._example: dict[FaultClass, str] = {}

    def __call__(self, number: int, rows: pa.Table) -> None:
        """Commit the rows of a shard (WRITTEN); its ``number`` is that of its pass."""
        records, store, run_id = written_records(rows), self.request.store, self.request.run_id
        commit(store, run_id, self._count, records, made_with=self._made_with, lock=self.lock)
        self._count += 1
        failed = filter(may_succeed_elsewhere, records)
        self.retryable.update({record["video_id"]: record["attempts"] for record in failed})
        for record in filter(failed_from_outside, records):
            self._outside[record["error_class"]] += 1
            self._example[record["error_class"]] = f"{record['video_id']}: {record['error_message']}"

    def give_up(self, reading: Reading) -> str | None:
        """Why this pass should stop: too many videos failed alike, by no fault of theirs, and no worker does better."""
        if not reading.failing or not self._outside:
            return None
        ((fault, count),) = self._outside.most_common(1)
        if count <= self._limit:
            return None
        stage, remedy = reading.failing[0], FAULTS[fault].remedy
        return f"{count} videos failed alike and all {stage} workers fail ({fault}, {self._example[fault]}): {remedy}"


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
        setups = Setups(request.decode_setup(), request.encode_setup(device, dtype))
        plan = self._planned(cluster, n_videos, setups)
        made_with = fingerprint(read_header(request.store)["identity"])
        commits = Commits(request, made_with, lock, config.outside_limit(n_videos))
        run_file = RunFile(request.store, _run_record(request, device, dtype, plan, n_videos))
        with run_file:
            build = partial(build_graph, todo.videos, *setups, plan, request.store, request.run_id)
            ended = stream(Graph(build, commits, plan, n_videos, commits.give_up), lock, self.console, config)
            run_file.save(out_of_service=ended.reading.out_of_service)
            again = another_attempt(todo.videos, commits.retryable, config.max_attempts)
            n_mended = self._second_pass(again, troubled(ended.reading.tried), setups, commits) if len(again) else 0
        return Streamed(run_file, ended.n_failed - n_mended)

    def _second_pass(self, again: pa.Table, without: Mapping[str, str], setups: Setups, commits: Commits) -> int:
        """Try videos that failed once more, on other nodes; returns how many of them are ok now.

        ``without`` are the nodes to leave out, id -> host: where there is none, nothing would go another way.
        """
        if not without:
            return 0
        request, hosts = commits.request, ", ".join(sorted(set(without.values())))
        cluster = resources_without(without)
        if cluster.get("CPU", 0.0) <= 0 or (setups.encode.device == "cuda" and cluster.get("GPU", 0.0) < 1):
            self._note(f"{len(again)} videos failed, many on {hosts}, and no other node is there to try them again")
            return 0
        self._note(f"{len(again)} videos that failed are tried again without {hosts}, where most did")
        plan = self._planned(cluster, len(again), setups)
        build = partial(build_graph, again, *setups, plan, request.store, request.run_id, without=without)
        ended = stream(Graph(build, commits, plan, len(again)), commits.lock, self.console, self.options)
        return len(again) - ended.n_failed

    def _note(self, text: str) -> None:
        self.console.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)

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

    def _planned(self, cluster: dict[str, float], n_videos: int, setups: Setups) -> Resources:
        """The shares of the cluster; what was asked for and is not to be had is said."""
        shape = setups.decode.largest_frames()
        token_bytes = setups.encode.bytes_per_video(*shape)
        wanted = _plan(self.options, cluster, setups.encode.device, n_videos, token_bytes, shape[0])
        plan = wanted.fitting(cluster.get("object_store_memory", math.inf), token_bytes)
        for note in _shortfalls(self.options, wanted, plan, n_videos):
            self._note(note)
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
