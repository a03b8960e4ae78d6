"""The load of a run's stages: how busy their workers are, how many items wait for them, and which one holds it up."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from pipeline.execution.monitoring.report import WorkerReport

_LOOKS = 4  # reports that are kept: the busy shares are those of the three looks between them, half a minute
# Shares of their time: from the first on workers count as always busy; below the second they hold nothing up.
SATURATED, SLACK = 0.9, 0.5


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The numbers of a run at one moment.

    Attributes:
        item: the kind of its items, "video" or "question".
        total: items of this run.
        ok: items with a result.
        failed: items with an error row.
        ahead: how many items each stage before the last has done, by its word for that: "decoded".
        busy: stage -> share of the last half minute in which its workers had items in hand, 0 to 1.
        waiting: stage -> items that it has to do or in hand.
        bottleneck: the stage that holds the others up; "" as long as that is not measured.
        note: a line for the user; "" if only the numbers are new.
    """

    item: str = ""
    total: int = 0
    ok: int = 0
    failed: int = 0
    ahead: Mapping[str, int] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)
    bottleneck: str = ""
    note: str = ""

    @property
    def done(self) -> int:
        """The number of items with a row, ok or failed."""
        return self.ok + self.failed

    def __str__(self) -> str:
        counts = f"{self.done}/{self.total} {self.item}s, {self.failed} failed{stage_counts(self.ahead)}"
        return ", ".join(filter(None, (counts, self.load)))

    @property
    def load(self) -> str:
        """The busy shares and the bottleneck in words, "" before they are measured."""
        shares = " ".join(f"{stage} {share:.0%}" for stage, share in self.busy.items())
        limit = f" (bottleneck: {self.bottleneck})" if self.bottleneck else ""
        return f"busy: {shares}{limit}" if shares else ""


def stage_counts(ahead: Mapping[str, int]) -> str:
    """Format the items that each stage has done, to follow other numbers: ", 9 decoded"."""
    return "".join(f", {count} {word}" for word, count in ahead.items())


class Load:
    """The load of a run's stages, measured between the latest reports of its workers."""

    def __init__(self) -> None:
        self._reports: deque[WorkerReport] = deque([WorkerReport()], maxlen=_LOOKS)

    def add(self, report: WorkerReport) -> None:
        """Take a report as the latest one."""
        self._reports.append(report)

    def busy(self) -> dict[str, float]:
        """Return the share of their time in which each stage's workers had items in hand, 0 to 1.

        A stage is left out as long as none of its workers could work.
        """
        first, last = self._reports[0], self._reports[-1]
        up_s = {stage: seconds - first.up_s.get(stage, 0.0) for stage, seconds in last.up_s.items()}
        worked_s = {stage: seconds - first.busy_s.get(stage, 0.0) for stage, seconds in last.busy_s.items()}
        return {stage: min(1.0, max(0.0, worked_s[stage] / seconds)) for stage, seconds in up_s.items() if seconds > 0}

    def waiting(self, total: int) -> dict[str, int]:
        """Return how many items each stage has to do or in hand, of those that the stage before is through with.

        The first stage has those of ``total`` that it is not through with.
        """
        left = {"": total, **self._reports[-1].left}
        return {stage: max(0, left[before] - left[stage]) for before, stage in pairwise(left)}


def bottleneck(busy: Mapping[str, float]) -> str:
    """Return the stage that holds the others up; "" where none does, or that is not measured yet.

    It is the last stage whose workers are always busy, since what feeds them has more than they can take. Where no
    stage is so, it is the busiest, if it is busy for half of its time.
    """
    saturated = [stage for stage, share in busy.items() if share >= SATURATED]
    busiest = max(busy, key=lambda stage: busy[stage], default="")
    if len(busy) < 2 or busy[busiest] < SLACK:
        return ""
    return saturated[-1] if saturated else busiest
