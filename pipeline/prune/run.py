"""One prune run: videos are decoded, encoded, pruned and written; the driver commits shard by shard.

``PruneRun`` overrides the steps of ``pipeline.runner.driver``. A second pass retries failed videos: without the nodes
where most videos failed if there are such nodes, else on all nodes the videos that could not be read.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import cast

import numpy as np
import pyarrow as pa
from ray.actor import ActorHandle
from rich.console import Console

from gstep.backbones import family_of
from gstep.checkpoints.tensors import tower_hash
from pipeline.cache.changed_code import delete_superseded, restart_cache
from pipeline.cache.dataset_card import write_new_header
from pipeline.cache.header import (
    HEADER,
    deepstack_levels,
    find_codec,
    fingerprint,
    made_with,
    read_header,
)
from pipeline.cache.live import TIMED_STAGES, Ledger, select_ok
from pipeline.cache.merging import MAX_WAITING_AT_END, MAX_WAITING_FILES, try_merge
from pipeline.cache.schema import VIDEOS
from pipeline.cache.token_shard import parse_shard_id
from pipeline.cache.writer import commit_rows
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
from pipeline.inputs.indexes import Indexes
from pipeline.inputs.left_out import format_counts
from pipeline.inputs.manifest import given_manifest
from pipeline.inputs.video_list import First, VideoList
from pipeline.options import read_ids
from pipeline.prune.batches import unpack_failed
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import check_decoder_device
from pipeline.prune.facts import Facts, sum_column
from pipeline.prune.graph import build_graph
from pipeline.prune.manifest_checks import refuse_forbidden, refuse_other_files
from pipeline.prune.recipe import resolve
from pipeline.prune.resources import Resources, list_shortfalls, plan_workers, total_file_bytes
from pipeline.prune.resume import (
    check_redo,
    format_skipped,
    restore_old_ids,
    select_existing,
    select_retries,
    select_shard,
    select_unfinished,
)
from pipeline.prune.summary import Summary, format_lost, summarise
from pipeline.prune.todo import Selection, Todo
from pipeline.rows import JsonObject, is_infrastructure_error, may_succeed_elsewhere
from pipeline.runner.cluster import choose_device, find_failing_nodes, provenance, sum_resources
from pipeline.runner.driver import Driver
from pipeline.runner.heartbeats import WorkerReport
from pipeline.runner.run_record import (
    COMMITTED_KEY,
    RunFile,
    check_out,
    list_committed_shards,
    new_run_id,
    newest_record,
)
from pipeline.runner.shards import RunGraph
from pipeline.runner.stages import Plan
from pipeline.storage.hub import is_remote
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import store_at
from pipeline.video.sampling import CHANGED_BY_RULES, DECODING_RULES

_RECORDED_VERSIONS = ("gstep-cache", "torch", "transformers", "ray", "pyarrow", "av", "decord", "torchcodec")
# Fewer failures of one class never stop a run: a missing folder may hold as many videos.
MIN_ALIKE_FAILURES = 50
_MIN_SAVE_S = 60.0  # seconds between two saves of the run's record while it runs


class PruneRun(Driver[PruneConfig, Todo, Summary]):
    """The prune run of some options.

    Args:
        given_videos: paths, or rows with video_id and uri (``given_manifest``); None if the options name the videos.
        list_failed: whether ``Summary.failed`` names each failed video.

    Attributes:
        recipe, videos: set by ``prepare``: the settings that make the rows of the cache; the videos that the options
            name, of all shards.
        ledger: the rows of the cache; set by ``list_remaining``.
        stages, facts: set by ``process``: the settings of the workers that decode and encode; the run's seconds and
            bytes so far, None before.
        failed: failed video -> its attempts so far. This and the next three grow with each commit.
        retryable: the same for failed videos that may succeed on another machine.
        unread: the same for videos that could not be read, and may be readable later.
        fetched: bytes of videos that were read from stores.
    """

    def __init__(
        self, options: PruneConfig, console: Console, given_videos: object = None, *, list_failed: bool = False
    ) -> None:
        """Set up an empty run; nothing is checked or read before ``prepare``."""
        super().__init__(options, console)
        self._given_videos, self._list_failed = given_videos, list_failed
        self.facts: Facts | None = None
        self.failed: dict[str, int] = {}
        self.retryable: dict[str, int] = {}
        self.unread: dict[str, int] = {}
        self.fetched = 0
        self._is_second_pass = False
        self._reports: list[WorkerReport] = []  # the last report of each graph
        self._infrastructure_errors: Counter[FaultClass] = Counter()
        self._example: dict[FaultClass, str] = {}
        self._token_shards: list[str] = []  # committed by this run, ascending
        self._last_counted: set[tuple[str, int]] = set()  # the ids and attempts of the last commit
        self._n_unmerged = 0
        self._saved_at = time.monotonic()

    def prepare(self) -> None:
        """Check the options, read the list of videos, and resolve model and method.

        Sets ``store``, ``run_id``, ``videos`` and ``recipe``, and prints notes. Raises UsageError; nothing is started.
        """
        config = self.options
        self._objects = Objects.from_environment(config.s3_endpoint, config.s3_requester_pays)
        self.store, self.run_id = store_at(config.out, self._objects), new_run_id()
        check_out(self.store)
        self._redo = None if config.redo is None else pa.array(read_ids("redo", config.redo), pa.string())
        with store_usage_errors():
            if not self.store.exists(HEADER) and self.store.has_other_files():
                raise NotACache(
                    f"{self.store} exists and is no cache (it has no {HEADER}): name an empty place with --out"
                )
            self._list_videos()
        self.recipe = resolve(config, self._objects)
        ratio = self.recipe.retention_ratio
        if config.retention_ratio not in (ratio, PruneConfig.retention_ratio):
            self.say(f"note: --pruner {config.pruner} keeps {ratio:g} of the tokens, not {config.retention_ratio:g}")
        with store_usage_errors():
            self.match()

    def _list_videos(self) -> None:
        """Read the manifest or the caller's rows, and set ``videos``; print notes on files left out.

        New indexes of archives are stored in the cache, except for a plan or a dry run. Raises UsageError.
        """
        config, is_limited = self.options, self.options.limit is not None
        writes = not (config.dry_run or config.plan)
        indexes = Indexes(config.archive_options(), self.store, keeps=writes, say=self.say)
        if self._given_videos is not None:
            given = given_manifest(self._given_videos, config.video_root, self._objects)
            self.videos = VideoList(given, indexes, self._objects)
        else:
            first: First = "needed"
            if config.dry_run or (config.plan and not is_limited):
                first = "kept" if config.dry_run and not config.index else "all"
            self.videos = VideoList.read(
                config.videos, config.video_root, self._objects, indexes, first=first, is_limited=is_limited
            )
            for name in config.videos if len(config.videos) == 1 else ():
                refuse_other_files(self.videos.known, name, self._objects)
        for kind, remedy in indexes.left_out.remedies.items():
            self.say(f"note: left out: {format_counts({kind: indexes.left_out.counts()[kind]})}. {remedy}")
        known = self.videos.known
        own_videos = select_shard(known, config.part())
        if len(known) and not len(own_videos) and not self.videos.unindexed:
            raise UsageError(f"--shard {config.shard}: none of the {len(known)} videos are in it")
        if config.on_forbidden == "refuse":
            refuse_forbidden(own_videos, config.named)

    def match(self) -> None:
        self.recipe = self.recipe.match_cache(self.store, self.console)

    def list_remaining(self) -> Todo:
        """Read what earlier runs committed, say what is skipped, and return the videos left to do.

        Sets ``ledger``. Archives that are not indexed yet are searched while the run works. Files of the table from a
        superseded identity are left out without a warning. A cache of a method with other code is restarted
        (``_restart_cache``). Raises UsageError.
        """
        if self.recipe.is_restarted:
            self._restart_cache()
        self._committed = list_committed_shards(self.store)  # by earlier runs
        self.ledger = Ledger(self.store, self._fingerprint()).refresh()
        superseded = read_header(self.store).get("superseded", []) if self.store.exists(HEADER) else []
        if foreign := [name for name, identity in self.ledger.foreign.items() if identity not in superseded]:
            self.say(
                f"warning: {len(foreign)} files of {self.store}/{VIDEOS} were made with other settings than its "
                f"header. Their rows do not count. First file: {foreign[0]}"
            )
        if strays := self.ledger.strays:
            self.say(f"note: {strays[0]} is no file of the videos table ({len(strays)} such files): left out")
        if lost_ids := self.ledger.lost(self._committed):
            self.say(f"warning: {format_lost(len(lost_ids), lost_ids)}")
        if self._redo is not None:
            known = None if self.videos.unindexed else restore_old_ids(self.videos.known, self.ledger)
            check_redo(self._redo, known, self.ledger, self.options)
        selection = Selection(self.options, self.videos, self.ledger, self._redo)
        todo = Todo(*selection.select(self.videos.known), selection)
        for line in format_skipped(todo.tally, self.options):
            self.say(line)
        return todo

    def _restart_cache(self) -> None:
        """Restart the cache with its method's new code: its rows count no more. A plan or dry run only says so.

        Raises UsageError if that loses tokens of videos that this run does not name.
        """
        ledger = Ledger(self.store, made_with(self.store)).refresh()
        with_tokens = np.flatnonzero(ledger.columns["fault"] == 0)
        with_tokens = with_tokens[~ledger.removed(with_tokens)]
        unnamed_rows = np.setdiff1d(with_tokens, ledger.find(restore_old_ids(self.videos.known, ledger)["video_id"]))
        if len(unnamed_rows) and not self.videos.unindexed:
            example = ledger.read(int(unnamed_rows[0]))["video_id"]
            raise UsageError(
                f"--on-changed redo encodes a whole cache again, and {self.store} has {len(unnamed_rows)} videos that "
                f"{self.options.named} does not name, e.g. {example}: name them too, or another --out"
            )
        self.say(f"note: {self.recipe.method} has other code now: its videos in {self.store} are encoded again")
        if not (self.options.dry_run or self.options.plan):
            restart_cache(self.store, read_header(self.store), self.recipe.identity(self.recipe.dtype), self.run_id)

    def _fingerprint(self) -> str | None:
        """Return the fingerprint of the identity whose rows count; None without a cache."""
        if self.recipe.is_restarted:
            return fingerprint(self.recipe.identity(self.recipe.dtype))
        return made_with(self.store)

    def refuse_empty(self, todo: Todo) -> None:
        """Raise UsageError if no opened archive holds a video, and no other video is named."""
        if not len(todo.list_videos()):
            part = "" if self.options.shard is None else f" of --shard {self.options.shard}"
            raise UsageError(f"{self.options.named}: none of the {todo.n_archives} archives holds a video{part}")

    def process(self, todo: Todo) -> None:
        """Encode the videos, then the failed videos once more, and keep the run's record meanwhile.

        A limit of hours ends it without an error.
        """
        with todo:
            self._todo, self._is_estimated = todo, not todo.is_complete
            n_videos = todo.estimate_count()
            device, dtype = self._begin(n_videos)
            self._note_other_rules()
            record: JsonObject = {
                **provenance(self.run_id, _RECORDED_VERSIONS),
                "decoding_rules": DECODING_RULES,
                "config": self.options.as_record(),
                "device": device,
                "dtype": dtype,
                "videos": n_videos,
                "estimated": self._is_estimated,
            }
            if (layout := self.recipe.source.layout) is not None:
                record = {**record, "parity": layout.get("parity")}
            self.run_file = RunFile(self.store, record)
            with self.run_file:
                try:
                    self.stream(todo)
                    todo.check()
                    self.run_file.note(
                        videos=len(todo),
                        estimated=False,
                        left_out=cast(JsonObject, self.videos.indexes.left_out.as_record()),
                    )
                    self._retry_failed(todo)
                except LimitReached as reached:
                    self.run_file.note(ended_by=str(reached))
                    self.say(f"note: {reached}. Progress is saved. Rerun the command to continue")

    def _note_other_rules(self) -> None:
        """Say if the last run on this cache made frames by other rules: rows of both versions are in one cache then."""
        record = newest_record(self.store)
        if record is not None and record.get("decoding_rules", 1) != DECODING_RULES:
            self.say(
                "note: another version of this program decoded the rows that the cache has. They stay as they are. "
                f"This run's frames or times differ for {CHANGED_BY_RULES}. --redo IDS decodes such videos again"
            )

    def _begin(self, n_videos: int) -> tuple[str, str]:
        """Join the cluster, write the header of a new cache, and set ``stages`` and ``facts``; return device and dtype.

        Waits for ``--min-gpus``, starts the monitor, and reads the tower's weights once for their hash. Raises
        UsageError or RunFailed.
        """
        recipe, config = self.recipe, self.options
        device, dtype = choose_device(config, recipe.dtype, self.say)
        self.refuse_empty(self._todo)
        self.monitor.start()
        check_decoder_device(config.decoder, device)
        with usage_errors():
            if not self.store.names(VIDEOS, ".parquet"):
                write_new_header(self.store, recipe.header(dtype, family_of(recipe.source).static()))
                self.ledger = Ledger(self.store, made_with(self.store))  # the header may be new
            stages = recipe.stages(device, dtype)
            encode = replace(stages.encode, tower_hash=tower_hash(recipe.source))
        self.stages = replace(stages, encode=encode)
        self.facts = Facts(recipe.token_bytes(), device == "cuda", config.max_hours)
        self._max_alike_failures = max(config.infrastructure_limit(n_videos), MIN_ALIKE_FAILURES)
        self.remember_header()
        return device, dtype

    def remember_header(self) -> None:
        """Read the cache's header into memory; ``commit`` raises if the header changes afterwards."""
        self._header = self.store.read(HEADER)
        self._made_with = fingerprint(json.loads(self._header)["identity"])

    def _retry_failed(self, todo: Todo) -> None:
        """Retry failed videos once, if there are any to retry; print a note.

        If most failed on some nodes, videos that may succeed elsewhere run on the other nodes. These nodes are excluded
        from then on. Otherwise videos that could not be read run again, if they exist now.
        """
        without: dict[str, str] = {}
        for report in self._reports:
            without |= find_failing_nodes(report.tallies)
        hosts = ", ".join(sorted(set(without.values())))
        elsewhere = bool(without) and self.can_run_on(sum_resources({**self.excluded_nodes, **without}))
        attempts = self.options.max_attempts
        retries = select_retries(todo.list_todo(), self.retryable if elsewhere else self.unread, attempts)
        if elsewhere:
            self.excluded_nodes = {**self.excluded_nodes, **without}
            why = f"failed, most of them on {hosts}. Retrying them on the other nodes"
        else:  # a missing file would fail again, after the start of all workers
            retries = select_existing(retries, self._objects)
            why = "that could not be read (io) are there now, and are tried again"
        if len(retries):
            self.say(f"note: {len(retries)} videos {why}")
            self._is_second_pass = True
            self.stream(Todo.of(retries))

    def knows_all(self, items: Todo) -> bool:
        return items.is_complete

    def can_run_on(self, cluster: Mapping[str, float]) -> bool:
        on_gpus = self.stages.encode.device == "cuda"
        return super().can_run_on(cluster) and (not on_gpus or cluster.get("GPU", 0.0) >= 1)

    def plan(self, items: Todo) -> Resources:
        """Plan the workers for the cluster as it is now, say what is short, and record the plan.

        Raises RunFailed if no node is left that the run needs.
        """
        cluster = self.available_resources()
        if not self.can_run_on(cluster):
            raise RunFailed("the nodes that the run needs were lost. Rerun the command once they are back")
        n_videos = items.estimate_count()
        self._total_file_bytes = math.inf if items.n_left else total_file_bytes(items.list_todo())
        uncapped, plan = self._plan_workers(cluster, n_videos)
        for note in list_shortfalls(self.options, uncapped, plan, n_videos):
            self.say(f"note: {note}")
        if self.facts is not None:
            self.facts.set_encoders(plan.encode.workers)
        self.run_file.save(resources={"cluster": cluster, "plan": asdict(plan)})
        return plan

    def replan(self, n_items: int) -> Resources | None:
        if self._todo.n_left:  # the number of videos is unknown until all archives are indexed
            return None
        return self._plan_workers(self.available_resources(), n_items)[1]

    def _plan_workers(self, cluster: Mapping[str, float], n_videos: int) -> tuple[Resources, Resources]:
        """Plan the workers as ``plan_workers`` does, and make units of whole row groups."""
        uncapped, plan = plan_workers(self.options, self.stages, cluster, n_videos, self._total_file_bytes)
        return uncapped, replace(plan, rows_per_group=self.videos.indexes.rows_per_group)

    def build(self, items: Todo, plan: Plan, heartbeats: ActorHandle) -> RunGraph:
        """Build the graph of the plan, which must be a ``Resources``, without the excluded nodes."""
        assert isinstance(plan, Resources)
        decode, encode = self.stages.decode, self.stages.encode
        return build_graph(
            items, decode, encode, plan, self.store, self.run_id, heartbeats, without=self.excluded_nodes
        )

    def commit(self, number: int, rows: pa.Table) -> None:
        """Commit the rows of a shard (WRITTEN_SCHEMA), and count them; now and then merge small files of the table.

        Raises RunFailed if the cache's header has changed.
        """
        self._check_header()
        commit_rows(self.store, self.run_id, number, rows, made_with=self._made_with)
        attempts = list(zip(rows["video_id"].to_pylist(), rows["attempts"].to_pylist(), strict=True))
        is_new = [attempt not in self._last_counted for attempt in attempts]
        self._last_counted = set(attempts)
        if any(is_new):  # else an interrupt came after the same rows were counted
            self._count(rows.filter(pa.array(is_new)))
        ok_rows, failed_records = select_ok(rows), unpack_failed(rows)
        self._record_shards(set(map(parse_shard_id, ok_rows["token_shard"].to_pylist())))
        self._n_unmerged += 1
        if self._n_unmerged > MAX_WAITING_FILES:
            try_merge(self.store, self._made_with, MAX_WAITING_FILES, self.say)
            self._n_unmerged = 0
        for video_id in ok_rows["video_id"].to_pylist():
            self.failed.pop(video_id, None)
        self.failed |= {record["video_id"]: record["attempts"] for record in failed_records}
        self.retryable |= {
            record["video_id"]: record["attempts"] for record in filter(may_succeed_elsewhere, failed_records)
        }
        self.unread |= {
            record["video_id"]: record["attempts"] for record in failed_records if record["error_class"] == "io"
        }

    def _check_header(self) -> None:
        """Raise RunFailed if the cache was deleted, or replaced by another cache."""
        try:
            header = self.store.read(HEADER)
        except FileNotFoundError:
            message = f"{self.store}: {HEADER} was deleted during this run, and the run's work with it"
            raise RunFailed(message) from None
        if header != self._header:
            raise RunFailed(
                f"{self.store}: another cache was started here during this run. This run writes nothing more"
            )

    def _count(self, rows: pa.Table) -> None:
        """Add the seconds, tokens and bytes of committed rows to the facts and the metrics of the run.

        Infrastructure errors are counted by their class.
        """
        assert self.facts is not None
        self.facts.add(rows)
        failed_records = unpack_failed(rows)
        for record in filter(is_infrastructure_error, failed_records):
            self._infrastructure_errors[record["error_class"]] += 1
            self._example[record["error_class"]] = f"{record['video_id']}: {record['error_message']}"
        self.fetched += sum_column(rows.filter(pa.array(map(is_remote, rows["uri"].to_pylist()))), "source_size")
        self.monitor.count_rows("video", len(rows) - len(failed_records), len(failed_records))
        n_kept, metrics = sum_column(rows, "n_tokens"), self.monitor.metrics
        metrics.count("tokens", sum_column(rows, "n_total"), kind="in")
        metrics.count("tokens", n_kept, kind="kept")
        metrics.count("bytes", sum_column(rows, "source_size"), kind="read")
        metrics.count("bytes", n_kept * self.facts.token_bytes, kind="stored")
        for stage in TIMED_STAGES:
            metrics.count("stage_seconds", sum_column(rows, f"{stage}_s"), stage=stage)

    def _record_shards(self, token_shards: Collection[str]) -> None:
        """Add committed token shards and the facts to the run's record, so that lost files of the table are noticed.

        Saves the record each minute.
        """
        assert self.facts is not None
        for shard in token_shards:  # sorting the whole list would take longer with each commit
            index = bisect_left(self._token_shards, shard)
            if self._token_shards[index : index + 1] != [shard]:
                self._token_shards.insert(index, shard)
        self.run_file.note(**{COMMITTED_KEY: self._token_shards}, **self.facts.as_record())
        if time.monotonic() - self._saved_at > _MIN_SAVE_S:
            self.run_file.save()
            self._saved_at = time.monotonic()

    def find_stop_reason(self, report: WorkerReport) -> str | None:
        """Return a reason if too many videos failed for one infrastructure reason and no worker does better, else None.

        The second pass has no such reason. Saves the run's record once all archives are indexed. Raises LimitReached
        after ``--max-hours``, and RunFailed if an archive cannot be indexed.
        """
        self._todo.check()
        if self._is_estimated and self._todo.is_complete:
            self._is_estimated = False
            self.run_file.save(videos=len(self._todo), estimated=False)
        if self.facts is not None:
            self.facts.check_limit()
        if self._is_second_pass or not report.failing or not self._infrastructure_errors:
            return None
        ((fault, count),) = self._infrastructure_errors.most_common(1)
        if count <= self._max_alike_failures:
            return None
        stage, remedy = report.failing[0], FAULTS[fault].remedy
        return f"{count} videos failed alike and all {stage} workers fail ({fault}, {self._example[fault]}): {remedy}"

    def take_last_report(self, report: WorkerReport) -> None:
        self._reports.append(report)
        self.run_file.note(out_of_service=[worker for last in self._reports for worker in last.excluded_workers])

    def select_unfinished(self, items: Todo) -> Todo:
        return Todo.of(select_unfinished(items.wait_for_all(), self.ledger.refresh(), self.failed))

    def summarise(self, todo: Todo, wall_s: float) -> Summary:
        """Return the summary of the cache's rows for this run's videos; say which archives were not read wholly."""
        header = read_header(self.store)
        if todo.n_left:
            self.say(f"note: {todo.n_left} archives are not indexed yet; their videos are not in these counts")
        if todo.n_cut:
            consequence = "captions behind the last video were not read"
            self.say(f"note: {todo.n_cut} archives were read in part (--limit): {consequence}")
        summary = summarise(
            self.ledger.refresh(),
            todo.list_videos(),
            deepstack_levels(header),
            find_codec(header["identity"]),
            n_waiting=todo.n_waiting,
            list_failed=self._list_failed,
            committed=self._committed,
        )
        summary = replace(summary, n_new=len(todo), n_new_failed=len(self.failed), wall_s=wall_s, out=str(self.store))
        indexes = self.videos.indexes
        summary = replace(summary, fetched_bytes=self.fetched + indexes.fetched, left_out=indexes.left_out.counts())
        if self.facts is None:
            return summary
        if self.facts.limit_reached:  # the other videos were not started, and wait as with --limit
            n_left = summary.n_missing
            n_videos, n_waiting = summary.n_videos - n_left, summary.n_waiting + n_left
            n_new = min(self.facts.videos, len(todo))  # the second pass has counted videos again
            summary = replace(summary, n_new=n_new, n_missing=0, n_videos=n_videos, n_waiting=n_waiting)
        return replace(summary, facts=self.facts.as_record(wall_s))

    def tidy(self) -> None:
        """Delete the files of the method's old code, and merge files of the table.

        A failure to delete is only a warning.
        """
        try:
            delete_superseded(self.store, read_header(self.store))
        except (CorruptShard, OSError) as error:
            self.say(f"warning: the files of the old code were not deleted: {error}")
        try_merge(self.store, made_with(self.store), MAX_WAITING_AT_END, self.say)
