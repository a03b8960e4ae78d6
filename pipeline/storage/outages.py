"""Stores that do not answer for a while: one line when that begins and one when it ends, not one a request.

Each process notes what its own requests meet. The workers of a run report theirs to the driver, which says both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

NOTED_S = 5.0  # a store that fails for a shorter time is only busy


class Outage(NamedTuple):
    """A store that does not answer.

    Attributes:
        place: its name: s3://BUCKET.
        since: when the first request was sent that it did not answer, in seconds since 1970.
        why: what it answered instead.
    """

    place: str
    since: float
    why: str


class Outages:
    """The stores that do not answer now. Threads may share it, and a fork: it has no lock.

    Attributes:
        say: prints a line for the user; outside a run it is a warning of ``logging``.
    """

    def __init__(self) -> None:
        self.say: Callable[[str], object] = logging.getLogger(__name__).warning
        self._here: dict[str, Outage] = {}  # by place: since the last answer that this process got
        self._workers: dict[str, Outage] = {}
        self._noted: dict[str, Outage] = {}

    def clear(self) -> None:
        """Forget what was noted: of a store that nobody asks any more nobody learns that it answers."""
        for noted in (self._here, self._workers, self._noted):
            noted.clear()

    def failed(self, outage: Outage) -> None:
        """Take a request that failed in a way which another try may not."""
        self._here.setdefault(outage.place, outage)
        self._note()

    def answered(self, place: str) -> None:
        """Take a request that was answered."""
        if place in self._here:
            self._here.pop(place, None)
            self._note()

    def report(self) -> tuple[Outage, ...]:
        """Return the stores that do not answer this process, for long enough to speak of."""
        if not self._here:
            return ()
        until = time.time() - NOTED_S
        return tuple(outage for outage in [*self._here.values()] if outage.since <= until)

    def take_reports(self, outages: Collection[Outage]) -> None:
        """Take what all workers report now."""
        self._workers = {outage.place: outage for outage in sorted(outages, key=lambda outage: -outage.since)}
        self._note()

    def _note(self) -> None:
        """Say which outages are new, and which are over."""
        lasting = {**self._workers, **{outage.place: outage for outage in self.report()}}
        for place, outage in lasting.items():
            if place not in self._noted:
                self._noted[place] = outage
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(outage.since))
                self.say(f"note: the store {place} fails since {since} ({outage.why}). Requests are tried again")
        for place in self._noted.keys() - lasting.keys():
            with suppress(KeyError):  # another thread has said it
                took_s = time.time() - self._noted.pop(place).since
                self.say(f"note: the store {place} answers again, after {took_s:.0f} s")


#: Those of this process.
OUTAGES = Outages()


@contextmanager
def saying_outages(say: Callable[[str], object]) -> Iterator[None]:
    """Let ``say`` have the lines about outages that begin inside the context."""
    OUTAGES.clear()
    before, OUTAGES.say = OUTAGES.say, say
    try:
        yield
    finally:
        OUTAGES.say = before
