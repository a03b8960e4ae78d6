"""Support for runs that are called from Python: their progress, their errors, and restoring the process."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import ray
from rich.console import Console

from pipeline.console import CleanConsole
from pipeline.errors import TooManyFailed
from pipeline.options import RunOptions, check
from pipeline.runner.progress import CallbackConsole, NotebookLine, Progress
from pipeline.runner.run_record import Outcome
from pipeline.runner.stages import end_workers

S = TypeVar("S", bound=Outcome)
#: The values of ``progress=``: show it or not, or a function to call.
ProgressOption = bool | Callable[[Progress], object]
_counting = threading.Lock()
_n_runs = 0  # runs that have not ended
_restore_stack = ExitStack()  # restores the process when the last run ends
# Ray reads the token once in a process, so the next cluster that this process starts must have the same one.
_TOKEN = "RAY_AUTH_TOKEN"


def make_console(progress: ProgressOption) -> Console:
    """Return the console that displays a run as ``progress`` says.

    Args:
        progress: False for no display; True for a bar on a terminal, one line in a notebook, or lines in a log on
            stderr; a function gets each ``Progress``.

    Raises:
        UsageError: ``progress`` is none of these.
    """
    if progress is False:
        return Console(quiet=True)
    if progress is not True:
        check(callable(progress), "progress", "True, False or a function", progress)
        return CallbackConsole(progress)
    return CallbackConsole(NotebookLine()) if Console().is_jupyter else CleanConsole(stderr=True)


def check_outcome(summary: S, config: RunOptions, n_items: int, infrastructure_limit: int | None = None) -> S:
    """Return ``summary`` if a command with this outcome would exit with code 0.

    Args:
        n_items: the number of items of the run, for a ``max_failed`` that is a share.
        infrastructure_limit: the maximum number of infrastructure errors; None for no limit.

    Raises:
        TooManyFailed: the exit code would not be 0; the error carries the summary.
    """
    if not summary.exit_code(config.compute_failure_limit(n_items), infrastructure_limit):
        return summary
    troubles = "; ".join(summary.iter_troubles(config.item, n_items))
    raise TooManyFailed(
        f"{troubles}; the results are in {summary.out}, and .summary of this error has all counts and ids", summary
    )


@contextmanager
def isolate_run() -> Iterator[None]:
    """Run a job in this process inside the context; kill its workers, and restore the process after the last such run.

    A Ray that the runs have started is then shut down; one that ran before is kept.
    """
    global _n_runs  # noqa: PLW0603 - the process has one state
    with _counting:
        if not _n_runs:
            _restore_stack.enter_context(_restore_process())
        _n_runs += 1
    try:
        yield
    finally:
        end_workers()
        with _counting:
            _n_runs -= 1
            if not _n_runs:
                _restore_stack.close()


@contextmanager
def _restore_process() -> Iterator[None]:
    """Restore the process after the context: shut down a Ray that runs have started, and undo their settings.

    These are Ray Data's context, the levels of Ray's loggers, Ray's environment variables except the cluster's token,
    and the warning filters.
    """
    context = vars(ray.data.DataContext.get_current())
    settings = dict(context)
    loggers = [logging.getLogger(name) for name in ("ray", "ray.data")]
    levels = [logger.level for logger in loggers]
    variables = _list_ray_variables()
    is_joined = ray.is_initialized()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        if not is_joined and ray.is_initialized():
            ray.shutdown()
        context.clear()
        context.update(settings)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for name in _list_ray_variables().keys() - {_TOKEN}:
            del os.environ[name]
        os.environ.update(variables)


def _list_ray_variables() -> dict[str, str]:
    """Return the environment variables whose names start with "RAY_"."""
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
