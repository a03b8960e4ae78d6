"""The caches of a server in its ``/metrics``, summed over its processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.serve.config import FIRST
from pipeline.serve.videos import ServedVideos

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge

_COUNTS = {
    "hits": "videos that were held when they were asked about",
    "misses": "videos that had to be read",
    "load_seconds": "seconds that reading took",
}

_registered: list[Counter | Gauge] = []


class CacheMetrics:
    """The Prometheus metrics of a process's caches, set whenever ``update`` is called."""

    def __init__(self, caches: Mapping[str, ServedVideos]) -> None:
        """Register metrics of these caches in place of those of others."""
        from prometheus_client import REGISTRY, Counter, Gauge  # noqa: PLC0415 - vLLM brings it

        while _registered:
            REGISTRY.unregister(_registered.pop())
        self._caches = {name or FIRST: videos for name, videos in caches.items()}
        self._counts = {name: Counter(f"gstep_cache_{name}", text, ["cache"]) for name, text in _COUNTS.items()}
        self._errors = Counter("gstep_cache_errors", "videos without an answer", ["cache", "kind"])
        held, away = "bytes of the outlines of videos in memory", "1 where the store did not answer last"
        self._held = Gauge("gstep_cache_held_bytes", held, ["cache"], multiprocess_mode="livesum")
        self._away = Gauge("gstep_cache_store_away", away, ["cache"], multiprocess_mode="livemax")
        self._told: dict[tuple[str, str], float] = {}
        _registered.extend((*self._counts.values(), self._errors, self._held, self._away))

    def update(self) -> None:
        """Take over what the caches have counted so far."""
        for name, videos in self._caches.items():
            self._held.labels(name).set(videos.held_bytes)
            self._away.labels(name).set(int(videos.away))
            for count, counter in self._counts.items():
                counter.labels(name).inc(self._more(name, count, getattr(videos.stats, count)))
            for kind, number in list(videos.stats.errors.items()):
                self._errors.labels(name, kind).inc(self._more(name, kind, number))

    def _more(self, name: str, count: str, now: float) -> float:
        """Return by how much a count of a cache has grown since this was asked last."""
        before = self._told.get((name, count), 0.0)
        self._told[name, count] = now
        return now - before
