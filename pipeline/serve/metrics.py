"""The caches of a server in its ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.serve.videos import ServedVideos

_COUNTS = {
    "hits": "videos that were held when they were asked about",
    "misses": "videos that had to be read",
    "load_seconds": "seconds that reading took",
}

_shown: dict[str, ServedVideos] = {}


class _Collector:
    """A Prometheus collector that reads the caches' counts whenever ``/metrics`` is asked for."""

    def collect(self) -> Iterator[Any]:
        """Yield a family of metrics for each count."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 - vLLM brings it

        held = GaugeMetricFamily(
            "gstep_cache_held_bytes", "bytes of the outlines of videos in memory", labels=["cache"]
        )
        away = GaugeMetricFamily("gstep_cache_store_away", "1 where the store did not answer last", labels=["cache"])
        errors = CounterMetricFamily("gstep_cache_errors", "videos without an answer", labels=["cache", "kind"])
        for name, videos in _shown.items():
            held.add_metric([name], videos.held_bytes)
            away.add_metric([name], int(videos.away))
            for kind, count in videos.stats.errors.items():
                errors.add_metric([name, kind], count)
        yield from (held, away, errors)
        for field, text in _COUNTS.items():
            family = CounterMetricFamily(f"gstep_cache_{field}", text, labels=["cache"])
            for name, videos in _shown.items():
                family.add_metric([name], getattr(videos.stats, field))
            yield family


def export(caches: Mapping[str, ServedVideos]) -> None:
    """Register the metrics of these caches with ``/metrics``."""
    from prometheus_client import REGISTRY  # noqa: PLC0415 - as above

    if not _shown:
        REGISTRY.register(_Collector())
    _shown.clear()
    _shown.update({name or "default": videos for name, videos in caches.items()})
