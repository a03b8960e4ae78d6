"""From a running graph to the disk: every shard is committed as it comes, while a watchdog looks on.

What a graph has given and no shard holds yet is written before a run ends, whatever ends it but a store that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sized
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import ray
from rich.console import Console

from pipeline.errors import RunFailed
from pipeline.execution.cluster import cause
from pipeline.execution.heartbeat import Reading, start_heartbeats
from pipeline.execution.progress import Reporter, reporter
from pipeline.execution.shards import TICK_S, Flow, Shard, Shards
from pipeline.execution.stages import Plan, end_workers
from pipeline.execution.watchdog import ClusterShrunk, Watchdog, patiently, still_running
from pipeline.options import RunOptions

W = TypeVar("W", bound=Sized)
# A run that is ended waits so long for what is being written: schedulers kill half a minute after they ask.
LEAVE_S = 15.0


@dataclass(frozen=True)
class Graph:
    """A graph that is ready to run.

    Attributes:
        build: makes what is to be run, given the actor that its workers tell what they do.
        commit: makes the rows of a shard visible, given its number and the rows, a ``status`` among them. What it was
            given before, where it was interrupted, changes nothing.
        plan: the shares of the cluster.
        total: items that must come out.
        give_up: why the run should go no further, if so, given what the workers say.
        offer: what the nodes that it may use have now.
        heard: told what the workers said in the end, however it ended.
    """

    build: Callable[[Any], Flow]
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


def stream(work: Work[W], console: Console, options: RunOptions) -> int:
    """Do the work and commit every shard; what a lost node leaves undone is done by the others.

    Returns how many items failed. Raises RunFailed where the graph or the store fails, nothing moves for
    ``options.stall_timeout`` seconds, or rows are missing.
    """
    items, n_failed = work.items, 0
    while len(items):
        graph, count = work.planned(items), Count()
        try:
            _stream(graph, console, options, count)
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


def _stream(graph: Graph, console: Console, options: RunOptions, count: Count) -> None:
    """Run one graph. Raises ClusterShrunk too."""
    wording = graph.plan.wording
    console.print(f"starting workers: {graph.plan.workers}", highlight=False, soft_wrap=True)
    heartbeats = start_heartbeats(tuple(wording.stages))
    flow = graph.build(heartbeats)
    with (
        reporter(console, graph.total, options.log_interval, wording) as progress,
        Shards(flow, options.flush_seconds) as shards,
    ):
        told = (graph.plan, graph.total, progress.stages, graph.give_up, graph.offer)
        watchdog = Watchdog(heartbeats, options.stall_timeout, *told)
        committing = (graph, watchdog, progress, count)
        try:
            with closing(written(flow, shards, watchdog.look, watchdog.every_s, progress.through)) as done:
                _commit_all(done, *committing)
        except (RunFailed, ClusterShrunk, KeyboardInterrupt) as ending:
            if shards.unwritten and not isinstance(ending.__cause__, OSError):  # a store that fails will fail again
                console.print(f"stopping: what is done is written first, in {LEAVE_S:g} s at most", highlight=False)
                with suppress(RunFailed):
                    _commit_all(shards.rest(LEAVE_S), *committing)
            raise
        finally:
            reading = watchdog.last()
            graph.heard(reading)
            for worker in reading.out_of_service:
                console.print(f"note: out of service: {worker}", highlight=False, markup=False, soft_wrap=True)


def written(
    flow: Flow, shards: Shards, look: Callable[[], object], every_s: float, through: Callable[[int], object]
) -> Generator[Shard, None, None]:
    """Run a graph; yield every shard once it is on disk. ``through`` is told of items that came out."""
    meanwhile = partial(patiently, tick_s=TICK_S, room=shards.has_room, unfinished=shards.finish)
    with closing(meanwhile(flow.parts(), look, every_s)) as parts:
        for part in parts:
            if part is not None:
                shards.take(part)
                through(part.n_items)
            yield from shards.written()


def _commit_all(
    shards: Iterable[tuple[int, pa.Table]],
    graph: Graph,
    watchdog: Watchdog,
    progress: Reporter,
    count: Count,
) -> None:
    items = f"{graph.total} {graph.plan.wording.item}s"
    try:
        for number, rows in shards:
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
