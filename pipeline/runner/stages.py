"""The resources and actors of a graph's stages: what a plan reserves, how workers start and end."""

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

# More than ``Heartbeat.start`` allows per hour, since that limit ends the run with a reason. Not infinite: only Ray
# counts the processes that crash before their heartbeat starts, for example for lack of memory during imports.
RESTARTS = 40
# Ray retries a task whenever its worker crashed: twice for each item that kills it, and for half a minute while it
# still believes that the worker of a lost node is alive (7 retries were counted).
TASK_RETRIES = 30
# Retries of a task that Ray killed because its node ran low on memory.
OOM_RETRIES = 3
MAX_BLOCKS = 20_000
# The target block size. Each row becomes its own block: no row waits for the next one, and a retried task makes the
# same blocks.
BLOCK_BYTES = 1
# A task pauses once the driver has not taken this many of its blocks; the driver takes blocks ten times a second. With
# Ray's default of two, a decoder would often wait. No public setting exists.
BLOCKS_AHEAD = 4


class StageWords(NamedTuple):
    """The words with which messages describe a stage.

    Attributes:
        past_tense: what the stage did to an item, such as "decoded".
        remedy: the advice if the stage stalls.
    """

    past_tense: str
    remedy: str


@dataclass(frozen=True)
class Wording:
    """The words with which messages describe a kind of run.

    Attributes:
        doing: such as "pruning".
        item: such as "video".
        stages: the words of each stage by name, in processing order.
        to_lower: the flags to lower if resources are short.
    """

    doing: str
    item: str
    stages: Mapping[str, StageWords]
    to_lower: str

    def ahead(self, n_results: Mapping[str, int], ok: int) -> dict[str, int]:
        """Return the number of results of each stage before the last, keyed by ``past_tense``: {"decoded": 9}.

        A run with a single stage counts that stage. Each count is at least ``ok``, since reports lag. Before the first
        report (empty ``n_results``) the result is {}.
        """
        early = list(self.stages.items())[: max(1, len(self.stages) - 1)]
        return {words.past_tense: max(n_results[stage], ok) for stage, words in early} if n_results else {}


@dataclass(frozen=True)
class Stage:
    """The resources that each actor of a stage reserves.

    Attributes:
        workers: the number of actors.
        why: the reason for these numbers, for the record of the run.
        calls: the number of calls that a worker runs concurrently.
        in_flight: the maximum number of queued and running calls per worker; None for Ray Data's default.
    """

    num_cpus: float
    num_gpus: float
    workers: int
    why: str
    calls: int = 1
    in_flight: int | None = None


class Plan(ABC):
    """The resources that the stages of a run reserve. A subclass has a ``Stage`` for each stage name of ``wording``."""

    wording: ClassVar[Wording]

    @property
    @abstractmethod
    def workers(self) -> str:
        """A description of the workers that the plan starts, for the user."""

    def min_items_to_start(self, stage: str, more_expected: bool) -> int:
        """Return the number of waiting items at which an idle ``stage`` counts as stalled, by default 1.

        ``more_expected`` says that the stage before will pass on more.
        """
        return 1

    @property
    def stages(self) -> dict[str, Stage]:
        """The stages by name, in processing order."""
        return {name: getattr(self, name) for name in self.wording.stages}

    @property
    def cpus(self) -> float:
        """The number of CPUs that all workers together reserve."""
        return sum(stage.num_cpus * stage.workers for stage in self.stages.values())

    @property
    def gpus(self) -> float:
        """The number of GPUs that all workers together reserve, rounded to four decimals."""
        return round(sum(stage.num_gpus * stage.workers for stage in self.stages.values()), 4)

    @property
    def pools(self) -> dict[str, int]:
        """The number of workers of each stage, by stage name."""
        return {name: stage.workers for name, stage in self.stages.items()}


def add_stage(
    rows: ray.data.Dataset,
    kind: type,
    stage: Stage,
    arguments: Sequence[object],
    labels: Mapping[str, str] | None = None,
) -> ray.data.Dataset:
    """Return a dataset that maps ``rows`` with the actors of a stage, one row per call.

    The actors start when the dataset is executed. ``end_workers`` of the calling thread can end them.

    Args:
        kind: the class of the actors, constructed with ``arguments``; a call gets a read-only pyarrow table of one row.
        labels: a label selector of Ray that restricts the actors to matching nodes; None or {} allows all nodes.
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
        **_make_worker_options(stage, labels),
    )


def _make_worker_options(stage: Stage, labels: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the Ray options of a stage's actors: resources, restarts, task retries, and a label selector if any."""
    reserved = {"num_cpus": stage.num_cpus, "num_gpus": stage.num_gpus}
    nodes = {"label_selector": dict(labels)} if labels else {}
    return {**reserved, "max_restarts": RESTARTS, "max_task_retries": TASK_RETRIES, **nodes}


def start_actors(
    kind: type, stage: Stage, arguments: Sequence[object], labels: Mapping[str, str] | None = None
) -> list[ActorHandle]:
    """Start the actors of a stage that the driver calls itself, and return their handles without waiting for them.

    They have the options of ``add_stage``, and are spread over the nodes. ``end_workers`` of this thread ends them.
    """
    options = {**_make_worker_options(stage, labels), "scheduling_strategy": "SPREAD"}
    return [
        ray.remote(kind).options(**options, **_name_actor(threading.get_ident())).remote(*arguments)
        for _ in range(stage.workers)
    ]


_names: dict[int, list[str]] = defaultdict(list)  # thread of a run -> names of the workers that it started


def _name_actor(run: int) -> dict[str, str]:
    """Return the Ray option with a new actor name, recorded for ``end_workers`` of thread ``run``."""
    _names[run].append(f"worker-{uuid4().hex}")
    return {"name": _names[run][-1]}


def end_workers() -> None:
    """Kill the actors that runs of the calling thread have left, and forget their names; errors are ignored.

    An actor outlives its graph if it hangs, or if its node was lost and it waits for resources.
    """
    with suppress(Exception):  # a cluster that is gone has no workers either
        for name in _names[threading.get_ident()]:
            with suppress(ValueError):  # the actor has ended already
                ray.kill(ray.get_actor(name))
    _names.pop(threading.get_ident(), None)


def configure_ray_data() -> None:
    """Configure Ray Data for a run: for example, no progress bars, no tolerated errors, one block per row.

    This modifies the current ``DataContext``, and silences the logger "ray.data" below CRITICAL and a deprecation
    warning of Ray for the whole process.
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
