"""The counts of a manifest's videos in a cache, made from the videos table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.cache.codecs import BFLOAT16, TokenCodec
from pipeline.cache.header import SamplingIdentity
from pipeline.cache.live import HDR, INFRASTRUCTURE, SHARED, STRETCHED, TIMED_STAGES, UNEVEN, WARNED, Ledger
from pipeline.cache.schema import VIDEOS
from pipeline.errors import FAULTS, format_count, list_first_names
from pipeline.inputs.left_out import format_left_out
from pipeline.keys import iter_column_slices
from pipeline.prune.frame_limits import FrameLimits, describe_limits, get_max_frames, make_limits
from pipeline.rows import JsonObject
from pipeline.runner.run_record import Outcome, as_text

_MAX_EXAMPLES = 3  # examples of lost videos, videos with warnings and reasons in a summary
_REMARKS = {"hdr": HDR, "stretched": STRETCHED, "uneven": UNEVEN, "shared": SHARED}


@dataclass(frozen=True, kw_only=True)
class Summary(Outcome):
    """Counts of the videos of a manifest in a cache, or of a whole cache. ``str`` renders it as text.

    Attributes:
        n_videos: videos of the manifest, without removed and waiting videos.
        tokens_in: tokens before pruning, of ok videos.
        token_bytes: bytes of the stored tokens with their deepstack levels.
        seconds: stage -> seconds, summed over the videos.
        n_warned: ok videos that were decoded with warnings.
        warned: the ids of the first 3 of them.
        other_decoder: the reason why another decoder than the requested one was used -> number of videos.
        remarks: remark -> number of videos: "hdr" (high dynamic range), "stretched" (pixels that are not square),
            "uneven" (frames away from the model's positions in time) and "shared" (patches that share a position).
        frame_limits: None unless sampled with ``--fps``.
        n_removed: videos that were removed for good; no other count includes them.
        fetched_bytes: bytes of videos and indexes that this run read from stores.
        n_lost: videos that a run committed, but of which no file of the table has a row.
        lost: the ids of up to 3 of them.
        left_out: kind of file -> number of files in VIDEOS that are not videos or are not read.
        left_out_names: kind of file -> the first names.
        facts: seconds and bytes of this run (``Facts.as_record``); empty for a summary of a cache.
    """

    n_videos: int
    tokens_in: int
    tokens_kept: int
    token_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    n_warned: int = 0
    warned: list[str] = field(default_factory=list)
    other_decoder: Mapping[str, int] = field(default_factory=dict)
    remarks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_REMARKS, 0))
    frame_limits: FrameLimits | None = None
    n_removed: int = 0
    fetched_bytes: int = 0
    n_lost: int = 0
    lost: list[str] = field(default_factory=list)
    left_out: Mapping[str, int] = field(default_factory=dict)
    left_out_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)

    def exit_code(self, failure_limit: int, infrastructure_limit: int | None = None) -> int:
        """Return 1 if rows are lost or missing, no video is ok, too many failed, or one by a bug; otherwise 0."""
        return 1 if self.n_lost else super().exit_code(failure_limit, infrastructure_limit)

    def iter_troubles(self, item: str, n_items: int) -> Iterator[str]:
        """Yield a text for each reason of the exit code 1, lost rows first."""
        if self.n_lost:
            yield format_lost(self.n_lost, self.lost)
        yield from super().iter_troubles(item, n_items)

    def as_record(self) -> JsonObject:
        """Return the counts and examples as a mapping for JSON, with the facts of the run as top-level keys."""
        counts = {name: value for name, value in super().as_record().items() if name != "facts"}
        return {**counts, **self.facts}

    def __str__(self) -> str:
        return as_text(render_summary(self))


def summarize_videos(
    ledger: Ledger,
    manifest: pa.Table | None = None,
    deepstack_levels: int = 0,
    codec: TokenCodec = BFLOAT16,
    *,
    sampling: SamplingIdentity | None = None,
    n_waiting: int = 0,
    list_failed: bool = False,
    committed: Sequence[str] = (),
) -> Summary:
    """Count the videos of a manifest by their live rows, or all videos of the cache.

    Args:
        manifest: the videos to count (column video_id); None for all rows of the ledger.
        deepstack_levels: the deepstack vectors stored with each token.
        sampling: the sampling entry of the cache's identity; None leaves ``Summary.frame_limits`` None.
        n_waiting: videos of the manifest that are left for another run, which are not counted as missing.
        list_failed: True to fill ``Summary.failed``, if there is a manifest.
        committed: the token shards that the records of runs name, to detect lost videos.
    """
    counts, failed_classes = _count_rows(ledger, sampling, manifest, list_failed=list_failed)
    n_videos = counts.n_rows if manifest is None else len(manifest) - n_waiting - counts.n_removed
    failures, examples = counts.failures()
    return Summary(
        n_videos=n_videos,
        n_ok=counts.n_ok,
        failures=failures,
        examples=examples,
        n_missing=n_videos - counts.n_rows,
        n_outside=counts.n_outside,
        n_waiting=n_waiting,
        tokens_in=counts.tokens_in,
        tokens_kept=counts.tokens_kept,
        token_bytes=counts.tokens_kept * codec.token_bytes(ledger.hidden_size, deepstack_levels),
        seconds=dict(zip(TIMED_STAGES, counts.seconds.tolist(), strict=True)),
        n_warned=counts.n_warned,
        warned=counts.warned(),
        other_decoder=counts.other_decoder(),
        remarks=counts.remarks,
        frame_limits=counts.frame_limits(),
        n_removed=counts.n_removed,
        failed=failed_classes,
        n_lost=len(lost_ids := ledger.lost(committed)),
        lost=lost_ids[:_MAX_EXAMPLES],
    )


def _count_rows(
    ledger: Ledger, sampling: SamplingIdentity | None, manifest: pa.Table | None, *, list_failed: bool
) -> tuple[_Counts, dict[str, str]]:
    """Count the rows of a manifest's videos, or all rows without a manifest.

    Returns:
        The counts, and video_id -> error class of the failed videos; {} without ``list_failed`` or a manifest.
    """
    failed_classes: dict[str, str] = {}
    counts = _Counts(ledger, sampling)
    if manifest is None:
        counts.add(np.arange(len(ledger)))
        return counts, failed_classes
    for ids in iter_column_slices(manifest["video_id"]):
        rows = ledger.find(ids)
        counts.add(rows[rows >= 0])
        if list_failed:
            has_row = np.flatnonzero(rows >= 0)
            faults = ledger.columns["fault"][rows[has_row]]
            failed_ids = ids.take(pa.array(has_row[faults > 0])).to_pylist()
            classes = [ledger.classes[fault] for fault in faults[faults > 0].tolist()]
            failed_classes |= dict(zip(failed_ids, classes, strict=True))
    return counts, failed_classes


def format_lost(n_lost: int, examples: Sequence[str]) -> str:
    """Format the number of videos that the table has lost, with examples and the remedy."""
    lost = f"{format_count(n_lost, 'committed video')} without a row in any file of {VIDEOS}/"
    return (
        f"{lost} ({list_first_names(examples, n_lost)}): restore the files of {VIDEOS}/ from a copy, or let python -m "
        "jobs.verify CACHE --repair mark the videos for another attempt"
    )


class _Counts:
    """Sums over rows of a ledger, which become a Summary."""

    def __init__(self, ledger: Ledger, sampling: SamplingIdentity | None) -> None:
        """Set all sums to zero. Limits of frames are counted only if ``sampling`` has ``fps``."""
        self._ledger = ledger
        self._sampling = sampling if sampling is not None and sampling.get("fps") is not None else None
        self._n_capped = self._n_filled = self._n_unknown = 0
        self._most_by_rate, self._longest = 0, -1  # of the longest capped video: ``frames_by_rate``, and its row
        self._filled: list[int] = []  # the first rows of filled videos
        self._by_class = np.zeros(len(ledger.classes), np.int64)
        self._first: dict[int, int] = {}  # class -> its first row
        self._warned: list[int] = []  # the first rows of videos with warnings
        self.n_rows = self.tokens_in = self.tokens_kept = self.n_warned = self.n_outside = self.n_removed = 0
        self.seconds = np.zeros(len(TIMED_STAGES))
        self.remarks = dict.fromkeys(_REMARKS, 0)
        self._by_note = np.zeros(len(ledger.notes), np.int64)

    def add(self, rows: NDArray[np.int64]) -> None:
        """Add the rows of the ledger with these indices. Removed videos count only in ``n_removed``."""
        is_removed = self._ledger.removed(rows)
        self.n_removed += int(is_removed.sum())
        rows = rows[~is_removed]
        columns = self._ledger.columns
        faults = columns["fault"][rows]
        ok_rows = rows[faults == 0]
        self._by_class += np.bincount(faults, minlength=len(self._by_class))
        for fault in set(np.unique(faults).tolist()) - {0, *self._first}:
            self._first[fault] = int(rows[faults == fault][0])
        self.n_rows += len(rows)
        self.tokens_in += int(columns["n_total"][ok_rows].sum(dtype=np.int64))
        self.tokens_kept += int(columns["n_tokens"][ok_rows].sum(dtype=np.int64))
        warned_rows = ok_rows[self._ledger.make_remark_mask(ok_rows, WARNED)]
        self.n_warned += len(warned_rows)
        self._warned += warned_rows[: _MAX_EXAMPLES - len(self._warned)].tolist()
        for name, remark in _REMARKS.items():
            self.remarks[name] += int(self._ledger.make_remark_mask(ok_rows, remark).sum())
        self._by_note += np.bincount(columns["note"][ok_rows], minlength=len(self._by_note))
        if self._sampling is not None:
            self._add_limits(ok_rows, self._sampling)
        self.n_outside += int(self._ledger.make_remark_mask(rows, INFRASTRUCTURE).sum())
        self.seconds += columns["seconds"][rows].sum(axis=0, dtype=np.float64)

    def _add_limits(self, ok_rows: NDArray[np.int64], sampling: SamplingIdentity) -> None:
        """Count the ok videos whose number of frames a limit changed, and note the rows for ``frame_limits``."""
        by_rate = self._ledger.columns["by_rate"][ok_rows]
        cap = get_max_frames(sampling)
        n_capped = int((by_rate > cap).sum())
        (filled,) = np.nonzero((by_rate > 0) & (by_rate <= cap))
        self._n_capped += n_capped
        self._n_filled += len(filled)
        self._n_unknown += int((by_rate < 0).sum())
        self._filled += ok_rows[filled[: _MAX_EXAMPLES - len(self._filled)]].tolist()
        if n_capped and by_rate.max() > self._most_by_rate:
            self._most_by_rate, self._longest = int(by_rate.max()), int(ok_rows[by_rate.argmax()])

    def frame_limits(self) -> FrameLimits | None:
        """Return the counts of videos whose number of frames a limit changed; None unless sampled with ``fps``."""
        if (sampling := self._sampling) is None:
            return None
        longest = self._ledger.read(self._longest) if self._n_capped else None
        filled = [self._ledger.read(row)["video_id"] for row in self._filled]
        return make_limits(sampling, self._n_capped, longest, self._n_filled, filled, self._n_unknown)

    @property
    def n_ok(self) -> int:
        """The number of videos with tokens."""
        return int(self._by_class[0])

    def other_decoder(self) -> dict[str, int]:
        """Return reason for another decoder -> number of videos, the most frequent reason first."""
        order = [
            number for number in np.argsort(-self._by_note, kind="stable").tolist() if number and self._by_note[number]
        ]
        return {self._ledger.notes[number]: int(self._by_note[number]) for number in order}

    def warned(self) -> list[str]:
        """Read the ids of the first videos that were decoded with warnings."""
        return [self._ledger.read(row)["video_id"] for row in self._warned]

    def failures(self) -> tuple[dict[str, int], dict[str, tuple[str, str]]]:
        """Return class -> number of failed videos, and class -> (id, message) of the first; frequent classes first."""
        order = [int(fault) for fault in np.argsort(-self._by_class, kind="stable") if fault in self._first]
        names = self._ledger.classes
        rows = {fault: self._ledger.read(self._first[fault]) for fault in order}
        counts = {names[fault]: int(self._by_class[fault]) for fault in order}
        return counts, {names[fault]: (row["video_id"], row["error_message"] or "") for fault, row in rows.items()}


def iter_remarks(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield (name, sentence) for each remark on frames, warnings, decoder, pictures and positions that applies."""
    for line in () if summary.frame_limits is None else describe_limits(summary.frame_limits):
        yield "frames", line
    if summary.n_warned:
        warned = format_count(summary.n_warned, "video")
        names = list_first_names(summary.warned, summary.n_warned)
        yield "warnings", f"{warned} decoded with warnings of FFmpeg, whose frames may be damaged: {names}"
    if n_other := sum(summary.other_decoder.values()):
        reasons = [f"{why} ({format_count(count, 'video')})" for why, count in summary.other_decoder.items()]
        more = "; ..." if len(reasons) > _MAX_EXAMPLES else ""
        others = f"{format_count(n_other, 'video')} by another decoder than the requested one"
        yield "decoder", f"{others}: {'; '.join(reasons[:_MAX_EXAMPLES])}{more}"
    hdr, stretched, uneven, shared = (summary.remarks[name] for name in _REMARKS)
    kinds = (
        ("pictures", hdr, "in HDR (PQ or HLG): colors are taken as stored, without tone mapping"),
        ("pictures", stretched, "with pixels that are not square: frames are not stretched to the shape on a screen"),
        ("positions", uneven, "with unevenly spaced frames, where this model's positions in time are evenly spaced"),
        ("positions", shared, "with temporal patches that share a position in time"),
    )
    yield from ((name, f"{format_count(count, 'video')} {kind}") for name, count, kind in kinds if count)


def render_summary(summary: Summary) -> RenderableType:
    """Render the summary as a table for the terminal; failures follow by class, with an example and the remedy."""
    table = Table.grid(padding=(0, 2))
    share = summary.tokens_kept / summary.tokens_in if summary.tokens_in else 0.0
    waiting = f", {summary.n_waiting} wait for another run (--limit, --max-hours)" if summary.n_waiting else ""
    counts = f"{summary.n_ok} ok, {summary.n_failed} failed, {summary.n_missing} without a row"
    table.add_row("videos", counts + waiting)
    table.add_row("tokens", f"{summary.tokens_kept:,} kept of {summary.tokens_in:,} ({share:.1%})")
    table.add_row("bytes", f"{summary.token_bytes:,} of tokens")
    seconds = ", ".join(f"{stage} {value:.2f}" for stage, value in summary.seconds.items())
    table.add_row("seconds", f"{seconds}; summed over the videos")
    if summary.fetched_bytes:
        table.add_row("from stores", f"{summary.fetched_bytes:,} bytes of videos and indexes")
    if summary.left_out:
        table.add_row("left out", Text(format_left_out(summary.left_out, summary.left_out_names)))
    if summary.n_removed:
        table.add_row("removed", f"{format_count(summary.n_removed, 'video')}, by jobs.remove")
    if summary.n_lost:
        table.add_row("lost", Text(format_lost(summary.n_lost, summary.lost)))
    for name, line in iter_remarks(summary):
        table.add_row(name, Text(line))
    if summary.wall_s is not None:
        table.add_row("this run", Text(summary.pace("video")))
    if summary.facts:
        busy = summary.facts["encoder_busy"]
        decode_s = summary.facts["decode_core_s"] / max(1, summary.n_new)
        table.add_row("its pace", f"encoders busy {busy:.1%} of the time, decoding {decode_s:.3g} core-seconds a video")
    failures: list[RenderableType] = ["", summary.make_failures_table("video", FAULTS)] if summary.failures else []
    return Group(table, *failures)
