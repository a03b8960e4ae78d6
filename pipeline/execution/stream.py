"""From a running graph to the disk: every shard is committed as it comes, under the lock, while a watch looks on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing

import ray
import ray.data

from pipeline.errors import RunFailed
from pipeline.execution.cluster import cause
from pipeline.execution.progress import Reporter
from pipeline.execution.stages import run_graph
from pipeline.execution.watchdog import Watch, patiently
from pipeline.rows import Record
from pipeline.storage.lock import Lock

Commit = Callable[[int, list[Record]], object]


def stream(
    dataset: ray.data.Dataset,
    commit: Commit,
    total: int,
    item: str,
    lock: Lock,
    make_watch: Callable[[Callable[[Mapping[str, int]], None]], Watch],
    bar: Reporter,
) -> int:
    """Run the graph and ``commit`` (number, rows) of every shard; returns how many items failed.

    Args:
        total: rows that must come; each has a status.
        item: what they are called, "video".
        make_watch: makes the watch, given whom to tell how far the stages are.

    Raises RunFailed where the graph, the store or the lock fails, nothing moves, or rows are missing.
    """
    with bar as progress:
        watch = make_watch(progress.stages)
        with closing(patiently(run_graph(dataset), watch.look, watch.every_s)) as shards:
            return _commit_all(shards, commit, total, item, lock, watch, progress)


def _commit_all(
    shards: Iterable[list[Record]],
    commit: Commit,
    total: int,
    item: str,
    lock: Lock,
    watch: Watch,
    progress: Reporter,
) -> int:
    done = good = 0
    try:
        for number, rows in enumerate(shards):
            if "write_error" in rows[0]:
                raise RunFailed(f"the run stopped after {done} of {total} {item}s: {rows[0]['write_error']}")
            lock.check()
            commit(number, rows)
            watch.moved()
            new_good = sum(row["status"] == "ok" for row in rows)
            done, good = done + len(rows), good + new_good
            progress.advance(new_good, len(rows) - new_good)
    except (ray.exceptions.RayError, OSError) as error:
        raise RunFailed(f"the run stopped after {done} of {total} {item}s: {cause(error)}") from error
    if done != total:
        raise RunFailed(f"{total - done} of {total} {item}s have no row; run the same command again")
    return done - good
