"""How the tokens of videos are asked for, how many of a video's rows that is, and several videos run by run.

Neighbours in a shard are one run, read together; from a store that is far away the next runs are fetched ahead.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Literal, NamedTuple, TypeVar, cast

from gstep.types import budget_for
from pipeline.cache.codecs import BFLOAT16, TokenCodec
from pipeline.cache.schema import token_schema
from pipeline.cache.token_shard import Rows
from pipeline.errors import RatioNotCached
from pipeline.rows import JSON_COLUMNS, VideoRow

F = TypeVar("F")
R = TypeVar("R")
T = TypeVar("T")
V = TypeVar("V")
_RUN_BYTES = 2**26  # of tokens that one request fetches, unless one video has more
TokenOrder = Literal["index", "selection"]


class Reading(NamedTuple):
    """The options by which the tokens of videos are read.

    Attributes:
        retention_ratio: of the nested selection; None for all that is stored.
        order: of the rows.
        evidence: name in the result -> column.
        columns: what is read of the rows.
        near: columns that may be fetched with those.
        verify: whether a video's checksum is compared.
    """

    retention_ratio: float | None
    order: TokenOrder
    evidence: Mapping[str, str]
    columns: tuple[str, ...]
    near: tuple[str, ...]
    verify: bool


@cache
def token_columns(deepstack_levels: int, codec: TokenCodec = BFLOAT16) -> tuple[str, ...]:
    """Return the names of the columns that every token shard has."""
    return tuple(token_schema(1, deepstack_levels, codec=codec).names)


def rows_wanted(row: VideoRow, retention_ratio: float | None) -> int:
    """Return how many of a video's stored tokens make up ``retention_ratio``. ``row`` is its row of the videos table.

    Raises RatioNotCached, and ValueError for no ratio at all.
    """
    stored = row["retention_ratio"]
    if retention_ratio is None:
        return int(row["n_tokens"])
    budget = budget_for(retention_ratio, row["n_total"])
    if retention_ratio > stored + 1e-9:
        raise RatioNotCached(f"{row['video_id']!r} is stored at retention ratio {stored}; {retention_ratio} is larger")
    if abs(retention_ratio - stored) <= 1e-9:
        return int(row["n_tokens"])
    if not row["nested"]:
        raise RatioNotCached(
            f"{row['video_id']!r} was pruned by a method without an order of selection, so only its own retention "
            f"ratio {stored} can be served, not {retention_ratio}"
        )
    return min(budget, int(row["n_tokens"]))


def read_json(row: VideoRow) -> VideoRow:
    """Return ``row`` with the columns that hold JSON parsed."""
    parsed = {name: None if row[name] is None else json.loads(row[name]) for name in JSON_COLUMNS}
    return cast(VideoRow, {**row, **parsed})


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
