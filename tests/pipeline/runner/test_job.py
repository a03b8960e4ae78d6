"""What all kinds of runs share: errors of stores, options, a restored process, and what stages are made of."""

import inspect
import io
import logging
import os
import warnings
from contextlib import ExitStack, nullcontext
from unittest.mock import create_autospec

import pytest
import ray
import ray.data
from ray.data import DataContext
from rich.console import Console

from pipeline.errors import CorruptShard, IdentityMismatch, RunFailed, UsageError
from pipeline.options import RunOptions
from pipeline.runner.job import convert_store_errors, print_options
from pipeline.runner.python_calls import isolate_run, make_console
from pipeline.runner.stages import (
    BLOCK_BYTES,
    BLOCKS_AHEAD,
    RESTARTS,
    TASK_RETRIES,
    Stage,
    add_stage,
    configure_ray_data,
)
from pipeline.storage.outages import OUTAGES, Outage


def test_an_error_of_a_store_ends_a_run():
    with pytest.raises(RunFailed, match=r"OSError: .*No space left") as caught, convert_store_errors(lambda line: None):
        raise OSError(28, "No space left on device")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    "error", [UsageError("no"), IdentityMismatch("other"), RunFailed("bad"), KeyboardInterrupt(), CorruptShard("torn")]
)
def test_a_refusal_stays_one_and_so_do_other_errors(error):
    with pytest.raises(type(error)) as caught, convert_store_errors(lambda line: None):
        raise error
    assert caught.value is error


def test_a_store_that_does_not_answer_is_announced_inside_the_context():
    lines: list[str] = []
    with convert_store_errors(lines.append):
        OUTAGES.take_reports([Outage("s3://bucket", 5.0, "503")])
    OUTAGES.take_reports([])
    (line,) = lines
    assert "s3://bucket" in line


def test_the_options_that_are_not_at_their_defaults_are_printed_without_their_secrets():
    console = Console(file=io.StringIO(), width=20)
    print_options(RunOptions(), console)
    print_options(RunOptions(device="cpu", s3_endpoint="http://secret.example", log_interval=60), console)
    first, second = console.file.getvalue().splitlines()
    assert first == "configuration: all defaults"
    assert second.startswith("configuration: ") and "device=cpu" in second and "s3_endpoint=(set)" in second
    assert "secret.example" not in second and "revision=" not in second and "max_attempts=" not in second


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


def test_actors_are_options_of_map_batches():
    """Ray takes them: the names are those of the installed version, and as many actors start as are planned."""
    rows = create_autospec(ray.data.Dataset, instance=True)
    add_stage(rows, dict, Stage(0.5, 1, 3, "why", calls=2, in_flight=16), ((),))
    options = rows.map_batches.call_args.kwargs
    accepted = set(inspect.signature(ray.data.Dataset.map_batches).parameters)
    of_the_actors = {"max_concurrency", "max_restarts", "max_task_retries"}
    assert options.keys() - of_the_actors <= accepted
    assert (options["num_cpus"], options["num_gpus"], options["batch_size"]) == (0.5, 1, 1)
    assert (options["max_restarts"], options["max_task_retries"]) == (RESTARTS, TASK_RETRIES)
    assert RESTARTS > 0 < TASK_RETRIES  # for Ray -1 is without end
    assert (options["max_concurrency"], options["compute"].max_tasks_in_flight_per_actor) == (2, 16)
    assert (options["compute"].min_size, options["compute"].max_size) == (3, 3)
    made = [options["ray_remote_args_fn"]()["name"] for _ in range(3)]
    assert len(set(made)) == 3  # by which those that outlive their graph are found


def test_ray_data_shows_nothing_and_swallows_nothing():
    context = ray.data.DataContext.get_current()
    before = dict(vars(context))
    try:
        context.max_errored_blocks = 7
        configure_ray_data()
        assert (context.enable_progress_bars, context.max_errored_blocks) == (False, 0)
        assert context.target_max_block_size == BLOCK_BYTES
        assert context._max_num_blocks_in_streaming_gen_buffer == BLOCKS_AHEAD
    finally:
        vars(context).update(before)
