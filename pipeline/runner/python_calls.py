"""Runs that are called from Python: their options, their progress, and the process that they restore."""

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
from pipeline.runner.progress import Listening, OneLine, Progress
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
    """Return the console of a run: a bar on a terminal, a line in a notebook, lines in a log, or a function's.

    ``progress=False`` shows nothing. Raises UsageError for any other value that is no function.
    """
    if progress is False:
        return Console(quiet=True)
    if progress is not True:
        check(callable(progress), "progress", "True, False or a function", progress)
        return Listening(progress)
    return Listening(OneLine()) if Console().is_jupyter else CleanConsole(stderr=True)


def check_outcome(summary: S, config: RunOptions, n_items: int, infrastructure_limit: int | None = None) -> S:
    """Return the summary of a run called from Python if the command's exit code would be 0.

    Otherwise raises TooManyFailed, which carries the summary.

    Args:
        n_items: the items of the run, of which ``max_failed`` may be a share.
        infrastructure_limit: the largest number of infrastructure errors; None for no limit of their own.
    """
    if not summary.exit_code(config.failure_limit(n_items), infrastructure_limit):
        return summary
    troubles = "; ".join(summary.iter_troubles(config.item, n_items))
    raise TooManyFailed(
        f"{troubles}; the results are in {summary.out}, and .summary of this error has all counts and ids", summary
    )


@contextmanager
def run_here() -> Iterator[None]:
    """Run a job inside this process, whose state is restored once the last of its runs has ended.

    A Ray that the runs started is shut down then. A Ray that ran before is kept, without the workers of this run.
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
    """Restore the process after the block: shut down a Ray that runs started, and undo their settings.

    Settings are Ray Data's context, the levels of Ray's loggers, Ray's environment variables and warning filters. The
    token of a cluster stays.
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
    """Return Ray's environment variables."""
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
