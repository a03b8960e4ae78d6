"""Several videos, read shard by shard: neighbours together, and from a store that is far away the next ones ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from pipeline.cache.token_shard import Rows

F = TypeVar("F")
R = TypeVar("R")
T = TypeVar("T")
V = TypeVar("V")
_RUN_BYTES = 2**26  # of tokens that one request fetches, unless one video has more


def read_runs(
    wanted: Sequence[Rows], fetch: Callable[[Sequence[Rows]], F], read: Callable[[Rows, F], V], *, ahead: int
) -> list[V]:
    """Read videos by runs of neighbours: return what ``read`` gives for each of ``wanted``, in their order.

    Args:
        fetch: what is needed to read some neighbours; called by threads where ``ahead`` is not 0.
        read: called by this thread alone.
        ahead: runs of neighbours that are fetched, or wait to be read, at once.
    """
    found: dict[int, V] = {}
    runs = runs_of(wanted)
    neighbours = [[wanted[i] for i in run] for run in runs]
    all_fetched = map(fetch, neighbours) if ahead == 0 or len(runs) < 2 else in_order(fetch, neighbours, ahead, ahead)
    for run, fetched in zip(runs, all_fetched, strict=True):
        for i in run:
            found[i] = read(wanted[i], fetched)
    return [found[i] for i in range(len(wanted))]


def runs_of(wanted: Sequence[Rows], limit: int = _RUN_BYTES) -> list[list[int]]:
    """Group the places in ``wanted`` by shard, in the order of row groups; neighbours without a gap are one run."""
    runs: list[list[int]] = []
    size = 0
    for i in sorted(range(len(wanted)), key=lambda i: _position(wanted[i])):
        n_bytes = 2 * wanted[i].keep * int(wanted[i].row["hidden_size"])
        if runs and size + n_bytes <= limit and _touch(wanted[runs[-1][-1]], wanted[i]):
            runs[-1].append(i)
            size += n_bytes
        else:
            runs.append([i])
            size = n_bytes
    return runs


def _position(rows: Rows) -> tuple[str, int]:
    """Return where a video's rows are: token shard, first row group."""
    return rows.row["token_shard"], rows.row["first_row_group"]


def _touch(one: Rows, other: Rows) -> bool:
    """Return whether one video's bytes end where the other's begin, so that one request can fetch them together."""
    shard, first = _position(one)
    whole = one.keep == one.row["n_tokens"]
    return whole and (shard, first + len(one.row["row_counts"])) == _position(other)


def in_order(work: Callable[[T], R], items: Iterable[T], threads: int, ahead: int) -> Iterator[R]:
    """Yield ``work`` of each item in order, done by threads; behind what is yielded at most ``ahead`` are begun."""
    pool = ThreadPoolExecutor(threads)
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
