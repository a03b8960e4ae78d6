"""What stages are made of: retries, and words for what they do."""

import inspect
from unittest.mock import create_autospec

import ray.data

from pipeline.execution.monitoring.heartbeats import DEATHS
from pipeline.execution.monitoring.load import stage_counts
from pipeline.execution.stages import (
    BLOCK_BYTES,
    BLOCKS_AHEAD,
    OOM_RETRIES,
    RESTARTS,
    TASK_RETRIES,
    Stage,
    StageWords,
    Wording,
    add_stage,
    configure_ray_data,
)


def test_tasks_are_tried_again_finitely():
    """Of an actor's deaths the heartbeats hear first; those that they cannot hear of end, too."""
    assert DEATHS < RESTARTS < 50
    assert 0 < OOM_RETRIES < TASK_RETRIES < 100


WORDING = Wording(
    "pruning",
    "video",
    {name: StageWords(f"{name}d", "") for name in ("decode", "encode", "write")},
    "--workers",
)


def test_what_is_ahead_of_the_last_stage_is_never_less_than_what_is_done():
    made = {"decode": 9, "encode": 5, "write": 4}
    assert WORDING.ahead(made, 4) == {"decoded": 9, "encoded": 5}
    assert stage_counts(WORDING.ahead(made, 7)) == ", 9 decoded, 7 encoded"
    assert stage_counts(WORDING.ahead({}, 7)) == ""


def test_of_a_single_stage_what_went_through_it_is_told():
    one = Wording("answering", "question", {"answer": StageWords("asked", "")}, "--workers")
    assert one.ahead({"answer": 3}, 1) == {"asked": 3}


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
