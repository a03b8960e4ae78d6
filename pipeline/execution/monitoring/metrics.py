"""The metrics of runs at Ray's metrics port, as ``ray_gstep_...``.

The driver records them from the rows that it commits and from the reports that it reads anyway. Ray's agent of the
driver's node serves them; without an agent (``ray[default]`` is not installed) recording them does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ray.util.metrics import Counter, Gauge


class _Metric(NamedTuple):
    """The kind of a metric, what it means, and its labels beside ``run``."""

    kind: type[Counter] | type[Gauge]
    meaning: str
    labels: tuple[str, ...] = ()


METRICS: Mapping[str, _Metric] = MappingProxyType(
    {
        "rows": _Metric(Counter, "rows committed", ("item", "status")),
        "tokens": _Metric(Counter, "tokens of committed videos, before pruning (in) and stored (kept)", ("kind",)),
        "bytes": _Metric(Counter, "bytes of committed videos: of files (read) and of tokens (stored)", ("kind",)),
        "stage_seconds": _Metric(Counter, "seconds that committed videos took in a stage", ("stage",)),
        "failures": _Metric(Counter, "failed items, also those tried again", ("stage", "node", "class")),
        "items_left": _Metric(Gauge, "items without a row"),
        "queue": _Metric(Gauge, "items that a stage has to do or in hand", ("stage",)),
        "busy_share": _Metric(Gauge, "share of half a minute in which workers had items in hand", ("stage",)),
        "last_row_time": _Metric(Gauge, "when the last row was committed, or the run began, in seconds since 1970"),
    }
)


class Metrics:
    """The recorder of the metrics of one run; ``run`` is their label of that name."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._recorders: dict[str, Counter | Gauge] = {}

    def count(self, name: str, amount: float, **labels: str) -> None:
        """Add an amount to a counter of METRICS; 0 does nothing."""
        if amount > 0:
            self._recorder(name).inc(amount, {**labels, "run": self._run})

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge of METRICS."""
        self._recorder(name).set(value, {**labels, "run": self._run})

    def _recorder(self, name: str) -> Counter | Gauge:
        """Return the recorder of a metric, made when it is first used, as Ray is joined by then."""
        if name not in self._recorders:
            metric = METRICS[name]
            self._recorders[name] = metric.kind(f"gstep_{name}", metric.meaning, ("run", *metric.labels))
        return self._recorders[name]
