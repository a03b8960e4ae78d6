"""The steps of every run: check, claim, match, resume, stream, summarise.

Each kind of run implements the steps (``pipeline.prune.run``, ``pipeline.generate.run``). This module has their order,
the claim and the record of the run.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sized
from dataclasses import replace
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from rich.console import Console

from pipeline.errors import RunFailed
from pipeline.execution.claim import Claim
from pipeline.execution.cluster import check_device, root_cause
from pipeline.execution.monitoring.monitor import Monitor
from pipeline.execution.outcome import Outcome
from pipeline.execution.run_record import RunFile
from pipeline.options import RunOptions
from pipeline.storage.stores import Store


class Request(Protocol):
    """A checked request of any kind of run; nothing was started yet."""

    @property
    def run_id(self) -> str: ...

    @property
    def store(self) -> Store:
        """The store of the results."""


class Streamed(NamedTuple):
    """The result of streaming: the record of the run, and how many items failed."""

    run_file: RunFile
    n_failed: int


O = TypeVar("O", bound=RunOptions)  # noqa: E741 - beside R, T and S
R = TypeVar("R", bound=Request)
T = TypeVar("T", bound=Sized)
S = TypeVar("S", bound=Outcome)


class Run(ABC, Generic[O, R, T, S]):
    """One run on the driver, with options O, a checked request R, items to do T, and a summary S."""

    def __init__(self, options: O, console: Console) -> None:
        self.options = options
        self.console = console
        self.monitor: Monitor  # of the run that is carried out

    @abstractmethod
    def prepare(self) -> R:
        """Check the options, and return the request. Raise UsageError; nothing is started."""

    @abstractmethod
    def match(self, request: R) -> R:
        """Return the request completed with the settings of existing results.

        Raise IdentityMismatch where they do not go with the request.
        """

    @abstractmethod
    def remaining(self, request: R) -> T:
        """Return the items that are left to do. Raise UsageError if the store fails or an item has changed."""

    @abstractmethod
    def stream(self, request: R, todo: T) -> Streamed:
        """Run the remaining items through the graph and commit their rows, under a record of the run.

        Raise RunFailed.
        """

    @abstractmethod
    def summarise(self, request: R, todo: T, n_failed: int, wall_s: float) -> S:
        """Count the committed rows and return the summary."""

    def tidy(self, request: R, todo: T) -> None:
        """Merge the files that the run wrote, once all is committed and counted."""

    def say(self, line: str) -> None:
        """Print a line for the user."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def carry_out(self) -> S:
        """Bring the store up to date with the request.

        Raises UsageError (nothing was started) or RunFailed (what was committed stays; a rerun goes on).
        """
        try:
            return self._carry_out(self.prepare())
        except OSError as error:  # a store failed; a fault of a single item becomes its error row
            raise RunFailed(root_cause(error)) from error

    def _carry_out(self, request: R) -> S:
        """Register the run at the store, find what is left, stream it, and return the summary."""
        values = self.options.chosen().items()
        shown = " ".join(f"{name}={value}" for name, value in values) or "all defaults"
        self.console.print(f"configuration: {shown}", style="dim", markup=False, highlight=False, soft_wrap=True)
        request.store.make()
        notify = partial(self.console.print, highlight=False, markup=False)
        with Claim(request.store, request.run_id, notify, join=self.options.join) as claim:
            request = self.match(request)  # once more: another run may have written before the claim was made
            started = time.monotonic()
            todo = self.remaining(request)
            if not len(todo):
                check_device(self.options, self.say)
            with Monitor(request.store, request.run_id, claim.tell) as self.monitor:
                streamed = self.stream(request, todo) if len(todo) else None
            n_failed = streamed.n_failed if streamed else 0
            wall_s = time.monotonic() - started
            summary = replace(self.summarise(request, todo, n_failed, wall_s), log=self.monitor.log)
            if streamed:
                streamed.run_file.save(summary=summary.as_record())
                self.tidy(request, todo)
            return summary
