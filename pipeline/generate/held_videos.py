"""Cached videos as prompts take them: the last few in memory, and of whole ones what methods select of them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from gstep import PrunedTokens
from gstep.language import Visual
from gstep.pruners.base import Pruner
from pipeline.cache.reader import TokenCache, TokenOrder
from pipeline.generate.late_pruning import LatePruning
from pipeline.runner.heartbeat import Heartbeat

_HELD_BYTES = 2**30  # bytes of tokens that an actor keeps in memory for later questions
_SELECTED_BYTES = 2**29  # bytes of selections, and again of selected tokens, kept beside them
_READERS = 8  # values that are read at once; who asks for what is held waits for none of them
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """A cache of the last used values up to a number of bytes, which always keeps the newest value."""

    def __init__(self, limit: int, size: Callable[[V], int]) -> None:
        self._limit = limit
        self._size = size
        self._held: OrderedDict[K, V] = OrderedDict()
        #: Of all values that are held.
        self.bytes = 0

    def keys(self) -> list[K]:
        """List the keys, the least recently used first."""
        return list(self._held)

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None."""
        if key in self._held:
            self._held.move_to_end(key)
        return self._held.get(key)

    def put(self, key: K, value: V) -> V:
        """Store a value, drop the least recently used ones beyond the limit, and return the value."""
        if key in self._held:
            self.bytes -= self._size(self._held.pop(key))
        self._held[key] = value
        self.bytes += self._size(value)
        while self.bytes > self._limit and len(self._held) > 1:
            _, old = self._held.popitem(last=False)
            self.bytes -= self._size(old)
        return value


class SharedReads(Generic[K, V]):
    """Threads that read values by key, each once for all that ask for it meanwhile."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(_READERS, name)
        self._loading: dict[K, Future[V]] = {}

    def find(self, key: K, held: V | None, read: Callable[[K], V]) -> Future[V]:
        """Return a finished future of what is ``held``, or else one of what a thread reads.

        Its caller holds the lock under which values are stored, so that none is read twice.
        """
        if held is not None:
            done: Future[V] = Future()
            done.set_result(held)
            return done
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = self._threads.submit(read, key)
            loading.add_done_callback(lambda _: self._loading.pop(key, None))
        return loading

    def close(self) -> None:
        """Start no further read."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class HeldVideo(NamedTuple):
    """A video as a prompt takes it, its nominal ratio, seconds of reading it (0 from memory), and decode warnings."""

    visual: Visual
    retention_ratio: float
    seconds: float
    decode_warnings: int = 0


class HeldVideos:
    """The cached videos read last, kept in memory; all questions on a video share one Visual."""

    def __init__(
        self,
        cache: TokenCache,
        retention_ratio: float | None,
        order: TokenOrder = "index",
        limit: int = _HELD_BYTES,
        heartbeat: Heartbeat | None = None,
        evidence: Sequence[str] = (),
    ) -> None:
        """Hold up to ``limit`` bytes."""
        self._cache = cache
        self._heartbeat = heartbeat or Heartbeat("answer")
        self._ratio = retention_ratio
        self._order: TokenOrder = order
        self._evidence = evidence
        self._held: LruCache[str, HeldVideo] = LruCache(limit, lambda held: n_bytes(held.visual))

    def get(self, video_id: str) -> HeldVideo:
        """Return a video from memory or from the cache. Raises as TokenCache.get."""
        if (held := self._held.get(video_id)) is not None:
            return held._replace(seconds=0.0)
        started = time.perf_counter()
        with self._heartbeat.busy(f"the tokens of {video_id}, being read"):
            video = self._cache.get(video_id, self._ratio, self._order, self._evidence)
        row = video.metadata
        ratio = self._ratio if self._ratio is not None else float(row["retention_ratio"])
        seconds = time.perf_counter() - started
        return self._held.put(video_id, HeldVideo(video.visual, ratio, seconds, row["decode_warnings"] or 0))


class ChosenVideos:
    """The cached videos after pruning by any of several methods and ratios.

    A method that looks at the video alone selects once for each video: where it is nested at its largest ratio, of
    which smaller ones are the beginning.
    """

    def __init__(
        self, videos: HeldVideos, prunings: Iterable[LatePruning | None], device: str, *, own_order: bool = True
    ) -> None:
        self._videos = videos
        self._device = device
        self._own_order = own_order
        rising = sorted(filter(None, prunings), key=attrgetter("retention_ratio"))
        self._largest: dict[Hashable, LatePruning] = {_selection_key(late): late for late in rising}
        self._selected: LruCache[Hashable, PrunedTokens] = LruCache(_SELECTED_BYTES, lambda p: int(p.tokens.nbytes))
        self._visuals: LruCache[Hashable, Visual] = LruCache(_SELECTED_BYTES, n_bytes)

    def get(self, video_id: str, late: LatePruning | None, words: Tensor | None = None) -> HeldVideo:
        """Return a video pruned by ``late``, or as the cache holds it if that is None.

        ``words`` is the question's embedding, for a method that asks for one. Raises as TokenCache.get, and ValueError
        where a method cannot prune the tokens.
        """
        held = self._videos.get(video_id)
        if late is None or late.inside is not None:
            return held
        if not late.pruner.cacheable:
            pruned = late.select(held.visual, self._device, words)
            return held._replace(visual=self._kept(late, held, pruned), retention_ratio=late.retention_ratio)
        visual = self._visuals.get((video_id, late))
        if visual is None:
            visual = self._visuals.put((video_id, late), self._kept(late, held, self._select(video_id, held, late)))
        return held._replace(visual=visual, retention_ratio=late.retention_ratio)

    def _select(self, video_id: str, held: HeldVideo, late: LatePruning) -> PrunedTokens:
        """Return the video's selection under a pruning, sharing one selection among a nested method's ratios."""
        largest = self._largest.get(_selection_key(late), late)
        pruned = self._selected.get((video_id, _selection_key(largest)))
        if pruned is None:
            pruned = largest.select(held.visual, self._device)
            self._selected.put((video_id, _selection_key(largest)), pruned)
        return pruned.at(late.retention_ratio) if late.pruner.nested else pruned

    def _kept(self, late: LatePruning, held: HeldVideo, pruned: PrunedTokens) -> Visual:
        """Return the video reduced to its selected tokens."""
        return late.kept(held.visual, pruned, own_order=self._own_order)


def _selection_key(late: LatePruning) -> tuple[Pruner, int, float | None]:
    """Return the key that prunings share if one selection of a video serves them all."""
    return late.pruner, late.seed, None if late.pruner.nested else late.retention_ratio


def n_bytes(visual: Visual) -> int:
    """Return the bytes of a video's tensors."""
    tensors = (visual.tokens, visual.index, *visual.deepstack, *visual.evidence.values())
    return sum(tensor.nbytes for tensor in tensors)
