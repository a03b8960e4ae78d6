"""Running a graph: every shard is committed as it is written, while a watchdog looks for progress.

However a run ends, rows already encoded are written first, unless the store itself fails.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sized
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.actor import ActorHandle
from rich.console import Console

from pipeline.errors import RunFailed
from pipeline.execution.cluster import root_cause
from pipeline.execution.monitoring.heartbeats import heartbeats_of
from pipeline.execution.monitoring.load import Progress
from pipeline.execution.monitoring.report import WorkerReport
from pipeline.execution.progress import Reporter, reporter
from pipeline.execution.shards import TICK_S, RunGraph, Shard, Shards
from pipeline.execution.stages import Plan, end_workers
from pipeline.execution.watchdog import ClusterChanged, Growth, Watchdog, iterate_watched, still_running
from pipeline.options import RunOptions

W = TypeVar("W", bound=Sized)
# How long an interrupted run waits for shards that are being written: schedulers send SIGKILL after half a minute.
LEAVE_S = 15.0


@dataclass(frozen=True)
class PlannedGraph:
    """A graph for some items, planned for the cluster as it is now.

    Attributes:
        build: builds the graph, given the actor to which its workers report.
        commit: makes the rows of a shard visible, given its number and the rows, which have a ``status``. After an
            interrupt it may get the same shard again, which must change nothing.
        plan: the shares of the cluster.
        total: returns how many items must come out, as far as that is known now.
        give_up: returns why the run should stop, if so, given the workers' report.
        available_resources: returns the resources of the nodes that the graph may use now.
        on_look: gets the workers' report and the run's numbers at every look, and at the end.
        on_end: gets the workers' last report, however the run ended.
        again: plans so many items on the nodes that are there now; None where that cannot be done now.
    """

    build: Callable[[ActorHandle], RunGraph]
    commit: Callable[[int, pa.Table], object]
    plan: Plan
    total: Callable[[], int]
    give_up: Callable[[WorkerReport], str | None] = lambda reading: None
    available_resources: Callable[[], Mapping[str, float]] = ray.cluster_resources
    on_look: Callable[[WorkerReport, Progress], object] = lambda reading, at: None
    on_end: Callable[[WorkerReport], object] = lambda reading: None
    again: Callable[[int], Plan | None] = lambda left: None


def stream(
    items: W,
    plan: Callable[[W], PlannedGraph],
    unfinished: Callable[[W], W],
    console: Console,
    options: RunOptions,
) -> int:
    """Run all items through graphs and commit every shard; what is left is planned anew where the nodes change.

    Args:
        plan: plans the graph for items, on what the cluster has now.
        unfinished: selects the items that have no row yet.

    Returns how many items failed. Raises RunFailed where the graph or the store fails, nothing moves for
    ``options.stall_timeout`` seconds, or rows are missing.
    """
    n_failed = 0
    while len(items):
        graph = plan(items)
        progress = reporter(console, graph.total(), options.log_interval, graph.plan.wording)
        try:
            with heartbeats_of(tuple(graph.plan.wording.stages)) as heartbeats:
                _stream(graph, heartbeats, progress, console, options)
            return n_failed + progress.at.failed
        except ClusterChanged as why:
            items = unfinished(items)
            what = f"{len(items)} {graph.plan.wording.item}s are planned anew on those that are there"
            if still_running():
                raise RunFailed(f"{why}, but what ran before does not end; run the same command again") from None
            end_workers()
            console.print(f"note: {why}: {what}", highlight=False, soft_wrap=True)
        except RunFailed:
            end_workers()  # they would keep room from the next run of this process
            raise
        n_failed += progress.at.failed
    return n_failed


def _stream(
    graph: PlannedGraph, heartbeats: ActorHandle, progress: Reporter, console: Console, options: RunOptions
) -> None:
    """Run one graph to its end, committing every shard. Raises RunFailed, and ClusterChanged."""
    console.print(f"starting workers: {graph.plan.workers}", highlight=False, soft_wrap=True)
    flow = graph.build(heartbeats)

    def tell(report: WorkerReport) -> None:
        progress.stages(report)
        graph.on_look(report, progress.at)

    with progress, Shards(flow, options.flush_seconds) as shards:
        told = (graph.plan, graph.total(), tell, graph.give_up, graph.available_resources)
        watchdog = Watchdog(heartbeats, options.stall_timeout, *told)
        growth = Growth(graph.plan, graph.again, options.max_gpus)

        def look() -> None:
            if (total := graph.total()) != watchdog.total:
                watchdog.grow(total)
            watchdog.look()
            growth.look(progress.at, progress.pace.speed())

        try:
            with closing(written_shards(flow, shards, look, watchdog.every_s, progress.through)) as done:
                commit_all(done, graph, watchdog, progress)
        except (RunFailed, ClusterChanged, KeyboardInterrupt) as ending:
            if shards.unwritten and not isinstance(ending.__cause__, OSError):  # a store that failed would fail again
                console.print(f"stopping: what is done is written first, in {LEAVE_S:g} s at most", highlight=False)
                with suppress(RunFailed):
                    commit_all(shards.rest(LEAVE_S), graph, watchdog, progress)
            raise
        finally:
            reading = watchdog.last()
            graph.on_look(reading, progress.at)
            graph.on_end(reading)
            for worker in reading.out_of_service:
                console.print(f"note: out of service: {worker}", highlight=False, markup=False, soft_wrap=True)


def written_shards(
    flow: RunGraph, shards: Shards, look: Callable[[], object], every_s: float, through: Callable[[int], object]
) -> Generator[Shard, None, None]:
    """Run a graph, and yield every shard once it is written; ``through`` gets the number of items that came out."""
    meanwhile = partial(iterate_watched, tick_s=TICK_S, room=shards.has_room, unfinished=shards.finish)
    with closing(meanwhile(flow.batches(), look, every_s)) as batches:
        for batch in batches:
            if batch is not None:
                shards.take(batch)
                through(batch.n_items)
            yield from shards.written()


def commit_all(
    shards: Iterable[tuple[int, pa.Table]], graph: PlannedGraph, watchdog: Watchdog, progress: Reporter
) -> None:
    """Commit shards one by one and count them as progress. Raises RunFailed, also if rows are missing at the end."""
    try:
        for number, rows in shards:
            graph.commit(number, rows)
            watchdog.moved()
            progress.grow(graph.total())
            new_good = pc.sum(pc.equal(rows["status"], "ok")).as_py()
            progress.advance(new_good, len(rows) - new_good)
    except (ray.exceptions.RayError, OSError) as error:
        why = (isinstance(error, ray.exceptions.RayError) and watchdog.failure()) or root_cause(error)
        items = f"{graph.total()} {graph.plan.wording.item}s"
        raise RunFailed(f"the run stopped after {progress.at.done} of {items}: {why}") from error
    if progress.at.done != (total := graph.total()):
        missing = f"{total - progress.at.done} of {total} {graph.plan.wording.item}s"
        raise RunFailed(f"{missing} have no row; run the same command again")
