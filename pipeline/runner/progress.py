"""The progress of a run and the load of its stages, displayed as a bar or as lines, or passed to a function."""

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

from pipeline.console import CleanConsole
from pipeline.runner.stages import Wording
from pipeline.runner.worker_reports import WorkerReport
from pipeline.storage.outages import OUTAGES

_LOOKS = 4  # reports in memory: busy shares are measured over the three intervals between them, half a minute
# Busy shares: at the first or above, a stage counts as always busy; below the second, it slows nothing down.
SATURATED_SHARE, SLACK_SHARE = 0.9, 0.5


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The counts and the load of a run at one moment, or a note for the user.

    Attributes:
        item: "video" or "question".
        total: the known items of the current graph.
        ok: items with a result.
        failed: items with an error row.
        ahead: results of each stage before the last, keyed by what it did: {"decoded": 9}.
        busy: stage -> share of the last half minute in which its workers had items in hand, 0 to 1.
        waiting: stage -> items in its queue or in hand.
        bottleneck: the slowest stage, or a store that does not answer; "" if unknown.
        note: a line for the user; "" in a report of new counts.
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
        counts = f"{self.done}/{self.total} {self.item}s, {self.failed} failed{format_stage_counts(self.ahead)}"
        return ", ".join(filter(None, (counts, self.load)))

    @property
    def load(self) -> str:
        """The busy shares and the bottleneck as text; "" before they are measured."""
        shares = " ".join(f"{stage} {share:.0%}" for stage, share in self.busy.items())
        limit = f"bottleneck: {self.bottleneck}" if self.bottleneck else ""
        return f"busy: {shares}{limit and f' ({limit})'}" if shares else limit


def format_stage_counts(ahead: Mapping[str, int]) -> str:
    """Format the counts of ``Progress.ahead`` to follow other numbers: ", 9 decoded"."""
    return "".join(f", {count} {word}" for word, count in ahead.items())


class StageLoad:
    """The load of a run's stages, measured over the last _LOOKS reports of its workers."""

    def __init__(self) -> None:
        self._reports: deque[WorkerReport] = deque([WorkerReport()], maxlen=_LOOKS)

    def add(self, report: WorkerReport) -> None:
        """Add a report; the oldest report in memory is dropped."""
        self._reports.append(report)

    def busy(self) -> dict[str, float]:
        """Return the share of time in which each stage's workers had items in hand, 0 to 1, over the reports in memory.

        A stage whose workers were not ready in this time is left out. A stage without news since the last report counts
        as not busy (0).
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
        """Return the number of items in each stage's queue or in hand, by the latest report; {} before it.

        The first stage gets ``total`` items, and each later stage the items that the stage before has passed on.
        """
        n_left = {"": total, **self._reports[-1].n_passed_on}
        return {stage: max(0, n_left[before] - n_left[stage]) for before, stage in pairwise(n_left)}


def find_bottleneck(busy: Mapping[str, float]) -> str:
    """Return the stage that limits the rate of the run; "" if there is none or there are fewer than two stages.

    It is the last one with a share of at least SATURATED_SHARE, otherwise the busiest, if its share is at least
    SLACK_SHARE.
    """
    saturated_stages = [stage for stage, share in busy.items() if share >= SATURATED_SHARE]
    busiest = max(busy, key=lambda stage: busy[stage], default="")
    if len(busy) < 2 or busy[busiest] < SLACK_SHARE:
        return ""
    return saturated_stages[-1] if saturated_stages else busiest


class CallbackConsole(CleanConsole):
    """A console that passes its lines as notes to ``tell``. An exception that ``tell`` raises ends the run."""

    def __init__(self, tell: Callable[[Progress], object]) -> None:
        super().__init__(file=sys.stderr, force_terminal=False, force_jupyter=False)
        self.tell = tell

    def print(self, *objects: Any, **keywords: Any) -> None:
        """Pass the printed text without styles to ``tell`` as the note of a ``Progress``; blank text is dropped."""
        with self.capture() as capture:
            super().print(*objects, **{**keywords, "soft_wrap": True})
        if text := capture.get().strip():
            self.tell(Progress(note=text))


class NotebookLine:
    """The progress display of a notebook: one line on stderr, overwritten until the run ends, below any notes."""

    def __init__(self) -> None:
        self._width = 0

    def __call__(self, progress: Progress) -> None:
        """Write a note or the progress to stderr, over the previous progress line.

        A note, and the progress of a complete run, end with a newline. The note about the configuration is dropped.
        """
        if progress.note.startswith("configuration: "):
            return  # the cell above shows the options
        ends = progress.note or (progress.total and progress.done == progress.total)
        text = f"\r{progress.note or progress}".ljust(self._width)
        sys.stderr.write(text + ("\n" if ends else ""))
        sys.stderr.flush()
        self._width = 0 if ends else len(text)


EARLY_S, _EARLY_LINES = 4.5, 7  # seconds between the first lines of a log, and their number


class Speed(NamedTuple):
    """The speed of a run.

    Attributes:
        rate: items per second.
        n_left: the number of items still to come.
        start_s: the seconds from the creation of the Pace to the first item.
    """

    rate: float
    n_left: int
    start_s: float

    @property
    def left_s(self) -> float:
        """The seconds until the last item at this rate."""
        return self.n_left / self.rate


class Pace:
    """The rate of a run's items, measured from the first item, so that loading models does not count."""

    def __init__(self, total: int, item: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Set the counts to zero, and read ``clock``; the measurement starts with the first item."""
        self._total = total
        self._item = item
        self._clock = clock
        self._is_final = True
        self._n_computed = self._n_written = self._n_at_start = 0
        self._created_at = clock()
        self._start: float | None = None

    def grow(self, total: int, *, is_final: bool = True) -> None:
        """Set the number of known items; ``is_final`` is False while it may grow."""
        self._total = total
        self._is_final = is_final

    def count_computed(self, items: int) -> None:
        """Add computed items. The sum is capped at the total, since ``items`` may be an upper bound."""
        self._n_computed = min(self._n_computed + items, self._total)
        self._begin()

    def count_written(self, items: int) -> None:
        """Add written items. They set the rate if they are more than the computed items."""
        self._n_written += items
        self._begin()

    def _begin(self) -> None:
        """Start the measurement unless it has started; the items counted by now do not count for the rate."""
        if self._start is None:
            self._start, self._n_at_start = self._clock(), self._n_counted

    @property
    def _n_counted(self) -> int:
        """The number of items so far: computed or written, whichever is more."""
        return max(self._n_computed, self._n_written)

    def measure_speed(self) -> Speed | None:
        """Return the speed since the first item; None until more items and some time have followed it."""
        if self._start is None:
            return None
        new = self._n_counted - self._n_at_start
        seconds = self._clock() - self._start
        return (
            Speed(new / seconds, self._total - self._n_counted, self._start - self._created_at)
            if new and seconds
            else None
        )

    def __str__(self) -> str:
        """Return the rate with the time left, "0.52 videos/s, 30 s left"; "" after the last item.

        If the total is not final, the text says instead that more items are being listed. Before there is a speed it is
        "no estimate yet".
        """
        if self._total == self._n_counted and self._is_final:
            return ""
        if (speed := self.measure_speed()) is None:
            return "no estimate yet"
        left = f"{speed.left_s:.0f} s left" if self._is_final else f"more {self._item}s are being listed"
        return f"{speed.rate:.2f} {self._item}s/s, {left}"


class Reporter:
    """A counter of a run's items that passes a ``Progress`` to ``tell`` on each change; subclasses display it."""

    def __init__(self, total: int, words: Wording, tell: Callable[[Progress], object] = lambda progress: None) -> None:
        """Set the counts to zero, and create the pace. The display starts with the ``with`` block."""
        self._tell = tell
        self.progress = Progress(item=words.item, total=total)
        self.pace = Pace(total, words.item)
        self._words = words
        self._stage_counts: Mapping[str, int] = {}
        self._load = StageLoad()

    def __enter__(self) -> Self:
        self.show()
        return self

    def __exit__(self, *error: object) -> None:
        """End the display."""

    @property
    def current(self) -> Progress:
        """The counts so far; a store that does not answer is named as the bottleneck."""
        places = OUTAGES.list_failing_stores()
        return replace(self.progress, bottleneck=f"no answer from {', '.join(places)}") if places else self.progress

    def show(self) -> None:
        """Show the current counts."""
        self._tell(self.current)

    def grow(self, total: int, *, is_final: bool = True) -> None:
        """Set the number of known items, and show the change; ``is_final`` is False while it may grow."""
        self.pace.grow(total, is_final=is_final)
        self._set_progress(replace(self.progress, total=total))

    def count_computed(self, items: int) -> None:
        """Add computed or failed items, written or not, to the pace; nothing is displayed."""
        self.pace.count_computed(items)

    def advance(self, ok: int, failed: int) -> None:
        """Add committed items, and show the counts."""
        self.pace.count_written(ok + failed)
        self._set_progress(replace(self.progress, ok=self.progress.ok + ok, failed=self.progress.failed + failed))

    def stages(self, report: WorkerReport) -> None:
        """Take the stages' results, busy shares, queues and bottleneck from a report; show changed counts."""
        self._stage_counts = report.n_results
        self._load.add(report)
        busy = self._load.busy()
        self._set_progress(
            replace(
                self.progress,
                busy=busy,
                waiting=self._load.waiting(self.progress.total),
                bottleneck=find_bottleneck(busy),
            )
        )

    def _set_progress(self, progress: Progress) -> None:
        """Replace the counts, add the results of the early stages, and show them if they differ from before."""
        now = replace(progress, ahead=self._words.ahead(self._stage_counts, progress.ok))
        if now != self.progress:
            self.progress = now
            self.show()


def make_reporter(console: Console, total: int, log_interval: float, words: Wording) -> Reporter:
    """Return a plain Reporter for a ``CallbackConsole`` console, a bar on a terminal, or otherwise a LineReporter."""
    if isinstance(console, CallbackConsole):
        return Reporter(total, words, console.tell)
    if console.is_terminal:
        return BarReporter(console, total, words)
    return LineReporter(console, total, log_interval, words)


class BarReporter(Reporter):
    """A reporter that draws a bar with the counts, failures, load, rate and time left."""

    def __init__(self, console: Console, total: int, words: Wording) -> None:
        """Create the bar, which is drawn inside the ``with`` block only."""
        super().__init__(total, words)
        texts = (words.doing, "{task.fields[more]}", "{task.fields[pace]}")  # both are formatted at each refresh
        doing, more, pace = map(rich_progress.TextColumn, texts)
        bar = rich_progress.SpinnerColumn(), doing, rich_progress.BarColumn(), rich_progress.MofNCompleteColumn()
        self._bar = rich_progress.Progress(*bar, more, pace, console=console)
        self._task = self._bar.add_task(words.doing, total=total, more=self, pace=self.pace)

    def __enter__(self) -> Self:
        self._bar.start()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self) -> None:
        """Update the bar, which redraws itself."""
        self._bar.update(self._task, completed=self.progress.done, total=self.progress.total)

    def __str__(self) -> str:
        """Return the text behind the bar: the failed items, the results of early stages, and the load."""
        progress = self.current
        return ", ".join(
            filter(None, (f"{progress.failed} failed{format_stage_counts(progress.ahead)}", progress.load))
        )


class LineReporter(Reporter):
    """A reporter that prints a line every ``interval`` seconds, also without progress, and a last line at the end.

    During the first half minute, lines come at least every EARLY_S seconds.
    """

    def __init__(self, console: Console, total: int, interval: float, words: Wording) -> None:
        """Create the thread that prints the lines; it starts with the ``with`` block."""
        super().__init__(total, words)
        self._console = console
        self._interval = min(interval, threading.TIMEOUT_MAX)  # the maximum that an event can wait
        self._end_event = threading.Event()
        self._ticker = threading.Thread(target=self._print_lines, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._ticker.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the thread, and print the last line."""
        self._end_event.set()
        self._ticker.join()
        self._print_line()

    def _print_lines(self) -> None:
        """Print a line at each interval until the run ends. Runs in a thread."""
        for _ in range(_EARLY_LINES):
            if self._end_event.wait(min(self._interval, EARLY_S)):
                return
            self._print_line()
        while not self._end_event.wait(self._interval):
            self._print_line()

    def _print_line(self) -> None:
        """Print the current counts and load, the rate and the time left."""
        pace = str(self.pace)
        self._console.print(", ".join(filter(None, (str(self.current), pace))), highlight=False, soft_wrap=True)
