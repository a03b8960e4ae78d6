"""The passes of a run: first all videos, then the failed ones again on the nodes where fewer failed."""

from __future__ import annotations

import json
import math
import os
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import pyarrow as pa
from rich.console import Console

from pipeline.cache.header import fingerprint
from pipeline.cache.ledger import TIMED, Ledger
from pipeline.cache.merging import WAITING, try_merge
from pipeline.cache.reader import HEADER
from pipeline.cache.writer import commit, token_shard_id
from pipeline.errors import FAULTS, FaultClass, RunFailed
from pipeline.execution.cluster import failing_nodes, resources_without
from pipeline.execution.monitoring.metrics import Metrics
from pipeline.execution.monitoring.monitor import Monitor
from pipeline.execution.monitoring.report import WorkerReport
from pipeline.execution.run_record import COMMITTED, RunFile
from pipeline.execution.stream import PlannedGraph, stream
from pipeline.inputs.discovery import Discovery
from pipeline.prune.batches import written_records
from pipeline.prune.config import PruneConfig
from pipeline.prune.facts import Facts
from pipeline.prune.graph import Resources, build_graph, plan_resources, videos_for
from pipeline.prune.map_batches import PruneStages
from pipeline.prune.request import PruneRequest
from pipeline.prune.resume import unfinished
from pipeline.rows import VideoRecord, failed_from_outside, may_succeed_elsewhere
from pipeline.storage.hub import is_remote

# Fewer failures of one class never stop a run, since a missing folder may hold as many videos.
LEAST_ALIKE = 50
# If there are no more videos, the sizes of their files decide how many decoders are worth starting.
FILES_LOOKED_AT = 256
_NOTE_S = 60.0  # least seconds between two saves of the run's record while it runs


class Commits:
    """The committer of a run's shards, over all its passes.

    Attributes:
        failed: failed video -> attempts that it has had.
        retryable: the same of videos that may succeed on another machine.
        n_shards: how many shard numbers are taken.
        fetched: bytes of videos that were read from stores.
    """

    def __init__(
        self,
        request: PruneRequest,
        header: bytes,
        limit: int,
        run_file: RunFile,
        say: Callable[[str], object],
        facts: Facts | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        """Take the cache's ``header``, as a file, and the ``limit`` of failures alike from outside the videos.

        ``facts`` are what the run has taken; ``monitor`` shows that to others.
        """
        self._monitor = monitor
        self.facts = facts or Facts(0.0)
        self._run_file, self._say = run_file, say
        self.request = request
        self.failed: dict[str, int] = {}
        self.retryable: dict[str, int] = {}
        self.n_shards = self.fetched = 0
        self._token_shards: list[str] = []  # ascending
        self._n_waiting = 0
        self._noted = time.monotonic()
        self._header, self._made_with = header, fingerprint(json.loads(header)["identity"])
        self._limit = max(limit, LEAST_ALIKE)
        self._outside: Counter[FaultClass] = Counter()
        self._example: dict[FaultClass, str] = {}

    def __call__(self, before: int, number: int, rows: pa.Table) -> None:
        """Commit the rows of a shard (WRITTEN); its ``number`` counts from those ``before`` its graph."""
        records, store, run_id = written_records(rows), self.request.store, self.request.run_id
        self._check_header()
        commit(store, run_id, before + number, records, made_with=self._made_with)
        self.facts.add(records)
        failed = [record for record in records if record["status"] != "ok"]
        if self._monitor is not None:
            self._monitor.committed("video", len(records) - len(failed), len(failed))
            self._count(records, self._monitor.metrics)
        self._note({token_shard_id(record["token_shard"]) for record in records if record["status"] == "ok"})
        self._n_waiting += 1
        if self._n_waiting > WAITING:
            try_merge(store, self._made_with, WAITING, self._say)
            self._n_waiting = 0
        self.n_shards = max(self.n_shards, before + number + 1)
        self.fetched += sum(record.get("source_size") or 0 for record in records if is_remote(record["uri"]))
        self.failed |= {record["video_id"]: record["attempts"] for record in failed}
        self.retryable |= {record["video_id"]: record["attempts"] for record in filter(may_succeed_elsewhere, failed)}
        for record in filter(failed_from_outside, records):
            self._outside[record["error_class"]] += 1
            self._example[record["error_class"]] = f"{record['video_id']}: {record['error_message']}"

    def _count(self, records: Sequence[VideoRecord], metrics: Metrics) -> None:
        """Count what committed videos took in the metrics of the run."""
        kept = sum(record.get("n_tokens", 0) for record in records)
        metrics.count("tokens", sum(record.get("n_total", 0) for record in records), kind="in")
        metrics.count("tokens", kept, kind="kept")
        metrics.count("bytes", sum(record.get("source_size") or 0 for record in records), kind="read")
        metrics.count("bytes", kept * self.facts.token_bytes, kind="stored")
        seconds = [
            [record.get(name, 0.0) for name in ("decode_s", "encode_s", "prune_s", "write_s")] for record in records
        ]
        for stage, spent in zip(TIMED, zip(*seconds, strict=True), strict=True):
            metrics.count("stage_seconds", sum(spent), stage=stage)

    def _note(self, token_shards: set[str]) -> None:
        """Record in the run's file what it has committed, so that lost files of the table are noticed."""
        for shard in token_shards:  # sorting all of them would take longer with each commit
            place = bisect_left(self._token_shards, shard)
            if self._token_shards[place : place + 1] != [shard]:
                self._token_shards.insert(place, shard)
        self._run_file.note(**{COMMITTED: self._token_shards}, **self.facts.as_record())
        if time.monotonic() - self._noted > _NOTE_S:
            self._run_file.save()
            self._noted = time.monotonic()

    def _check_header(self) -> None:
        """Raise RunFailed where the cache is gone, or another one was begun in its place."""
        store = self.request.store
        try:
            there = store.read(HEADER)
        except FileNotFoundError:
            raise RunFailed(f"{store}: {HEADER} is gone since this run began, and what it has done with it") from None
        if there != self._header:
            raise RunFailed(f"{store}: another cache was begun here since this run began; nothing more is written")

    def give_up(self, report: WorkerReport) -> str | None:
        """Return the reason to stop this pass, or None. Raise LimitReached where the run has taken what it may.

        Too many videos failed alike, by no fault of theirs, and no worker does better.
        """
        self.facts.check_limit()
        if not report.failing or not self._outside:
            return None
        ((fault, count),) = self._outside.most_common(1)
        if count <= self._limit:
            return None
        stage, remedy = report.failing[0], FAULTS[fault].remedy
        return f"{count} videos failed alike and all {stage} workers fail ({fault}, {self._example[fault]}): {remedy}"


@dataclass
class Passes:
    """The runner of a run's passes, which streams videos through the graph and records each plan."""

    config: PruneConfig
    console: Console
    setups: PruneStages
    commits: Commits
    ledger: Ledger
    run_file: RunFile
    monitor: Monitor
    reports: list[WorkerReport] = field(default_factory=list)

    def first(self, videos: pa.Table | Discovery) -> int:
        """Prune all videos (TODO_SCHEMA) on all nodes, those to be found too; return how many failed."""
        n_failed = self._stream(videos, (), self.commits.give_up)
        if isinstance(videos, Discovery):
            videos.check()
        return n_failed

    def second(self, again: pa.Table) -> int:
        """Try failed videos once more, without the nodes where most failed; return how many of them are ok now."""
        without: dict[str, str] = {}
        for report in self.reports:
            without |= failing_nodes(report.tried)
        if not without or not len(again):
            return 0  # the second attempt would go like the first
        hosts = ", ".join(sorted(set(without.values())))
        if not self._can_run_on(resources_without(without)):
            self._note(f"{len(again)} videos failed, many on {hosts}, and no other node is there to try them again")
            return 0
        self._note(f"{len(again)} videos that failed are tried again without {hosts}, where most did")
        return len(again) - self._stream(again, without, lambda report: self.commits.facts.check_limit())

    def _can_run_on(self, cluster: Mapping[str, float]) -> bool:
        """Return whether a cluster with these resources can run all stages."""
        return cluster.get("CPU", 0.0) > 0 and (self.setups.encode.device != "cuda" or cluster.get("GPU", 0.0) >= 1)

    def _stream(
        self,
        videos: pa.Table | Discovery,
        without: Collection[str],
        give_up: Callable[[WorkerReport], str | None],
    ) -> int:
        """Stream videos through graphs on all nodes but ``without``; return how many failed."""
        available = partial(resources_without, without, self.config.max_gpus)

        def planned(videos: pa.Table | Discovery) -> PlannedGraph:
            plan, request = self._planned(available(), videos), self.commits.request
            known_bytes = files_bytes(videos)
            setups = self.setups.decode, self.setups.encode
            build = partial(build_graph, videos, *setups, plan, request.store, request.run_id, without=without)
            commit = partial(self.commits, self.commits.n_shards)
            stop = give_up if isinstance(videos, pa.Table) else partial(_checked, videos, give_up)

            def again(left: int) -> Resources | None:
                """Plan ``left`` videos for the cluster as it is now; None while containers are not all indexed."""
                found = isinstance(videos, pa.Table) or not videos.n_left
                return self._resources(available(), left, known_bytes)[1] if found else None

            looks = (stop, available, self.monitor.look, self._on_end, again)
            return PlannedGraph(build, commit, plan, partial(len, videos), *looks)

        def left(videos: pa.Table | Discovery) -> pa.Table | Discovery:
            found = videos if isinstance(videos, pa.Table) else videos.all().todo
            return unfinished(found, self.ledger.refresh(), self.commits.failed)

        return stream(videos, planned, left, self.console, self.config)

    def _on_end(self, report: WorkerReport) -> None:
        """Keep the workers' last report, and record the workers that were put out of service."""
        self.reports.append(report)
        self.run_file.save(out_of_service=[worker for one in self.reports for worker in one.out_of_service])

    def _note(self, text: str) -> None:
        """Print a note."""
        self.console.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)

    def _planned(self, cluster: dict[str, float], videos: pa.Table | Discovery) -> Resources:
        """Plan the workers for the cluster, and print notes about requested resources that it lacks."""
        if not self._can_run_on(cluster):
            raise RunFailed("the nodes that the run needs are gone; run the same command again once they are back")
        n_videos = len(videos) if isinstance(videos, pa.Table) else videos.expected()
        wanted, plan = self._resources(cluster, n_videos, files_bytes(videos))
        for note in shortfalls(self.config, wanted, plan, n_videos):
            self._note(note)
        self.commits.facts.set_encoders(plan.encode.workers)
        self.run_file.save(resources={"cluster": cluster, "plan": asdict(plan)})
        return plan

    def _resources(self, cluster: dict[str, float], n_videos: int, file_bytes: float) -> tuple[Resources, Resources]:
        """Plan the workers as ``planned_workers`` does, with units of whole row groups."""
        wanted, plan = planned_workers(self.config, self.setups, cluster, n_videos, file_bytes)
        return wanted, replace(plan, rows_per_group=self.commits.request.indexing.unit)


def _checked(videos: Discovery, give_up: Callable[[WorkerReport], str | None], report: WorkerReport) -> str | None:
    """Return what ``give_up`` does. Raise RunFailed where videos can no longer be found."""
    videos.check()
    return give_up(report)


def planned_workers(
    config: PruneConfig, setups: PruneStages, cluster: dict[str, float], n_videos: int, file_bytes: float = math.inf
) -> tuple[Resources, Resources]:
    """Plan the workers for ``n_videos`` of ``file_bytes`` in all: as wanted, and as the object stores allow."""
    shape, encode = setups.decode.largest_frames(), setups.encode
    by_size = videos_for(config.target_shard_mb * 10**6, encode.stored_bytes_per_video(*shape), shape[0])
    wanted = plan_resources(
        cluster["CPU"],
        cluster.get("GPU", 0.0) if encode.device == "cuda" else 0.0,
        n_videos,
        memory=cluster.get("memory", math.inf),
        files_bytes=file_bytes,
        videos_per_shard=config.videos_per_shard or by_size,
        decode_workers=config.decode_workers,
        encode_workers=config.encode_workers,
        encoders_per_gpu=config.encoders_per_gpu,
        decode_on_gpus=config.decoder == "nvdec",
    )
    sizes = 3 * math.prod(shape), encode.bytes_per_video(*shape)
    return wanted, wanted.fitting(cluster["object_store_memory"], *sizes, n_videos)


def files_bytes(videos: pa.Table | Discovery) -> float:
    """Return the total bytes of the files of ``videos`` (TODO_SCHEMA).

    It is infinite if there are many videos, or if some are to be found yet, or a size is not known here: then all
    decoders are started.
    """
    if not isinstance(videos, pa.Table) or len(videos) > FILES_LOOKED_AT:
        return math.inf
    rows = videos.select(["uri", "policy", "size"]).to_pylist()
    return sum(_file_bytes(row["uri"], row["size"]) for row in rows if row["policy"] is None)


def _file_bytes(path: str, listed: int | None) -> float:
    """Return a file's size: as listed, or measured on this machine; infinite if neither is known."""
    if listed is not None or is_remote(path):
        return math.inf if listed is None else listed
    return os.path.getsize(path) if os.path.isfile(path) else math.inf  # noqa: PTH202, PTH113 - as manifests have it


def shortfalls(config: PruneConfig, wanted: Resources, plan: Resources, n_videos: int) -> Iterator[str]:
    """Yield a note for each requested number of workers that the cluster cannot hold."""
    for name, asked, given in (
        ("decode-workers", config.decode_workers, plan.decode.workers),
        ("encode-workers", config.encode_workers, plan.encode.workers),
    ):
        if asked is not None and given < min(asked, n_videos):
            yield f"the cluster has room for {given} of --{name} {asked}"
    if plan.videos_per_shard < wanted.videos_per_shard:
        yield f"shards get {plan.videos_per_shard} videos: more would not fit Ray's object stores"
