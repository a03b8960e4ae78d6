"""The videos that a user names: a table of those known before the run, then those of archives as they are indexed."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import ManifestError
from pipeline.inputs.archive import format_fault
from pipeline.inputs.indexes import Indexes, IndexView, Missing, NamedFile
from pipeline.inputs.manifest import NameContents, list_names, require_unique_files, sort_roots
from pipeline.inputs.named_videos import MANIFEST_SCHEMA
from pipeline.keys import find, find_repeated, hash_column
from pipeline.storage.location import Location
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import request_threads

_NOTE_S = 10.0  # seconds between two progress lines
_AT_ONCE = 32  # archives that are read in parallel
_OWN_IDS = "name the folder with both archives, or give rows a column video_id of other values"
_BEFORE, _BEHIND = format_fault("corrupt", "an earlier video has the id "), f" already; {_OWN_IDS}"
First = Literal["all", "needed", "kept"]


def plan_indexing(first: First, *, is_limited: bool, may_share_ids: bool, keeps_indexes: bool) -> tuple[Missing, bool]:
    """Decide which archives are indexed before a run starts, and which wait and are indexed while it runs.

    The columns on the right are the state of an archive's kept index: it fits, the archive has changed since, or there
    is none, as for tables. An archive that must not be read does not wait.

    ========  ==========  =============  ===========  ===========  ========
    first     is_limited  may_share_ids  index fits   changed      no index
    ========  ==========  =============  ===========  ===========  ========
    "all"     any         any            before       before       before
    "needed"  False       True           before       before       before
    "needed"  False       False          before       before       waits
    "needed"  True        any            before (*)   before (*)   waits
    "kept"    any         any            before       waits        waits
    ========  ==========  =============  ===========  ===========  ========

    (*) If archives may share an id, an archive after one that waits waits too: which of its videos repeat an id is
    known only once all archives before it are indexed. A changed archive is indexed to its end, regardless of the
    limit.

    Args:
        is_limited: True if fewer videos than all may be taken (``--limit``).
        may_share_ids: True if videos of two archives, or of an archive and others, may have the same id. Also True for
            a single archive, which would gain nothing from waiting without a limit.
        keeps_indexes: True if a cache keeps indexes. If False, "needed" is "all", unless ``is_limited``.

    Returns:
        The argument ``missing`` of ``Indexes.read`` before the start (an archive that yields nothing waits); and True
        if the archives after one that waits wait too.
    """
    if first == "kept":
        return "skip", False
    can_wait = is_limited or (keeps_indexes and not may_share_ids)
    if first == "all" or not can_wait:
        return "make", False
    return "renew", may_share_ids


@dataclass
class VideoList:
    """The videos of a run: those known before it starts, and those of archives that are indexed while it runs.

    Attributes:
        known: the videos known before the start, in a stable order, MANIFEST_SCHEMA.
        indexes: the indexes of archives; its ``left_out`` counts the files that are left out.
        is_limited: True if fewer videos than all may be taken. ``read_unindexed`` then reads one archive at a time, and
            a large one in several views.
        unindexed: the archives whose videos are not in ``known``, in the order of the list.
    """

    known: pa.Table
    indexes: Indexes = field(default_factory=Indexes)
    objects: Objects = field(default_factory=Objects)
    is_limited: bool = False
    unindexed: list[NamedFile] = field(default_factory=list)
    _ids: SeenIds | None = None  # the ids of all videos so far; None if archives cannot share an id

    @classmethod
    def read(
        cls,
        names: str | Sequence[str],
        video_roots: Sequence[str] = (),
        objects: Objects | None = None,
        indexes: Indexes | None = None,
        *,
        first: First = "all",
        is_limited: bool = False,
    ) -> VideoList:
        """List the videos that names stand for, one name after the other.

        A member of an archive whose id an earlier video has becomes an error row with the id ID@URI.

        Args:
            names: folders, globs, files, manifests or addresses, with brace patterns.
            video_roots: folders and prefixes that manifests and tables may name besides their own.
            objects: the access to S3; None reads it from the environment.
            indexes: the indexes of archives, whose ``roots`` are set; None keeps none.
            first: the archives that are indexed now. "all": all of them. "needed": those that cannot wait until the run
                works (``plan_indexing``). "kept": none; only kept indexes that fit their archives are read.
            is_limited: True if fewer videos than all may be taken. Then tables and archives that may share an id can
                wait too.

        Raises:
            ManifestError (a UsageError): the list cannot be made: for example, a folder is missing or has no video, a
                manifest cannot be read, a ``video_id`` is missing or repeated, an archive is named twice or, without a
                limit, has only repeated ids, no archive has a video, or the only row of the only name has a fault.
            RunFailed: an index cannot be written.
        """
        objects, indexes = objects or Objects.from_environment(), indexes or Indexes()
        indexes.roots = sort_roots(video_roots)
        all_contents = list_names(names, indexes.roots, objects, indexes.options, indexes.left_out)
        if len(all_contents) == 1 and all_contents[0].videos is not None:
            return cls(all_contents[0].videos, indexes, objects)
        archives = [archive for contents in all_contents for archive in contents.archives]
        ((uri, _), count), *_ = Counter(archive[:2] for archive in archives).most_common(1) or [(("", ""), 0)]
        if count > 1:
            raise ManifestError(f"{uri}: it is named {count} times; name it once")
        ids = SeenIds() if _may_share_ids(all_contents, archives) else None
        keeps_indexes = indexes.store is not None
        missing, in_order = plan_indexing(
            first, is_limited=is_limited, may_share_ids=ids is not None, keeps_indexes=keeps_indexes
        )
        video_list = cls(MANIFEST_SCHEMA.empty_table(), indexes, objects, is_limited, _ids=ids)
        tables = iter(video_list._read_first(archives, missing, in_order=in_order))
        parts = [
            part
            for contents in all_contents
            for part in (islice(tables, len(contents.archives)) if contents.videos is None else [contents.videos])
        ]
        video_list.known = pa.concat_tables(parts)
        if not len(video_list.known) and not video_list.unindexed:
            raise ManifestError(f"{names}: none of the {len(parts)} archives holds a video")
        if len(video_list.known) == len(parts) == 1 and (wrong := video_list.known["fault"][0].as_py()) is not None:
            raise ManifestError(f"{video_list.known['uri'][0]}: {wrong}")
        require_unique_files(all_contents, indexes.options)
        if ids is not None:
            video_list.known = video_list._separate_known_ids(parts, ids)
        return video_list

    def read_unindexed(self) -> Generator[IndexView, None, None]:
        """Index the archives in ``unindexed``, and yield their views in order. Call this once.

        A video with the id of an earlier one becomes an error row with the id ID@URI.

        Without a limit, 32 archives are read at once, and each gives one view of all its videos. With a limit, archives
        are read one by one, and a large one gives several views, each with all videos of the previous view. To leave
        the rest unread, close the generator, or call ``close`` from another thread.

        The left-out files of whole views are counted; call ``count_left_out`` for other views.

        Raises:
            ManifestError: the options do not fit an archive.
            RunFailed: an index cannot be written.
        """
        views = self._read_in_views() if self.is_limited else self._read_in_parallel(self.unindexed)
        with closing(self._report_progress(views, len(self.unindexed))) as views:
            for view in views:
                if view is None or self.indexes.stopped.is_set():
                    return
                videos = view.videos if self._ids is None else self._ids.mark_repeated_ids(view.videos)
                if self._ids is not None and view.is_whole:
                    self._ids.add(videos)
                if view.is_whole:
                    self.count_left_out(view)
                yield view._replace(videos=videos)

    def close(self) -> None:
        """End ``read_unindexed`` at the next member of each archive that it reads. Thread-safe."""
        self.indexes.stopped.set()

    def count_left_out(self, view: IndexView) -> None:
        """Count the left-out files of a view; needed if the last view read is not whole."""
        self.indexes.left_out.add_all(view.left_out.as_record())

    def _read_first(self, archives: Sequence[NamedFile], missing: Missing, *, in_order: bool) -> list[pa.Table]:
        """Return a table of videos per archive; it is empty for an archive that waits, which is added to ``unindexed``.

        The left-out files of the other archives are counted. With ``in_order``, every archive after one that waits is
        added too; its view is dropped, and read again later.
        """
        tables = list[pa.Table]()
        with closing(self._report_progress(self._read_in_parallel(archives, missing), len(archives))) as views:
            for archive, view in zip(archives, views, strict=True):
                if view is None or (in_order and self.unindexed):
                    self.unindexed.append(archive)
                    tables.append(MANIFEST_SCHEMA.empty_table())
                else:
                    self.count_left_out(view)
                    tables.append(view.videos)
        return tables

    def _read_in_parallel(
        self, archives: Sequence[NamedFile], missing: Missing = "make"
    ) -> Generator[IndexView | None, None, None]:
        """Yield the whole view of each archive in order; None for an archive that waits, or after ``close``.

        If the generator is closed early or an archive raises an error, this calls ``close``.
        """
        with request_threads(_AT_ONCE) as pool:
            begun = (pool.submit(list, self.indexes.read(archive, self.objects, missing)) for archive in archives)
            reading = deque(islice(begun, _AT_ONCE))
            try:
                for _ in archives:
                    yield [None, *reading.popleft().result()][-1]
                    reading.extend(islice(begun, 1))
            except BaseException:
                self.close()  # threads that are still reading stop at the next member
                pool.shutdown(cancel_futures=True)
                raise

    def _read_in_views(self) -> Generator[IndexView | None, None, None]:
        """Yield the views of each archive in turn, until ``close``."""
        for archive in self.unindexed:
            if self.indexes.stopped.is_set():
                return
            yield from self.indexes.read(archive, self.objects, in_views=True)

    def _report_progress(
        self, views: Generator[IndexView | None, None, None], n_archives: int
    ) -> Generator[IndexView | None, None, None]:
        """Yield the views unchanged; pass a progress line to ``Indexes.say`` every 10 s at most, and at the end.

        The last line is left out if no archive had to be read. An archive that waits does not count as indexed.
        """
        last_line_at = time.monotonic()
        n_archives_seen = 0
        n_indexed = 0
        n_videos = 0
        with closing(views):
            for view in views:
                if view is None or view.is_whole:
                    n_archives_seen += 1
                    if view is not None:
                        n_indexed, n_videos = n_indexed + 1, n_videos + len(view.videos)
                    is_last = n_archives_seen == n_archives and self.indexes.n_made
                    if is_last or time.monotonic() - last_line_at > _NOTE_S:
                        last_line_at = time.monotonic()
                        self.indexes.say(f"indexed {n_indexed} of {n_archives} archives: {n_videos} videos so far")
                yield view

    def _separate_known_ids(self, parts: Sequence[pa.Table], ids: SeenIds) -> pa.Table:
        """Return the known videos, with errors for members that repeat an id; add the ids to ``ids`` if archives wait.

        ``parts`` are the tables that ``known`` consists of.

        Raises:
            ManifestError: all videos of an archive repeat earlier ids, and there is no limit.
        """
        is_repeated = ids.find_repeated(self.known)
        for part, end in zip(parts, accumulate(map(len, parts)), strict=True):
            if not self.is_limited and part["fault"].null_count and is_repeated[end - len(part) : end].all():
                first = Location.parse(part["uri"][0].as_py(), part["source_offset"][0].as_py())
                raise ManifestError(
                    f"{first.file}: all of its {len(part)} videos have ids of earlier "
                    f"ones, e.g. {part['video_id'][0]}; {_OWN_IDS}"
                )
        videos = ids.mark_repeated_ids(self.known, is_repeated)
        if self.unindexed:
            ids.add(videos)
        return videos


class SeenIds:
    """The ids that were added so far, as hashes of 16 bytes."""

    def __init__(self) -> None:
        self._high, self._low = np.empty(0, np.uint64), np.empty(0, np.uint64)  # sorted by the high half

    def find_repeated(self, videos: pa.Table) -> NDArray[np.bool_]:
        """Return a mask [n] of the videos whose id was added or belongs to an earlier one of ``videos``.

        Separate files count as earlier than all members.
        """
        keys = hash_column(videos["video_id"])
        member = pc.is_valid(videos["source_offset"]).to_numpy()
        return find_repeated(keys, member) | (find(keys, self._high, self._low) >= 0)

    def mark_repeated_ids(self, videos: pa.Table, is_repeated: NDArray[np.bool_] | None = None) -> pa.Table:
        """Return the videos, with a fault and the id ID@URI for each that repeats an id; a fault that it has stays.

        The ids are not added. ``is_repeated`` is the result of ``find_repeated``, if the caller has it.
        """
        is_repeated = self.find_repeated(videos) if is_repeated is None else is_repeated
        if not is_repeated.any():
            return videos
        ids = videos["video_id"]
        mask = pa.array(is_repeated)
        why = pc.coalesce(videos["fault"], pc.binary_join_element_wise(_BEFORE, ids, _BEHIND, ""))
        own_columns = {
            "video_id": pc.if_else(mask, pc.binary_join_element_wise(ids, videos["uri"], "@"), ids),
            "fault": pc.if_else(mask, why, videos["fault"]),
        }
        return pa.table([own_columns.get(name, videos[name]) for name in videos.column_names], schema=videos.schema)

    def add(self, videos: pa.Table) -> None:
        """Add the ids of videos after ``mark_repeated_ids``."""
        keys = hash_column(videos["video_id"])
        keys = keys[np.argsort(keys[:, 0])]
        positions = np.searchsorted(self._high, keys[:, 0])
        self._high = np.insert(self._high, positions, keys[:, 0])
        self._low = np.insert(self._low, positions, keys[:, 1])


def _may_share_ids(all_contents: Sequence[NameContents], archives: Sequence[NamedFile]) -> bool:
    """Return False if only tars and zips are named, at least two, and no two of these can share an id.

    Two archives can share an id only if one's name, with a slash, begins the other's.
    """
    if len(archives) <= 1 or any(contents.videos is not None for contents in all_contents):
        return True
    names = sorted(f"{archive.name}/" for archive in archives)
    has_prefixes = any(after.startswith(name) for name, after in pairwise(names))
    return has_prefixes or any(archive.is_table for archive in archives)


def get_archive_size(archive: NamedFile) -> int:
    """Return the size of an archive in bytes, from its listing or the disk; 0 if it is unknown."""
    if archive.info is not None:
        return archive.info.size
    try:
        return os.path.getsize(archive.uri)  # noqa: PTH202 - as manifests have it
    except OSError:
        return 0
