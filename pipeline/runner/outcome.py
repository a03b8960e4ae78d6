"""The outcome of a request: counts, failures by class, and the exit code."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.errors import Fault
from pipeline.rows import JsonObject

_OF_A_RUN = frozenset({"n_missing", "n_waiting", "n_new", "n_new_failed", "wall_s", "log"})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a request: counts of items, and failures by class.

    Attributes:
        n_ok: items (videos, questions) with a result.
        failures: error class -> items.
        examples: error class -> (id, message) of one of them.
        n_missing: items without a row.
        n_outside: failures from outside the item: a mount, a store, a bug, a GPU that others fill.
        n_waiting: items that ``--limit`` left for another run; they count nowhere else.
        n_new: items that this run processed.
        n_new_failed: those of them that failed; a failed redo leaves an earlier result in place.
        wall_s: seconds this run took; None for a summary of a cache.
        out: where the results are; "" for a summary of a cache.
        log: the file with what worker processes said before they died; "" where none did.
        failed: id -> error class of the items that failed; of videos only where a caller from Python asked for it.
    """

    n_ok: int
    failures: dict[str, int]
    examples: dict[str, tuple[str, str]]
    n_missing: int
    n_outside: int = 0
    n_waiting: int = 0
    n_new: int = 0
    n_new_failed: int = 0
    wall_s: float | None = None
    out: str = ""
    log: str = ""
    failed: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def n_failed(self) -> int:
        """The number of failed items."""
        return sum(self.failures.values())

    def exit_code(self, failure_limit: int, outside_limit: int | None = None) -> int:
        """Return 0 where every item has a row, at least one is ok, and failures keep the limits; else 1.

        An item that failed by a bug makes it 1 too. ``outside_limit`` is the limit for failures from outside the items.
        """
        bad = (
            self.n_missing
            or not self.n_ok
            or "internal" in self.failures
            or max(self.n_failed, self.n_new_failed) > failure_limit
            or (outside_limit is not None and self.n_outside > outside_limit)
        )
        return 1 if bad else 0

    def as_record(self) -> JsonObject:
        """Return the counts and examples as a JSON-able mapping."""
        own = {name: value for name, value in vars(self).items() if name not in ("out", "failed")}
        return {**own, "n_failed": self.n_failed}

    def standing(self) -> JsonObject:
        """Return the part of ``as_record`` that does not depend on which run made the results."""
        return {name: value for name, value in self.as_record().items() if name not in _OF_A_RUN}

    def pace(self, item: str) -> str:
        """Return a sentence with the number of items of this run, its time and its rate."""
        if not self.n_new:
            return f"nothing to do: every {item} has a row already"
        failed = f" ({self.n_new_failed} failed)" if self.n_new_failed else ""
        rate = self.n_new / self.wall_s if self.wall_s else 0.0
        died = f"; what workers said before they died is in {self.log}" if self.log else ""
        return f"{self.n_new} {item}s{failed} in {self.wall_s or 0.0:.1f} s, {rate:.2f} {item}s/s{died}"

    def failures_table(self, item: str, faults: Mapping[Any, Fault]) -> Table:
        """Make a table of the failures by class, with one example and the remedy of each."""
        table = Table(title=f"failed {item}s", title_justify="left", show_edge=False)
        for name in ("class", f"{item}s", "example", "remedy"):
            table.add_column(name, overflow="fold", justify="right" if name == f"{item}s" else "left")
        for name, count in self.failures.items():
            example, message = self.examples[name]
            # Ids and messages come from files and must not be read as markup.
            table.add_row(
                name, str(count), Text(f"{example}: {message}"), Text(faults[name].remedy if name in faults else "")
            )
        return table


def as_text(shown: RenderableType) -> str:
    """Render a Rich object as plain text."""
    console = Console(file=io.StringIO(), width=120, force_jupyter=False)
    with console.capture() as captured:
        console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().split("\n"))


def count_failures(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[dict[str, int], dict[str, tuple[str, str]]]:
    """Count failed rows with ``key``, error_class and error_message as ``failures`` and ``examples`` of an Outcome."""
    failures = dict(Counter(row["error_class"] for row in rows).most_common())
    return failures, {row["error_class"]: (row[key], row["error_message"]) for row in reversed(rows)}
