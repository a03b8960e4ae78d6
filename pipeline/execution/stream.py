"""From a running graph to the disk: every shard is committed as it comes, under the lock, while a watchdog looks on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.data
from rich.console import Console

from pipeline.errors import RunFailed
from pipeline.execution.cluster import cause
from pipeline.execution.heartbeat import Reading, start_heartbeats
from pipeline.execution.progress import Reporter, reporter
from pipeline.execution.stages import Plan, run_graph
from pipeline.execution.watchdog import Watchdog, patiently
from pipeline.options import RunOptions
from pipeline.storage.lock import Lock


@dataclass(frozen=True)
class Graph:
    """A graph that is ready to run.

    Attributes:
        build: makes the lazy dataset, given the actor that its workers tell what they do.
        commit: makes the rows of a shard visible, given its number and what the last stage gave, a ``status`` among it.
        plan: the shares of the cluster.
        total: items that must come out.
        give_up: why the run should go no further, if so, given what the workers say.
    """

    build: Callable[[Any], ray.data.Dataset]
    commit: Callable[[int, pa.Table], object]
    plan: Plan
    total: int
    give_up: Callable[[Reading], str | None] = lambda reading: None


class Ended(NamedTuple):
    """How many items failed, and what the workers said in the end."""

    n_failed: int
    reading: Reading


def stream(graph: Graph, lock: Lock, console: Console, options: RunOptions) -> Ended:
    """Run the graph and commit every shard.

    Raises RunFailed where the graph, the store or the lock fails, nothing moves for ``options.stall_timeout`` seconds,
    or rows are missing.
    """
    wording = graph.plan.wording
    heartbeats = start_heartbeats(tuple(wording.stages))
    dataset = graph.build(heartbeats)
    with reporter(console, graph.total, options.log_interval, wording) as progress:
        told = (graph.plan, graph.total, progress.stages, graph.give_up)
        watchdog = Watchdog(heartbeats, options.stall_timeout, *told)
        with closing(patiently(run_graph(dataset), watchdog.look, watchdog.every_s)) as shards:
            n_failed = _commit_all(shards, graph, lock, watchdog, progress)
        reading = watchdog.last()
    for worker in reading.out_of_service:
        console.print(f"note: out of service: {worker}", highlight=False, markup=False, soft_wrap=True)
    return Ended(n_failed, reading)


def _commit_all(shards: Iterable[pa.Table], graph: Graph, lock: Lock, watchdog: Watchdog, progress: Reporter) -> int:
    done = good = 0
    items = f"{graph.total} {graph.plan.wording.item}s"
    try:
        for number, rows in enumerate(shards):
            lock.check()
            graph.commit(number, rows)
            watchdog.moved()
            new_good = pc.sum(pc.equal(rows["status"], "ok")).as_py()
            done, good = done + len(rows), good + new_good
            progress.advance(new_good, len(rows) - new_good)
    except ray.exceptions.RayError as error:
        why = watchdog.failure() or cause(error)
        raise RunFailed(f"the run stopped after {done} of {items}: {why}") from error
    except OSError as error:
        raise RunFailed(f"the run stopped after {done} of {items}: {cause(error)}") from error
    if done != graph.total:
        raise RunFailed(f"{graph.total - done} of {items} have no row; run the same command again")
    return done - good
