"""The videos that a user names: a table of those known at once, then those of archives as they are indexed."""

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
from pipeline.inputs.archive import fault
from pipeline.inputs.indexes import Indexes, Missing, NamedFile, View
from pipeline.inputs.manifest import NameContents, list_names, require_unique_files, sort_roots
from pipeline.inputs.named_videos import MANIFEST_SCHEMA
from pipeline.keys import column_keys, find, find_repeated
from pipeline.storage.location import Location
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import request_threads

_NOTE_S = 10.0  # seconds between two lines of progress
_AT_ONCE = 32  # archives that are read in parallel
_OWN_IDS = "name the folder with both archives, or give rows a column video_id of other values"
_BEFORE, _BEHIND = fault("corrupt", "an earlier video has the id "), f" already; {_OWN_IDS}"
First = Literal["all", "needed", "kept"]


@dataclass
class VideoList:
    """The videos of a run: those known before its start, and those of archives that are indexed while it runs.

    Iterating, which is possible once, indexes the archives in ``unindexed``, one after the other in their order, and
    yields the videos of each. Whoever has enough closes the iterator, or calls ``close`` from another thread.

    Attributes:
        known: the videos known before a start in a stable order, MANIFEST_SCHEMA.
        indexes: the indexes of archives, with the files that are left out.
        objects: the access to S3.
        is_limited: whether fewer videos than all may be taken. Then any archive without a kept index can wait, and a
            large archive comes in several views (``View.is_whole``).
        unindexed: the archives whose videos are not in ``known``.
    """

    known: pa.Table
    indexes: Indexes = field(default_factory=Indexes)
    objects: Objects = field(default_factory=Objects)
    is_limited: bool = False
    unindexed: list[NamedFile] = field(default_factory=list)
    _ids: Ids | None = None  # of all videos so far, where archives may share an id

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

        Args:
            names: folders, globs, files, manifests or addresses, with brace patterns. On S3 a manifest is one GET,
                whatever it names; for anything else see ``list_videos``.
            video_roots: folders and prefixes besides their own that manifests and tables may name.
            objects: the access to S3; None makes it from the environment.
            indexes: the indexes of archives; None keeps none.
            first: the archives that are indexed now. "all": all of them. "needed": those whose videos must be known
                before a start, and those that have changed since their index was kept; tars and zips can wait, unless
                archives may share an id. "kept": none; only kept indexes that fit their archives are read.

        Raises ManifestError (a UsageError) where the list cannot be made: no such folder, no video in it, an unreadable
        manifest, a missing or duplicate ``video_id``; RunFailed if an index cannot be kept.
        """
        objects, indexes = objects or Objects.from_environment(), indexes or Indexes()
        indexes.roots = sort_roots(video_roots)
        listings = list_names(names, indexes.roots, objects, indexes.options, indexes.left_out)
        if len(listings) == 1 and listings[0].videos is not None:
            return cls(listings[0].videos, indexes, objects)
        places = [place for listing in listings for place in listing.archives]
        (place, count), *_ = Counter(place[:2] for place in places).most_common(1) or [(("", ""), 0)]
        if count > 1:
            raise ManifestError(f"{place[0]}: it is named {count} times; name it once")
        ids = None if _are_ids_apart(listings, places) else Ids()
        if first == "needed" and ids is not None and not is_limited:
            first = "all"
        video_list = cls(MANIFEST_SCHEMA.empty_table(), indexes, objects, is_limited, _ids=ids)
        tables = iter(video_list._read_first(places, first))
        parts = [
            part
            for listing in listings
            for part in (islice(tables, len(listing.archives)) if listing.videos is None else [listing.videos])
        ]
        video_list.known = pa.concat_tables(parts)
        if not len(video_list.known) and not video_list.unindexed:
            raise ManifestError(f"{names}: none of the {len(parts)} archives holds a video")
        if len(video_list.known) == len(parts) == 1 and (wrong := video_list.known["fault"][0].as_py()) is not None:
            raise ManifestError(f"{video_list.known['uri'][0]}: {wrong}")
        require_unique_files(listings, indexes.options)
        if ids is not None:
            video_list.known = video_list._separate_ids(parts, ids)
        return video_list

    def __iter__(self) -> Generator[View, None, None]:
        """Index the archives that are left, and yield their videos.

        What a whole archive leaves out is counted before it is yielded. Raises ManifestError for an impossible request,
        RunFailed if an index cannot be kept.
        """
        views = self._read_in_views() if self.is_limited else self._read_in_parallel(self.unindexed)
        with closing(self._note_progress(views, len(self.unindexed))) as views:
            for view in views:
                if view is None or self.indexes.stopped.is_set():
                    return
                videos = view.videos if self._ids is None else self._ids.separate_ids(view.videos)
                if self._ids is not None and view.is_whole:
                    self._ids.add(videos)
                if view.is_whole:
                    self.count_left_out(view)
                yield view._replace(videos=videos)

    def close(self) -> None:
        """End the iteration at the next member of the archive that it reads. Any thread may call it."""
        self.indexes.stopped.set()

    def count_left_out(self, view: View) -> None:
        """Count what an archive leaves out. Call it for a view that is not whole if no other view is read."""
        self.indexes.left_out.add_all(view.left_out.as_record())

    def _read_first(self, places: Sequence[NamedFile], first: First) -> list[pa.Table]:
        """Return the videos of each archive; of one that is left for later, an empty table."""
        tables = list[pa.Table]()
        with closing(self._note_progress(self._read_in_parallel(places, first), len(places))) as views:
            for place, view in zip(places, views, strict=True):
                # Which videos of an archive repeat an id is known once all archives before it are.
                waits = first == "needed" and self._ids is not None and bool(self.unindexed)
                if view is None or waits:
                    self.unindexed.append(place)
                    tables.append(MANIFEST_SCHEMA.empty_table())
                else:
                    self.count_left_out(view)
                    tables.append(view.videos)
        return tables

    def _read_in_parallel(
        self, places: Sequence[NamedFile], first: First = "all"
    ) -> Generator[View | None, None, None]:
        """Yield the whole view of each archive in order; None for one that is left for later, and after ``close``."""
        with request_threads(_AT_ONCE) as pool:
            begun = (pool.submit(self._read_whole, place, first) for place in places)
            reading = deque(islice(begun, _AT_ONCE))
            try:
                for _ in places:
                    yield reading.popleft().result()
                    reading.extend(islice(begun, 1))
            except BaseException:
                self.close()  # threads that still read an archive end at its next member
                pool.shutdown(cancel_futures=True)
                raise

    def _read_whole(self, place: NamedFile, first: First) -> View | None:
        """Return all videos of an archive, as ``_read_in_parallel`` yields them."""
        missing: Missing = "skip" if first == "kept" else "make"
        if first == "needed" and (self.is_limited or (self.indexes.store is not None and not place.is_table)):
            missing = "renew"
        views = list(self.indexes.read(place, self.objects, missing))
        return views[-1] if views else None

    def _read_in_views(self) -> Generator[View | None, None, None]:
        """Yield the views of each archive, one archive after the other, until ``close``."""
        for place in self.unindexed:
            if self.indexes.stopped.is_set():
                return
            yield from self.indexes.read(place, self.objects, in_views=True)

    def _note_progress(
        self, views: Generator[View | None, None, None], n_archives: int
    ) -> Generator[View | None, None, None]:
        """Yield the views; say now and then how many archives are indexed, and at the end if one was read for that."""
        last_line_at, n_indexed, n_videos = time.monotonic(), 0, 0
        with closing(views):
            for view in views:
                if view is None or view.is_whole:
                    n_indexed, n_videos = n_indexed + 1, n_videos + (0 if view is None else len(view.videos))
                    is_last = n_indexed == n_archives and self.indexes.n_made
                    if is_last or time.monotonic() - last_line_at > _NOTE_S:
                        last_line_at = time.monotonic()
                        self.indexes.say(f"indexed {n_indexed} of {n_archives} archives: {n_videos} videos so far")
                yield view

    def _separate_ids(self, parts: Sequence[pa.Table], ids: Ids) -> pa.Table:
        """Return the known videos, which ``parts`` are the pieces of, with errors for members that repeat an id.

        The ids are added to ``ids`` if archives are left. Raises ManifestError if all videos of an archive repeat
        earlier ids, unless a limit may hide that.
        """
        is_repeated = ids.find_repeated(self.known)
        for part, end in zip(parts, accumulate(map(len, parts)), strict=True):
            if not self.is_limited and part["fault"].null_count and is_repeated[end - len(part) : end].all():
                first = Location.parse(part["uri"][0].as_py(), part["source_offset"][0].as_py())
                raise ManifestError(
                    f"{first.file}: all of its {len(part)} videos have ids of earlier "
                    f"ones, e.g. {part['video_id'][0]}; {_OWN_IDS}"
                )
        videos = ids.separate_ids(self.known, is_repeated)
        if self.unindexed:
            ids.add(videos)
        return videos


class Ids:
    """The ids of all videos so far, as hashes of 16 bytes."""

    def __init__(self) -> None:
        self._high, self._low = np.empty(0, np.uint64), np.empty(0, np.uint64)  # sorted by the first

    def find_repeated(self, videos: pa.Table) -> NDArray[np.bool_]:
        """Return a mask [n] of the videos (MANIFEST_SCHEMA) with the id of an earlier video, here or of ``add``.

        Files come before all members.
        """
        keys, member = column_keys(videos["video_id"]), pc.is_valid(videos["source_offset"]).to_numpy()
        return find_repeated(keys, member) | (find(keys, self._high, self._low) >= 0)

    def separate_ids(self, videos: pa.Table, is_repeated: NDArray[np.bool_] | None = None) -> pa.Table:
        """Return the videos, with an error and an id of its own (ID@URI) for each that is ``find_repeated``.

        The ids are not added: ``add`` does that.
        """
        is_repeated = self.find_repeated(videos) if is_repeated is None else is_repeated
        if not is_repeated.any():
            return videos
        ids, mask = videos["video_id"], pa.array(is_repeated)
        why = pc.coalesce(videos["fault"], pc.binary_join_element_wise(_BEFORE, ids, _BEHIND, ""))
        own_columns = {
            "video_id": pc.if_else(mask, pc.binary_join_element_wise(ids, videos["uri"], "@"), ids),
            "fault": pc.if_else(mask, why, videos["fault"]),
        }
        return pa.table([own_columns.get(name, videos[name]) for name in videos.column_names], schema=videos.schema)

    def add(self, videos: pa.Table) -> None:
        """Add the ids of videos after ``separate_ids``."""
        keys = column_keys(videos["video_id"])
        keys = keys[np.argsort(keys[:, 0])]
        positions = np.searchsorted(self._high, keys[:, 0])
        self._high, self._low = (
            np.insert(self._high, positions, keys[:, 0]),
            np.insert(self._low, positions, keys[:, 1]),
        )


def _are_ids_apart(listings: Sequence[NameContents], places: Sequence[NamedFile]) -> bool:
    """Return True if videos are named only in several tars and zips, and no two of these can share an id.

    An id begins with its archive's name. A single archive is indexed before its first video anyway.
    """
    names = sorted(f"{place.name}/" for place in places)
    apart = all(listing.videos is None for listing in listings) and len(places) > 1
    apart = apart and not any(place.is_table for place in places)  # rows may name any id
    return apart and not any(after.startswith(name) for name, after in pairwise(names))


def find_size(place: NamedFile) -> int:
    """Return the bytes of an archive, 0 if unknown."""
    if place.info is not None:
        return place.info.size
    try:
        return os.path.getsize(place.uri)  # noqa: PTH202 - as manifests have it
    except OSError:
        return 0
