"""The indexes of containers: which videos each holds, found once and kept beside the cache that is made of them."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import ManifestError, RunFailed, printable
from pipeline.inputs.container import (
    Container,
    ContainerOptions,
    Member,
    RandomFile,
    fault,
    named_safely,
    open_container,
)
from pipeline.inputs.forms import FORMS, OF_COLUMNS
from pipeline.inputs.left_out import LeftOut
from pipeline.inputs.listings import suffix_of
from pipeline.inputs.named_videos import MANIFEST_SCHEMA
from pipeline.inputs.tables import number_of
from pipeline.keys import column_keys, find, mark_key, repeated
from pipeline.rows import Json
from pipeline.storage.s3 import ObjectInfo, Objects
from pipeline.storage.stores import INDEXES, Store, request_threads

_NOTE_S = 10.0  # seconds between two lines of progress
_FIRST_LOOK = 256  # members, after which it is first looked whether they are enough
_VERSION: Final = 2  # of kept indexes; others are made anew
_SUFFIX: Final = ".json.zlib"
_KEPT_NAMES = 100  # of what is left out, of a kind, in a kept index
_BEYOND: Final = 2**53  # bytes that no file has, as of a manifest; sums of fewer stay numbers of 64 bits
_CLIP = ("start_s", "end_s")  # columns of a table that tell the clip by themselves


class NamedContainer(NamedTuple):
    """A container that was found in what the user named.

    Attributes:
        uri: a path or an address.
        name: what the ids of its videos begin with.
        policy: why it must not be read, if so.
        info: what a listing said of it.
    """

    uri: str
    name: str
    policy: str | None = None
    info: ObjectInfo | None = None


class _Index(NamedTuple):
    """The members of a container, and what is left out of it; the mark tells whether the container has changed."""

    members: list[Member]
    left_out: LeftOut
    mark: str = ""


@dataclass
class Indexing:
    """The way in which containers are indexed, and what indexing has met so far.

    Attributes:
        asked: the options about containers.
        store: the cache's, which keeps the indexes.
        keeps: whether new ones are written there.
        only_known: whether containers without a kept index are left out.
        later: whether tars and zips that were never indexed are left out, to be indexed while others are read.
        limited: whether tables, and what stands alone, are left out then too: a limit may need none of them.
        ids: those of all videos so far, where containers may have an id in common; then none that lies behind one that
            is left out is taken before it.
        enough: tells of the first videos of a container whether they are all that is wanted of it.
        say: gets lines of progress.
        left: the containers that were left out, in order.
        fetched: bytes that were read from stores.
        unit: the most videos that share what is read of their container.
        at_once: how many containers are read at a time.
        n_cut: how many containers were read in part.
        left_out: the files and members that were met and are not taken.
    """

    asked: ContainerOptions = field(default_factory=ContainerOptions)
    store: Store | None = None
    keeps: bool = False
    only_known: bool = False
    later: bool = False
    limited: bool = False
    ids: Ids | None = None
    enough: Callable[[pa.Table], bool] | None = None
    say: Callable[[str], object] = lambda line: None
    left: list[NamedContainer] = field(default_factory=list)
    fetched: int = 0
    unit: int = 1
    at_once: int = 32
    n_cut: int = 0
    left_out: LeftOut = field(default_factory=LeftOut)
    _notes: set[str] = field(default_factory=set)  # forms of containers of which a note was said
    _n_read: int = 0
    _stopped: bool = False
    _counting: threading.Lock = field(default_factory=threading.Lock)  # several threads index

    def rows(self, places: Sequence[NamedContainer], objects: Objects) -> Generator[pa.Table, None, None]:
        """Yield the videos of each container, as MANIFEST_SCHEMA; several containers are read at a time.

        Raises ManifestError where a request cannot be met.
        """
        told = time.monotonic()
        n_videos = 0
        with request_threads(self.at_once) as pool:
            begun = (pool.submit(self._rows, place, objects) for place in places)
            reading = deque(islice(begun, self.at_once))
            try:
                for number in range(1, len(places) + 1):
                    table = reading.popleft().result()
                    if table is None or (self.later and self.ids is not None and self.left):
                        self.left.append(places[number - 1])
                        table = MANIFEST_SCHEMA.empty_table()
                    n_videos += len(table)
                    if time.monotonic() - told > _NOTE_S or (number == len(places) and self._n_read):
                        told = time.monotonic()
                        self.say(f"indexed {number} of {len(places)} containers: {n_videos} videos seen")
                    yield table
                    reading.extend(islice(begun, 1))
            finally:
                self._stopped = True  # threads that still read one end at its next member
                pool.shutdown(cancel_futures=True)
                self._stopped = False

    def stop(self) -> None:
        """End all threads of ``rows`` at their next member; the index that each makes is dropped."""
        self._stopped = True

    def _rows(self, place: NamedContainer, objects: Objects) -> pa.Table | None:
        """Return the videos of one container, as MANIFEST_SCHEMA; None where they are left out.

        Raises ManifestError, RunFailed.
        """
        if "#" in place.uri:
            raise ManifestError(f"{place.uri}: rename it: a # in a container's name would stand before its members'")
        if place.policy is not None:
            return _table(place, [Member("", 0)], self.asked)
        kept = self._kept_index(place)
        if kept is None and self.later and (self.limited or self._keeps(place)):
            return None
        try:
            with closing(open_container(place.uri, objects, place.info)) as file:
                try:
                    index = self._index(place, file, kept)
                finally:
                    with self._counting:
                        self.fetched += file.fetched
        except OSError as error:
            wrong = fault("io", printable(f"the container cannot be read: {error.strerror or error}"))
            index = _Index([Member("", 0, fault=wrong)], LeftOut())  # stands for all of its videos
        if index is None:
            return None
        self.left_out.add_all(index.left_out.as_record(), f"{place.name}/")
        return _table(place, index.members, self.asked, index.mark)

    def _index(self, place: NamedContainer, file: RandomFile, kept: _Index | None) -> _Index | None:
        """Return the index of an open container; None where it is left out. Raises as ``_rows``, and OSError."""
        if kept is not None and kept.mark and kept.mark == self._mark(place, file):
            return kept
        if self.only_known:
            return None
        with self._counting:
            self._n_read += 1
        container = FORMS[suffix_of(place.uri)](file)
        index, complete = self._members(place, container)
        index = index._replace(mark=self._mark(place, file))
        with self._counting:
            self.unit = max(self.unit, container.unit)
            if container.note is not None and suffix_of(place.uri) not in self._notes:
                self._notes.add(suffix_of(place.uri))
                self.say(f"note: {place.uri}: {printable(container.note)}")
        if complete:
            self._keep(place, index)
        return index

    def _mark(self, place: NamedContainer, file: RandomFile) -> str:
        """Return a text that differs once a container, or the way in which it is read, has changed; "" for none."""
        encoding = self.asked.zip_encoding if suffix_of(place.uri) == ".zip" else None
        return f"{file.mark} {encoding}" if encoding and file.mark else file.mark

    def _members(self, place: NamedContainer, container: Container) -> tuple[_Index, bool]:
        """Return the members of a container, and whether they are all; not so once there are ``enough``."""
        members, look_at = list[Member](), _FIRST_LOOK
        for member in container.members(self.asked):
            if self._stopped:
                return _Index([], LeftOut()), False
            # Here all that lies before the next video was seen, and with it what side by side belongs to the last one.
            if len(members) == look_at and self.enough is not None:
                look_at *= 2
                index = self._paired(place, container, members)
                if self._clips_known(place, index) and self.enough(_table(place, index.members, self.asked)):
                    self.n_cut += 1
                    return index, False
            members.append(member)
        return self._paired(place, container, members), True

    def _paired(self, place: NamedContainer, container: Container, members: list[Member]) -> _Index:
        """Return the index of the members that were read so far, under safe names."""
        paired, left_out = container.paired(members)
        if suffix_of(place.uri) in OF_COLUMNS:  # whose names are no part of an id
            return _Index(paired, left_out)
        seen = set[str]()
        return _Index([named_safely(member, seen) for member in paired], left_out)

    def _clips_known(self, place: NamedContainer, index: _Index) -> bool:
        """Return whether the clips of members are known; what tells the clip of a tar's video may lie far behind it."""
        if self.asked.clips_from is None or suffix_of(place.uri) in OF_COLUMNS:
            return True
        return all(member.carried is not None or member.fault is not None for member in index.members)

    def _keeps(self, place: NamedContainer) -> bool:
        """Return whether indexes of containers of this form are kept: not those of tables, which are read fast."""
        return self.store is not None and suffix_of(place.uri) not in OF_COLUMNS

    def _kept_index(self, place: NamedContainer) -> _Index | None:
        """Return the kept index of a container, or None where it was never indexed."""
        if self.store is None or not self._keeps(place):
            return None
        try:
            told, *members = json.loads(zlib.decompress(self.store.read(_name(place.uri))))
            version, uri, mark, *left_out = told
            if (version, uri) != (_VERSION, place.uri):
                return _Index([], LeftOut())  # it is made anew
            return _Index([Member(*member) for member in members], LeftOut(*left_out), mark)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, AttributeError, zlib.error):  # a damaged one is made anew
            return _Index([], LeftOut())

    def _keep(self, place: NamedContainer, index: _Index) -> None:
        """Keep a whole index; runs that make it at once write the same. Raises RunFailed where the store fails."""
        if self.store is None or not self.keeps or not self._keeps(place) or not index.mark:
            return
        told = [_VERSION, place.uri, index.mark, index.left_out.as_record(_KEPT_NAMES)]
        data = json.dumps([told, *index.members]).encode()
        self.store.make()
        try:
            self.store.put(_name(place.uri), zlib.compress(data, 1))
        except OSError as error:  # no fault of the container's
            raise RunFailed(f"{self.store}: the index of {place.uri} cannot be kept: {error}") from error


def forget_members(store: Store, uris: Collection[str], ids: Collection[str] = ()) -> list[str]:
    """Take members out of the kept indexes, with what is carried with them; return the names of deleted indexes.

    An index is deleted, and made anew when it is wanted, where it cannot be read, or where a member may have an id of
    ``ids`` and its place is not among ``uris``: an id does not tell which folder was named. Raises OSError.
    """
    deleted, ends = list[str](), frozenset(ids)
    names = store.names(INDEXES, _SUFFIX) if ids or uris else []
    if not ids:
        names = sorted(set(names) & {_name(uri.partition("#")[0]) for uri in uris})
    for name, data in zip(names, store.read_all(names), strict=True):
        try:
            told, *members = json.loads(zlib.decompress(data))
            if told[0] != _VERSION:
                raise ValueError(told[0])
            places = [f"{told[1]}#{member[0]}" for member in members]
            gone = [member[0] for member, place in zip(members, places, strict=True) if place in uris]
            left = [member for member, place in zip(members, places, strict=True) if place not in uris]
            doubtful = any(not ends.isdisjoint(_ends(f"{told[1]}/{member[0]}")) for member in left)
        except (ValueError, TypeError, LookupError, zlib.error):
            doubtful, left, gone = True, [], []
        if doubtful:
            store.delete(name)
            deleted.append(name)
        elif gone:
            left_out = LeftOut(*told[3:])
            left_out.forget(gone)
            store.put(name, zlib.compress(json.dumps([[*told[:3], left_out.as_record()], *left]).encode(), 1))
    return deleted


def _ends(path: str) -> Iterator[str]:
    """Yield what remains of a path behind each of its slashes."""
    return (path[place + 1 :] for place, letter in enumerate(path) if letter == "/")


def _name(uri: str) -> str:
    """Return the name of a container's kept index."""
    digest = hashlib.blake2b(uri.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return f"{INDEXES}/{digest}{_SUFFIX}"


def _table(place: NamedContainer, members: Sequence[Member], asked: ContainerOptions, mark: str = "") -> pa.Table:
    """Return the members of a container as MANIFEST_SCHEMA; ``mark`` is the container's, for members without one."""
    rows = suffix_of(place.uri) in OF_COLUMNS
    members = [_bounded(member) for member in members]
    if asked.clips_from is not None or rows:
        members = [_clipped(member, asked.clips_from, rows) for member in members]
    names = [str(member.offset) if rows else member.name for member in members]
    columns = {
        "video_id": [
            one.video_id or f"{place.name}/{name}".rstrip("/") for one, name in zip(members, names, strict=True)
        ],
        "uri": [f"{place.uri}#{member.name}" for member in members],
        "start_s": [member.start_s for member in members],
        "end_s": [member.end_s for member in members],
        "manifest": [member.carried for member in members],
        "policy": [place.policy] * len(members),
        "size": [member.size for member in members],
        "source_offset": [member.offset for member in members],
        "fault": [member.fault for member in members],
        # A table that was changed has other uris.
        "mark": [None if rows else mark_key(member.mark or mark) for member in members],
    }
    return pa.Table.from_pydict(columns, MANIFEST_SCHEMA)


def _bounded(member: Member) -> Member:
    """Return a member as it is, or with a fault where its place or its size is beyond any file's."""
    if max(member.offset, member.size or 0) < _BEYOND:
        return member
    wrong = member.fault or fault("corrupt", "its size or its place is beyond any file")
    return member._replace(offset=0, size=None, fault=wrong)


def _clipped(member: Member, names: tuple[str, str] | None, of_row: bool) -> Member:
    """Return a member with its clip: two numbers of its row, or of the carried .json; a fault where there are none.

    Without ``names`` a row may have ``start_s`` and ``end_s``, or one of them.
    """
    told = json.loads(member.carried or "{}")
    told = told if of_row else told.get("json")
    start, end = (_seconds(told.get(name)) if isinstance(told, dict) else None for name in names or _CLIP)
    wrong = any(time is not None and math.isnan(time) for time in (start, end))
    if member.fault is None and (wrong or (names is not None and None in (start, end))):
        first, last = names or _CLIP
        return member._replace(
            fault=fault("unsupported", f"the clip's {first} and {last} are not both numbers of seconds")
        )
    return member._replace(start_s=start, end_s=end) if member.fault is None else member


def _seconds(value: Json) -> float | None:
    """Return a carried value as a number of seconds, None where there is none, nan where it is of another type."""
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return number_of(value) if is_number else math.nan


OWN_IDS = "name the folder that holds both containers, or give rows a column video_id of other values"
_BEFORE, _BEHIND = fault("corrupt", "an earlier video has the id "), f" already; {OWN_IDS}"


class Ids:
    """The ids of all videos so far, as hashes of 16 bytes."""

    def __init__(self) -> None:
        self._high, self._low = np.empty(0, np.uint64), np.empty(0, np.uint64)  # sorted by the first

    def repeated(self, videos: pa.Table) -> NDArray[np.bool_]:
        """Return which videos (MANIFEST_SCHEMA) have the id of an earlier one; files come before all members."""
        keys, member = column_keys(videos["video_id"]), pc.is_valid(videos["source_offset"]).to_numpy()
        return repeated(keys, member) | (find(keys, self._high, self._low) >= 0)

    def told_apart(self, videos: pa.Table, again: NDArray[np.bool_] | None = None) -> pa.Table:
        """Return the videos, with an error and an id of its own (ID@URI) for each that is ``repeated``."""
        again = self.repeated(videos) if again is None else again
        if not again.any():
            return videos
        ids, mask = videos["video_id"], pa.array(again)
        why = pc.coalesce(videos["fault"], pc.binary_join_element_wise(_BEFORE, ids, _BEHIND, ""))
        own = {
            "video_id": pc.if_else(mask, pc.binary_join_element_wise(ids, videos["uri"], "@"), ids),
            "fault": pc.if_else(mask, why, videos["fault"]),
        }
        return pa.table([own.get(name, videos[name]) for name in videos.column_names], schema=videos.schema)

    def add(self, videos: pa.Table) -> None:
        """Add the ids of videos that were told apart."""
        keys = column_keys(videos["video_id"])
        keys = keys[np.argsort(keys[:, 0])]
        places = np.searchsorted(self._high, keys[:, 0])
        self._high, self._low = np.insert(self._high, places, keys[:, 0]), np.insert(self._low, places, keys[:, 1])
