"""The stages of a graph: actors and the resources that they reserve."""

from __future__ import annotations

import logging
import threading
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple
from uuid import uuid4

import ray
from ray.actor import ActorHandle

# Above the limit of ``Heartbeat.start`` per hour, which ends a run with its reason. Not infinite: only Ray counts the
# processes that crash before their heartbeat starts, for lack of memory for imports say.
RESTARTS = 40
# Ray retries a task whenever its worker crashed: twice for each item that kills it, and for half a minute while it
# takes the worker of a lost node for alive (7 retries were counted).
TASK_RETRIES = 30
# Retries of a task that Ray killed because its node was short of memory.
OOM_RETRIES = 3
MAX_BLOCKS = 20_000
# Each row of a task is a block of its own: no row waits for the next one, and a retried task makes the same blocks.
BLOCK_BYTES = 1
# A task pauses after so many blocks that the driver has not taken, which it does ten times a second. With Ray's
# default of two a decoder would stand still. No public setting exists.
BLOCKS_AHEAD = 4


class StageWords(NamedTuple):
    """The words about a stage in messages.

    Attributes:
        past_tense: what the stage did to an item, "decoded".
        remedy: the advice if the stage stalls.
    """

    past_tense: str
    remedy: str


@dataclass(frozen=True)
class Wording:
    """The words about a kind of run in messages.

    Attributes:
        doing: what the run does, "pruning".
        item: the unit of work, "video".
        stages: the stages by name, in their order; items of the last stage count as done.
        to_lower: the flags to lower if the cluster has too few resources.
    """

    doing: str
    item: str
    stages: Mapping[str, StageWords]
    to_lower: str

    def ahead(self, n_results: Mapping[str, int], ok: int) -> dict[str, int]:
        """Return the results of each stage before the last, by its word: {"decoded": 9}; {} before the first report.

        Reports lag by seconds, so each count is at least ``ok``, the committed items.
        """
        early = list(self.stages.items())[: max(1, len(self.stages) - 1)]
        return {words.past_tense: max(n_results[stage], ok) for stage, words in early} if n_results else {}


@dataclass(frozen=True)
class Stage:
    """The resources that an actor of a stage reserves, and how many actors may run.

    Attributes:
        why: the reason for these numbers, for the run's record.
        calls: how many calls a worker runs at a time.
        in_flight: how many calls wait for a worker or run on it; None leaves it to Ray Data.
    """

    num_cpus: float
    num_gpus: float
    workers: int
    why: str
    calls: int = 1
    in_flight: int | None = None


class Plan(ABC):
    """The resources that a run's stages reserve, each a field of its stage's name, and the run's words for messages."""

    wording: ClassVar[Wording]

    @property
    @abstractmethod
    def workers(self) -> str:
        """A description of the workers that start."""

    def min_items_to_start(self, stage: str, more_expected: bool) -> int:
        """Return the number of waiting items at which ``stage`` starts to take them: 1, unless a plan collects items.

        ``more_expected``: the stage before will still pass items on.
        """
        return 1

    @property
    def stages(self) -> dict[str, Stage]:
        """The stages by name, in their order."""
        return {name: getattr(self, name) for name in self.wording.stages}

    @property
    def cpus(self) -> float:
        """CPUs that all workers reserve at once."""
        return sum(stage.num_cpus * stage.workers for stage in self.stages.values())

    @property
    def gpus(self) -> float:
        """GPUs that all workers reserve at once."""
        return round(sum(stage.num_gpus * stage.workers for stage in self.stages.values()), 4)

    @property
    def pools(self) -> dict[str, int]:
        """Stage -> the number of its workers."""
        return {name: stage.workers for name, stage in self.stages.items()}


def add_stage(
    rows: ray.data.Dataset,
    kind: type,
    stage: Stage,
    arguments: Sequence[object],
    labels: Mapping[str, str] | None = None,
) -> ray.data.Dataset:
    """Add a stage to the graph: its workers map ``rows``, one row a call, on nodes that match ``labels``.

    A worker is an actor of class ``kind``, constructed with ``arguments``. ``end_workers`` of the same thread ends the
    workers.
    """
    return rows.map_batches(
        kind,
        fn_constructor_args=arguments,
        batch_size=1,
        batch_format="pyarrow",
        zero_copy_batch=True,
        compute=ray.data.ActorPoolStrategy(size=stage.workers, max_tasks_in_flight_per_actor=stage.in_flight),
        max_concurrency=stage.calls,
        ray_remote_args_fn=partial(_name_actor, threading.get_ident()),
        **_worker_options(stage, labels),
    )


def _worker_options(stage: Stage, labels: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the options of Ray for every worker of a stage: what it reserves, its nodes, and its restarts."""
    reserved = {"num_cpus": stage.num_cpus, "num_gpus": stage.num_gpus}
    nodes = {"label_selector": dict(labels)} if labels else {}
    return {**reserved, "max_restarts": RESTARTS, "max_task_retries": TASK_RETRIES, **nodes}


def start_actors(
    kind: type, stage: Stage, arguments: Sequence[object], labels: Mapping[str, str] | None = None
) -> list[ActorHandle]:
    """Start the workers of a stage that the driver runs by itself, with the options that Ray Data's actors have.

    ``labels`` selects the nodes that they may start on, by Ray's labels of nodes. Returns before they run.
    """
    options = {**_worker_options(stage, labels), "scheduling_strategy": "SPREAD"}
    return [
        ray.remote(kind).options(**options, **_name_actor(threading.get_ident())).remote(*arguments)
        for _ in range(stage.workers)
    ]


_names: dict[int, list[str]] = defaultdict(list)  # thread of a run -> names of the workers that it started


def _name_actor(run: int) -> dict[str, str]:
    """Return options that name an actor of the run of thread ``run``, and note the name for ``end_workers``.

    Ray calls this for every actor, in another thread.
    """
    _names[run].append(f"worker-{uuid4().hex}")
    return {"name": _names[run][-1]}


def end_workers() -> None:
    """End the Ray workers that graphs of this thread's run have left behind. A cluster that does not answer is ignored.

    A worker outlives its graph if it hangs, or if its node was lost and it waits for resources elsewhere. It would
    block the resources of the next graph for ever.
    """
    with suppress(Exception):  # a cluster that is gone has no workers either
        for name in _names[threading.get_ident()]:
            with suppress(ValueError):  # the actor has ended
                ray.kill(ray.get_actor(name))
    _names.pop(threading.get_ident(), None)


def configure_ray_data() -> None:
    """Set Ray Data up for a run: no progress bars of its own, no tolerated errors, a block a row.

    Also silences its logger and a warning, for the whole process.
    """
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # the run itself says which error ended it
    # Ray 2.60 announces that max_restarts and names will move to a named parameter, which it does not have yet.
    warnings.filterwarnings("ignore", message="`ray_remote_args(_fn)?` is deprecated")
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.max_errored_blocks = 0
    context.target_max_block_size = BLOCK_BYTES
    context._max_num_blocks_in_streaming_gen_buffer = BLOCKS_AHEAD
