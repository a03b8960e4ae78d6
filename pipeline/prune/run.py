"""One prune run: videos are decoded, encoded and pruned, and written; the driver commits shard by shard.

``PruneRun`` overrides the steps of ``pipeline.runner.driver``. All videos are tried on all nodes first. Videos that
failed where most videos failed are tried once more on the other nodes, and videos that could not be read on all.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import cast

import numpy as np
import pyarrow as pa
from ray.actor import ActorHandle
from rich.console import Console

from gstep.backbones import family_of
from gstep.checkpoints.tensors import tower_hash
from pipeline.cache.changed_code import begin_anew, drop_superseded
from pipeline.cache.header import HEADER, codec_of, deepstack_levels, fingerprint, header_bytes, made_with, read_header
from pipeline.cache.live import REMOVED, TIMED, Ledger
from pipeline.cache.merging import WAITING, WAITING_AT_END, try_merge
from pipeline.cache.schema import VIDEOS
from pipeline.cache.token_shard import token_shard_id
from pipeline.cache.writer import commit
from pipeline.errors import (
    FAULTS,
    CorruptShard,
    FaultClass,
    LimitReached,
    NotACache,
    RunFailed,
    UsageError,
    store_usage_errors,
    usage_errors,
)
from pipeline.inputs.container import ContainerOptions
from pipeline.inputs.discovery import Discovery
from pipeline.inputs.indexes import Indexing, forget_members
from pipeline.inputs.left_out import say_counts
from pipeline.inputs.manifest import given_manifest, read_manifest
from pipeline.options import read_ids
from pipeline.prune.batches import written_records
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import check_decoder_device
from pipeline.prune.facts import Facts
from pipeline.prune.graph import build_graph
from pipeline.prune.manifest_checks import refuse_forbidden, refuse_other_files
from pipeline.prune.recipe import resolve
from pipeline.prune.resources import Resources, files_bytes, planned_workers, shortfalls
from pipeline.prune.resume import (
    at_hand,
    check_redo,
    of_shard,
    remaining,
    retry_candidates,
    skipped_lines,
    unfinished,
    within_limit,
)
from pipeline.prune.summary import Summary, lost_line, summarise
from pipeline.rows import JsonObject, VideoRecord, failed_from_outside, may_succeed_elsewhere
from pipeline.runner.cluster import choose_device, failing_nodes, provenance, resources_without
from pipeline.runner.driver import Driver
from pipeline.runner.heartbeats import WorkerReport
from pipeline.runner.run_record import COMMITTED, RunFile, check_out, committed_shards, new_run_id
from pipeline.runner.shards import RunGraph
from pipeline.runner.stages import Plan
from pipeline.storage.hub import is_remote
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import store_at

_RECORDED_VERSIONS = ("gstep-cache", "torch", "transformers", "ray", "pyarrow", "av", "decord", "torchcodec")
# Fewer failures of one class never stop a run, since a missing folder may hold as many videos.
LEAST_ALIKE = 50
_NOTE_S = 60.0  # least seconds between two saves of the run's record while it runs


class PruneRun(Driver[PruneConfig, Discovery, Summary]):
    """The prune run of some options.

    Args:
        given_videos: paths, or rows with video_id and uri (``given_manifest``); None where the options name the videos.
        list_failed: whether ``Summary.failed`` names each failed video.

    Attributes:
        recipe: the settings that make the rows of the cache.
        manifest: the videos that are known before the run (MANIFEST_SCHEMA).
        indexing: the containers that were read for the manifest, and those that are read while the run goes on.
        tally: the videos of the manifest by what is to be done with them.
        ledger: the rows of the cache.
        stages: the settings of the workers that decode and encode.
        facts: what the run has taken; None until it begins to process.
        failed: failed video -> attempts that it has had.
        retryable: the same of videos that may succeed on another machine.
        unread: the same of those that could not be read, which may succeed at another time.
        fetched: bytes of videos that were read from stores.
    """

    def __init__(
        self, options: PruneConfig, console: Console, given_videos: object = None, *, list_failed: bool = False
    ) -> None:
        super().__init__(options, console)
        self._given, self._list_failed = given_videos, list_failed
        self.facts: Facts | None = None
        self.failed: dict[str, int] = {}
        self.retryable: dict[str, int] = {}
        self.unread: dict[str, int] = {}
        self.fetched = 0
        self._is_again = False  # whether this is the second pass
        self._reports: list[WorkerReport] = []  # the last ones of the graphs
        self._outside: Counter[FaultClass] = Counter()  # failures from outside the videos
        self._example: dict[FaultClass, str] = {}
        self._token_shards: list[str] = []  # committed by this run, ascending
        self._n_unmerged = 0
        self._noted = time.monotonic()

    def prepare(self) -> None:
        config = self.options
        self._objects = Objects.from_environment(config.s3_endpoint)
        self.store, self.run_id = store_at(config.out, self._objects), new_run_id()
        check_out(self.store)
        self._redo = None if config.redo is None else pa.array(read_ids("redo", config.redo), pa.string())
        with store_usage_errors():
            if not self.store.exists(HEADER) and self.store.taken():
                raise NotACache(
                    f"{self.store} exists and is no cache (it has no {HEADER}): name an empty place with --out"
                )
            self._list_videos()
        self.recipe = resolve(config, self._objects)
        with store_usage_errors():
            self.match()

    def _list_videos(self) -> None:
        """Read the manifest, or what the caller gave. Raises UsageError."""
        config = self.options
        writes = not (config.dry_run or config.plan)
        limited = config.limit is not None
        self.indexing = Indexing(
            ContainerOptions(config.column, config.clip_names(), config.zip_encoding),
            self.store,
            keeps=writes,
            only_known=config.dry_run and not config.index,
            later=writes or (limited and not config.dry_run),  # a plan without a limit needs all indexes at once
            limited=limited,
            say=self.say,
        )
        if self._given is None:
            listed = read_manifest(config.videos, config.video_root, self._objects, self.indexing)
            for named in config.videos if len(config.videos) == 1 else ():
                refuse_other_files(listed, named, self._objects)
        else:
            listed = given_manifest(self._given, config.video_root)
        for kind, remedy in self.indexing.left_out.remedies.items():
            count = self.indexing.left_out.counts()[kind]
            self.say(f"note: left out: {say_counts({kind: count})}. {remedy}")
        self._listed, self.manifest = listed, of_shard(listed, config.part())
        if len(listed) and not len(self.manifest) and not self.indexing.left:
            raise UsageError(f"--shard {config.shard}: none of the {len(listed)} videos are in it")
        if config.on_forbidden == "refuse":
            refuse_forbidden(self.manifest, config.named)

    def match(self) -> None:
        self.recipe = self.recipe.matched(self.store, self.console)

    def remaining(self) -> Discovery:
        if self.recipe.begins_anew:
            self._begin_anew()
        self._committed = committed_shards(self.store)  # by earlier runs
        self.ledger = Ledger(self.store, self._fingerprint()).refresh()
        superseded = read_header(self.store).get("superseded", []) if self.store.exists(HEADER) else []
        if foreign := [name for name, identity in self.ledger.foreign.items() if identity not in superseded]:
            self.say(
                f"warning: {len(foreign)} files of {self.store}/{VIDEOS} were made with other settings than its header "
                f"has; their rows do not count: {foreign[0]}"
            )
        if lost := self.ledger.lost(self._committed):
            self.say(f"warning: {lost_line(len(lost), lost)}")
        if self._redo is not None:
            check_redo(self._redo, None if self.indexing.left else self._listed, self.ledger, self.options)
        self._forget_removed(self.manifest)
        todo, self.tally = remaining(self.manifest, self.ledger, self.options, self._objects, self._redo)
        for line in skipped_lines(self.tally, self.options):
            self.say(line)
        known, self._n_waiting = within_limit(todo, self.options.limit)
        return Discovery(self.indexing, self._objects, self._select, known, self.options.limit)

    def _begin_anew(self) -> None:
        """Begin the cache anew with the code that its method has now. Raise UsageError if other tokens would go."""
        ledger = Ledger(self.store, made_with(self.store)).refresh()
        with_tokens = np.flatnonzero(ledger.columns["fault"] == 0)
        with_tokens = with_tokens[~ledger.removed(with_tokens)]
        others = np.setdiff1d(with_tokens, ledger.find(self._listed["video_id"]))
        if len(others) and not self.indexing.left:
            example = ledger.read(int(others[0]))["video_id"]
            raise UsageError(
                f"--on-changed redo encodes a whole cache again, and {self.store} holds {len(others)} videos that "
                f"{self.options.named} does not name, e.g. {example}: name them too, or another --out"
            )
        self.say(f"note: {self.recipe.method} has other code now: its videos in {self.store} are encoded again")
        if not (self.options.dry_run or self.options.plan):
            begin_anew(self.store, read_header(self.store), self.recipe.identity(self.recipe.dtype), self.run_id)

    def _fingerprint(self) -> str | None:
        """Return the fingerprint of the identity whose rows count; None where there is no cache."""
        if self.recipe.begins_anew:
            return fingerprint(self.recipe.identity(self.recipe.dtype))
        return made_with(self.store)

    def _select(self, videos: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Return the videos of this run among those of a container, and the rows of those to process."""
        self._forget_removed(videos)
        mine = of_shard(videos, self.options.part())
        return mine, remaining(mine, self.ledger, self.options, self._objects, self._redo).todo

    def _forget_removed(self, videos: pa.Table) -> None:
        """Take removed videos out of indexes that were made since, and out of the names of what is left out."""
        if not self.indexing.keeps or not np.any(self.ledger.columns["state"] == REMOVED):
            return
        rows = self.ledger.find(videos["video_id"])
        removed = rows >= 0
        removed[removed] = self.ledger.removed(rows[removed])
        gone = videos.filter(pa.array(removed))
        self.indexing.left_out.forget(gone["video_id"].to_pylist())
        forget_members(self.store, set(gone["uri"].filter(gone["source_offset"].is_valid()).to_pylist()))

    def refuse_empty(self, todo: Discovery) -> None:
        """Raise UsageError where no container that was opened holds a video, and no other is named."""
        if not len(self.manifest) and not len(todo.found().videos):
            part = "" if self.options.shard is None else f" of --shard {self.options.shard}"
            raise UsageError(f"{self.options.named}: none of the {todo.n_parts - 1} containers holds a video{part}")

    def process(self, todo: Discovery) -> None:
        with todo:
            self._todo, self._is_estimated = todo, not todo.is_complete
            n_videos = todo.expected()
            device, dtype = self._begin(n_videos)
            record: JsonObject = {
                **provenance(self.run_id, _RECORDED_VERSIONS),
                "config": self.options.as_record(),
                "device": device,
                "dtype": dtype,
                "videos": n_videos,
                "estimated": self._is_estimated,
            }
            self.run_file = RunFile(self.store, record)
            with self.run_file:
                try:
                    self.stream(todo)
                    todo.check()
                    self.run_file.note(
                        videos=len(todo), estimated=False, left_out=cast(JsonObject, self.indexing.left_out.as_record())
                    )
                    self._try_again(todo)
                except LimitReached as reached:
                    self.run_file.note(ended_by=str(reached))
                    self.say(f"note: {reached}: what is done is written; the same command goes on")

    def _begin(self, n_videos: int) -> tuple[str, str]:
        """Join the cluster, write the header of a new cache, and set up the workers. Return device and dtype."""
        recipe, config = self.recipe, self.options
        device, dtype = choose_device(config, recipe.dtype, self.say)
        self.refuse_empty(self._todo)
        self.monitor.start()
        check_decoder_device(config.decoder, device)
        with usage_errors():
            if not self.store.names(VIDEOS, ".parquet"):
                self.store.put(HEADER, header_bytes(recipe.header(dtype, family_of(recipe.source).static())))
                self.ledger = Ledger(self.store, made_with(self.store))  # not of a header that was there before
            stages = recipe.stages(device, dtype)
            encode = replace(stages.encode, tower_hash=tower_hash(recipe.source))
        self.stages = replace(stages, encode=encode)
        self.facts = Facts(recipe.token_bytes(), device == "cuda", config.max_hours)
        self._limit_alike = max(config.outside_limit(n_videos), LEAST_ALIKE)
        self.hold_header()
        return device, dtype

    def hold_header(self) -> None:
        """Remember the header of the cache, which must be the same at every commit."""
        self._header = self.store.read(HEADER)
        self._made_with = fingerprint(json.loads(self._header)["identity"])

    def _try_again(self, todo: Discovery) -> None:
        """Try failed videos once more: without the nodes where most failed, else those that could not be read."""
        without: dict[str, str] = {}
        for report in self._reports:
            without |= failing_nodes(report.tried)
        hosts = ", ".join(sorted(set(without.values())))
        elsewhere = bool(without) and self.can_run_on(resources_without({**self.without, **without}))
        attempts = self.options.max_attempts
        again = retry_candidates(todo.found().todo, self.retryable if elsewhere else self.unread, attempts)
        if elsewhere:
            self.without, why = (
                {**self.without, **without},
                f"that failed are tried again without {hosts}, where most did",
            )
        else:  # a file that is gone would fail again, for the start of all workers
            again, why = at_hand(again, self._objects), "that could not be read (io) are there now, and are tried again"
        if len(again):
            self.say(f"note: {len(again)} videos {why}")
            self._is_again = True
            self.stream(Discovery.of(again))

    def can_run_on(self, cluster: Mapping[str, float]) -> bool:
        on_gpus = self.stages.encode.device == "cuda"
        return super().can_run_on(cluster) and (not on_gpus or cluster.get("GPU", 0.0) >= 1)

    def plan(self, items: Discovery) -> Resources:
        cluster = self.available_resources()
        if not self.can_run_on(cluster):
            raise RunFailed("the nodes that the run needs are gone; run the same command again once they are back")
        n_videos = items.expected()
        self._files_bytes = math.inf if items.n_left else files_bytes(items.found().todo)
        wanted, plan = self._planned(cluster, n_videos)
        for note in shortfalls(self.options, wanted, plan, n_videos):
            self.say(f"note: {note}")
        if self.facts is not None:
            self.facts.set_encoders(plan.encode.workers)
        self.run_file.save(resources={"cluster": cluster, "plan": asdict(plan)})
        return plan

    def plan_again(self, n_items: int) -> Resources | None:
        if self._todo.n_left:  # while containers are not all indexed, nobody knows what is left
            return None
        return self._planned(self.available_resources(), n_items)[1]

    def _planned(self, cluster: Mapping[str, float], n_videos: int) -> tuple[Resources, Resources]:
        """Plan the workers as ``planned_workers`` does, with units of whole row groups."""
        wanted, plan = planned_workers(self.options, self.stages, cluster, n_videos, self._files_bytes)
        return wanted, replace(plan, rows_per_group=self.indexing.unit)

    def build(self, items: Discovery, plan: Plan, heartbeats: ActorHandle) -> RunGraph:
        assert isinstance(plan, Resources)
        decode, encode = self.stages.decode, self.stages.encode
        return build_graph(items, decode, encode, plan, self.store, self.run_id, heartbeats, without=self.without)

    def commit(self, number: int, rows: pa.Table) -> None:
        """Commit the rows of a shard (WRITTEN), and count them."""
        records = written_records(rows)
        self._check_header()
        commit(self.store, self.run_id, number, records, made_with=self._made_with)
        good = [record for record in records if record["status"] == "ok"]
        failed = [record for record in records if record["status"] != "ok"]
        self._count(records, len(failed))
        self._note({token_shard_id(record["token_shard"]) for record in good})
        self._n_unmerged += 1
        if self._n_unmerged > WAITING:
            try_merge(self.store, self._made_with, WAITING, self.say)
            self._n_unmerged = 0
        for record in good:
            self.failed.pop(record["video_id"], None)
        self.failed |= {record["video_id"]: record["attempts"] for record in failed}
        self.retryable |= {record["video_id"]: record["attempts"] for record in filter(may_succeed_elsewhere, failed)}
        self.unread |= {record["video_id"]: record["attempts"] for record in failed if record["error_class"] == "io"}
        for record in filter(failed_from_outside, records):
            self._outside[record["error_class"]] += 1
            self._example[record["error_class"]] = f"{record['video_id']}: {record['error_message']}"

    def _check_header(self) -> None:
        """Raise RunFailed where the cache is gone, or another one was begun in its place."""
        try:
            there = self.store.read(HEADER)
        except FileNotFoundError:
            gone = f"{self.store}: {HEADER} is gone since this run began, and what it has done with it"
            raise RunFailed(gone) from None
        if there != self._header:
            raise RunFailed(f"{self.store}: another cache was begun here since this run began; nothing more is written")

    def _count(self, records: Sequence[VideoRecord], n_failed: int) -> None:
        """Count what committed videos took, in the facts and in the metrics of the run."""
        assert self.facts is not None
        self.facts.add(records)
        self.fetched += sum(record.get("source_size") or 0 for record in records if is_remote(record["uri"]))
        self.monitor.committed("video", len(records) - n_failed, n_failed)
        kept, metrics = sum(record.get("n_tokens", 0) for record in records), self.monitor.metrics
        metrics.count("tokens", sum(record.get("n_total", 0) for record in records), kind="in")
        metrics.count("tokens", kept, kind="kept")
        metrics.count("bytes", sum(record.get("source_size") or 0 for record in records), kind="read")
        metrics.count("bytes", kept * self.facts.token_bytes, kind="stored")
        seconds = [
            [record.get(name, 0.0) for name in ("decode_s", "encode_s", "prune_s", "write_s")] for record in records
        ]
        for stage, spent in zip(TIMED, zip(*seconds, strict=True), strict=True):
            metrics.count("stage_seconds", sum(spent), stage=stage)

    def _note(self, token_shards: Collection[str]) -> None:
        """Record in the run's file what it has committed, so that lost files of the table are noticed."""
        assert self.facts is not None
        for shard in token_shards:  # sorting all of them would take longer with each commit
            place = bisect_left(self._token_shards, shard)
            if self._token_shards[place : place + 1] != [shard]:
                self._token_shards.insert(place, shard)
        self.run_file.note(**{COMMITTED: self._token_shards}, **self.facts.as_record())
        if time.monotonic() - self._noted > _NOTE_S:
            self.run_file.save()
            self._noted = time.monotonic()

    def give_up(self, report: WorkerReport) -> str | None:
        """Return the reason to stop, or None. Raise LimitReached where the run has had its hours.

        Too many videos failed alike, by no fault of theirs, and no worker does better.
        """
        self._todo.check()
        if self._is_estimated and self._todo.is_complete:
            self._is_estimated = False
            self.run_file.save(videos=len(self._todo), estimated=False)
        if self.facts is not None:
            self.facts.check_limit()
        if self._is_again or not report.failing or not self._outside:
            return None
        ((fault, count),) = self._outside.most_common(1)
        if count <= self._limit_alike:
            return None
        stage, remedy = report.failing[0], FAULTS[fault].remedy
        return f"{count} videos failed alike and all {stage} workers fail ({fault}, {self._example[fault]}): {remedy}"

    def graph_ended(self, report: WorkerReport) -> None:
        self._reports.append(report)
        self.run_file.note(out_of_service=[worker for one in self._reports for worker in one.out_of_service])

    def unfinished(self, items: Discovery) -> Discovery:
        return Discovery.of(unfinished(items.all().todo, self.ledger.refresh(), self.failed))

    def summarise(self, todo: Discovery, wall_s: float) -> Summary:
        header = read_header(self.store)
        if todo.n_left:
            self.say(f"note: videos of {todo.n_left} containers are not known yet, and not counted")
        if self.indexing.n_cut:
            what = "what would be carried with a video and lies behind the last one was not looked for"
            self.say(f"note: {self.indexing.n_cut} containers were read in part (--limit): {what}")
        held = summarise(
            self.ledger.refresh(),
            pa.concat_tables([self.manifest, todo.found().videos]),
            deepstack_levels(header),
            codec_of(header["identity"]),
            n_waiting=self._n_waiting + within_limit(todo.beyond, 0)[1],
            list_failed=self._list_failed,
            committed=self._committed,
        )
        held = replace(held, n_new=len(todo), n_new_failed=len(self.failed), wall_s=wall_s, out=str(self.store))
        held = replace(
            held, fetched_bytes=self.fetched + self.indexing.fetched, left_out=self.indexing.left_out.counts()
        )
        if self.facts is None:
            return held
        if self.facts.reached:  # what is left was not begun, and waits as with --limit
            left = held.n_missing
            n_videos, n_waiting = held.n_videos - left, held.n_waiting + left
            held = replace(held, n_new=self.facts.videos, n_missing=0, n_videos=n_videos, n_waiting=n_waiting)
        return replace(held, facts=self.facts.as_record(wall_s))

    def tidy(self) -> None:
        try:
            drop_superseded(self.store, read_header(self.store))
        except (CorruptShard, OSError) as error:
            self.say(f"warning: the files of the code before were not deleted: {error}")
        try_merge(self.store, made_with(self.store), WAITING_AT_END, self.say)
