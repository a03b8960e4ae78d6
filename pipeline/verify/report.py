"""What ``jobs.verify`` found: problems by class, files that were left behind, and the same as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.rows import JsonObject
from pipeline.storage.s3 import Upload
from pipeline.storage.stores import FileInfo

_REDO = "restore it from a copy, or let --repair mark its videos for another attempt of jobs.prune"


class Kind(StrEnum):
    """The kind of a problem, with its remedy."""

    remedy: str

    def __new__(cls, name: str, remedy: str = "") -> Kind:
        kind = str.__new__(cls, name)
        kind._value_, kind.remedy = name, remedy
        return kind

    HEADER = "header", "restore cache.json from a copy: it says what all tokens were made with"
    COMMIT = "commit", _REDO
    LOST = "lost", "restore the files of videos/ from a copy, or let --repair mark their videos for another attempt"
    SCHEMA = "schema", "another program or another version of this one wrote it: read it with that one"
    FINGERPRINT = (
        "fingerprint",
        "the shard belongs to a cache of other settings: move it there, and its token shards, or let --repair set it "
        "aside",
    )
    ROW = "row", "the row contradicts itself: report it; --repair marks its video for another attempt of jobs.prune"
    MISSING = "missing", _REDO
    FOOTER = "footer", _REDO
    DAMAGED = "damaged", _REDO
    ROWS = "rows", _REDO
    CHECKSUM = "checksum", _REDO
    TOKENS = (
        "tokens",
        "the tokens contradict their row: report it; --repair marks the video for another attempt of jobs.prune",
    )
    UNREADABLE = "unreadable", "look at the disk or the store, and at who may read there; then verify again"
    LIVE_FAILED = (
        "live-failed",
        "the source is the same and cannot be encoded here: the message says why, the tokens may be sound",
    )
    LIVE = "live", "run jobs.prune again into another --out, unless that processor rounds in another way"


_SHOWN = 10  # files listed by name in the terminal; the JSON has them all


@dataclass(frozen=True)
class Problem:
    """A fault of the cache that a check found.

    Attributes:
        kind: its class.
        what: in words.
        shard: the file it is about.
        video_id: the video, where it is about one.
        videos_shard: the commit that names the shard, where that is another file.
    """

    kind: Kind
    what: str
    shard: str | None = None
    video_id: str | None = None
    videos_shard: str | None = None

    def as_record(self) -> JsonObject:
        """Return the problem as a JSON-able dict."""
        record = asdict(self)
        return {"class": record.pop("kind"), **record, "remedy": self.kind.remedy}


@dataclass(frozen=True)
class LiveResult:
    """The result of encoding one video again from its source.

    Attributes:
        video_id: which one.
        state: "same" (every bit), "different", "source-gone" (or changed), or "failed" (to be encoded again).
        note: why, in words.
        same_indices: the share of the selected positions that both have.
        max_difference: the largest absolute difference of a number of a token that both have.
        relative_difference: the norm of all those differences against the norm of the stored tokens.
        versions: what has another version or device now, name -> (then, now).
    """

    video_id: str
    state: Literal["same", "different", "source-gone", "failed"]
    note: str = ""
    same_indices: float | None = None
    max_difference: float | None = None
    relative_difference: float | None = None
    versions: dict[str, tuple[str, str]] = field(default_factory=dict)


class Marked(NamedTuple):
    """A video that a repair gave a failed row, in place of one that could not be trusted.

    ``uri`` is "" where it is not known.
    """

    video_id: str
    uri: str
    attempts: int
    why: str


@dataclass
class Repaired:
    """The result of a repair.

    Attributes:
        kept_in: the folder below the cache that has what was replaced.
        marked: videos for another attempt.
        moved: sound videos whose tokens were written again, away from damaged ones.
        replaced: videos shards.
        command: what encodes the marked videos again; "" where there are none.
    """

    kept_in: str
    marked: list[Marked] = field(default_factory=list)
    moved: int = 0
    replaced: list[str] = field(default_factory=list)
    command: str = ""

    def as_record(self) -> JsonObject:
        """Return the repair as a JSON-able dict."""
        return {**vars(self), "marked": [video._asdict() for video in self.marked]}

    def lines(self) -> Iterator[str]:
        """Yield lines for the user about the repair."""
        if self.replaced:
            kept = f"those that were there before are in {self.kept_in}/, to be removed by hand"
            yield f"{len(self.replaced):,} videos shards written anew; {kept}"
        if self.moved:
            yield f"{self.moved:,} sound videos moved to new token shards"
        yield f"{len(self.marked):,} videos marked for another attempt"
        for video in self.marked[:_SHOWN]:
            yield f"  {video.video_id}: {video.why}"
        if len(self.marked) > _SHOWN:
            yield f"  ... and {len(self.marked) - _SHOWN:,} more: jobs.inspect CACHE --failed lists them"


@dataclass
class Report:
    """The findings of a verification, which are added as it goes on.

    Attributes:
        cache: as it was named.
        counts: what was looked at.
        problems: what is wrong.
        notes: what a user should know and is not wrong.
        orphans: token shards that no videos shard names.
        leftovers: files of writes that did not end.
        superseded: token shards that only rows name which a later attempt replaced.
        uploads: pending multipart uploads.
        removed: names of what ``--clean`` removed.
        live: videos that were encoded again.
        found: the problems that a repair mended; ``problems`` are those that are left.
        repaired: what the repair did; None where there was none.
        bytes_read: of the cache.
        seconds: what reading took.
    """

    cache: str
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    orphans: list[FileInfo] = field(default_factory=list)
    leftovers: list[FileInfo] = field(default_factory=list)
    superseded: list[FileInfo] = field(default_factory=list)
    uploads: list[Upload] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    live: list[LiveResult] = field(default_factory=list)
    found: list[Problem] = field(default_factory=list)
    repaired: Repaired | None = None
    bytes_read: int = 0
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0 without problems, else 1; files left behind are no problem."""
        return 1 if self.problems else 0

    @property
    def gb_per_s(self) -> float:
        """The reading speed in GB/s."""
        return self.bytes_read / 1e9 / self.seconds if self.seconds else 0.0

    def as_record(self) -> JsonObject:
        """Return the report as a JSON-able dict."""
        return {
            "cache": self.cache,
            "exit_code": self.exit_code,
            "counts": self.counts,
            "problems": [problem.as_record() for problem in self.problems],
            "notes": self.notes,
            **{name: [f._asdict() for f in getattr(self, name)] for name in ("orphans", "leftovers", "superseded")},
            "uploads": [{**u._asdict(), "started": u.started.isoformat()} for u in self.uploads],
            "removed": self.removed,
            "live": [asdict(result) for result in self.live],
            "found": [problem.as_record() for problem in self.found],
            "repaired": None if self.repaired is None else self.repaired.as_record(),
            "bytes_read": self.bytes_read,
            "seconds": round(self.seconds, 3),
            "gb_per_s": round(self.gb_per_s, 3),
        }


def render(report: Report) -> RenderableType:
    """Render the report for the terminal."""
    head = Table.grid(padding=(0, 2))
    head.add_row("cache", Text(report.cache))
    for name, count in report.counts.items():
        head.add_row(name.replace("_", " "), f"{count:,}")
    head.add_row("read", f"{report.bytes_read:,} bytes in {report.seconds:.1f} s, {report.gb_per_s:.2f} GB/s")
    for note in report.notes:
        head.add_row("note", Text(note))
    for title, files in _left_behind(report):
        head.add_row(title, Text(_listed(files)))
    parts: list[RenderableType] = [head]
    if report.live:
        parts += ["", _live_table(report.live)]
    if report.repaired is not None:
        parts += ["", _problem_table(report.found, "problems before"), "", *map(Text, report.repaired.lines())]
    n = len(report.problems)
    parts += ["", _problem_table(report.problems, "problems")] if n else []
    parts += ["", Text(f"{n:,} problems" if n else "nothing is wrong", style="red" if n else "green")]
    return Group(*parts)


def _left_behind(report: Report) -> list[tuple[str, list[str]]]:
    """Return (title, names) of each kind of file left behind, without empty ones."""
    found = [
        ("orphans", [f"{name} ({size:,} bytes)" for name, size in report.orphans]),
        ("leftovers", [f"{name} ({size:,} bytes)" for name, size in report.leftovers]),
        ("superseded", [f"{name} ({size:,} bytes)" for name, size in report.superseded]),
        ("uploads", [f"{upload.uri} since {upload.started:%Y-%m-%d %H:%M}" for upload in report.uploads]),
        ("removed", report.removed),
    ]
    return [(title, names) for title, names in found if names]


def _listed(names: Sequence[str]) -> str:
    """Format a count and the first names."""
    more = f"\n... and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return "\n".join([str(len(names)), *names[:_SHOWN]]) + more


def _problem_table(problems: Sequence[Problem], title: str) -> Table:
    """Render the problems by class, with one example and the remedy of each."""
    table = Table(title=title, title_justify="left", show_edge=False)
    for name in ("class", "count", "example", "remedy"):
        table.add_column(name, overflow="fold", justify="right" if name == "count" else "left")
    for kind in Kind:
        mine = [problem for problem in problems if problem.kind == kind]
        if mine:
            video = f"{mine[0].video_id}: " if mine[0].video_id is not None else ""
            # Names come from files: never let them be read as markup.
            table.add_row(kind, str(len(mine)), Text(f"{video}{mine[0].what}"), Text(kind.remedy))
    return table


def _live_table(results: Sequence[LiveResult]) -> Table:
    """Lay out the results of encoding videos again."""
    table = Table(title="encoded again", title_justify="left", show_edge=False)
    for name in ("video", "result", "same indices", "max difference", "other versions"):
        table.add_column(name, overflow="fold")
    for item in results:
        share = "" if item.same_indices is None else f"{item.same_indices:.1%}"
        most = "" if item.max_difference is None else f"{item.max_difference:.3g}"
        others = "; ".join(f"{name} {then} then, {now} now" for name, (then, now) in item.versions.items())
        result = item.state + (f": {item.note}" if item.note else "")
        table.add_row(Text(item.video_id), Text(result), share, most, Text(others))
    return table
