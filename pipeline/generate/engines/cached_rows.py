"""The rows of cached videos as an engine's workers read them: by names that only rows of the given caches have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple, cast
from urllib.parse import quote, unquote

import numpy as np

from gstep.language import Visual
from pipeline.cache.cached_video import PackedRows, bfloat16, outline, vector_bytes
from pipeline.cache.reader import TokenCache
from pipeline.cache.reading import TokenOrder
from pipeline.cache.token_shard import Rows
from pipeline.errors import CorruptShard, UnknownVideo
from pipeline.generate.held_videos import LruCache, SharedReads
from pipeline.rows import VideoRow

PREFIX = "cached-rows:"  # of every name, by which an engine tells them from its own
_SNAPSHOTS = 2  # of a table: rows that were replaced just now are still asked for by those who have not looked again


class RowName(NamedTuple):
    """The name of stored rows: it differs where the rows do, and stays where a merge moves them to another file.

    Attributes:
        cache: by which the caches were given; "" is the first one's.
        video_id: whose rows.
        checksum: of all the video's vectors, from its row of the videos table.
        keep: how many rows, the first ones in order of selection.
        order: in which they stand in the prompt.
    """

    cache: str
    video_id: str
    checksum: str
    keep: int
    order: TokenOrder

    def __str__(self) -> str:
        cache, video_id = (quote(text, safe="") for text in (self.cache, self.video_id))
        return f"{PREFIX}{cache}/{video_id}/{self.checksum}/{self.keep}/{self.order}"

    @classmethod
    def parse(cls, text: str) -> RowName:
        """Parse a name. Raises ValueError."""
        parts = text.removeprefix(PREFIX).split("/")
        if not text.startswith(PREFIX) or len(parts) != len(cls._fields) or parts[-1] not in ("index", "selection"):
            raise ValueError(f"{text[:200]!r} is no name of cached rows")
        cache, video_id, checksum, keep, order = parts
        return cls(unquote(cache), unquote(video_id), checksum, int(keep), cast(TokenOrder, order))


def read_outline(
    cache: TokenCache, row: VideoRow, retention_ratio: float | None, order: TokenOrder, name: str = ""
) -> Visual:
    """Read a video as prompts take it, without its vectors, which are left to the engine. Raises as TokenCache.get.

    ``name`` is that of the cache.
    """
    wanted = cache.wanted(row, cache.reading(retention_ratio, order, (), verify=False))
    rows = RowName(name, row["video_id"], row["checksum"] or "", wanted.keep, order)
    with cache.shard_of(wanted) as shard:
        table = shard.read(wanted._replace(columns=("index",), near=()))
    return outline(row, table, cache.header, order, str(rows))


def read_packed(cache: TokenCache, row: VideoRow, keep: int, order: TokenOrder) -> PackedRows:
    """Read the first ``keep`` rows of a video as they are stored, in ``order``. Raises as TokenCache.get.

    Each column is [K,width / 2] of two bytes each, which bfloat16 stands for.
    """
    reading = cache.reading(None, order, (), verify=False)
    cache.wanted(row, reading)
    vectors = [name for name in reading.columns if name.startswith(("token", "deepstack"))]
    wanted = Rows(row, keep, ("index", *vectors), reading.near)
    with cache.shard_of(wanted) as shard:
        if order == "selection":
            table = shard.read(wanted)
            columns = {name: bfloat16(vector_bytes(table[name])).view(keep, -1) for name in vectors}
        else:
            placed = shard.read_by_index(wanted).vectors
            columns = {name: bfloat16(np.ascontiguousarray(placed[name])).view(keep, -1) for name in vectors}
    return PackedRows(columns, row["hidden_size"], cache.header)


class RowReader:
    """The rows that one worker holds: each read once for all that ask together, kept up to a number of bytes.

    What is held is never behind what has to be read. Threads may share it.
    """

    def __init__(self, caches: Mapping[str, Callable[[], TokenCache]], limit: int) -> None:
        """Open the caches. ``limit`` is in bytes. Raises NotACache, CorruptShard and OSError."""
        self._open = caches
        self._snapshots = {name: [opened()] for name, opened in caches.items()}
        self._held: LruCache[str, PackedRows] = LruCache(limit, lambda rows: rows.n_bytes)
        self._reads: SharedReads[str, PackedRows] = SharedReads("row-reader")
        self._lock = threading.RLock()
        #: Videos that were read.
        self.n_read = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows in memory."""
        return self._held.bytes

    def find(self, name: str) -> Future[PackedRows]:
        """Return a future of the rows of this name, finished where they are held; else a thread reads them.

        It raises ValueError for what is no name, UnknownVideo, CorruptShard and OSError.
        """
        with self._lock:
            return self._reads.find(name, self._held.get(name), self._read)

    def close(self) -> None:
        """Start no further read."""
        self._reads.close()

    def _read(self, name: str) -> PackedRows:
        """Read rows and hold them; the table is looked at again where the name, or a file of it, is not there."""
        wanted = RowName.parse(name)
        if wanted.cache not in self._snapshots:
            raise ValueError(f"no cache {wanted.cache[:80]!r} was given")
        try:
            found = self._load(wanted)
        except (UnknownVideo, CorruptShard) as error:
            if isinstance(error, CorruptShard) and error.kind != "missing":
                raise
            with self._lock:
                snapshots = self._snapshots[wanted.cache]
                self._snapshots[wanted.cache] = [self._open[wanted.cache](), *snapshots][:_SNAPSHOTS]
            found = self._load(wanted)
        with self._lock:
            self.n_read += 1
            return self._held.put(name, found)

    def _load(self, wanted: RowName) -> PackedRows:
        """Read rows by the newest snapshot of the table that knows them."""
        for cache in self._snapshots[wanted.cache]:
            try:
                row = cache.metadata(wanted.video_id)
            except UnknownVideo:
                continue
            alike = row["status"] == "ok" and row["checksum"] == wanted.checksum
            if alike and (wanted.keep == row["n_tokens"] or (row["nested"] and 0 < wanted.keep < row["n_tokens"])):
                return read_packed(cache, row, wanted.keep, wanted.order)
        raise UnknownVideo(f"{wanted.video_id!r} has other rows by now, or was removed")
