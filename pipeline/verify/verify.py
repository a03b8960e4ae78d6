"""``jobs.verify``: check that every file of a cache holds what was committed, and find what interrupted runs left."""

from __future__ import annotations

import base64
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import PurePosixPath
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from pipeline.cache.header import CHECKSUM, HEADER, CacheHeader, get_method_declarations, read_header
from pipeline.cache.live import make_membership_mask, select_live_rows, select_ok, select_removed
from pipeline.cache.merging import KEEP
from pipeline.cache.reader import TokenCache, map_in_order
from pipeline.cache.schema import TOKENS, VIDEOS
from pipeline.cache.strays import StrayFault, find_stray_fault
from pipeline.cache.table import TableFile, VideosTable, list_unchecked, make_empty_location_table
from pipeline.cache.token_shard import parse_run_id, parse_shard_id
from pipeline.console import make_speaker
from pipeline.errors import CorruptShard, NotACache
from pipeline.runner.claim import Claim, describe_holder, find_holder
from pipeline.runner.progress import make_reporter
from pipeline.runner.run_record import RUNS, make_run_id, read_committed
from pipeline.runner.stages import Wording
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import TEMPORARY, FileInfo, Store
from pipeline.verify.checks import (
    JUDGED_COLUMNS,
    CheckedCommit,
    CheckedShard,
    RowKey,
    check_commit,
    check_token_shard,
    get_recorded_method,
)
from pipeline.verify.repair import REPAIRABLE, Repair, delete_leftovers, list_shard_ids
from pipeline.verify.report import Kind, Problem, Report

R = TypeVar("R", bound="CheckedCommit | CheckedShard")
Places = dict[str, dict[str, RowKey]]  # token shard -> the place of the row of each of its videos
_ORPHANS_STAY = (
    "orphaned token shards were kept: they may belong to damaged or missing videos/ files. Restore those files from a "
    "copy, or pass --clean"
)
#: Problems whose table files may be restored from a copy, so that their token shards must stay.
_MAY_COME_BACK = (Kind.COMMIT, Kind.LOST, Kind.FINGERPRINT, Kind.STRAY)
_TRIES = 5  # attempts to read a table whose files another run merges
# Shares of damaged videos for which the report of a sample gives the chance that it misses them all.
_SHARES = (0.001, 0.01, 0.05)


@dataclass(frozen=True)
class VerifyRequest:
    """The options of a verification.

    Attributes:
        jobs: the number of files read at a time.
        clean: True to delete orphans, leftovers and old uploads.
        keep: files younger than this are not deleted.
        repair: True to repair problems first; this implies ``clean``.
        live: the number of videos to encode again.
        sample: the number of random videos whose tokens are read; 0 for all.
        model: the model's folder or id for ``live``; None for the one in the run's record.
        objects: the access to sources on S3; None for the settings of the environment.
        log_interval: seconds between lines of progress.
        video_root: folders and prefixes below which ``live`` may read sources.
    """

    jobs: int = 2
    clean: bool = False
    keep: timedelta = KEEP
    repair: bool = False
    live: int = 0
    sample: int = 0
    seed: int = 0
    model: str | None = None
    objects: Objects | None = None
    log_interval: float = 30.0
    video_root: Sequence[str] = ()


def verify(store: Store, request: VerifyRequest, console: Console) -> Report:
    """Read and check the whole cache at ``store``; repair and clean it if the request says so.

    Problems are in the report, not raised. With ``repair``, repairable problems are mended and the cache is checked
    once more; sound token shards are not read again. Orphans then stay if table files that may name them could be
    restored.

    Raises:
        NotACache: there is no cache. A damaged header is a problem of the report.
        CacheLocked: the cache is to be changed, and another run is writing to it.
        UsageError: videos cannot be encoded again (``live``), or nothing can be written to the cache.
        RunFailed: a repair would leave no video, or a file is not of this cache.
        CorruptShard: bytes that were sound before are damaged during the repair.
    """
    if not store.exists(HEADER):
        read_header(store)  # raises NotACache with the remedy
    if not (request.clean or request.repair):
        return _Check(store, request, console).run()
    # The claim starts first: orphans must be listed while no run writes.
    with Claim(store, make_run_id(), make_speaker(console)):
        check = _Check(store, request, console, claimed=True)
        report, may_clean = check.run(), True
        if request.repair and report.has(*REPAIRABLE):
            assert check.header is not None  # a header with a fault is the only problem
            repaired = Repair(store, check.header, report).repair_problems(check.live, check.bad)
            may_clean = not report.has(*_MAY_COME_BACK)
            before, sound = report, check.sound
            check = _Check(store, request, console, claimed=True)
            check.sound = sound
            report = check.run()
            report.found, report.repaired = before.problems, repaired
            stay = [] if may_clean else [_ORPHANS_STAY]
            report.notes += [note for note in before.notes if note not in report.notes] + stay
            report.bytes_read += before.bytes_read
            report.seconds += before.seconds
        if may_clean:
            delete_leftovers(store, report, request.keep, commits=check.table_names)
    return report


class _Check:
    """One check of a cache, which changes nothing there.

    Attributes:
        sound: token shards without a problem, by name; shards that are in it before ``run`` are not read again.
        header: the cache's header; None before ``run``, and if it is too damaged to check rows against it.
        live: JUDGED_COLUMNS of the live rows, with ``file`` and ``row``.
        bad: the locations of rows that contradict themselves.
        table_names: the files in videos/ at the beginning of ``run``.
    """

    def __init__(self, store: Store, request: VerifyRequest, console: Console, *, claimed: bool = False) -> None:
        """Initialize the check without reading the cache.

        Args:
            claimed: True if the caller holds the cache's claim, so that no run writes to it during the check.
        """
        self.store = store
        self.request = request
        self.console = console
        self.claimed = claimed
        self.sound: dict[str, CheckedShard] = {}
        self.report = Report(str(store))
        self.header: CacheHeader | None = None
        self.live = make_empty_location_table(JUDGED_COLUMNS)
        self.bad = set[RowKey]()
        self.table_names: list[str] = []
        self._commits: dict[str, CheckedCommit] = {}  # files of the table that were checked
        self._strays: set[str] = set()  # stray files that were checked

    def run(self) -> Report:
        """Check the cache, and return the report; a header with a fault is then the only problem.

        Raises:
            UsageError: videos are to be encoded again and cannot be.
        """
        store = self.store
        request = self.request
        report = self.report
        start = time.monotonic()
        header = self.header = self._check_header()
        if header is None:
            return report
        # Listed before the table is read, so that a shard that a run commits meanwhile does not look like an orphan.
        files = {folder: store.list_files(folder) for folder in ("", TOKENS, VIDEOS, RUNS)}
        self.table_names = [file.name for file in files[VIDEOS]]
        try:  # pending uploads are invisible and billed
            report.uploads += store.uploads()
        except OSError as error:  # listing them needs an extra permission, and not every store supports it
            report.notes.append(f"pending uploads cannot be listed: {error.strerror or error}")
        rows = self._check_table(header)
        n_ok, n_removed = len(select_ok(self.live)), len(select_removed(self.live))
        n_failed = len(self.live) - n_ok - n_removed
        report.counts |= {"videos": n_ok, "failed_videos": n_failed, "removed_videos": n_removed}
        encoder = None
        if request.live:  # before the long check, so that refusals come early
            from pipeline.verify.live_check import LiveCheck  # noqa: PLC0415 - models and decoders load only for this

            cache, objects = TokenCache(str(store), store=store, live=self.live), request.objects
            objects = objects or Objects.from_environment()
            encoder = LiveCheck(cache, request.model, objects, request.video_root)
        places = _choose_rows_to_check(rows, self.live)
        if 0 < request.sample < sum(map(len, places.values())):
            places = self._draw_sample(places)
        while places := self._check_tokens(header, places):
            rows = self._check_table(header)
            places = _find_new_locations(places, _choose_rows_to_check(rows, self.live))
        self._report_leftovers(files, rows)
        report.seconds = time.monotonic() - start
        if encoder is not None:
            encoder.run(_select_without_problems(self.live, report), request.live, request.seed, report)
        return report

    def _check_header(self) -> CacheHeader | None:
        """Read the header, and report its faults; note a missing checksum, an unknown method and a run that is writing.

        Returns None if it has faults, so that rows cannot be checked against it.
        """
        store, report = self.store, self.report
        try:
            header = read_header(store)
        except NotACache as error:
            report.problems.append(Problem(Kind.HEADER, str(error), HEADER))
            return None
        faults = (f"{store}/{HEADER}: {fault}" for fault in _iter_header_faults(header))
        report.problems += [Problem(Kind.HEADER, fault, HEADER) for fault in faults]
        if report.problems:
            return None
        if CHECKSUM not in header:
            report.notes.append(f"{HEADER} has no checksum: it was written before headers had one")
        if get_method_declarations(header["identity"]) is None:
            method = get_recorded_method(header)
            report.notes.append(
                f"the method {method} is unknown here, and {HEADER} does not say what it declares: how many tokens it "
                "keeps, in which order, and whether it merges was not checked"
            )
        if not self.claimed and (holder := find_holder(store)) is not None:
            report.notes.append(
                f"a run writes here at this moment, {describe_holder(holder)}; its next shards look like orphans"
            )
        return header

    def _check_table(self, header: CacheHeader) -> pa.Table:
        """Check every file of the videos table that was not checked yet, and add problems and counts to the report.

        If another run merged a listed file away, the table is listed again, up to _TRIES times, since other files have
        its rows now; after that it is a problem. Sets ``live`` and ``bad``.

        Returns:
            JUDGED_COLUMNS of all rows of this identity, with ``file`` and ``row``.
        """
        report, store = self.report, self.store
        check = partial(check_commit, store, header=header)
        for tries_left in reversed(range(_TRIES)):
            files, strays = list_unchecked(store)
            names = [file.name for file in files]
            self._commits = {name: self._commits[name] for name in names if name in self._commits}
            new = [name for name in names if name not in self._commits]
            n_gone = 0
            for name, answer in self._check_all(check, new, "videos shard"):
                if answer.is_gone and tries_left:
                    n_gone += 1
                    continue
                report.problems += answer.problems
                report.bytes_read += answer.n_bytes
                self._commits[name] = answer
            if not n_gone:
                break
        self._check_strays(strays, files)
        report.counts["videos_shards"] = len(self._commits)
        tables = [answer.rows for answer in self._commits.values() if answer.rows is not None]
        rows = pa.concat_tables([make_empty_location_table(JUDGED_COLUMNS), *tables])
        self.live = select_live_rows(rows)
        self.bad = {(name, place) for name, answer in self._commits.items() for place in answer.bad}
        return rows

    def _check_strays(self, names: Sequence[str], files: Sequence[TableFile]) -> None:
        """Compare the rows of stray files with those of the table, once per file.

        A stray file whose rows the table has gives a note. One with rows that would count, or that cannot be compared,
        gives a STRAY problem; one with another fault and no rows, a COMMIT problem; one that is gone by now, nothing.
        """
        for name in sorted({*names} - self._strays):
            self._strays.add(name)
            try:
                fault = find_stray_fault(self.store, name, files)
            except (CorruptShard, OSError) as error:
                message = (
                    f"{self.store}/{name} is not a file of the videos table, and cannot be compared with it: {error}"
                )
                fault = StrayFault(message, has_rows=True)
            if fault is not None:
                kind = Kind.STRAY if fault.has_rows else Kind.COMMIT
                self.report.problems.append(Problem(kind, fault.message, name))
            elif self.store.exists(name):
                self.report.notes.append(
                    f"{name} is not a file of the videos table, which has its rows: it is left out"
                )

    def _draw_sample(self, places: Places) -> Places:
        """Draw ``request.sample`` rows at random, and note the chance that they miss damage; sorted by shard."""
        every = [(name, video_id) for name in sorted(places) for video_id in places[name]]
        n = self.request.sample
        drawn: Places = defaultdict(dict)
        for number in sorted(np.random.default_rng(self.request.seed).choice(len(every), n, replace=False).tolist()):
            name, video_id = every[number]
            drawn[name][video_id] = places[name][video_id]
        chances = ", ".join(f"to {share:.1%} of them {(1 - share) ** n:.1%}" for share in _SHARES)
        message = f"tokens of {n:,} of {len(every):,} videos were read"
        self.report.notes.append(f"{message}; the chance that these miss damage: {chances}")
        return drawn

    def _check_tokens(self, header: CacheHeader, places: Places) -> Places:
        """Check the token shards in ``places`` against their rows, except known sound shards and rows in ``bad``.

        Adds shards without a problem to ``sound``, and problems and counts to the report. Shards with different widths
        of one evidence are a problem.

        Returns:
            The entries of ``places`` that were not checked because another run merged away the files with their rows.
        """
        # Neighbours in the order of commits share a videos shard, which is in memory then.
        names = sorted(places, key=lambda name: min(places[name].values()))
        table = VideosTable(self.store, keep=8 * self.request.jobs)

        def check(name: str) -> CheckedShard:
            """Check one token shard against its rows; a sound shard, or one with bad rows only, is not read."""
            if name in self.sound:
                return replace(self.sound[name], n_bytes=0)
            try:
                rows = [(place[0], table.read_row(*place)) for place in places[name].values() if place not in self.bad]
            except FileNotFoundError:
                return CheckedShard([], is_gone=True)
            return check_token_shard(self.store, name, rows, header) if rows else CheckedShard([])

        report = self.report
        n_tokens = 0
        widths: dict[str, int] = {}
        unchecked: Places = {}
        for name, answer in self._check_all(check, names, "token shard"):
            if answer.is_gone:
                unchecked[name] = places[name]
                continue
            report.problems += answer.problems
            if not answer.problems:
                self.sound[name] = answer
            report.bytes_read += 0 if self.request.sample else answer.n_bytes
            n_tokens += answer.n_tokens
            for key, width in answer.widths.items():
                if widths.setdefault(key, width) != width:
                    message = f"{self.store}/{name}: {width} numbers of {key} a token, {widths[key]} in other shards"
                    report.problems.append(Problem(Kind.SCHEMA, message, name))
        for key, count in (("token_shards", len(names) - len(unchecked)), ("tokens", n_tokens)):
            report.counts[key] = report.counts.get(key, 0) + count
        return unchecked

    def _report_leftovers(self, files: dict[str, list[FileInfo]], rows: pa.Table) -> None:
        """Report temporary files, orphans and superseded shards, and a problem if committed rows are lost.

        The loss is not searched for if a table file is damaged, foreign or stray, since it may have those rows.

        Args:
            files: the files of each folder, listed before the table was read.
            rows: all rows, superseded ones too.
        """
        store, report = self.store, self.report
        all_shards, live_shards = _list_named_shards(rows), _list_named_shards(self.live)
        for infos in files.values():
            report.leftovers += [file for file in infos if PurePosixPath(file.name).name.startswith(TEMPORARY)]
        shards = [file for file in files[TOKENS] if file.name.endswith(".parquet") and file not in report.leftovers]
        report.orphans += [file for file in shards if file.name not in all_shards]
        report.superseded += [file for file in shards if file.name in all_shards and file.name not in live_shards]
        known_ids = set(self.live["video_id"].to_pylist())
        if report.has(Kind.COMMIT, Kind.FINGERPRINT, Kind.STRAY):
            return  # the rows of such orphans were in those files
        committed_names = _iter_committed_orphans(store, report.orphans, without_record=not known_ids)
        lost_shards = [
            name for name in committed_names if not known_ids.issuperset(list_shard_ids(store, name, report))
        ]
        if lost_shards:
            message = f"{store}/{VIDEOS} has no row of videos in {len(lost_shards)} token shards that were committed"
            report.problems.append(
                Problem(Kind.LOST, f"{message}, {', '.join(lost_shards[:3])}: a file of it is gone", VIDEOS)
            )

    def _check_all(self, work: Callable[[str], R], names: Sequence[str], item: str) -> Iterator[tuple[str, R]]:
        """Call ``work`` with each name in several threads; show progress, and yield (name, result) in order."""
        if not names:
            return
        wording = Wording("verifying", item, {}, "")
        jobs = self.request.jobs
        with make_reporter(self.console, len(names), self.request.log_interval, wording) as progress:
            for name, result in zip(names, map_in_order(work, names, jobs, 2 * jobs), strict=True):
                progress.advance(int(not result.problems), int(bool(result.problems)))
                yield name, result


def _iter_committed_orphans(store: Store, orphans: Collection[FileInfo], *, without_record: bool) -> Iterator[str]:
    """Yield the orphans that the record of their run lists as committed: their rows were replaced or are lost.

    Args:
        without_record: True to yield the orphans of runs without a readable record too.
    """
    by_run: dict[str, list[str]] = defaultdict(list)
    for file in orphans:
        by_run[parse_run_id(file.name)].append(file.name)
    for run, names in sorted(by_run.items()):
        shard_ids = read_committed(store, run)
        if shard_ids is None:
            yield from names if without_record else ()
        else:
            yield from (name for name in names if parse_shard_id(name) in shard_ids)


def _iter_header_faults(header: CacheHeader) -> Iterator[str]:
    """Yield the faults of the header's retention ratio (not in (0, 1]) and newline row (not base64, wrong size)."""
    identity, hidden = header["identity"], header.get("hidden_size")
    ratio = identity.get("retention_ratio")
    if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        yield f"its retention ratio is {ratio!r}"
    newline = header.get("newline")
    if newline is not None:
        try:
            n_bytes = len(base64.b64decode(newline, validate=True))
        except (TypeError, ValueError):
            yield "its newline row is not base64"
        else:
            if hidden is not None and n_bytes != 2 * hidden:
                yield f"its newline row has {n_bytes} bytes, not {hidden} bfloat16 numbers"


def _list_named_shards(rows: pa.Table) -> set[str]:
    """Return the names of the token shards that ok rows name; None is among them if an ok row names none."""
    return set(select_ok(rows)["token_shard"].to_pylist())


def _choose_rows_to_check(rows: pa.Table, live: pa.Table) -> Places:
    """Return the locations of the rows to check: for each shard that a live row names, one row per video in it.

    A live row is preferred; for a video whose live row names another shard, a superseded row is taken.
    """
    places: Places = {name: {} for name in sorted(_list_named_shards(live) - {None})}
    for table in (live, rows):  # a row in several files counts once
        for row in select_ok(table).select(["token_shard", "video_id", "file", "row"]).to_pylist():
            if row["token_shard"] in places:
                places[row["token_shard"]].setdefault(row["video_id"], (row["file"], row["row"]))
    return places


def _find_new_locations(old: Places, new: Places) -> Places:
    """Return the new locations of the videos in ``old``; videos and shards that are not in ``new`` are left out."""
    places = {name: {key: new[name][key] for key in old[name] if key in new[name]} for name in old if name in new}
    return {name: by_video for name, by_video in places.items() if by_video}


def _select_without_problems(live: pa.Table, report: Report) -> pa.Table:
    """Select the live rows of videos that have no problem and whose token shard has no problem as a whole."""
    ids = [problem.video_id for problem in report.problems if problem.video_id is not None]
    shards = [problem.shard for problem in report.problems if problem.video_id is None and problem.shard is not None]
    return live.filter(
        pc.invert(
            pc.or_(make_membership_mask(live["video_id"], ids), make_membership_mask(live["token_shard"], shards))
        )
    )
