"""Report stores that do not answer for a while: one line when an outage begins and one when it ends.

The workers of a run report their outages to the driver, which prints all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

MIN_OUTAGE_S = 5.0  # a store that fails for a shorter time is merely busy


class Outage(NamedTuple):
    """An outage of a store.

    Attributes:
        place: the name of the store: s3://BUCKET.
        since: when the first unanswered request was sent, in seconds since 1970.
    """

    place: str
    since: float
    why: str


class Outages:
    """The stores that do not answer at present. It has no lock, so it is safe in threads and after a fork.

    Attributes:
        say: prints a line for the user; the default logs a warning.
        record: called when a line is printed, with the store's name and the time since which it has not answered; 0 for
            a store that answers again.
    """

    def __init__(self) -> None:
        self.say: Callable[[str], object] = logging.getLogger(__name__).warning
        self.record: Callable[[str, float], object] = _ignore
        self._own_outages: dict[str, Outage] = {}  # of this process, by the name of the store
        self._workers: dict[str, Outage] = {}
        self._announced: dict[str, Outage] = {}

    def clear(self) -> None:
        """Forget all outages without printing."""
        for outages in (self._own_outages, self._workers, self._announced):
            outages.clear()

    def note_failure(self, outage: Outage) -> None:
        """Record a failed request that will be retried; print a line, once, if the store has failed for 5 s."""
        self._own_outages.setdefault(outage.place, outage)
        self._print_changes()

    def note_answer(self, place: str) -> None:
        """Record that a store answered, which ends its outage; print a line if its beginning was printed."""
        if place in self._own_outages:
            self._own_outages.pop(place, None)
            self._print_changes()

    def report(self) -> tuple[Outage, ...]:
        """Return the outages of this process that have lasted at least MIN_OUTAGE_S."""
        if not self._own_outages:
            return ()
        until = time.time() - MIN_OUTAGE_S
        return tuple(outage for outage in [*self._own_outages.values()] if outage.since <= until)

    def list_failing_stores(self) -> list[str]:
        """Return the names of the stores whose outage was printed and is not over."""
        return [*self._announced]

    def take_reports(self, outages: Collection[Outage]) -> None:
        """Replace the outages of the workers by ``outages``, and print the lines about outages that are new or over.

        If a store has several reports, the earliest beginning counts.
        """
        self._workers = {outage.place: outage for outage in sorted(outages, key=lambda outage: -outage.since)}
        self._print_changes()

    def _print_changes(self) -> None:
        """Print a line and call ``record`` for each outage that is new or over.

        An outage of this process is new once it lasts MIN_OUTAGE_S; those of workers have passed this limit.
        """
        lasting = {**self._workers, **{outage.place: outage for outage in self.report()}}
        for place, outage in lasting.items():
            if place not in self._announced:
                self._announced[place] = outage
                self.record(place, outage.since)
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(outage.since))
                self.say(f"note: the store {place} has failed since {since} ({outage.why}). Requests are retried")
        for place in self._announced.keys() - lasting.keys():
            with suppress(KeyError):  # another thread has printed the line
                took_s = time.time() - self._announced.pop(place).since
                self.record(place, 0.0)
                self.say(f"note: the store {place} answers again, after {took_s:.0f} s")


def _ignore(place: str, since: float) -> None:
    """Do nothing; the default of ``Outages.record``."""


#: The outages of this process.
OUTAGES = Outages()


@contextmanager
def announce_outages(say: Callable[[str], object]) -> Iterator[None]:
    """Print the lines about outages with ``say`` inside the context, and forget outages that began before it.

    At the end, the previous ``say`` is restored and ``record`` is reset.
    """
    OUTAGES.clear()
    previous_say, OUTAGES.say = OUTAGES.say, say
    try:
        yield
    finally:
        OUTAGES.say = previous_say
        OUTAGES.record = _ignore
