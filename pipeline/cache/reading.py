"""How the tokens of videos are asked for, and how many of a video's rows that is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple, cast

from gstep.types import budget_for
from pipeline.cache.codecs import BFLOAT16, TokenCodec
from pipeline.cache.schema import token_schema
from pipeline.errors import RatioNotCached
from pipeline.rows import JSON_COLUMNS, VideoRow

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
