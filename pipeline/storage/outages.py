"""Report stores that do not answer for a while: one line when an outage begins and one when it ends.

The workers of a run report their outages to the driver, which prints all.
"""

from __future__ import annotations

import logging
import threading
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

    Several runs may go on in threads of one process. Each has its own speaker and recorder, and all of them are told.

    Attributes:
        speakers: the functions that print a line for the user; if there are none, a warning is logged.
        recorders: the functions that are called when a line is printed, with the store's name and the time since which
            it has not answered; 0 for a store that answers again.
    """

    def __init__(self) -> None:
        self.speakers: list[Callable[[str], object]] = []
        self.recorders: list[Callable[[str, float], object]] = []
        self._own_outages: dict[str, Outage] = {}  # of this process, by the name of the store
        self._workers: dict[int, dict[str, Outage]] = {}  # the same of the workers, by the thread of their run
        self._announced: dict[str, Outage] = {}

    def say(self, line: str) -> None:
        """Print a line for the user with all speakers, or log it as a warning if there are none."""
        for say in [*self.speakers] or [logging.getLogger(__name__).warning]:
            say(line)

    def clear(self) -> None:
        """Forget all outages without printing."""
        self._own_outages.clear()
        self._workers.clear()
        self._announced.clear()

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
        """Replace the outages of the workers of this thread's run; print the lines about outages that are new or over.

        If a store has several reports, the earliest beginning counts.
        """
        latest_first = sorted(outages, key=lambda outage: -outage.since)
        self._workers[threading.get_ident()] = {outage.place: outage for outage in latest_first}
        self._print_changes()

    def forget_reports(self) -> None:
        """Forget the outages that the workers of this thread's run reported, without printing."""
        self._workers.pop(threading.get_ident(), None)
        for place in self._announced.keys() - self._find_lasting().keys():
            self._announced.pop(place, None)
            self._record(place, 0.0)

    def _find_lasting(self) -> dict[str, Outage]:
        """Return the outages of all workers, which have lasted MIN_OUTAGE_S, and those of this process that have."""
        found: dict[str, Outage] = {}
        for outages in [*self._workers.values()]:
            found |= outages
        return found | {outage.place: outage for outage in self.report()}

    def _print_changes(self) -> None:
        """Print a line and call the recorders for each outage that is new or over."""
        lasting = self._find_lasting()
        for place, outage in lasting.items():
            if place not in self._announced:
                self._announced[place] = outage
                self._record(place, outage.since)
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(outage.since))
                self.say(f"note: the store {place} has failed since {since} ({outage.why}). Requests are retried")
        for place in self._announced.keys() - lasting.keys():
            with suppress(KeyError):  # another thread has printed the line
                took_s = time.time() - self._announced.pop(place).since
                self._record(place, 0.0)
                self.say(f"note: the store {place} answers again, after {took_s:.0f} s")

    def _record(self, place: str, since: float) -> None:
        """Call all recorders."""
        for record in [*self.recorders]:
            record(place, since)


#: The outages of this process.
OUTAGES = Outages()


@contextmanager
def announce_outages(say: Callable[[str], object]) -> Iterator[None]:
    """Print the lines about outages with ``say`` inside the context, as well as in the contexts of other threads.

    Outages that began before it are forgotten, unless another such context is open. At the end, the outages that the
    workers of this thread's run reported are forgotten.
    """
    if not OUTAGES.speakers:
        OUTAGES.clear()
    OUTAGES.speakers.append(say)
    try:
        yield
    finally:
        OUTAGES.speakers.remove(say)
        OUTAGES.forget_reports()
