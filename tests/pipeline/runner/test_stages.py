"""What stages are made of: retries, and words for what they do."""

import inspect
from unittest.mock import create_autospec

import ray.data

from pipeline.runner.stages import (
    BLOCK_BYTES,
    BLOCKS_AHEAD,
    RESTARTS,
    TASK_RETRIES,
    Stage,
    add_stage,
    configure_ray_data,
)


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
