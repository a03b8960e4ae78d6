"""The result of a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.errors import UsageError, make_printable

State = Literal["ok", "slow", "wrong", "unknown"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        name: what was checked, followed by the host if there are several.
        state: "wrong" if a run would fail or compute something different; "unknown" if it was not checked.
        says: what was observed, with units.
        remedy: what to do; "" if nothing.
    """

    name: str
    state: State
    says: str
    remedy: str = ""

    @classmethod
    def warn_if_slow(cls, slow: object, name: str, says: str, remedy: str) -> Finding:
        """Return a "slow" finding with the remedy if ``slow`` is true, otherwise an "ok" finding."""
        return cls(name, "slow", says, remedy) if slow else cls(name, "ok", says)

    def with_host(self, host: str) -> Finding:
        """Return a copy of this finding with the host after its name."""
        return replace(self, name=f"{self.name} ({host})")


def run_guarded(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check, and a "wrong" finding last if it raises an exception."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 - whatever breaks a check is what the user wants to know
        says = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
        yield Finding(name, "wrong", make_printable(says), "see the message")
