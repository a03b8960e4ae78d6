"""The report of ``jobs.verify``: problems by kind and files left behind, as lines for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Literal

from pipeline.rows import JsonObject
from pipeline.storage.s3 import Upload
from pipeline.storage.stores import FileInfo

KEPT_IN = "repaired"  # folder of a cache for the files that a repair has replaced
_MAX_EXAMPLES = 10  # files and videos listed by name in the terminal; the JSON lists all
_REDO = "restore it from a copy, or let --repair mark its videos for another attempt of jobs.prune"


class Kind(StrEnum):
    """The kind of a problem; its value is the name in the report, and ``remedy`` says what the user can do."""

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
    STRAY = "stray", "rename the file if its rows belong to this cache, or move it out of videos/; nothing deletes it"
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
    UNREADABLE = "unreadable", "check the disk or the store, and the permissions to read it; then verify again"
    LIVE_FAILED = (
        "live-failed",
        "the source is the same and cannot be encoded here: the message says why, the tokens may be sound",
    )
    SOURCE_CHANGED = (
        "source-changed",
        "the tokens are those of an earlier file: jobs.prune with --redo FILE, a video_id a line, encodes the new one",
    )
    LIVE = "live", "run jobs.prune again into another --out, unless that processor rounds in another way"


@dataclass(frozen=True)
class Problem:
    """A problem of the cache that a check found.

    Attributes:
        shard: the file with the problem: a token shard, a file of the videos table, or the header.
        video_id: the video, or None if the problem concerns the whole file.
        videos_shard: the file of the videos table that names the damaged token shard; otherwise None.
    """

    kind: Kind
    what: str
    shard: str | None = None
    video_id: str | None = None
    videos_shard: str | None = None

    def as_record(self) -> JsonObject:
        """Return the problem as a dict for JSON: its fields, with "class" for the kind, and the remedy."""
        record = asdict(self)
        return {"class": record.pop("kind"), **record, "remedy": self.kind.remedy}


@dataclass(frozen=True)
class LiveResult:
    """The result of encoding one video again from its source.

    Attributes:
        state: "same" (every bit), "different", "source-gone" (or it must not be read), "source-changed", or "failed"
            (it could not be encoded).
        note: the reason for the state; "" if there is nothing to say.
        same_indices: the share of selected positions that both have; None if nothing was compared.
        max_difference: the largest absolute difference of values at common positions; None if there are none.
        relative_difference: the norm of the differences divided by the norm of the stored values, the largest over
            tokens, deepstack levels and evidence; None if nothing was compared.
        versions: versions and devices that differ now: name -> (then, now).
    """

    video_id: str
    state: Literal["same", "different", "source-gone", "source-changed", "failed"]
    note: str = ""
    same_indices: float | None = None
    max_difference: float | None = None
    relative_difference: float | None = None
    versions: dict[str, tuple[str, str]] = field(default_factory=dict)

    def line(self) -> str:
        """Return a line for the terminal about the video."""
        share = "" if self.same_indices is None else f", {self.same_indices:.1%} of the positions"
        most = "" if self.max_difference is None else f", {self.max_difference:.3g} apart at most"
        changes = "".join(f"; {name} {then} then, {now} now" for name, (then, now) in self.versions.items())
        return f"encoded again: {self.video_id}: {self.state}{self.note and f': {self.note}'}{share}{most}{changes}"


@dataclass(frozen=True)
class MarkedVideo:
    """A video that a repair gave a failed row because its own row or tokens could not be trusted.

    ``uri`` is "" if it is not known; ``attempts`` is that of the row.
    """

    video_id: str
    uri: str
    attempts: int
    why: str


@dataclass
class RepairResult:
    """The result of a repair.

    Attributes:
        moved: the number of sound videos copied to new token shards, away from damaged ones.
        replaced: names of the table files that were rewritten or set aside.
    """

    kept_in: str
    marked: list[MarkedVideo] = field(default_factory=list)
    moved: int = 0
    replaced: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield lines for the terminal, with the command that encodes the marked videos again."""
        if self.replaced:
            kept_note = f"the previous files are in {self.kept_in}/; delete them by hand"
            yield f"{len(self.replaced):,} videos shards rewritten; {kept_note}"
        if self.moved:
            yield f"{self.moved:,} sound videos moved to new token shards"
        yield f"{len(self.marked):,} videos marked for another attempt"
        yield from _cut_list([f"  {video.video_id}: {video.why}" for video in self.marked])
        if self.marked:
            attempts = max(video.attempts for video in self.marked) + 1
            yield (
                "encode them again: run the command that made the cache with --retry-failed "
                f"--max-attempts {attempts}; jobs.inspect CACHE --failed lists the videos"
            )


@dataclass
class Report:
    """The findings of a verification, filled while it runs.

    Attributes:
        counts: the numbers of checked videos, files and tokens, by name.
        problems: what is wrong; after a repair, what is still wrong.
        orphans: token shards that no row names.
        leftovers: temporary files of interrupted writes.
        superseded: token shards that only superseded rows name.
        uploads: pending multipart uploads.
        found: the problems before a repair; empty without one.
        bytes_read: bytes of the checked files, without token shards if only a sample of videos was read.
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
    repaired: RepairResult | None = None
    bytes_read: int = 0
    seconds: float = 0.0

    def has(self, *kinds: Kind) -> bool:
        """Return True if there is a problem of one of these kinds."""
        return any(problem.kind in kinds for problem in self.problems)

    @property
    def exit_code(self) -> int:
        """0 without problems, else 1; files left behind are not problems."""
        return 1 if self.problems else 0

    @property
    def gb_per_s(self) -> float:
        """The reading speed in GB/s; 0.0 before ``seconds`` is set."""
        return self.bytes_read / 1e9 / self.seconds if self.seconds else 0.0

    def as_record(self) -> JsonObject:
        """Return the whole report as a dict for JSON, with exit code and speed."""
        files = {name: [f._asdict() for f in getattr(self, name)] for name in ("orphans", "leftovers", "superseded")}
        problems = {name: [p.as_record() for p in getattr(self, name)] for name in ("problems", "found")}
        uploads = [{**upload._asdict(), "started": upload.started.isoformat()} for upload in self.uploads]
        speed = {"seconds": round(self.seconds, 3), "gb_per_s": round(self.gb_per_s, 3)}
        return {**asdict(self), "exit_code": self.exit_code, **problems, **files, "uploads": uploads, **speed}

    def lines(self) -> Iterator[str]:
        """Yield the report as lines for the terminal; long lists are cut, and problems come last."""
        yield f"cache: {self.cache}"
        yield ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in self.counts.items())
        yield f"read {self.bytes_read:,} bytes in {self.seconds:.1f} s, {self.gb_per_s:.2f} GB/s"
        yield from (f"note: {note}" for note in self.notes)
        uploads = [f"{upload.uri} since {upload.started:%Y-%m-%d %H:%M}" for upload in self.uploads]
        files = {name: getattr(self, name) for name in ("orphans", "leftovers", "superseded")}
        lists = {title: [f"{name} ({size:,} bytes)" for name, size in entries] for title, entries in files.items()}
        for title, names in {**lists, "uploads": uploads, "removed": self.removed}.items():
            if names:
                yield f"{title}: {len(names):,}"
                yield from _cut_list([f"  {name}" for name in names])
        yield from (result.line() for result in self.live)
        if self.repaired is not None:
            yield from _iter_kind_lines(self.found, "found before the repair: ")
            yield from self.repaired.lines()
        yield from _iter_kind_lines(self.problems)
        yield f"{len(self.problems):,} problems" if self.problems else "nothing is wrong"


def _cut_list(lines: Sequence[str]) -> list[str]:
    """Return the first _MAX_EXAMPLES lines, followed by the number of the others if there are any."""
    more = [f"  ... and {len(lines) - _MAX_EXAMPLES:,} more"] if len(lines) > _MAX_EXAMPLES else []
    return [*lines[:_MAX_EXAMPLES], *more]


def _iter_kind_lines(problems: Sequence[Problem], before: str = "") -> Iterator[str]:
    """Yield two lines for each kind of problem: its name after ``before``, count and first example; then the remedy."""
    for kind in Kind:
        of_kind = [problem for problem in problems if problem.kind == kind]
        if of_kind:
            video = f"{of_kind[0].video_id}: " if of_kind[0].video_id is not None else ""
            yield f"{before}{kind}, {len(of_kind):,}: {video}{of_kind[0].what}"
            yield f"  remedy: {kind.remedy}"
