"""The videos that a run must process: the manifest minus the videos that the cache already has."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.cache.live import Ledger
from pipeline.errors import SourceChanged, UsageError, describe_similar_name, format_count, make_printable
from pipeline.inputs.forms import OpenArchives
from pipeline.inputs.named_videos import TODO_SCHEMA
from pipeline.keys import ROWS_AT_ONCE, hash_clips, hash_column
from pipeline.own_code import is_comparable
from pipeline.prune.config import PruneConfig
from pipeline.rows import ManifestRow, VideoRow
from pipeline.storage.location import Location
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import request_threads
from pipeline.video.decoders import CODE, find_installed_version
from pipeline.video.source import SourceStates, compute_source_sample, make_no_answer_error

Mask = NDArray[np.bool_]
_MAX_EXAMPLES = 5  # changed videos that a refusal lists
_AT_ONCE = 32  # files and archives that are compared in parallel


class ManifestCounts(NamedTuple):
    """The number of videos in a manifest for each way in which a run treats them.

    Attributes:
        new: videos without a row.
        retried: failed videos that the run processes again.
        redone: changed videos and videos of ``--redo`` that the run processes again.
        done: cached and removed videos, which the run skips.
        failed: failed videos that the run skips.
        unread: the videos among ``failed`` that could not be read (io) and have attempts left.
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
    """The rows of the videos that a run must process (TODO_SCHEMA), and the counts of all rows of the manifest."""

    todo: pa.Table
    tally: ManifestCounts


def select_slice(manifest: pa.Table, shard: tuple[int, int] | None) -> pa.Table:
    """Select slice I of N (``shard``) of the manifest by the hash of the ids; all videos if it is None."""
    if shard is None or not len(manifest):
        return manifest
    number, n_shards = shard
    return manifest.filter(pa.array(hash_column(manifest["video_id"])[:, 0] % np.uint64(n_shards) == number))


def restore_old_ids(videos: pa.Table, ledger: Ledger) -> pa.Table:
    """Return the videos, with the old id of each member of a zip that the cache has under an id with backslashes.

    Older versions used a member's name as it is written in the zip. A video with a row under its new id keeps that id.
    """
    has_backslash = pc.match_substring(videos["uri"], "\\")
    if not len(ledger) or not pc.any(has_backslash, min_count=0).as_py():
        return videos
    numbers = np.flatnonzero(pc.and_(has_backslash, videos["source_offset"].is_valid()).to_numpy())
    members = videos.take(pa.array(numbers))
    ids, uris, offsets = (members[name].to_pylist() for name in ("video_id", "uri", "source_offset"))
    names = [location.member for location in map(Location.parse, uris, offsets)]
    old_ids = [
        video_id[: -len(name)] + name if name and video_id.endswith(name.replace("\\", "/")) else video_id
        for video_id, name in zip(ids, names, strict=True)
    ]
    is_stored, is_new = (ledger.find(pa.array(texts, pa.string())) >= 0 for texts in (old_ids, ids))
    mask = np.zeros(len(videos), np.bool_)
    mask[numbers] = keeps = is_stored & ~is_new
    stored_ids = pa.array(old_ids, pa.string()).filter(pa.array(keeps))
    column = pc.replace_with_mask(videos["video_id"].combine_chunks(), pa.array(mask), stored_ids)
    return videos.set_column(0, videos.schema.field(0), column)


def check_redo(ids: pa.Array, videos: pa.Table | None, ledger: Ledger, config: PruneConfig) -> None:
    """Raise UsageError if ids of ``--redo`` have no row in the cache, were removed, or are not among ``videos``.

    The message has one example, and suggests an id in the cache that differs only by its Unicode form or outer blanks.

    Args:
        videos: the videos of the run; None skips that check.
    """
    rows = ledger.find(ids)
    has_row = rows >= 0
    is_removed = has_row.copy()
    is_removed[has_row] = ledger.removed(rows[has_row])
    is_absent = (
        np.zeros_like(has_row) if videos is None else pc.invert(pc.is_in(ids, videos["video_id"])).to_numpy(False)
    )
    faults = {
        f"have no row in {config.out}": ~has_row,
        "were removed for good": is_removed,
        f"are not among the videos of {config.named}": is_absent,
    }
    for why, is_wrong in faults.items():
        if is_wrong.any():
            example = ids[int(np.flatnonzero(is_wrong)[0])].as_py()
            forms = [normalize("NFC", example), normalize("NFD", example), example.strip()]
            stored = (form for form, row in zip(forms, ledger.find(pa.array(forms)), strict=True) if row >= 0)
            near = next(
                (f"; did you mean {describe_similar_name(example, form)}?" for form in stored if form != example), ""
            )
            raise UsageError(f"--redo {config.redo}: {is_wrong.sum()} of its ids {why}, e.g. {example}{near}")


def select_remaining(
    manifest: pa.Table,
    ledger: Ledger,
    config: PruneConfig,
    objects: Objects | None = None,
    redo: pa.Array | None = None,
) -> Remaining:
    """Select the videos that this run must process, in order, with the number of their next attempt; count all videos.

    A video with a row is skipped, except: under ``--retry-failed``, a failed video that has attempts left or whose URI,
    clip or file has changed; changed videos under ``--on-changed redo``; and videos in ``redo``. Removed videos are
    always skipped. A missing file does not count as changed.

    Current sizes and marks come from the listing, index or manifest. If these state none, a local file is looked up,
    and an object costs a HEAD (for ok rows, and for failed rows without attempts left under ``--retry-failed``); with
    ``--on-changed skip`` nothing is looked up. A file with its old size but another mark has changed if its start,
    middle or end differs.

    Args:
        objects: the access to S3; None creates it from the environment when it is needed.
        redo: the ids of ``--redo``; None without it.

    Raises:
        SourceChanged: the URI, file or clip of a cached video, or the code of its user decoder, has changed, and
            ``--on-changed`` is "refuse".
        UsageError: a store does not answer.
    """
    sizes = SourceStates(objects)
    tally = Counter[str]()
    todo = []
    n_changed = 0
    examples = list[str]()
    for batch in manifest.to_batches(max_chunksize=ROWS_AT_ONCE):  # to save memory, only the rows to process are kept
        state = _compare(batch, ledger, config, sizes, redo)
        n_changed += int(state.changed.sum())
        for index in np.flatnonzero(state.changed)[: _MAX_EXAMPLES - len(examples)].tolist():
            row = batch.slice(index, 1).to_pylist()[0]
            old = ledger.read(int(state.rows[index]))
            change = _describe_change(row, old, int(state.sizes[index]), is_replaced=bool(state.replaced[index]))
            examples.append(make_printable(change))
        redone = state.named | (state.changed & (config.on_changed == "redo"))
        left_alone = state.failed & ~state.retried & ~redone
        kinds = {
            "new": ~state.has_row,
            "retried": state.retried,
            "redone": redone,
            "done": state.has_row & ~state.failed & ~redone,
            "failed": left_alone,
            "unread": left_alone & state.unread,
        }
        tally.update({kind: int(mask.sum()) for kind, mask in kinds.items()})
        is_todo = pa.array(~state.has_row | state.retried | redone)
        columns = batch.append_column("attempts", pa.array(state.attempts + 1, pa.int32())).filter(is_todo).columns
        todo.append(pa.RecordBatch.from_arrays(columns, schema=TODO_SCHEMA))
    sizes.finish()
    if n_changed and config.on_changed == "refuse":
        raise SourceChanged(
            f"{n_changed} videos of the cache {config.out} have changed:\n  "
            + "\n  ".join(examples)
            + "\n--on-changed skip processes the new videos and keeps the cached tokens of the changed videos; "
            "--on-changed redo encodes the changed videos again."
        )
    counts = ManifestCounts(**{kind: tally[kind] for kind in ManifestCounts._fields})
    return Remaining(pa.Table.from_batches([batch for batch in todo if len(batch)], TODO_SCHEMA), counts)


class _Comparison(NamedTuple):
    """The comparison of n manifest rows with the rows of the cache; each field is an array [n].

    Attributes:
        rows: the index of the row in the ledger; -1 if the video has none.
        failed: True for an error row.
        attempts: 0 without a row.
        sizes: the current bytes of the file; -1 if unknown or not needed.
        changed: True for an ok row of another URI, clip, size or content, or by other code of the user decoder.
        replaced: True for a changed row whose file has its old size but other content.
        retried: True for an error row to retry.
        named: True if ``--redo`` names the video; it is then neither changed nor retried.
        unread: True for an error row of class io with attempts left.
    """

    rows: NDArray[np.int64]
    has_row: Mask
    failed: Mask
    attempts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    changed: Mask
    replaced: Mask
    retried: Mask
    named: Mask
    unread: Mask


def _compare(
    part: pa.RecordBatch, ledger: Ledger, config: PruneConfig, asker: SourceStates, redo: pa.Array | None
) -> _Comparison:
    """Compare a batch of the manifest with the rows of the cache.

    With ``--on-changed skip``, no ok row counts as changed and no file is looked up.

    Args:
        asker: looks up the size and mark of files if the batch does not state them, on disk or with a request each.

    Raises:
        UsageError: a store does not answer.
    """
    rows = ledger.find(part["video_id"])
    has_row = rows >= 0

    def read_column(name: str, otherwise: int, kind: type[np.integer[Any]] = np.int64) -> NDArray[Any]:
        values = np.full(len(rows), otherwise, kind)
        values[has_row] = ledger.columns[name][rows[has_row]]
        return values

    is_failed, is_other_clip, is_removed = np.zeros_like(has_row), np.zeros_like(has_row), np.zeros_like(has_row)
    is_failed[has_row], is_removed[has_row] = ledger.failed(rows[has_row]), ledger.removed(rows[has_row])
    if has_row.any():
        is_other_clip[has_row] = hash_clips(part.filter(pa.array(has_row))) != ledger.columns["clip"][rows[has_row]]
    attempts = read_column("attempts", 0)
    old_sizes = read_column("size", -1)
    old_marks = read_column("mark", 0, np.uint64)
    is_spent = is_failed & (attempts - read_column("earlier", 0) >= config.max_attempts)
    sizes = pc.fill_null(part["size"], -1).to_numpy(zero_copy_only=False).copy()
    marks = pc.fill_null(part["mark"], 0).to_numpy(zero_copy_only=False).copy()
    is_named = np.zeros_like(has_row)
    if redo is not None:
        is_named = has_row & ~is_removed & pc.is_in(part["video_id"], redo).to_numpy(zero_copy_only=False)
    is_readable = has_row & ~is_named & part["policy"].is_null().to_numpy(zero_copy_only=False)
    is_whole_file = (
        part["source_offset"].is_null().to_numpy(zero_copy_only=False)
    )  # members of archives are compared by the index or the URI
    needs_state = (
        is_readable
        & is_whole_file
        & ~is_other_clip
        & (sizes < 0)
        & np.where(is_failed, is_spent & config.retry_failed, old_sizes >= 0)
    )
    if config.on_changed != "skip" and needs_state.any():
        states = asker.look_up_states(part["uri"].filter(pa.array(needs_state)).to_pylist())
        sizes[needs_state] = [state.size for state in states]
        marks[needs_state] = np.array([state.mark for state in states], np.uint64)
    # A file without a size was deleted, but its cached tokens remain valid.
    is_resized = is_readable & (sizes >= 0) & (sizes != old_sizes)
    is_remarked = is_readable & (sizes >= 0) & ~is_resized & (marks != 0) & (old_marks != 0) & (marks != old_marks)
    is_recoded = _find_recoded(ledger, config.decoder)[read_column("decoder", 0)]
    is_changed = (
        has_row & ~is_failed & ~is_removed & ~is_named & (is_other_clip | (is_resized & (old_sizes >= 0)) | is_recoded)
    )
    is_replaced = np.zeros_like(has_row)
    if config.on_changed == "skip":
        is_changed[:] = False
    elif (is_doubtful := is_remarked & ~is_failed & ~is_removed & ~is_changed).any():
        doubtful = part.filter(pa.array(is_doubtful))
        columns = doubtful["uri"].to_pylist(), doubtful["source_offset"].to_pylist(), sizes[is_doubtful].tolist()
        samples = read_column("sample", 0, np.uint64)[is_doubtful].tolist()
        is_replaced[is_doubtful] = _find_replaced([*map(Location.parse, *columns)], samples, asker.objects)
    is_changed |= is_replaced
    # A failed row has no tokens to protect. A file that was repaired, or was missing, is tried again in any case.
    is_retried = is_failed & ~is_named & config.retry_failed & (~is_spent | is_other_clip | is_resized | is_remarked)
    is_unread = np.zeros_like(has_row)
    is_unread[has_row] = ledger.make_failure_class_mask(rows[has_row], "io") & ~is_spent[has_row]
    return _Comparison(
        rows=rows,
        has_row=has_row,
        failed=is_failed,
        attempts=attempts,
        sizes=sizes,
        changed=is_changed,
        replaced=is_replaced,
        retried=is_retried,
        named=is_named,
        unread=is_unread,
    )


def _find_replaced(locations: Sequence[Location], samples: Sequence[int], objects: Objects) -> list[bool]:
    """Return a bool per location: True if its content differs from that of its cached video, False if the file is gone.

    Reads the start, middle and end of each file, of many files in parallel.

    Args:
        locations: the locations of the videos, with their sizes.
        samples: the ``hash_sample`` of the file of each cached video.

    Raises:
        UsageError: a store does not answer.
        VideoFault: the name of an archive has no known suffix.
    """
    groups = defaultdict[str, list[int]](list)  # file or archive -> indices of its locations
    for number, location in enumerate(locations):
        groups[location.file].append(number)
    is_replaced = [False] * len(locations)

    def compare_group(numbers: Sequence[int]) -> None:
        with OpenArchives(objects) as opened:
            for number in numbers:
                is_replaced[number] = _is_replaced(locations[number], samples[number], objects, opened)

    with request_threads(min(_AT_ONCE, len(groups) or 1)) as pool:
        list(pool.map(compare_group, groups.values()))  # raises the error of a thread
    return is_replaced


def _is_replaced(location: Location, sample: int, objects: Objects, opened: OpenArchives) -> bool:
    """Return True if the current sample of a video differs from ``sample``; False if the file is gone.

    A member of an archive that has no sample counts as replaced. Raises UsageError if a store does not answer.
    """
    if location.member is None:
        return compute_source_sample(location.file, location.size or 0, objects) not in (None, sample)
    try:
        return opened.sample(location) != sample
    except FileNotFoundError:
        return False
    except OSError as error:
        raise make_no_answer_error(error) from error


def _find_recoded(ledger: Ledger, decoder: str) -> Mask:
    """Return a mask over ``ledger.decoders``: True for the user decoder ``decoder`` with other code than now.

    It is False if the row states no code, or code hashed by an older version.
    """
    current_text = f"{decoder} {find_installed_version(decoder)}" if ":" in decoder else ""
    is_recoded = (
        bool(current_text)
        and text.startswith(f"{decoder} ")
        and is_comparable(text.partition(CODE)[2])
        and text != current_text
        for text in ledger.decoders
    )
    return np.array(list(is_recoded), np.bool_)


def _describe_change(row: ManifestRow, old: VideoRow, size: int, *, is_replaced: bool) -> str:
    """Describe the first difference of a manifest row from its cached row: URI, clip, content, decoder's code or size.

    ``size`` is the current bytes of the file; -1 if unknown.
    """
    for name in ("uri", "start_s", "end_s"):
        if row[name] != old[name]:
            return f"{row['video_id']}: {name} was {old[name]!r}, is {row[name]!r}"
    if is_replaced:
        return f"{row['video_id']}: the file still has {size} bytes, but other content"
    if old["source_size"] == size or size < 0:
        return f"{row['video_id']}: its decoder {old['backend']} has other code now"
    return f"{row['video_id']}: the file had {old['source_size']} bytes, has {size}"


def select_retries(todo: pa.Table, failed_attempts: Mapping[str, int], max_attempts: int) -> pa.Table:
    """Select the rows of ``todo`` (TODO_SCHEMA) of failed videos that have attempts left, and count their next attempt.

    Args:
        failed_attempts: id -> attempts so far.
    """
    next_attempts = {
        video_id: n_attempts + 1 for video_id, n_attempts in failed_attempts.items() if n_attempts < max_attempts
    }
    ids = pa.array(list(next_attempts), todo.schema.field("video_id").type)
    retries = todo.filter(pc.is_in(todo["video_id"], value_set=ids))
    attempts = pa.array([next_attempts[video_id] for video_id in retries["video_id"].to_pylist()], pa.int32())
    column = retries.schema.get_field_index("attempts")
    return retries.set_column(column, retries.schema.field(column), attempts)


def select_existing(todo: pa.Table, objects: Objects | None = None) -> pa.Table:
    """Select the rows of ``todo`` (TODO_SCHEMA) whose file or archive exists now; each remote file costs a request.

    Rows with a known fault are left out, because no worker has tried to read them. If the store refuses the requests,
    no row is selected.
    """
    todo = todo.filter(todo["fault"].is_null())
    locations = map(Location.parse, todo["uri"].to_pylist(), todo["source_offset"].to_pylist())
    files = [location.file for location in locations]
    names = list(dict.fromkeys(files))
    try:
        sizes = dict(zip(names, SourceStates(objects).of(names), strict=True))
    except UsageError:  # the store refuses every request
        return todo.slice(0, 0)
    return todo.filter(pa.array([sizes[file] >= 0 for file in files], pa.bool_()))


def format_skipped(tally: ManifestCounts, config: PruneConfig) -> list[str]:
    """Return lines for the user about videos that are cached, failed, or left for later by ``--limit``."""
    n_cached = tally.done + tally.failed
    lines = []
    if n_cached:
        remedy = "" if config.retry_failed else " (--retry-failed tries them again)"
        errors = f", {tally.failed} of them as errors{remedy}" if tally.failed else ""
        lines.append(f"{n_cached} of {n_cached + tally.n_todo} videos are in the cache already{errors}")
    if tally.unread and not config.retry_failed:
        lines.append(
            f"note: {format_count(tally.unread, 'video')} failed for infrastructure reasons (I/O) in earlier runs: "
            "--retry-failed tries again"
        )
    if tally.failed and config.retry_failed:
        lines.append(
            f"note: the failed videos have used their {config.max_attempts} attempts; --max-attempts allows more"
        )
    if config.limit is not None and config.limit < tally.n_todo:
        lines.append(f"{config.limit} of {tally.n_todo} videos still to do (--limit {config.limit})")
    return lines
