"""Progress of a run, counted once and shown as a bar on a terminal, as lines in a log, or to a function."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Self

from rich import progress as rich_progress
from rich.console import Console

from pipeline.execution.monitoring.load import Load, Progress, bottleneck, stage_counts
from pipeline.execution.monitoring.report import WorkerReport
from pipeline.execution.stages import Wording


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
