"""``jobs.verify``: whether every file of a cache holds what it was committed with, and what was left behind."""

from __future__ import annotations

import base64
import binascii
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from pipeline.cache.header import CHECKSUM, CacheHeader
from pipeline.cache.live_rows import VIDEOS, VideoRows, live_rows
from pipeline.cache.merging import KEEP
from pipeline.cache.method import declared_method
from pipeline.cache.reader import HEADER, TokenCache, read_header
from pipeline.cache.token_shard import videos_in
from pipeline.errors import NotACache
from pipeline.execution.claim import Claim, holder, who
from pipeline.execution.progress import reporter
from pipeline.execution.request import new_run_id
from pipeline.execution.stages import Wording
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import FileInfo, Store
from pipeline.verify.command_again import command_again
from pipeline.verify.judge import Judge, Place
from pipeline.verify.orphans import clean, committed_orphans, list_files, list_uploads, sort_files
from pipeline.verify.repair import Repair, repairable
from pipeline.verify.report import Problem, Repaired, Report
from pipeline.verify.rows import KEPT, CheckedCommit, check_commit, method_of
from pipeline.verify.tokens import CheckedShard, check_token_shard

if TYPE_CHECKING:
    from pipeline.verify.live_check import LiveCheck

T = TypeVar("T")
R = TypeVar("R", bound="CheckedCommit | CheckedShard")
Sound = dict[str, CheckedShard]  # token shards without a problem, by name
_STAY = (
    "no orphan was removed: they may be of the files of videos/ that were damaged or lost; put those back from a copy, "
    "or remove the orphans with --clean"
)


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        jobs: files read at a time.
        clean: whether to remove what nothing names.
        keep: what is younger is not removed.
        repair: whether to mark what is damaged for another attempt, before that.
        live: how many videos are encoded again.
        seed: which ones.
        model: the model's folder or id, where it is not where the run found it.
        objects: how sources on S3 are read; None for what the environment says.
        log_interval: seconds between lines of progress.
    """

    jobs: int = 2
    clean: bool = False
    keep: timedelta = KEEP
    repair: bool = False
    live: int = 0
    seed: int = 0
    model: str | None = None
    objects: Objects | None = None
    log_interval: float = 30.0


def verify(store: Store, request: Request, console: Console) -> Report:
    """Read all of the cache at ``store`` and check it; nothing is written there without ``clean`` or ``repair``.

    Raises NotACache where there is none, CacheLocked where it is to be changed and a run writes to it, UsageError where
    videos cannot be encoded again, RunFailed where nothing would be left, and OSError where the store fails as a whole.
    """
    if not store.exists(HEADER):
        read_header(store)  # raises
    if not (request.clean or request.repair):
        return _verify(store, request, console, {})
    # From the beginning: what is an orphan is found out while no run writes, too.
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    with Claim(store, new_run_id(), say):
        return _verify(store, replace(request, clean=True), console, {})


def _verify(store: Store, request: Request, console: Console, sound: Sound) -> Report:
    report = Report(str(store))
    started = time.monotonic()
    try:
        header = read_header(store)
    except NotACache as error:
        report.problems.append(Problem("header", str(error), HEADER))
        return report
    report.problems += [Problem("header", f"{store}/{HEADER}: {fault}", HEADER) for fault in _header_faults(header)]
    if report.problems:
        return report
    if CHECKSUM not in header:
        report.notes.append(f"{HEADER} has no checksum: it was written before they did")
    if declared_method(header["identity"]) is None:
        report.notes.append(
            f"the method {method_of(header)} is unknown here, and {HEADER} does not say what it declares: how many "
            "tokens it keeps, in which order, and whether it merges was not checked"
        )
    changing = request.clean or request.repair
    if not changing and (other := holder(store)) is not None:
        report.notes.append(f"a run writes here at this moment, {who(other)}; its next shards look like orphans")
    files = list_files(store)
    list_uploads(store, report)
    rows, bad = _check_commits(store, header, request, console, report)
    live = _check_live(rows, report)
    again = _live_check(store, request, live) if request.live else None
    sound |= _check_tokens(store, header, request, console, report, _places(rows, live), bad, sound)
    _sort(store, files, rows, live, report)
    report.seconds = time.monotonic() - started
    if again is not None:
        again.run(_sound(live, report), request.live, request.seed, report)
    if request.repair and repairable(report):
        repaired = Repair(store, header, report).carry_out(Judge(store, header, rows, live, bad), rows)
        request = replace(request, repair=False, clean=not _lost(report))
        return _after_repair(_verify(store, request, console, sound), report, repaired, store)
    if request.clean:
        clean(store, report, request.keep, commits=[file.name for file in files[VIDEOS]])
    return report


def _lost(report: Report) -> bool:
    """Whether a file of the table is lost or damaged: a copy of it may turn up, and its token shards are sound."""
    return any(problem.kind in {"commit", "lost"} for problem in report.problems)


def _after_repair(report: Report, before: Report, repaired: Repaired, store: Store) -> Report:
    """What is there now, with what was before."""
    if repaired.marked:
        repaired.command = command_again(store, max(video.attempts for video in repaired.marked))
    report.found, report.repaired = before.problems, repaired
    report.notes += [note for note in before.notes if note not in report.notes] + [_STAY] * _lost(before)
    report.bytes_read += before.bytes_read
    report.seconds += before.seconds
    return report


def _live_check(store: Store, request: Request, live: pa.Table) -> LiveCheck:
    """Refuses before the long part begins."""
    from pipeline.verify.live_check import LiveCheck  # noqa: PLC0415 - models and decoders load only for this

    cache = TokenCache(str(store), store=store, live=live)
    return LiveCheck(cache, request.model, request.objects or Objects.from_environment())


def _header_faults(header: CacheHeader) -> Iterator[str]:
    identity, hidden = header["identity"], header.get("hidden_size")
    ratio = identity.get("retention_ratio")
    if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        yield f"its retention ratio is {ratio!r}"
    newline = header.get("newline")
    if newline is not None:
        try:
            n_bytes = len(base64.b64decode(newline, validate=True))
        except (binascii.Error, TypeError, ValueError):
            yield "its newline row is not base64"
        else:
            if hidden is not None and n_bytes != 2 * hidden:
                yield f"its newline row has {n_bytes} bytes, not {hidden} bfloat16 numbers"


def _check_commits(
    store: Store, header: CacheHeader, request: Request, console: Console, report: Report
) -> tuple[pa.Table, set[Place]]:
    """Every videos shard; returns KEPT of all rows with shard and row, and which rows cannot be judged by."""
    names = store.names(VIDEOS, ".parquet")
    tables, bad, unmarked = [], set(), 0
    for name, checked in _checked(
        lambda name: check_commit(store, name, header), names, "videos shard", request, console
    ):
        report.problems += checked.problems
        report.bytes_read += checked.n_bytes
        if checked.rows is not None:
            tables.append(checked.rows)
            unmarked += checked.made_with is None
        bad |= {(name, place) for place in checked.bad}
    report.counts |= {"videos_shards": len(names)}
    if unmarked:
        report.notes.append(f"{unmarked} videos shards carry no fingerprint: they were written before they did")
    empty = pa.table({**{name: [] for name in KEPT}, "shard": [], "row": []})
    return pa.concat_tables(tables) if tables else empty, bad


def _check_live(rows: pa.Table, report: Report) -> pa.Table:
    """The live rows."""
    if not len(rows):
        report.counts |= {"videos": 0, "failed_videos": 0, "removed_videos": 0}
        return rows
    live = live_rows(rows)
    n_ok = pc.sum(pc.equal(live["status"], "ok")).as_py()
    n_removed = pc.sum(pc.equal(live["status"], "removed")).as_py()
    report.counts |= {"videos": n_ok, "failed_videos": len(live) - n_ok - n_removed, "removed_videos": n_removed}
    return live


def _check_tokens(
    store: Store,
    header: CacheHeader,
    request: Request,
    console: Console,
    report: Report,
    places: Mapping[str, Sequence[Place]],
    bad: set[Place],
    sound: Sound,
) -> Sound:
    """Check every token shard of ``places``; those that are ``sound`` are not read.

    Each has the videos rows that name it. Returns those without a problem.
    """
    # Neighbours in the order of commits share a videos shard, which is in memory then.
    names = sorted(places, key=lambda name: places[name][0])
    full = VideoRows(store, keep=8 * request.jobs)

    def check(name: str) -> CheckedShard:
        if name in sound:
            return replace(sound[name], n_bytes=0)
        good = [place for place in places[name] if place not in bad]
        rows = [(commit, full(commit, row)) for commit, row in good]
        return check_token_shard(store, name, rows, header) if rows else CheckedShard([])

    widths: dict[str, int] = {}
    n_tokens, passed = 0, {}
    for name, checked in _checked(check, names, "token shard", request, console):
        report.problems += checked.problems
        if not checked.problems:
            passed[name] = checked
        report.bytes_read += checked.n_bytes
        n_tokens += checked.n_tokens
        for key, width in checked.widths.items():
            if widths.setdefault(key, width) != width:
                what = f"{store}/{name}: {width} numbers of {key} a token, {widths[key]} in other shards"
                report.problems.append(Problem("schema", what, name))
    report.counts |= {"token_shards": len(names), "tokens": n_tokens}
    return passed


def _token_shards(rows: pa.Table) -> set[str]:
    return set(rows.filter(pc.equal(rows["status"], "ok"))["token_shard"].to_pylist())


def _places(rows: pa.Table, live: pa.Table) -> dict[str, list[Place]]:
    """Each token shard that a live row names -> a row of each video in it, superseded ones too."""
    found: dict[str, dict[str, Place]] = {name: {} for name in sorted(_token_shards(live) - {None})}
    for table in (live, rows):  # what is in several files counts once
        ok = table.filter(pc.equal(table["status"], "ok")).select(["token_shard", "video_id", "shard", "row"])
        for row in ok.to_pylist():
            if row["token_shard"] in found:
                found[row["token_shard"]].setdefault(row["video_id"], (row["shard"], row["row"]))
    return {name: list(places.values()) for name, places in found.items()}


def _sort(store: Store, files: dict[str, list[FileInfo]], rows: pa.Table, live: pa.Table, report: Report) -> None:
    """Note the files that were left behind, and the rows that must have been there."""
    sort_files(files, _token_shards(rows), _token_shards(live), report)
    known = set(live["video_id"].to_pylist())
    if any(problem.kind == "commit" for problem in report.problems):
        return  # that is where their rows were
    lost = [name for name in committed_orphans(store, report.orphans) if not known.issuperset(videos_in(store, name))]
    if lost:
        what = f"{store}/{VIDEOS} has no row of videos in {len(lost)} token shards that were committed"
        report.problems.append(Problem("lost", f"{what}, {', '.join(lost[:3])}: a file of it is gone", VIDEOS))


def _sound(live: pa.Table, report: Report) -> pa.Table:
    """The live rows of videos that have no problem."""
    ids = [problem.video_id for problem in report.problems if problem.video_id is not None]
    shards = [problem.shard for problem in report.problems if problem.video_id is None]
    known = pc.is_in(live["video_id"], value_set=pa.array(ids, pa.string()))
    damaged = pc.is_in(live["token_shard"], value_set=pa.array(shards, pa.string()))
    return live.filter(pc.invert(pc.or_(known, damaged)))


def _checked(
    work: Callable[[str], R], names: Sequence[str], item: str, request: Request, console: Console
) -> Iterator[tuple[str, R]]:
    """``work`` of every file with its name, in order, by ``request.jobs`` threads, with progress."""
    if not names:
        return
    with reporter(console, len(names), request.log_interval, Wording("verifying", item, {}, "")) as progress:
        for name, result in zip(names, _in_order(work, names, request.jobs), strict=True):
            progress.advance(int(not result.problems), int(bool(result.problems)))
            yield name, result


def _in_order(work: Callable[[T], R], items: Iterable[T], jobs: int) -> Iterator[R]:
    """Results in the order of ``items``; no more of them wait than threads work."""
    pool = ThreadPoolExecutor(jobs, "verify")
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * jobs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
