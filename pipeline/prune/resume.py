"""The videos that are left to do: the manifest minus the live rows of the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.cache.live import Ledger
from pipeline.errors import SourceChanged, UsageError
from pipeline.inputs.named_videos import TODO_SCHEMA
from pipeline.keys import ROWS_AT_ONCE, clip_keys, column_keys
from pipeline.prune.changes import are_replaced
from pipeline.prune.config import PruneConfig
from pipeline.rows import ManifestRow, VideoRow
from pipeline.storage.s3 import Objects
from pipeline.video.decoders import CODE, decoder_version
from pipeline.video.source import Sizes

Mask = NDArray[np.bool_]
_SHOWN = 5  # changed videos that a refusal lists


class ManifestCounts(NamedTuple):
    """The number of a manifest's videos for each way they are treated.

    Attributes:
        new: videos without a row, which are done.
        retried: failed videos, which are done again.
        redone: changed videos and those of ``--redo``, which are done again.
        done: cached videos, which are left alone.
        failed: failed videos, which are left alone.
        unread: those of them that could not be read (io) and have attempts left.
    """

    new: int = 0
    retried: int = 0
    redone: int = 0
    done: int = 0
    failed: int = 0
    unread: int = 0

    @property
    def n_todo(self) -> int:
        """The number of videos to process."""
        return self.new + self.retried + self.redone


class Remaining(NamedTuple):
    """The manifest rows that a run must process (TODO_SCHEMA), and a tally of all rows."""

    todo: pa.Table
    tally: ManifestCounts


def of_shard(manifest: pa.Table, part: tuple[int, int] | None) -> pa.Table:
    """Select the videos of ``--shard I/N``, if that is given, by the hash of their ids."""
    if part is None or not len(manifest):
        return manifest
    return manifest.filter(pa.array(column_keys(manifest["video_id"])[:, 0] % np.uint64(part[1]) == part[0]))


def check_redo(ids: pa.Array, videos: pa.Table | None, ledger: Ledger, config: PruneConfig) -> None:
    """Raise UsageError where ids of ``--redo`` have no row, were removed, or are not among ``videos`` (None: unknown).

    A mistyped id would otherwise be passed over.
    """
    rows = ledger.find(ids)
    known = rows >= 0
    removed = known.copy()
    removed[known] = ledger.removed(rows[known])
    absent = np.zeros_like(known) if videos is None else pc.invert(pc.is_in(ids, videos["video_id"])).to_numpy(False)
    faults = {
        f"have no row in {config.out}": ~known,
        "were removed for good": removed,
        f"are not among the videos of {config.named}": absent,
    }
    for why, wrong in faults.items():
        if wrong.any():
            example = ids[int(np.flatnonzero(wrong)[0])]
            raise UsageError(f"--redo {config.redo}: {wrong.sum()} of its ids {why}, e.g. {example}")


def remaining(
    manifest: pa.Table,
    ledger: Ledger,
    config: PruneConfig,
    objects: Objects | None = None,
    redo: pa.Array | None = None,
) -> Remaining:
    """Return the videos that this run must process; a failed row counts as done unless ``--retry-failed``.

    Sizes and marks come from a listing on S3, an index or the manifest, else from a look at the file, or one HEAD for
    each ok row of an object that a manifest names. With ``--retry-failed`` failed rows without attempts left cost a
    HEAD too, since a mended video gets new attempts. With ``--on-changed skip`` none is needed. Of a file with its old
    size and another mark a few bytes are read. Videos with an id of ``redo`` are done again whatever their row says.

    Raises SourceChanged where a cached video's uri, size or clip differs, or the code of the user's own decoder that
    read it, and ``--on-changed`` is ``refuse``, UsageError where the store does not answer.
    """
    sizes, tally, todo = Sizes(objects), np.zeros(len(ManifestCounts._fields), np.int64), []
    n_changed, examples = 0, list[str]()
    for part in manifest.to_batches(max_chunksize=ROWS_AT_ONCE):  # only the rows that are to be done are kept
        state = _compare(part, ledger, config, sizes, redo)
        n_changed += int(state.changed.sum())
        for place in np.flatnonzero(state.changed)[: _SHOWN - len(examples)].tolist():
            row, old = part.slice(place, 1).to_pylist()[0], ledger.read(int(state.rows[place]))
            examples.append(_difference(row, old, int(state.sizes[place]), is_replaced=bool(state.replaced[place])))
        redone = state.named | (state.changed & (config.on_changed == "redo"))
        left_alone = state.failed & ~state.retried & ~redone
        kept = state.known & ~state.failed & ~redone, left_alone, left_alone & state.unread
        tally += [kind.sum() for kind in (~state.known, state.retried, redone, *kept)]
        todo.append(_selected(part, state, ~state.known | state.retried | redone))
    sizes.finish()
    if n_changed and config.on_changed == "refuse":
        raise SourceChanged(
            f"{n_changed} videos of the cache {config.out} have changed:\n  "
            + "\n  ".join(examples)
            + "\nNew videos need not wait: --on-changed skip goes on with them and keeps the cached tokens of these, "
            "--on-changed redo encodes these again too."
        )
    return Remaining(
        pa.Table.from_batches([part for part in todo if len(part)], TODO_SCHEMA), ManifestCounts(*tally.tolist())
    )


class _Comparison(NamedTuple):
    """The comparison of manifest rows with the cache's rows, arrays [n] each.

    Attributes:
        rows: the row in the ledger; -1 if the video has none.
        known: whether it has one.
        failed: whether that is an error row.
        attempts: the attempts that it took.
        sizes: the bytes of the file now, if they are known and matter; -1 elsewhere.
        changed: whether it is an ok row of another file, size, content or clip, or of other code of a user's own
            decoder.
        replaced: whether it is one whose file has its old size and other content.
        retried: whether it is an error row that is to be tried again.
        named: whether ``--redo`` names it, so that it is neither of both.
        unread: whether it is an error row of class io, and has attempts left.
    """

    rows: NDArray[np.int64]
    known: Mask
    failed: Mask
    attempts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    changed: Mask
    replaced: Mask
    retried: Mask
    named: Mask
    unread: Mask


def _compare(
    part: pa.RecordBatch, ledger: Ledger, config: PruneConfig, asker: Sizes, redo: pa.Array | None
) -> _Comparison:
    """Compare a part of the manifest with the cache's rows."""
    rows = ledger.find(part["video_id"])
    known = rows >= 0

    def held(name: str, otherwise: int, kind: type[np.integer[Any]] = np.int64) -> NDArray[Any]:
        values = np.full(len(rows), otherwise, kind)
        values[known] = ledger.columns[name][rows[known]]
        return values

    failed, another, removed = np.zeros_like(known), np.zeros_like(known), np.zeros_like(known)
    failed[known], removed[known] = ledger.failed(rows[known]), ledger.removed(rows[known])
    if known.any():
        another[known] = clip_keys(part.filter(pa.array(known))) != ledger.columns["clip"][rows[known]]
    attempts, was, old_marks = held("attempts", 0), held("size", -1), held("mark", 0, np.uint64)
    spent = failed & (attempts - held("earlier", 0) >= config.max_attempts)
    sizes = pc.fill_null(part["size"], -1).to_numpy(zero_copy_only=False).copy()
    marks = pc.fill_null(part["mark"], 0).to_numpy(zero_copy_only=False).copy()
    named = np.zeros_like(known)
    if redo is not None:
        named = known & ~removed & pc.is_in(part["video_id"], redo).to_numpy(zero_copy_only=False)
    readable = known & ~named & part["policy"].is_null().to_numpy(zero_copy_only=False)
    alone = part["source_offset"].is_null().to_numpy(zero_copy_only=False)  # elsewhere the index or the uri tells
    asked = readable & alone & ~another & (sizes < 0) & np.where(failed, spent & config.retry_failed, was >= 0)
    if config.on_changed != "skip" and asked.any():
        states = asker.states(part["uri"].filter(pa.array(asked)).to_pylist())
        sizes[asked] = [state.size for state in states]
        marks[asked] = np.array([state.mark for state in states], np.uint64)
    # A file whose size is not known now is gone, but its cached tokens remain valid.
    resized = readable & (sizes >= 0) & (sizes != was)
    marked = readable & (sizes >= 0) & ~resized & (marks != 0) & (old_marks != 0) & (marks != old_marks)
    recoded = _other_decoder_code(ledger, config.decoder)[held("decoder", 0)]
    changed = known & ~failed & ~removed & ~named & (another | (resized & (was >= 0)) | recoded)
    replaced = np.zeros_like(known)
    if config.on_changed == "skip":
        changed[:] = False
    elif (doubtful := marked & ~failed & ~removed & ~changed).any():
        again: list[ManifestRow] = part.filter(pa.array(doubtful)).to_pylist()
        for row, size in zip(again, sizes[doubtful].tolist(), strict=True):
            row["size"] = size
        replaced[doubtful] = are_replaced(again, held("sample", 0, np.uint64)[doubtful].tolist(), asker.objects)
    changed |= replaced
    # A failed row holds no tokens to protect. A file that was mended, or was missing, gets all its attempts anew.
    retried = failed & ~named & config.retry_failed & (~spent | another | resized | marked)
    unread = np.zeros_like(known)
    unread[known] = ledger.failed_by(rows[known], "io") & ~spent[known]
    return _Comparison(rows, known, failed, attempts, sizes, changed, replaced, retried, named, unread)


def _other_decoder_code(ledger: Ledger, decoder: str) -> Mask:
    """Return which of ``ledger.decoders`` [n] are the user's own ``decoder`` with other code than it has now."""
    now = f"{decoder} {decoder_version(decoder)}" if ":" in decoder else ""
    known = (bool(now) and text.startswith(f"{decoder} ") and CODE in text for text in ledger.decoders)
    return np.array([same and text != now for same, text in zip(known, ledger.decoders, strict=True)], np.bool_)


def _selected(part: pa.RecordBatch, state: _Comparison, mask: Mask) -> pa.RecordBatch:
    """Return the rows under ``mask`` with their attempt numbers; without a copy if all are selected."""
    attempts = pa.array(state.attempts[mask] + 1, pa.int32())
    kept = part if mask.all() else part.filter(pa.array(mask))
    return pa.RecordBatch.from_arrays([*kept.columns, attempts], schema=TODO_SCHEMA)


def _difference(row: ManifestRow, old: VideoRow, size: int, *, is_replaced: bool) -> str:
    """Describe how a manifest row, whose video has ``size`` bytes now, differs from the cached row of its id."""
    for name in ("uri", "start_s", "end_s"):
        if row[name] != old[name]:
            return f"{row['video_id']}: {name} was {old[name]!r}, is {row[name]!r}"
    if is_replaced:
        return f"{row['video_id']}: the file has its {size} bytes still, and other content"
    if old["source_size"] == size or size < 0:
        return f"{row['video_id']}: {old['backend']}, which read it, has other code now"
    return f"{row['video_id']}: the file had {old['source_size']} bytes, has {size}"


def within_limit(todo: pa.Table, limit: int | None) -> tuple[pa.Table, int]:
    """Return the first ``limit`` videos to do, and how many of the others have no row yet."""
    if limit is None:
        return todo, 0
    waiting = pc.sum(pc.equal(todo["attempts"].slice(limit), 1)).as_py() or 0
    return todo.slice(0, limit), waiting


def unfinished(todo: pa.Table, ledger: Ledger, failed: Mapping[str, int]) -> pa.Table:
    """Select the rows of ``todo`` (TODO_SCHEMA) whose attempt the cache has no row of.

    ``failed`` maps each video that failed in this run to its attempt, which may be later than the one of its live row.
    """
    ids, wanted = todo["video_id"], todo["attempts"].to_numpy()
    rows = ledger.find(ids)
    had = np.zeros(len(todo), np.int64)
    had[rows >= 0] = ledger.columns["attempts"][rows[rows >= 0]]
    had = np.maximum(had, [failed.get(video_id, 0) for video_id in ids.to_pylist()])
    return todo.filter(pa.array(had < wanted))


def retry_candidates(todo: pa.Table, failed: Mapping[str, int], max_attempts: int) -> pa.Table:
    """Return the rows of ``todo`` (TODO_SCHEMA) for one more attempt at the videos that failed.

    ``failed`` maps each of these to the attempts that it has had; after ``max_attempts`` it gets none.
    """
    wanted = {video_id: had + 1 for video_id, had in failed.items() if had < max_attempts}
    ids = pa.array(list(wanted), todo.schema.field("video_id").type)
    part = todo.filter(pc.is_in(todo["video_id"], value_set=ids))
    attempts = pa.array([wanted[video_id] for video_id in part["video_id"].to_pylist()], pa.int32())
    place = part.schema.get_field_index("attempts")
    return part.set_column(place, part.schema.field(place), attempts)


def at_hand(todo: pa.Table, objects: Objects | None = None) -> pa.Table:
    """Select the rows of ``todo`` (TODO_SCHEMA) whose file, or container, is there now; one request a remote one.

    Not those that are faults of the manifest or the index, which no worker has tried to read.
    """
    todo = todo.filter(todo["fault"].is_null())
    offsets, uris = todo["source_offset"].to_pylist(), todo["uri"].to_pylist()
    files = [uri if offset is None else uri.partition("#")[0] for uri, offset in zip(uris, offsets, strict=True)]
    names = list(dict.fromkeys(files))
    try:
        sizes = dict(zip(names, Sizes(objects).of(names), strict=True))
    except UsageError:  # the store refuses all
        return todo.slice(0, 0)
    return todo.filter(pa.array([sizes[file] >= 0 for file in files], pa.bool_()))


def skipped_lines(tally: ManifestCounts, config: PruneConfig) -> list[str]:
    """Return lines for the user about videos that this run leaves alone, and those left for later by a limit."""
    there, lines = tally.done + tally.failed, []
    if there:
        again = "" if config.retry_failed else " (--retry-failed tries them again)"
        errors = f", {tally.failed} of them as errors{again}" if tally.failed else ""
        lines.append(f"{there} of {there + tally.n_todo} videos are in the cache already{errors}")
    if tally.unread and not config.retry_failed:
        lines.append(
            f"note: {tally.unread} videos failed for infrastructure reasons (I/O) in earlier runs: --retry-failed "
            "tries them again"
        )
    if tally.failed and config.retry_failed:
        lines.append(f"note: they have had their {config.max_attempts} attempts; raise --max-attempts for more")
    if config.limit is not None and config.limit < tally.n_todo:
        lines.append(f"{config.limit} of {tally.n_todo} videos that are left to do (--limit {config.limit})")
    return lines
