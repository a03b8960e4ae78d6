"""Progress of a run and the load of its stages: counted once, shown as a bar, as lines in a log, or to a function."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

from rich import progress as rich_progress
from rich.console import Console

from pipeline.runner.heartbeats import WorkerReport
from pipeline.runner.stages import Wording

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

        A stage is left out as long as none of its workers could work. One of which nothing came since the last look is
        not busy: workers that are report each second, and dead ones do not.
        """
        first, last = self._reports[0], self._reports[-1]
        before = self._reports[-2] if len(self._reports) > 1 else first
        up_s = {stage: seconds - first.up_s.get(stage, 0.0) for stage, seconds in last.up_s.items()}
        worked_s = {stage: seconds - first.busy_s.get(stage, 0.0) for stage, seconds in last.busy_s.items()}
        silent = {stage for stage, seconds in last.up_s.items() if seconds == before.up_s.get(stage, 0.0)}
        return {
            stage: 0.0 if stage in silent else min(1.0, max(0.0, worked_s[stage] / seconds))
            for stage, seconds in up_s.items()
            if seconds > 0
        }

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


class Listening(Console):
    """A console that passes its lines, and progress, to the function ``tell``.

    An exception of ``tell`` ends the run.
    """

    def __init__(self, tell: Callable[[Progress], object]) -> None:
        super().__init__(file=sys.stderr, force_terminal=False, force_jupyter=False)
        self.tell = tell

    def print(self, *objects: Any, **keywords: Any) -> None:
        """Tell a line to the function as a note."""
        with self.capture() as captured:
            super().print(*objects, **{**keywords, "soft_wrap": True})
        if text := captured.get().strip():
            self.tell(Progress(note=text))


class OneLine:
    """The progress display of a notebook: one line, overwritten until the run ends, below the notes."""

    def __init__(self) -> None:
        self._width = 0

    def __call__(self, progress: Progress) -> None:
        if progress.note.startswith("configuration: "):
            return  # the options stand in the cell above
        ends = progress.note or (progress.total and progress.done == progress.total)
        text = f"\r{progress.note or progress}".ljust(self._width)
        sys.stderr.write(text + ("\n" if ends else ""))
        sys.stderr.flush()
        self._width = 0 if ends else len(text)


EARLY_S, _EARLY_LINES = 4.5, 7  # between the first lines of a log, and how many they are


class Speed(NamedTuple):
    """The speed of a run: ``rate`` items a second, ``left`` to come, the first ``start_s`` after the run began."""

    rate: float
    left: int
    start_s: float

    @property
    def left_s(self) -> float:
        """Seconds until the last item, if nothing changes."""
        return self.left / self.rate


class Pace:
    """The rate of items since the first one came, so that loading models does not count."""

    def __init__(self, total: int, item: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._item = item
        self._clock = clock
        self._through = self._done = self._at_first = 0
        self._made_at = clock()
        self._first: float | None = None

    def grow(self, total: int) -> None:
        """Set the number of items, of which more were found."""
        self._total = total

    def through(self, items: int) -> None:
        """Count computed items."""
        self._through = min(self._through + items, self._total)
        self._begin()

    def done(self, items: int) -> None:
        """Count written items; a run that does not count computed ones has its rate from these."""
        self._done += items
        self._begin()

    def _begin(self) -> None:
        """Start the clock at the first item."""
        if self._first is None:
            self._first, self._at_first = self._clock(), self._now

    @property
    def _now(self) -> int:
        """The number of items that are through so far."""
        return max(self._through, self._done)

    def speed(self) -> Speed | None:
        """Return how fast the items come; None where that is not known yet."""
        if self._first is None:
            return None
        new, seconds = self._now - self._at_first, self._clock() - self._first
        return Speed(new / seconds, self._total - self._now, self._first - self._made_at) if new and seconds else None

    def __str__(self) -> str:
        """Return the rate and the time left, "" where all are through."""
        if self._total == self._now:
            return ""
        speed = self.speed()
        return f"{speed.rate:.2f} {self._item}s/s, {speed.left_s:.0f} s left" if speed else "no estimate yet"


class Reporter:
    """A counter of a run's items, which tells the counts to a function; subclasses display them in their own way."""

    def __init__(self, total: int, words: Wording, tell: Callable[[Progress], object] = lambda at: None) -> None:
        self._tell = tell
        self.at = Progress(item=words.item, total=total)
        self.pace = Pace(total, words.item)
        self._words = words
        self._made: Mapping[str, int] = {}
        self._load = Load()

    def __enter__(self) -> Self:
        self.show()
        return self

    def __exit__(self, *error: object) -> None:
        """End the display."""

    def show(self) -> None:
        """Show the current counts."""
        self._tell(self.at)

    def grow(self, total: int) -> None:
        """Set the number of items, of which more were found."""
        self.pace.grow(total)
        self._take(replace(self.at, total=total))

    def through(self, items: int) -> None:
        """Count items that are computed, or have failed; they may wait to be written."""
        self.pace.through(items)

    def advance(self, ok: int, failed: int) -> None:
        """Count items that are committed."""
        self.pace.done(ok + failed)
        self._take(replace(self.at, ok=self.at.ok + ok, failed=self.at.failed + failed))

    def stages(self, report: WorkerReport) -> None:
        """Record how many items each stage has made so far, and how busy its workers are."""
        self._made = report.made
        self._load.add(report)
        busy = self._load.busy()
        self._take(replace(self.at, busy=busy, waiting=self._load.waiting(self.at.total), bottleneck=bottleneck(busy)))

    def _take(self, at: Progress) -> None:
        """Set the current counts, and show them if they changed."""
        now = replace(at, ahead=self._words.ahead(self._made, at.ok))
        if now != self.at:
            self.at = now
            self.show()


def reporter(console: Console, total: int, log_interval: float, words: Wording) -> Reporter:
    """Return the progress display for a console: a bar on a terminal, a function's, or a line at each interval."""
    if isinstance(console, Listening):
        return Reporter(total, words, console.tell)
    if console.is_terminal:
        return BarReporter(console, total, words)
    return LineReporter(console, total, log_interval, words)


class BarReporter(Reporter):
    """A reporter that draws a bar with the count, the failures, the rate and the time left."""

    def __init__(self, console: Console, total: int, words: Wording) -> None:
        super().__init__(total, words)
        texts = (words.doing, "{task.fields[more]}", "{task.fields[pace]}")  # the pace is formatted at each refresh
        doing, more, pace = map(rich_progress.TextColumn, texts)
        bar = rich_progress.SpinnerColumn(), doing, rich_progress.BarColumn(), rich_progress.MofNCompleteColumn()
        self._bar = rich_progress.Progress(*bar, more, pace, console=console)
        self._task = self._bar.add_task(words.doing, total=total, more="", pace=self.pace)

    def __enter__(self) -> Self:
        self._bar.start()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self) -> None:
        more = ", ".join(filter(None, (f"{self.at.failed} failed{stage_counts(self.at.ahead)}", self.at.load)))
        self._bar.update(self._task, completed=self.at.done, total=self.at.total, more=more)


class LineReporter(Reporter):
    """A reporter that prints a line every ``interval`` seconds, also while nothing moves, and one at the end.

    In the first half minute, in which workers start and load models, a line comes at least every EARLY_S seconds.
    """

    def __init__(self, console: Console, total: int, interval: float, words: Wording) -> None:
        super().__init__(total, words)
        self._console = console
        self._interval = interval
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._ticker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._ticker.join()
        self._line()

    def _tick(self) -> None:
        """Print a line at each interval until the run ends; runs in a thread."""
        for _ in range(_EARLY_LINES):
            if self._ended.wait(min(self._interval, EARLY_S)):
                return
            self._line()
        while not self._ended.wait(self._interval):
            self._line()

    def _line(self) -> None:
        """Print the counts, the rate and the time left."""
        pace = str(self.pace)
        self._console.print(f"{self.at}, {pace}" if pace else str(self.at), highlight=False, soft_wrap=True)
