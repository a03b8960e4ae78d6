"""The videos of one cache that a server answers from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple
from urllib.parse import quote

from gstep.language import Visual
from pipeline.cache.header import get_method_declarations, read_header
from pipeline.cache.reader import TokenCache, TokenOrder
from pipeline.cache.table import list_table_files
from pipeline.errors import CorruptShard, NotACache, RemovedVideo, UnknownVideo
from pipeline.generate.prompts import LruCache, count_bytes
from pipeline.rows import VideoRow

_MAX_READERS = 8  # videos read in parallel
VideoKey = tuple[str, float | None]  # video id, retention ratio


class StoreAway(Exception):  # noqa: N818
    """The store of the cache does not answer now."""


class VideoGone(Exception):  # noqa: N818
    """The video was removed, or its tokens no longer exist."""


class TooLarge(Exception):  # noqa: N818
    """The engine has no memory for a video of this many tokens."""


class ServedVideo(NamedTuple):
    """A video in the form that prompts take.

    Attributes:
        content_name: a name of the stored content; it changes when the video is encoded again.
        snapshot: the number of the last snapshot whose row had this content.
    """

    visual: Visual
    content_name: str
    snapshot: int


class _Snapshot(NamedTuple):
    """An open cache, the names of the files of its table then, and the number of earlier snapshots."""

    cache: TokenCache
    files: frozenset[str]
    number: int


class ServedVideos:
    """The videos of one open cache that a server answers from; thread-safe.

    Attributes:
        away: True if the store did not answer at the last access.
    """

    def __init__(self, open_cache: Callable[[], TokenCache], refresh_seconds: float, held_bytes: int) -> None:
        """Open the cache, and start a thread that refreshes it every ``refresh_seconds``.

        Raises:
            NotACache: there is no cache.
            CorruptShard: a file of the cache's table is damaged.
        """
        self._open = open_cache
        cache = open_cache()
        self._snapshot = _Snapshot(cache, _list_file_names(cache), 0)
        self._identity = cache.identity
        method = get_method_declarations(cache.identity)
        self._order: TokenOrder = "selection" if method is not None and method.reorders else "index"
        self._videos_in_memory: LruCache[VideoKey, ServedVideo] = LruCache(held_bytes, _count_video_bytes)
        self._readers = ThreadPoolExecutor(_MAX_READERS, "cache-reader")
        self._loading: dict[VideoKey, Future[ServedVideo]] = {}
        self._lock = threading.RLock()
        self.away = False
        self._close_event = threading.Event()
        threading.Thread(
            target=self._refresh_regularly, args=(refresh_seconds,), name="cache-table", daemon=True
        ).start()

    @property
    def cache(self) -> TokenCache:
        """The cache as of the last refresh."""
        return self._snapshot.cache

    def close(self) -> None:
        """Stop refreshing the cache, and start no further reads."""
        self._close_event.set()
        self._readers.shutdown(wait=False, cancel_futures=True)

    def find(self, video_id: str, retention_ratio: float | None) -> Future[ServedVideo]:
        """Return a future of the video, done if memory has it as of the last refresh; otherwise a thread gets it.

        The thread reads the tokens only if their content has changed. Callers that ask meanwhile share the read. None
        for ``retention_ratio`` reads all stored tokens. The future raises UnknownVideo, RatioNotCached, CorruptShard,
        VideoGone or StoreAway.
        """
        key = (video_id, retention_ratio)
        with self._lock:  # videos are stored under this lock, so that none is read twice
            video = self._videos_in_memory.get(key)
            if video is not None and video.snapshot == self._snapshot.number:
                in_memory: Future[ServedVideo] = Future()
                in_memory.set_result(video)
                return in_memory
            loading = self._loading.get(key)
            if loading is None:
                loading = self._loading[key] = self._readers.submit(self._read, key)
                loading.add_done_callback(lambda _: self._loading.pop(key, None))
            return loading

    def refresh(self) -> None:
        """Open the table again if its files have changed, or if the store was away.

        If that fails (OSError, NotACache, CorruptShard, UnknownVideo), this sets ``away`` instead of raising; videos in
        memory are still served.
        """
        try:
            if self.away or _list_file_names(self.cache) != self._snapshot.files:
                self._open_again()
            self.away = False
        except (OSError, NotACache, CorruptShard, UnknownVideo):
            self.away = True

    def _open_again(self) -> None:
        """Open the cache again as the next snapshot.

        Raises:
            NotACache: the cache is gone, or was replaced by one with another identity.
        """
        cache = self._open()
        if cache.identity != self._identity:
            raise NotACache(f"{cache.store} has another cache now: restart the server")
        files = _list_file_names(cache)
        with self._lock:
            self._snapshot = _Snapshot(cache, files, self._snapshot.number + 1)

    def _refresh_regularly(self, seconds: float) -> None:
        """Refresh the cache at this interval until ``close``; runs in a thread."""
        while not self._close_event.wait(seconds):
            self.refresh()

    def _read(self, key: VideoKey) -> ServedVideo:
        """Read a video and keep it in memory; runs in a reader thread. Sets ``away`` by whether the store answers.

        If the store was away and the video or its tokens are not found, the cache is opened again for a second try.

        Raises UnknownVideo (without suggesting other ids), RatioNotCached, CorruptShard, VideoGone or StoreAway.
        """
        try:
            try:
                video = self._load(*key)
            except (CorruptShard, UnknownVideo):
                if not self.away:
                    raise
                self._open_again()  # the table was read while the store was away
                video = self._load(*key)
        except (OSError, NotACache, CorruptShard, UnknownVideo) as error:
            explanation = self._explain_error(error)
            if type(explanation) is UnknownVideo:  # the message must not reveal ids of other videos
                raise UnknownVideo(f"{key[0]!r} is not in the cache") from error
            if explanation is error:
                raise
            raise explanation from error
        self.away = False
        return video

    def _load(self, video_id: str, retention_ratio: float | None) -> ServedVideo:
        """Return a video from memory if its row still names the same content; otherwise read and keep it."""
        snapshot = self._snapshot
        key = (video_id, retention_ratio)
        content_name = _make_content_name(snapshot.cache.metadata(video_id))
        with self._lock:
            video = self._videos_in_memory.get(key)
        if video is None or video.content_name != content_name:
            cached = snapshot.cache.get(video_id, retention_ratio, self._order)
            video = ServedVideo(cached.visual, _make_content_name(cached.metadata), snapshot.number)
            _ = video.visual.placeholder_hash  # computed here once, so that no prompt waits for it
        with self._lock:
            return self._videos_in_memory.put(key, video._replace(snapshot=snapshot.number))

    def _explain_error(self, error: Exception) -> Exception:
        """Convert an error of reading a video to the error that its request gets.

        That is StoreAway if the store does not answer, which is checked again if a video or its tokens are missing;
        this sets ``away``. It is VideoGone for a removed video or a missing token shard, and otherwise ``error``
        itself.
        """
        is_missing = isinstance(error, CorruptShard) and error.kind == "missing"
        # An unmounted folder looks like an empty cache.
        is_doubtful = is_missing or type(error) is UnknownVideo
        if isinstance(error, OSError | NotACache) or (is_doubtful and not self._is_reachable()):
            self.away = True
            return StoreAway("the store of the cache does not answer; ask again later")
        if is_missing or isinstance(error, RemovedVideo):
            return VideoGone(str(error.args[0]))
        return error

    def _is_reachable(self) -> bool:
        """Return True if the header of the cache can be read."""
        try:
            read_header(self.cache.store)
        except (OSError, NotACache):
            return False
        return True


def _count_video_bytes(video: ServedVideo) -> int:
    """Count the bytes of a video's tensors, with its placeholder rows if they are a copy of the tokens."""
    visual = video.visual
    return count_bytes(visual) + (0 if visual.placeholder_rows is visual.tokens else visual.placeholder_rows.nbytes)


def _list_file_names(cache: TokenCache) -> frozenset[str]:
    """List the files of the cache's table."""
    return frozenset(file.name for file in list_table_files(cache.store))


def _make_content_name(row: VideoRow) -> str:
    """Name the stored content of a video: ID=SHARD:ROW_GROUP:CHECKSUM, with the id percent-encoded."""
    return f"{quote(row['video_id'])}={row['token_shard']}:{row['first_row_group']}:{row['checksum']}"
