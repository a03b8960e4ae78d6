"""Runs from Python: options by name, several at a time, and a process that is restored at the end."""

import logging
import os
import warnings
from contextlib import ExitStack, nullcontext

import pytest
import ray
from ray.data import DataContext

from pipeline.errors import UsageError
from pipeline.runner.python_calls import isolate_run, make_console
from pipeline.runner.stages import configure_ray_data


def state() -> dict[str, object]:
    """Of this process what a run of a command changes."""
    loggers = {name: logging.getLogger(name).level for name in ("ray", "ray.data")}
    return {
        "loggers": loggers,
        "ray": ray.is_initialized(),
        "context": dict(vars(DataContext.get_current())),
        "variables": dict(os.environ),
        "warnings": list(warnings.filters),
    }


@pytest.mark.parametrize("error", [None, RuntimeError()])
def test_all_is_as_it_was_after_a_run_that_fails_too(monkeypatch, error):
    monkeypatch.setenv("RAY_HELD", "1")
    before = state()
    with pytest.raises(RuntimeError) if error else nullcontext(), isolate_run():
        configure_ray_data()
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        os.environ.update(RAY_HELD="2", RAY_NEW="3")
        assert state() != before
        if error:
            raise error
    assert state() == before


def test_runs_beside_each_other_restore_the_process_when_the_last_one_ends(monkeypatch):
    before = state()
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(isolate_run())
        second.enter_context(isolate_run())
        configure_ray_data()
        within = state()
        first.close()
        assert state() == within != before
    assert state() == before


def test_progress_is_shown_or_told_or_neither(capsys):
    told = []
    for progress in (False, told.append, True):
        make_console(progress).print("a note")
    assert [one.note for one in told] == ["a note"] and capsys.readouterr().err == "a note\n"
    with pytest.raises(UsageError, match="--progress must be True, False or a function, got 'yes'"):
        make_console("yes")
