"""Progress of a run: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from pipeline.execution.stages import Wording


class Reporter(Protocol):
    """What a run tells about its progress."""

    def __enter__(self) -> Reporter: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def advance(self, ok: int, failed: int) -> None: ...

    def stages(self, left: Mapping[str, int]) -> None: ...


def reporter(console: Console, total: int, log_interval: float, words: Wording) -> Reporter:
    """A bar where the console is a terminal, else a line every ``log_interval`` seconds and one at the end."""
    if console.is_terminal:
        return BarReporter(console, total, words)
    return LineReporter(console, total, log_interval, words)


class _Rate(ProgressColumn):
    def __init__(self, item: str) -> None:
        super().__init__()
        self._item = item

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.2f} {self._item}s/s")


class BarReporter:
    """Bar, count, rate, failures and time left."""

    def __init__(self, console: Console, total: int, words: Wording) -> None:
        self._words = words
        columns = (SpinnerColumn(), TextColumn(words.doing), BarColumn(), MofNCompleteColumn(), _Rate(words.item))
        more = TextColumn("{task.fields[failed]} failed{task.fields[stages]}")
        self._progress = Progress(*columns, more, TimeRemainingColumn(), console=console)
        self._task = self._progress.add_task(words.doing, total=total, failed=0, stages="")
        self._failed = 0

    def __enter__(self) -> BarReporter:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def advance(self, ok: int, failed: int) -> None:
        self._failed += failed
        self._progress.update(self._task, advance=ok + failed, failed=self._failed)

    def stages(self, left: Mapping[str, int]) -> None:
        self._progress.update(self._task, stages=self._words.ahead(left, int(self._progress.tasks[0].completed)))


class LineReporter:
    """A line every ``interval`` seconds, also while nothing moves, and one at the end."""

    def __init__(self, console: Console, total: int, interval: float, words: Wording) -> None:
        self._words = words
        self._console = console
        self._total = total
        self._interval = interval
        self._started = time.monotonic()
        self._ok = self._failed = 0
        self._left: Mapping[str, int] = {}
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)

    def __enter__(self) -> LineReporter:
        self._ticker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._ticker.join()
        self._line()

    def advance(self, ok: int, failed: int) -> None:
        self._ok += ok
        self._failed += failed

    def stages(self, left: Mapping[str, int]) -> None:
        self._left = left

    def _tick(self) -> None:
        while not self._ended.wait(self._interval):
            self._line()

    def _line(self) -> None:
        done = self._ok + self._failed
        rate = done / max(time.monotonic() - self._started, 1e-9)
        left = f"{(self._total - done) / rate:.0f} s left" if done else "no estimate yet"
        ahead, items = self._words.ahead(self._left, done), f"{self._words.item}s"
        text = f"{done}/{self._total} {items}, {self._failed} failed{ahead}, {rate:.2f} {items}/s, {left}"
        self._console.print(text, highlight=False, soft_wrap=True)
