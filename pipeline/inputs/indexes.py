"""The indexes of containers: which videos each holds, found once and kept beside the cache that is made of them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import ManifestError, printable
from pipeline.inputs.container import Asked, Member, fault, open_container
from pipeline.inputs.forms import FORMS, OF_COLUMNS
from pipeline.inputs.listings import suffix_of
from pipeline.inputs.named_videos import MANIFEST_SCHEMA
from pipeline.storage.s3 import ObjectInfo, Objects
from pipeline.storage.stores import INDEXES, Store

_THREADS = 16
_NOTE_S = 10.0  # seconds between two lines of progress
_VERSION: Final = b"1"
_KEPT = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("size", pa.int64()),
        pa.field("carried", pa.string()),
        pa.field("fault", pa.string()),
    ]
)


class Place(NamedTuple):
    """A container that was found.

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


def _silent(line: str) -> None:
    """Say nothing."""


@dataclass
class Indexing:
    """How containers are indexed.

    Attributes:
        asked: the options about containers.
        store: the cache's, which keeps the indexes.
        keeps: whether new ones are written there.
        only_known: whether containers without a kept index are counted and left alone.
        say: gets lines of progress.
        unlisted: the containers that were left alone.
        fetched: bytes that were read from stores.
    """

    asked: Asked = field(default_factory=Asked)
    store: Store | None = None
    keeps: bool = False
    only_known: bool = False
    say: Callable[[str], object] = _silent
    unlisted: list[str] = field(default_factory=list)
    fetched: int = 0
    _n_read: int = 0
    _stopped: bool = False

    def rows(self, places: Sequence[Place], objects: Objects) -> Iterator[pa.Table]:
        """Yield the videos of each container, as MANIFEST_SCHEMA; several containers are read at a time.

        Raises ManifestError where a request cannot be met.
        """
        told = time.monotonic()
        n_videos = 0
        with ThreadPoolExecutor(_THREADS) as pool:
            futures = [pool.submit(self._rows, place, objects) for place in places]
            try:
                for number, future in enumerate(futures, 1):
                    table = future.result()
                    n_videos += len(table)
                    if time.monotonic() - told > _NOTE_S or (number == len(places) and self._n_read):
                        told = time.monotonic()
                        self.say(f"indexed {number} of {len(places)} containers: {n_videos} videos seen")
                    yield table
            finally:
                self._stopped = True  # threads that still read one end at its next member
                pool.shutdown(cancel_futures=True)
                self._stopped = False

    def _rows(self, place: Place, objects: Objects) -> pa.Table:
        if "#" in place.uri:
            raise ManifestError(f"{place.uri}: rename it: a # in a container's name would stand before its members'")
        if place.policy is not None:
            return _table(place, [Member("", 0)], self.asked)
        try:
            file = open_container(place.uri, objects, place.info)
        except OSError as error:
            return _table(place, [_unreadable(error)], self.asked)
        try:
            members = self._kept_index(place, file.mark)
            if members is not None:
                return _table(place, members, self.asked)
            if self.only_known:
                self.unlisted.append(place.uri)
                return MANIFEST_SCHEMA.empty_table()
            self._n_read += 1
            members = list(takewhile(self._goes_on, FORMS[suffix_of(place.uri)](file).members(self.asked)))
            if self._stopped:
                return MANIFEST_SCHEMA.empty_table()
            self._keep(place, file.mark, members)
            return _table(place, members, self.asked)
        except OSError as error:
            return _table(place, [_unreadable(error)], self.asked)
        finally:
            self.fetched += file.fetched
            file.close()

    def _goes_on(self, member: Member) -> bool:
        """Return whether more members are wanted."""
        return not self._stopped

    def _kept_index(self, place: Place, mark: str) -> list[Member] | None:
        """Return the kept index of a container with this mark, or None where there is none."""
        if self.store is None or suffix_of(place.uri) in OF_COLUMNS or not mark:
            return None
        try:
            data = pa.BufferReader(self.store.read(_name(place.uri)))
            with pq.ParquetFile(data, page_checksum_verification=True) as file:
                about = file.schema_arrow.metadata or {}
                if (about.get(b"mark"), about.get(b"version")) != (mark.encode(), _VERSION):
                    return None
                table = file.read(use_threads=False)
        except (OSError, pa.ArrowException):  # a damaged one is made anew
            return None
        columns = [table[name].to_pylist() for name in _KEPT.names]
        return [Member(*values) for values in zip(*columns, strict=True)]

    def _keep(self, place: Place, mark: str, members: Sequence[Member]) -> None:
        """Keep a whole index; runs that make it at once write the same. Raises OSError."""
        if self.store is None or not self.keeps or suffix_of(place.uri) in OF_COLUMNS or not mark:
            return
        about = {b"mark": mark.encode(), b"version": _VERSION, b"uri": place.uri.encode("utf-8", "replace")}
        columns = [pa.array([getattr(member, one.name) for member in members], one.type) for one in _KEPT]
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_arrays(columns, schema=_KEPT.with_metadata(about)), sink, write_page_checksum=True)
        self.store.make()
        self.store.put(_name(place.uri), sink.getvalue())


def _name(uri: str) -> str:
    digest = hashlib.blake2b(uri.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return f"{INDEXES}/{digest}.parquet"


def _unreadable(error: OSError) -> Member:
    """Return what stands for the videos of a container that cannot be read."""
    return Member("", 0, fault=fault("io", printable(f"the container cannot be read: {error.strerror or error}")))


def _table(place: Place, members: Sequence[Member], asked: Asked) -> pa.Table:
    """Return the members of a container as MANIFEST_SCHEMA."""
    if asked.clips_from is not None and suffix_of(place.uri) not in OF_COLUMNS:
        members = [_clipped(member, asked.clips_from) for member in members]
    ids = [member.video_id or f"{place.name}/{member.name}".rstrip("/") for member in members]
    columns = {
        "video_id": ids,
        "uri": [f"{place.uri}#{member.name}" for member in members],
        "start_s": [member.start_s for member in members],
        "end_s": [member.end_s for member in members],
        "manifest": [member.carried for member in members],
        "policy": [place.policy] * len(members),
        "size": [member.size for member in members],
        "source_offset": [member.offset for member in members],
        "fault": [member.fault for member in members],
    }
    return pa.Table.from_pydict(columns, MANIFEST_SCHEMA)


def _clipped(member: Member, names: tuple[str, str]) -> Member:
    """Return a member with the clip that the carried .json of its key gives, a fault where it gives none."""
    if member.fault is not None:
        return member
    told = json.loads(member.carried or "{}").get("json")
    start, end = (told.get(name) if isinstance(told, dict) else None for name in names)
    if any(isinstance(time, bool) or not isinstance(time, int | float) for time in (start, end)):
        wrong = f"the .json of this key has no numbers {names[0]} and {names[1]}, which --clips-from names"
        return member._replace(fault=fault("unsupported", wrong))
    return member._replace(start_s=start, end_s=end)
