"""What stages of a graph are made of: actors with what they reserve, and how a graph of them is run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
import ray.data

from pipeline.rows import Record, records

# A worker that dies is started again this often: Ray's default is for ever, and a video that kills its worker would
# then stall the run.
RESTARTS = 3
# A task is tried again while its worker has restarts left, and while Ray believes in a worker whose node is gone: for
# half a minute, in tries further and further apart (7 were counted).
TASK_RETRIES = 30
MAX_BLOCKS = 20_000
# Large items (decoded frames of a video: 14 MB for 32 of them) go on one by one, however many one task makes.
BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Stage:
    """What one task or actor of a stage reserves, and how many of them may run."""

    num_cpus: float
    num_gpus: float
    workers: int
    why: str


def actors(stage: Stage, batch_size: int) -> Mapping[str, Any]:
    """Options of ``map_batches`` for a stage whose calls get ``batch_size`` rows."""
    return {
        "batch_size": batch_size,
        "batch_format": "pyarrow",
        "zero_copy_batch": True,
        "compute": ray.data.ActorPoolStrategy(size=stage.workers),
        "num_cpus": stage.num_cpus,
        "num_gpus": stage.num_gpus,
        "max_restarts": RESTARTS,
        "max_task_retries": TASK_RETRIES,
    }


def run_graph(dataset: ray.data.Dataset) -> Iterator[list[Record]]:
    """Run the graph; yield the records of each shard as soon as its tokens are on disk."""
    # Not iter_batches: its threads wait in a way that nothing can interrupt, and it fetches ahead.
    for bundle in dataset.iter_internal_ref_bundles():
        for block in ray.get(bundle.block_refs):
            yield records(block)


def configure_ray_data() -> None:
    """Our progress instead of Ray's, and no error that Ray may swallow."""
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # an error ends the run, which says why
    # Ray 2.60 announces that max_restarts will move to a named parameter, which it does not have yet.
    warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated", category=DeprecationWarning)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.max_errored_blocks = 0
    context.target_max_block_size = BLOCK_BYTES
