"""What a check found, and the boundary that turns a check which fails itself into a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.errors import UsageError, printable

State = Literal["ok", "slow", "wrong", "unknown"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's page.

    Attributes:
        name: what was looked at, the node or the device in it where there are several.
        state: "wrong" where a run would fail or compute something else; "unknown" where nobody could look.
        says: what was seen, with units.
        remedy: what to do; "" where nothing is to be done.
    """

    name: str
    state: State
    says: str
    remedy: str = ""

    @classmethod
    def slow_if(cls, slow: object, name: str, says: str, remedy: str) -> Finding:
        """Return a finding that is "slow" and has a remedy if ``slow`` is true, else "ok" without one."""
        return cls(name, "slow", says, remedy) if slow else cls(name, "ok", says)

    def on(self, host: str) -> Finding:
        """Return this finding with the host's name behind its own."""
        return replace(self, name=f"{self.name} ({host})")


def run_guarded(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check; if it raises, yield the error as a "wrong" finding.

    So later checks still run.
    """
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 - whatever breaks a check is what the user wants to know
        says = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
        yield Finding(name, "wrong", printable(says), "see the message")
