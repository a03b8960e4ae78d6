"""From a running graph to the disk: every shard is committed as it comes, under the lock, while a watchdog looks on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.data
from rich.console import Console

from pipeline.errors import RunFailed
from pipeline.execution.cluster import cause
from pipeline.execution.heartbeat import Reading, start_heartbeats
from pipeline.execution.progress import Reporter, reporter
from pipeline.execution.stages import Plan, end_workers, run_graph
from pipeline.execution.watchdog import ClusterShrunk, Watchdog, patiently, still_running
from pipeline.options import RunOptions
from pipeline.storage.lock import Lock

W = TypeVar("W", bound=Sized)


@dataclass(frozen=True)
class Graph:
    """A graph that is ready to run.

    Attributes:
        build: makes the lazy dataset, given the actor that its workers tell what they do.
        commit: makes the rows of a shard visible, given its number and what the last stage gave, a ``status`` among it.
        plan: the shares of the cluster.
        total: items that must come out.
        give_up: why the run should go no further, if so, given what the workers say.
        offer: what the nodes that it may use have now.
        heard: told what the workers said in the end, however it ended.
    """

    build: Callable[[Any], ray.data.Dataset]
    commit: Callable[[int, pa.Table], object]
    plan: Plan
    total: int
    give_up: Callable[[Reading], str | None] = lambda reading: None
    offer: Callable[[], Mapping[str, float]] = ray.cluster_resources
    heard: Callable[[Reading], object] = lambda reading: None


@dataclass(frozen=True)
class Work(Generic[W]):
    """What is to be done, however often it must be planned.

    Attributes:
        items: all of it.
        planned: the graph for items, on what the cluster has now.
        left: those of the items that have no row yet.
    """

    items: W
    planned: Callable[[W], Graph]
    left: Callable[[W], W]


class Count:
    """How many items of a graph were committed, and how many of these failed."""

    def __init__(self) -> None:
        self.done = self.failed = 0


def stream(work: Work[W], lock: Lock, console: Console, options: RunOptions) -> int:
    """Do the work and commit every shard; what a lost node leaves undone is done by the others.

    Returns how many items failed. Raises RunFailed where the graph, the store or the lock fails, nothing moves for
    ``options.stall_timeout`` seconds, or rows are missing.
    """
    items, n_failed = work.items, 0
    while len(items):
        graph, count = work.planned(items), Count()
        try:
            _stream(graph, lock, console, options, count)
            return n_failed + count.failed
        except ClusterShrunk:
            items = work.left(items)
            what = f"{len(items)} {graph.plan.wording.item}s are planned anew on those that are there"
            if still_running():
                raise RunFailed(
                    "nodes were lost, and what ran on them does not end; run the same command again"
                ) from None
            end_workers()
            console.print(f"note: nodes were lost and nothing moves: {what}", highlight=False, soft_wrap=True)
        except RunFailed:
            end_workers()  # for who starts another run in this process
            raise
        n_failed += count.failed
    return n_failed


def _stream(graph: Graph, lock: Lock, console: Console, options: RunOptions, count: Count) -> None:
    """Run one graph. Raises ClusterShrunk too."""
    wording = graph.plan.wording
    heartbeats = start_heartbeats(tuple(wording.stages))
    dataset = graph.build(heartbeats)
    with reporter(console, graph.total, options.log_interval, wording) as progress:
        told = (graph.plan, graph.total, progress.stages, graph.give_up, graph.offer)
        watchdog = Watchdog(heartbeats, options.stall_timeout, *told)
        try:
            with closing(patiently(run_graph(dataset), watchdog.look, watchdog.every_s)) as shards:
                _commit_all(shards, graph, lock, watchdog, progress, count)
        finally:
            reading = watchdog.last()
            graph.heard(reading)
            for worker in reading.out_of_service:
                console.print(f"note: out of service: {worker}", highlight=False, markup=False, soft_wrap=True)


def _commit_all(
    shards: Iterable[pa.Table], graph: Graph, lock: Lock, watchdog: Watchdog, progress: Reporter, count: Count
) -> None:
    items = f"{graph.total} {graph.plan.wording.item}s"
    try:
        for number, rows in enumerate(shards):
            lock.check()
            graph.commit(number, rows)
            watchdog.moved()
            new_good = pc.sum(pc.equal(rows["status"], "ok")).as_py()
            count.done, count.failed = count.done + len(rows), count.failed + len(rows) - new_good
            progress.advance(new_good, len(rows) - new_good)
    except ray.exceptions.RayError as error:
        why = watchdog.failure() or cause(error)
        raise RunFailed(f"the run stopped after {count.done} of {items}: {why}") from error
    except OSError as error:
        raise RunFailed(f"the run stopped after {count.done} of {items}: {cause(error)}") from error
    if count.done != graph.total:
        raise RunFailed(f"{graph.total - count.done} of {items} have no row; run the same command again")
