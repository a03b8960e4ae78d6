"""Progress told to a function instead of a console: a notebook's line, or what a caller makes of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from rich.console import Console

from pipeline.execution.stages import Wording, in_words


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        item: what it works on, "video" or "question".
        total: items of this run.
        ok: those that have a result.
        failed: those that have an error row.
        ahead: how many items went through each stage before the last, by what that did to them: "decoded".
        note: a line for the user; "" where only the numbers are new.
    """

    item: str = ""
    total: int = 0
    ok: int = 0
    failed: int = 0
    ahead: Mapping[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def done(self) -> int:
        return self.ok + self.failed

    def __str__(self) -> str:
        return f"{self.done}/{self.total} {self.item}s, {self.failed} failed{in_words(self.ahead)}"


class Listening(Console):
    """A console whose lines, and whose progress, go to ``tell``. What that raises ends the run."""

    def __init__(self, tell: Callable[[Progress], object]) -> None:
        super().__init__(file=sys.stderr, force_terminal=False, force_jupyter=False)
        self.tell = tell

    def print(self, *objects: Any, **keywords: Any) -> None:
        """A note to ``tell``."""
        with self.capture() as captured:
            super().print(*objects, **{**keywords, "soft_wrap": True})
        if text := captured.get().strip():
            self.tell(Progress(note=text))


class ListenedReporter:
    """Tells the numbers to the function of a listening console."""

    def __init__(self, console: Listening, total: int, words: Wording) -> None:
        self._tell = console.tell
        self._words = words
        self._at = Progress(item=words.item, total=total)
        self._made: Mapping[str, int] = {}

    def __enter__(self) -> ListenedReporter:
        self._tell(self._at)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def through(self, items: int) -> None:
        """What is not written yet is told by its stage."""

    def advance(self, ok: int, failed: int) -> None:
        self._say(replace(self._at, ok=self._at.ok + ok, failed=self._at.failed + failed))

    def stages(self, made: Mapping[str, int]) -> None:
        self._made = made
        self._say(self._at)

    def _say(self, at: Progress) -> None:
        now = replace(at, ahead=self._words.ahead(self._made, at.ok))
        if now != self._at:
            self._at = now
            self._tell(now)


class OneLine:
    """Progress in a notebook: one line, written over until the run ends; notes stay above it."""

    def __init__(self) -> None:
        self._width = 0

    def __call__(self, progress: Progress) -> None:
        if progress.note.startswith("configuration: "):
            return  # it stands in the cell above
        ends = progress.note or (progress.total and progress.done == progress.total)
        text = f"\r{progress.note or progress}".ljust(self._width)
        sys.stderr.write(text + ("\n" if ends else ""))
        sys.stderr.flush()
        self._width = 0 if ends else len(text)
