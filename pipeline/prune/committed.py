"""The commits of a prune run, and the limits on failures and time that end it."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import pyarrow as pa

from pipeline.cache.live import TIMED_STAGES, select_ok
from pipeline.cache.token_shard import parse_shard_id
from pipeline.errors import FAULTS, FaultClass, RunFailed
from pipeline.prune.batches import unpack_failed
from pipeline.prune.facts import Facts, sum_column
from pipeline.prune.table import CacheTable
from pipeline.prune.todo import Todo
from pipeline.rows import VideoRecord, is_infrastructure_error, may_succeed_elsewhere
from pipeline.runner.job import Watch
from pipeline.runner.monitor import Monitor
from pipeline.runner.progress import Progress
from pipeline.runner.run_record import COMMITTED_KEY, RunFile
from pipeline.runner.worker_reports import WorkerReport
from pipeline.storage.hub import is_remote

_MIN_SAVE_S = 60.0  # seconds between two saves of the run's record while it runs


class CommittedVideos:
    """The commits of a run: each shard is committed, then counted for the run's record, metrics, limits and summary.

    Attributes:
        failed: id -> attempts so far, of each video that failed in this run and has not succeeded since.
        retryable: id -> attempts, of each video that had a retryable fault, even if it succeeded later.
        unread: id -> attempts, of each video that could not be read (io), even if it succeeded later.
        infrastructure_errors: class -> number of infrastructure errors, over all attempts.
        examples: class -> "ID: MESSAGE" of the last such error.
        fetched: the bytes of the videos from remote stores, summed over all attempts.
    """

    def __init__(self, table: CacheTable, record: RunFile, monitor: Monitor, facts: Facts) -> None:
        """Start with empty counts. ``table`` must have begun."""
        self.facts = facts
        self.failed: dict[str, int] = {}
        self.retryable: dict[str, int] = {}
        self.unread: dict[str, int] = {}
        self.infrastructure_errors: Counter[FaultClass] = Counter()
        self.examples: dict[FaultClass, str] = {}
        self.fetched = 0
        self.record = record
        self._table = table
        self._monitor = monitor
        self._last_counted: set[tuple[str, int]] = set()  # the ids and attempts of the last commit
        self._token_shards: list[str] = []  # committed by this run, ascending
        self._saved_at = time.monotonic()

    def commit(self, number: int, rows: pa.Table) -> None:
        """Commit the rows of a shard (WRITTEN_SCHEMA) to the videos table, and count them.

        Ok videos leave ``failed``. Failed rows enter ``failed`` with their attempts; those with a retryable fault also
        enter ``retryable``, and those of class "io" ``unread``.

        An interrupted driver may commit the same rows twice in succession: rows whose id and attempt were in the
        previous commit are not counted again. The method also saves the run's record about once a minute, and merges
        the small files of the table every few commits; a failed merge only warns.

        Raises:
            OSError: the store fails, or lacks a token shard that the rows name.
            RunFailed: during the run, the cache was deleted or replaced, or a token shard of the rows was removed.
        """
        self._table.commit(number, rows)
        attempts = list(zip(rows["video_id"].to_pylist(), rows["attempts"].to_pylist(), strict=True))
        is_new = [attempt not in self._last_counted for attempt in attempts]
        new_attempts, self._last_counted = {*attempts} - self._last_counted, set(attempts)
        ok_rows, failed_records = select_ok(rows), unpack_failed(rows)
        if new_attempts:  # otherwise an interrupt came after the same rows were counted
            new_failures = [row for row in failed_records if (row["video_id"], row["attempts"]) in new_attempts]
            self._count(rows.filter(pa.array(is_new)), new_failures)
        self._record_shards(set(map(parse_shard_id, ok_rows["token_shard"].to_pylist())))
        self._table.merge_occasionally()
        for video_id in ok_rows["video_id"].to_pylist():
            self.failed.pop(video_id, None)
        self.failed |= _list_attempts(failed_records)
        self.retryable |= _list_attempts(filter(may_succeed_elsewhere, failed_records))
        self.unread |= _list_attempts(record for record in failed_records if record["error_class"] == "io")

    def _count(self, rows: pa.Table, failed_records: Sequence[VideoRecord]) -> None:
        """Add newly committed rows to the facts, the metrics, ``fetched``, ``infrastructure_errors`` and ``examples``.

        Args:
            failed_records: the records of the failed videos among ``rows``.
        """
        self.facts.add(rows)
        for record in filter(is_infrastructure_error, failed_records):
            self.infrastructure_errors[record["error_class"]] += 1
            self.examples[record["error_class"]] = f"{record['video_id']}: {record['error_message']}"
        self.fetched += sum_column(rows.filter(pa.array(map(is_remote, rows["uri"].to_pylist()))), "source_size")
        self._monitor.count_rows("video", len(rows) - len(failed_records), len(failed_records))
        n_kept = sum_column(rows, "n_tokens")
        metrics = self._monitor.metrics
        metrics.count("tokens", sum_column(rows, "n_total"), kind="in")
        metrics.count("tokens", n_kept, kind="kept")
        metrics.count("bytes", sum_column(rows, "source_size"), kind="read")
        metrics.count("bytes", n_kept * self.facts.token_bytes, kind="stored")
        for stage in TIMED_STAGES:
            metrics.count("stage_seconds", sum_column(rows, f"{stage}_s"), stage=stage)

    def _record_shards(self, token_shards: Collection[str]) -> None:
        """Note the committed token shards and the facts in the run's record; save it about once a minute."""
        for shard in token_shards:  # sorting the whole list would take longer with each commit
            index = bisect_left(self._token_shards, shard)
            if self._token_shards[index : index + 1] != [shard]:
                self._token_shards.insert(index, shard)
        self.record.note(**{COMMITTED_KEY: self._token_shards}, **self.facts.as_record())
        if time.monotonic() - self._saved_at > _MIN_SAVE_S:
            self.record.save()
            self._saved_at = time.monotonic()


def _list_attempts(records: Iterable[VideoRecord]) -> dict[str, int]:
    """Return video_id -> attempts so far."""
    return {record["video_id"]: record["attempts"] for record in records}


class PruneWatch(Watch):
    """The watch of a prune run, which ends it at its time limit or if too many videos fail for the same reason.

    Attributes:
        is_second_pass: True while failed videos are tried once more; infrastructure errors do not end the run then.
    """

    def __init__(
        self, done: CommittedVideos, todo: Todo, monitor: Monitor, record: RunFile, max_alike_failures: int
    ) -> None:
        """Watch the videos of ``todo``, of which ``max_alike_failures`` may have infrastructure errors of one class."""
        super().__init__(monitor)
        self.is_second_pass = False
        self._done = done
        self._todo = todo
        self._record = record
        self._max_alike_failures = max_alike_failures
        self._is_estimated = not todo.is_complete

    def look(self, report: WorkerReport, progress: Progress) -> None:
        """Pass a report to the monitor, and end the run if a limit is exceeded.

        Once all archives are indexed, the final number of videos is saved in the run's record.

        Raises:
            LimitReached: ``--max-hours`` have passed.
            RunFailed: an archive cannot be indexed; or the run had more than ``max_alike_failures`` infrastructure
                errors of one class and all workers of a stage fail, unless this is the second pass.
        """
        super().look(report, progress)
        self._todo.check()
        if self._is_estimated and self._todo.is_complete:
            self._is_estimated = False
            self._record.save(videos=len(self._todo), estimated=False)
        self._done.facts.check_limit()
        if self.is_second_pass or not report.failing or not self._done.infrastructure_errors:
            return
        ((fault, count),) = self._done.infrastructure_errors.most_common(1)
        if count > self._max_alike_failures:
            stage = report.failing[0]
            example = self._done.examples[fault]
            raise RunFailed(
                f"{count} videos failed alike and all {stage} workers fail ({fault}, {example}): {FAULTS[fault].remedy}"
            )

    def take_last(self, report: WorkerReport, progress: Progress) -> None:
        """Keep the last report of a graph, and note the excluded workers of all graphs."""
        super().take_last(report, progress)
        self._record.note(out_of_service=[worker for last in self.reports for worker in last.excluded_workers])
