"""The videos of one cache that a server answers from: their live rows, and what prompts say of those asked about last.

Vectors are not read here: vLLM's workers do that, by the names of their rows.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote

import pyarrow as pa

from gstep.language import Visual
from pipeline.cache.header import CacheIdentity
from pipeline.cache.live_rows import VIDEOS
from pipeline.cache.method import declared_method
from pipeline.cache.reader import TokenCache, read_header
from pipeline.cache.reading import TokenOrder
from pipeline.cache.table import table_files
from pipeline.errors import CorruptShard, FailedVideo, NotACache, RatioNotCached, RemovedVideo, UnknownVideo
from pipeline.generate.engines.cached_rows import read_outline
from pipeline.generate.held_videos import LruCache, SharedReads, n_bytes
from pipeline.keys import keys_of
from pipeline.rows import VideoRow

_HELD_BYTES = 2**27  # bytes of outlines that a server keeps in memory for later questions
_HELD_ROWS = 2**14  # rows of videos, some 10 KB each; all are read again where the table has changed


class StoreAway(Exception):  # noqa: N818
    """An error: the cache's store does not answer now, but may later."""


class VideoGone(Exception):  # noqa: N818
    """An error: the cache names tokens that no longer exist, or has removed the video."""


class ServedVideo(NamedTuple):
    """A video as prompts take it, with a name that changes with its content."""

    visual: Visual
    name: str


@dataclass
class CacheStats:
    """The counts of a cache's requests since the server started; ``errors`` by kind."""

    hits: int = 0
    misses: int = 0
    load_seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)


class _Snapshot(NamedTuple):
    """An opened cache, the rows of videos that were asked about last, and the files of its table at that time."""

    cache: TokenCache
    rows: LruCache[str, VideoRow]
    files: frozenset[str]


class ServedVideos:
    """The videos of one open cache that a server answers from. Threads may share it.

    Attributes:
        stats: what was asked, for the server's metrics.
        away: whether the store did not answer when it was asked last.
    """

    def __init__(self, open_cache: Callable[[], TokenCache], refresh_seconds: float, name: str = "") -> None:
        """Open the cache, and look again every ``refresh_seconds``. Raises NotACache, CorruptShard and OSError.

        ``name`` is the cache's, by which engines look up rows.
        """
        self._open = open_cache
        self._name = name
        self._identity: CacheIdentity | None = None
        self._now = self._look(())
        self._identity = self.cache.identity
        declared = declared_method(self.cache.identity)
        self._order: TokenOrder = "selection" if declared is not None and declared.reorders else "index"
        self._held: LruCache[tuple[str, float | None], ServedVideo] = LruCache(_HELD_BYTES, lambda v: n_bytes(v.visual))
        self._reads: SharedReads[tuple[str, float | None], ServedVideo] = SharedReads("cache-reader")
        self._lock = threading.RLock()
        self.stats = CacheStats()
        self.away = False
        self._closed = threading.Event()
        threading.Thread(target=self._keep_looking, args=(refresh_seconds,), name="cache-table", daemon=True).start()

    @property
    def cache(self) -> TokenCache:
        """The cache as of the last refresh."""
        return self._now.cache

    @property
    def held_bytes(self) -> int:
        """Bytes of the outlines in memory."""
        return self._held.bytes

    def close(self) -> None:
        """Stop refreshing the cache."""
        self._closed.set()
        self._reads.close()

    def find(self, video_id: str, retention_ratio: float | None) -> Future[ServedVideo]:
        """Return a future of the video, finished if it is in memory; otherwise a reader thread reads it.

        It raises UnknownVideo, RatioNotCached and CorruptShard as TokenCache.get, VideoGone and StoreAway.
        """
        with self._lock:
            row = self._now.rows.get(video_id)
            held = None if row is None else self._held.get((_content_name(row), retention_ratio))
            if held is not None:
                self.stats.hits += 1
            else:
                self.stats.misses += 1
            return self._reads.find((video_id, retention_ratio), held, self._read)

    def refresh(self) -> None:
        """Open the table again if its files changed; while the store is away, videos in memory are still served."""
        try:
            if self.away or _names(self.cache) != self._now.files:
                self._look_again()
            self.away = False
        except (OSError, NotACache, CorruptShard, UnknownVideo):
            self.away = True

    def _look(self, wanted: Sequence[str]) -> _Snapshot:
        """Open the cache anew, and read the rows of the wanted videos, so that no request waits for them later.

        Raises NotACache where another cache has taken its place, whose tokens the model may not understand.
        """
        cache = self._open()
        if self._identity not in (None, cache.identity):
            raise NotACache(f"{cache.store} holds another cache now: start the server anew")
        files = _names(cache)
        rows: LruCache[str, VideoRow] = LruCache(_HELD_ROWS, lambda row: 1)
        ids = pa.array(wanted, pa.string())
        for name in ids.take(pa.array(keys_of(ids)[:, 0].argsort())).to_pylist():  # as sorted files have them
            with suppress(UnknownVideo):
                rows.put(name, cache.metadata(name))
        return _Snapshot(cache, rows, files)

    def _look_again(self) -> None:
        """Replace the snapshot by a new one."""
        with self._lock:
            wanted = self._now.rows.keys()
        new = self._look(wanted)
        with self._lock:
            self._now = new

    def _keep_looking(self, seconds: float) -> None:
        """Refresh at intervals until closed; runs in a thread."""
        while not self._closed.wait(seconds):
            self.refresh()

    def _read(self, asked: tuple[str, float | None]) -> ServedVideo:
        """Read a video, with one refresh if its files were merged or removed meanwhile; count errors."""
        started = time.perf_counter()
        try:
            try:
                found = self._load(*asked)
            except (CorruptShard, UnknownVideo) as error:
                # It may have been done again and its old shard deleted, or its table read while the store was away.
                if not (self.away or (isinstance(error, CorruptShard) and error.kind == "missing")):
                    raise
                self._look_again()
                found = self._load(*asked)
            self.away = False
            return found
        except Exception as error:
            told = self._counted(error)
            if told is error:
                raise
            raise told from error
        finally:
            self.stats.load_seconds += time.perf_counter() - started

    def _load(self, video_id: str, retention_ratio: float | None) -> ServedVideo:
        """Read which of a video's tokens are stored, name its content, and keep that in memory."""
        now = self._now
        row = now.cache.metadata(video_id)
        visual = read_outline(now.cache, row, retention_ratio, self._order, self._name)
        found = ServedVideo(visual, _content_name(row))
        with self._lock:
            now.rows.put(video_id, row)
            return self._held.put((found.name, retention_ratio), found)

    def _counted(self, error: Exception) -> Exception:
        """Count an error by its kind, and return the error that a request gets."""
        missing = isinstance(error, CorruptShard) and error.kind == "missing"
        # A folder that was unmounted looks like an empty cache.
        lost = isinstance(error, OSError | NotACache) or (
            (missing or type(error) is UnknownVideo) and not self._reachable()
        )
        if lost:
            self.away = True
            error = StoreAway("the store of the cache does not answer; ask again later")
        elif missing or isinstance(error, RemovedVideo):
            error = VideoGone(str(error.args[0]))
        kinds = {
            StoreAway: "store-away",
            VideoGone: "gone",
            FailedVideo: "failed-video",
            UnknownVideo: "unknown-video",
            RatioNotCached: "ratio-not-cached",
            CorruptShard: "corrupt",
        }
        self.stats.errors[next((kind for known, kind in kinds.items() if isinstance(error, known)), "internal")] += 1
        return error

    def _reachable(self) -> bool:
        """Return whether the cache's store answers."""
        try:
            read_header(self.cache.store)
        except (OSError, NotACache):
            return False
        return True


def _names(cache: TokenCache) -> frozenset[str]:
    """Return the names of the table's files."""
    return frozenset(file.name for file in table_files(cache.store, VIDEOS))


def _content_name(row: VideoRow) -> str:
    """Return a name for the video's stored content, which changes when it is encoded anew."""
    return f"{quote(row['video_id'])}={row['token_shard']}:{row['first_row_group']}:{row['checksum']}"
