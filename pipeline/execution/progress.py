"""Progress of a run: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from pipeline.execution.listening import ListenedReporter, Listening
from pipeline.execution.stages import Wording, in_words


class Reporter(Protocol):
    """What a run tells about its progress."""

    def __enter__(self) -> Reporter: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def through(self, items: int) -> None:
        """So many more are computed, or have failed; they may wait to be written."""

    def advance(self, ok: int, failed: int) -> None:
        """So many more are where they belong."""

    def stages(self, made: Mapping[str, int]) -> None:
        """What each stage has made by now."""


def reporter(console: Console, total: int, log_interval: float, words: Wording) -> Reporter:
    """A bar where the console is a terminal, else a line every ``log_interval`` seconds and one at the end; where it
    listens, it is told.
    """
    if isinstance(console, Listening):
        return ListenedReporter(console, total, words)
    if console.is_terminal:
        return BarReporter(console, total, words)
    return LineReporter(console, total, log_interval, words)


class Pace:
    """How fast items come through, from the first one on: until then workers start and load their models."""

    def __init__(self, total: int, item: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._item = item
        self._clock = clock
        self._through = self._done = self._at_first = 0
        self._first: float | None = None

    def through(self, items: int) -> None:
        """So many more are computed."""
        self._through = min(self._through + items, self._total)
        self._begin()

    def done(self, items: int) -> None:
        """So many more are written; where nobody says that they are computed, they are counted here."""
        self._done += items
        self._begin()

    def _begin(self) -> None:
        if self._first is None:
            self._first, self._at_first = self._clock(), self._now

    @property
    def _now(self) -> int:
        return max(self._through, self._done)

    def __str__(self) -> str:
        """Rate and time left; nothing where all are through."""
        new, seconds = self._now - self._at_first, 0.0 if self._first is None else self._clock() - self._first
        left = self._total - self._now
        if not left:
            return ""
        if not new or not seconds:
            return "no estimate yet"
        rate = new / seconds
        return f"{rate:.2f} {self._item}s/s, {left / rate:.0f} s left"


class _PaceColumn(ProgressColumn):
    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def render(self, task: Task) -> Text:
        return Text(str(self._pace))


class BarReporter:
    """Bar, count, failures, rate and time left."""

    def __init__(self, console: Console, total: int, words: Wording) -> None:
        self._words = words
        self._pace = Pace(total, words.item)
        columns = (SpinnerColumn(), TextColumn(words.doing), BarColumn(), MofNCompleteColumn())
        more = TextColumn("{task.fields[failed]} failed{task.fields[stages]}")
        self._progress = Progress(*columns, more, _PaceColumn(self._pace), console=console)
        self._task = self._progress.add_task(words.doing, total=total, failed=0, stages="")
        self._ok = self._failed = 0
        self._made: Mapping[str, int] = {}

    def __enter__(self) -> BarReporter:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def through(self, items: int) -> None:
        self._pace.through(items)

    def advance(self, ok: int, failed: int) -> None:
        self._pace.done(ok + failed)
        self._ok += ok
        self._failed += failed
        self._progress.update(self._task, advance=ok + failed)
        self._say()

    def stages(self, made: Mapping[str, int]) -> None:
        self._made = made
        self._say()

    def _say(self) -> None:
        ahead = in_words(self._words.ahead(self._made, self._ok))
        self._progress.update(self._task, failed=self._failed, stages=ahead)


class LineReporter:
    """A line every ``interval`` seconds, also while nothing moves, and one at the end."""

    def __init__(self, console: Console, total: int, interval: float, words: Wording) -> None:
        self._words = words
        self._console = console
        self._total = total
        self._interval = interval
        self._pace = Pace(total, words.item)
        self._ok = self._failed = 0
        self._made: Mapping[str, int] = {}
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)

    def __enter__(self) -> LineReporter:
        self._ticker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._ticker.join()
        self._line()

    def through(self, items: int) -> None:
        self._pace.through(items)

    def advance(self, ok: int, failed: int) -> None:
        self._pace.done(ok + failed)
        self._ok += ok
        self._failed += failed

    def stages(self, made: Mapping[str, int]) -> None:
        self._made = made

    def _tick(self) -> None:
        while not self._ended.wait(self._interval):
            self._line()

    def _line(self) -> None:
        ahead, done, pace = in_words(self._words.ahead(self._made, self._ok)), self._ok + self._failed, str(self._pace)
        text = f"{done}/{self._total} {self._words.item}s, {self._failed} failed{ahead}"
        self._console.print(f"{text}, {pace}" if pace else text, highlight=False, soft_wrap=True)
