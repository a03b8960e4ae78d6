"""The indexes of archives and tables, which list their videos. The cache keeps those of whole tars and zips."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import compress
from typing import Final, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import ManifestError, RunFailed, make_printable
from pipeline.inputs.archive import (
    CLIP_COLUMNS,
    Archive,
    ArchiveOptions,
    Member,
    RandomFile,
    check_name,
    format_fault,
    open_archive,
)
from pipeline.inputs.forms import FORMS, TABLE_FORMS
from pipeline.inputs.left_out import LeftOut
from pipeline.inputs.listings import find_suffix
from pipeline.inputs.named_videos import MANIFEST_SCHEMA, ManifestConverter, Roots
from pipeline.inputs.tables import parse_number
from pipeline.keys import hash_mark
from pipeline.rows import Json
from pipeline.storage.location import Location, make_uri
from pipeline.storage.s3 import ObjectInfo, Objects
from pipeline.storage.stores import INDEXES, Store

_FIRST_VIEW = 256  # members in the first view of an archive; each later view has twice as many
_VERSION: Final = 2  # the version of kept indexes; other versions are replaced
_SUFFIX: Final = ".json.zlib"
_MAX_KEPT_NAMES = 100  # names of left-out files per kind in a kept index
_BEYOND: Final = 2**53  # bytes that no file has; sums of smaller numbers fit 64 bits
Missing = Literal["make", "renew", "skip"]


class NamedFile(NamedTuple):
    """A file that a name in VIDEOS stands for: a video, an archive or a table.

    Attributes:
        name: the id of a video; the prefix of the ids of an archive's videos.
        policy: the reason why it must not be read; None if it may be read.
        info: the store's listing of an object; None for a file on disk.
    """

    uri: str
    name: str
    policy: str | None = None
    info: ObjectInfo | None = None

    @property
    def is_table(self) -> bool:
        """True for a table of videos, which needs ``--column``."""
        return find_suffix(self.uri) in TABLE_FORMS


class _Index(NamedTuple):
    """The members of an archive and its left-out files, with a mark that changes with the archive; "" for no mark."""

    members: list[Member]
    left_out: LeftOut
    mark: str = ""


class IndexView(NamedTuple):
    """The videos of an archive that are known after, or while, it is indexed.

    Attributes:
        videos: MANIFEST_SCHEMA.
        is_whole: True if these are all videos. Otherwise, the next view of the archive has these and more, or a single
            row with the reason if the archive cannot be read to its end.
    """

    videos: pa.Table
    left_out: LeftOut
    is_whole: bool = True


@dataclass
class Indexes:
    """Makes indexes of archives, and reads and writes the indexes that the cache keeps. Thread-safe.

    Attributes:
        store: the store of the cache, which keeps the indexes; None keeps none.
        keeps: whether new indexes are written there.
        roots: folders and prefixes, besides a table's own, that paths in its rows may name.
        say: gets progress lines, and notes about archives, one note per form.
        left_out: files and members that are not read. The caller adds those of the views from ``read``.
        fetched: the number of bytes read from stores.
        rows_per_group: the maximum ``Archive.rows_per_group`` of the indexed archives.
        n_made: the number of archives that were read to make an index.
        stopped: any thread may set it, to end the making of each index at the next member.
    """

    options: ArchiveOptions = field(default_factory=ArchiveOptions)
    store: Store | None = None
    keeps: bool = False
    roots: Roots = field(default_factory=Roots)
    say: Callable[[str], object] = lambda line: None
    left_out: LeftOut = field(default_factory=LeftOut)
    fetched: int = 0
    rows_per_group: int = 1
    n_made: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    _notes: set[str] = field(default_factory=set)  # forms whose note was printed
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def read(
        self, named_file: NamedFile, objects: Objects, missing: Missing = "make", *, in_views: bool = False
    ) -> Iterator[IndexView]:
        """Yield the videos of an archive, from its kept index if that fits, otherwise by indexing the archive.

        An index fits if its mark equals the archive's. An archive that must not be read (a policy), or that raises an
        OSError when it is opened or read, also with "skip", gives a view of a single row with the reason, in place of
        the whole view.

        Args:
            missing: what to do if no kept index fits the archive. "make" makes one. "renew" makes one if an index that
                does not fit is kept, and otherwise yields nothing. "skip" yields nothing.
            in_views: if True, the videos read so far are also yielded while a new index is made: 256 at first, then
                twice as many each time. Closing the generator leaves the rest of the archive unread.

        Yields:
            One whole view, after any partial views. If ``stopped`` ends the making of an index, there is no whole view.

        Raises:
            ManifestError: the uri contains "#", or the options do not fit the archive.
            RunFailed: a new index cannot be written.
            UsageError: the folder of the cache cannot be created.
        """
        if "#" in named_file.uri:
            raise ManifestError(f"{named_file.uri}: rename it: uris put a # between an archive's name and its members'")
        if named_file.policy is not None:
            yield self._make_view(named_file, _Index([Member("", 0)], LeftOut()))
            return
        kept_index = self._read_kept_index(named_file)
        if kept_index is None and missing == "renew":
            return
        try:
            with closing(open_archive(named_file.uri, objects, named_file.info)) as file:
                try:
                    if kept_index is not None and kept_index.mark and kept_index.mark == self._mark(named_file, file):
                        yield self._make_view(named_file, kept_index)
                    elif missing != "skip":
                        yield from self._index_archive(named_file, file, in_views)
                finally:
                    with self._counting:
                        self.fetched += file.fetched
        except OSError as error:
            wrong = format_fault("io", make_printable(f"the archive cannot be read: {error.strerror or error}"))
            # This row stands for all videos of the archive.
            yield self._make_view(named_file, _Index([Member("", 0, fault=wrong)], LeftOut()))

    def _index_archive(self, named_file: NamedFile, file: RandomFile, in_views: bool) -> Iterator[IndexView]:
        """Index an open archive, and yield its views; write the index if the whole archive was read.

        With ``in_views``, views of the part read so far come first, each twice as long as the one before; no such view
        is yielded while the clip of a member is unknown. Once ``stopped`` is set, this ends at the next member without
        a whole view. The archive counts in ``n_made`` from the start.
        """
        with self._counting:
            self.n_made += 1
        archive = FORMS[find_suffix(named_file.uri)](file)
        members = list[Member]()
        next_view = _FIRST_VIEW
        for member in archive.members(self.options):
            if self.stopped.is_set():
                return
            # The archive was read up to this video, so all members before it are known.
            if in_views and len(members) == next_view:
                next_view *= 2
                index = self._make_index(named_file, file, archive, members)
                if self._has_all_clips(named_file, index):
                    yield self._make_view(named_file, index, is_whole=False)
            members.append(member)
        index = self._make_index(named_file, file, archive, members)
        self._write_index(named_file, index)
        yield self._make_view(named_file, index)

    def _make_view(self, named_file: NamedFile, index: _Index, *, is_whole: bool = True) -> IndexView:
        """Convert an index to a view, with the archive's name before the names of left-out members.

        A row of a table with a path instead of bytes becomes a separate file, without an offset.
        """
        left_out = LeftOut()
        left_out.add_all(index.left_out.as_record(), f"{named_file.name}/")
        table = _make_member_table(named_file, index.members, self.options, index.mark)
        paths = pa.array([member.path for member in index.members], pa.string())
        if paths.null_count < len(paths):
            uri_columns = ManifestConverter.from_uri(named_file.uri, self.roots).locate(paths.drop_null())
            is_file = paths.is_valid()
            columns = {name: table[name].combine_chunks() for name in table.column_names}
            columns["uri"] = pc.replace_with_mask(columns["uri"], is_file, uri_columns.uris)
            columns["policy"] = pc.replace_with_mask(columns["policy"], is_file, uri_columns.policy)
            columns["source_offset"] = pc.if_else(is_file, None, columns["source_offset"])
            table = pa.Table.from_pydict(columns, MANIFEST_SCHEMA)
        return IndexView(table, left_out, is_whole)

    def _mark(self, named_file: NamedFile, file: RandomFile) -> str:
        """Return a text that changes with an archive or a zip's ``zip_encoding``; "" if the file has no mark."""
        encoding = self.options.zip_encoding if find_suffix(named_file.uri) == ".zip" else None
        return f"{file.mark} {encoding}" if encoding and file.mark else file.mark

    def _make_index(self, named_file: NamedFile, file: RandomFile, archive: Archive, members: list[Member]) -> _Index:
        """Return the index of the members read so far, with faults for unsafe or repeated names in tars and zips.

        This raises ``rows_per_group`` to the archive's, and passes the archive's note to ``say``, once per form.
        """
        form = find_suffix(named_file.uri)
        with self._counting:
            self.rows_per_group = max(self.rows_per_group, archive.rows_per_group)
            if archive.note is not None and form not in self._notes:
                self._notes.add(form)
                self.say(f"note: {named_file.uri}: {make_printable(archive.note)}")
        members, left_out = archive.pair_sidecars(members)
        if form not in TABLE_FORMS:  # the name of a row is not in its id
            seen_names = set[str]()
            members = [check_name(member, seen_names) for member in members]
        return _Index(members, left_out, self._mark(named_file, file))

    def _has_all_clips(self, named_file: NamedFile, index: _Index) -> bool:
        """Return False if ``--clips-from`` needs sidecars, and a member has neither these nor a fault yet."""
        if self.options.clips_from is None or named_file.is_table:
            return True
        return all(member.carried is not None or member.fault is not None for member in index.members)

    def _read_kept_index(self, named_file: NamedFile) -> _Index | None:
        """Return the kept index of an archive, or None if none is kept or it is a table.

        Errors of the store are ignored: an index that cannot be read, is damaged, or is of another version is returned
        as an empty one without a mark, which a new index replaces.
        """
        if self.store is None or named_file.is_table:
            return None
        try:
            facts, *members = json.loads(zlib.decompress(self.store.read(_make_index_name(named_file.uri))))
            version, uri, mark, *left_out = facts
            # Older versions kept fewer fields, and used the name of a zip's member as the end of its id.
            is_old = find_suffix(named_file.uri) == ".zip" and any(
                "\\" in member[0] and len(member) < len(Member._fields) for member in members
            )
            if (version, uri) == (_VERSION, named_file.uri) and not is_old:
                return _Index([Member(*member) for member in members], LeftOut(*left_out), mark)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, AttributeError, zlib.error):
            pass  # damaged or unreadable
        return _Index([], LeftOut())  # a new index replaces it

    def _write_index(self, named_file: NamedFile, index: _Index) -> None:
        """Write the index of a tar or zip to the cache; do nothing if this run keeps none or the archive has no mark.

        At most 100 names of left-out files per kind are written.

        Raises:
            RunFailed: the store fails.
            UsageError: the folder of the cache cannot be created.
        """
        if self.store is None or not self.keeps or named_file.is_table or not index.mark:
            return
        facts = [_VERSION, named_file.uri, index.mark, index.left_out.as_record(_MAX_KEPT_NAMES)]
        data = json.dumps([facts, *index.members]).encode()
        self.store.make()
        try:
            self.store.put(_make_index_name(named_file.uri), zlib.compress(data, 1))
        except OSError as error:  # the store failed, not the archive
            raise RunFailed(f"{self.store}: the index of {named_file.uri} cannot be kept: {error}") from error


def remove_members(store: Store, uris: Collection[str], ids: Collection[str] = ()) -> list[str]:
    """Delete members, and the names of their carried files, from the kept indexes, as ``jobs.remove`` needs.

    A whole index is deleted, to be made again on demand, if it is damaged or of another version, or if the archive and
    name of a member that is not in ``uris`` end in one of ``ids`` after a slash: an index does not tell the folder to
    which ids are relative.

    Args:
        uris: the uris of the members. Without ``ids``, only the indexes of their archives are read.
        ids: the video ids.

    Returns:
        The names of the deleted indexes; rewritten ones are not named.
    """
    deleted_names = list[str]()
    ends = frozenset(ids)
    names = store.names(INDEXES, _SUFFIX) if ids or uris else []
    if not ids:
        # Without ids, only the archives of the uris matter.
        names = sorted(set(names) & {_make_index_name(Location.parse(uri, 0).file) for uri in uris})
    for name, data in zip(names, store.read_all(names), strict=True):
        try:
            facts, *members = json.loads(zlib.decompress(data))
            if facts[0] != _VERSION:
                raise ValueError(facts[0])
            kept = [Member(*member) for member in members]
            is_removed = [make_uri(facts[1], member.name) in uris for member in kept]
            removed_ids = [member.shown_name or member.name for member in compress(kept, is_removed)]
            other_members = [member for member, removed in zip(kept, is_removed, strict=True) if not removed]
            doubtful = any(
                not ends.isdisjoint(_iter_path_ends(f"{facts[1]}/{name}"))
                for member in other_members
                for name in {member.name, member.shown_name or member.name}
            )
        except (ValueError, TypeError, LookupError, zlib.error):
            doubtful = True
            other_members = []
            removed_ids = []
        if doubtful:
            store.delete(name)
            deleted_names.append(name)
        elif removed_ids:
            left_out = LeftOut(*facts[3:])
            left_out.forget(removed_ids)
            store.put(name, zlib.compress(json.dumps([[*facts[:3], left_out.as_record()], *other_members]).encode(), 1))
    return deleted_names


def _iter_path_ends(path: str) -> Iterator[str]:
    """Yield the rest of a path after each of its slashes."""
    return (path[index + 1 :] for index, letter in enumerate(path) if letter == "/")


def _make_index_name(uri: str) -> str:
    """Return the name of an archive's kept index."""
    digest = hashlib.blake2b(uri.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return f"{INDEXES}/{digest}{_SUFFIX}"


def _make_member_table(
    named_file: NamedFile, members: Sequence[Member], options: ArchiveOptions, mark: str
) -> pa.Table:
    """Convert the members of an archive to MANIFEST_SCHEMA, with their clips.

    Offsets or sizes of 2^53 or more, and clips that are not finite numbers, become faults.

    Args:
        mark: the mark of the archive, for members without one.
    """
    is_table = named_file.is_table
    members = [_check_bounds(member) for member in members]
    if options.clips_from is not None or is_table:
        members = [_add_clip(member, options.clips_from, is_table) for member in members]
    names = [str(member.offset) if is_table else member.shown_name or member.name for member in members]
    columns = {
        "video_id": [
            member.video_id or f"{named_file.name}/{name}".rstrip("/")
            for member, name in zip(members, names, strict=True)
        ],
        "uri": [make_uri(named_file.uri, member.name) for member in members],
        "start_s": [member.start_s for member in members],
        "end_s": [member.end_s for member in members],
        "manifest": [member.carried for member in members],
        "policy": [named_file.policy] * len(members),
        "size": [member.size for member in members],
        "source_offset": [member.offset for member in members],
        "fault": [member.fault for member in members],
        # A modified table has other uris, so it needs no mark.
        "mark": [None if is_table else hash_mark(member.mark or mark) for member in members],
    }
    return pa.Table.from_pydict(columns, MANIFEST_SCHEMA)


def _check_bounds(member: Member) -> Member:
    """Return the member; if its offset or size is 2^53 or more, with a fault, offset 0 and no size."""
    if max(member.offset, member.size or 0) < _BEYOND:
        return member
    wrong = member.fault or format_fault("corrupt", "its size or its offset is beyond any file")
    return member._replace(offset=0, size=None, fault=wrong)


def _add_clip(member: Member, names: tuple[str, str] | None, of_row: bool) -> Member:
    """Return the member with its clip: the two values ``names`` of its row or its carried .json, in seconds.

    With ``names``, both values must be finite numbers. Without, a row may have ``start_s``, ``end_s``, both or none.
    Any other value becomes a fault. A member that already has a fault gets no clip.

    Args:
        of_row: True for a row of a table, whose carried columns have the values themselves.
    """
    values = json.loads(member.carried or "{}")
    values = values if of_row else values.get("json")
    start, end = (
        _parse_clip_seconds(values.get(name)) if isinstance(values, dict) else None for name in names or CLIP_COLUMNS
    )
    wrong = any(time is not None and not math.isfinite(time) for time in (start, end))
    if member.fault is None and (wrong or (names is not None and None in (start, end))):
        first, last = names or CLIP_COLUMNS
        return member._replace(
            fault=format_fault("unsupported", f"the clip's {first} and {last} are not both numbers of seconds")
        )
    return member._replace(start_s=start, end_s=end) if member.fault is None else member


def _parse_clip_seconds(value: Json) -> float | None:
    """Return a carried value as seconds; None if it is null, NaN if it is not a number."""
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return parse_number(value) if is_number else math.nan
