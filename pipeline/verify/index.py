"""Whether the compacted index says what the videos shards say that it covers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.index.files import FAULT, REMEDY, ROOT, Index
from pipeline.cache.live_rows import live_rows
from pipeline.errors import CorruptShard
from pipeline.storage.stores import Store
from pipeline.verify.report import Problem, Report

_COMPARED = ("video_id", "shard", "row", "status")


def check_index(store: Store, rows: pa.Table, report: Report) -> None:
    """Compare the index, where there is one, with ``rows`` of all videos shards, and note what differs."""
    try:
        index = Index.read(store)
        if index is None:
            return
        covered = index.all_shards()["name"]
        said = _said(index, covered)
    except CorruptShard as error:
        report.problems.append(Problem("index", str(error), ROOT))
        return
    report.counts["indexed_shards"] = len(covered)
    if gone := len(covered) - (pc.sum(pc.is_in(covered, value_set=rows["shard"].unique())).as_py() or 0):
        what = f"{store}/{ROOT}: it covers {gone} videos shards that are gone or cannot be read; {REMEDY}"
        report.problems.append(Problem("index", what, ROOT))
        return
    held = rows.filter(pc.is_in(rows["shard"], value_set=covered.combine_chunks()))
    true = live_rows(held).select(_COMPARED).sort_by("video_id").to_pydict()
    if true != said:
        wrong = _first_difference(true, said)
        what = f"{store}/{ROOT}: it says another row of {wrong} than the videos shards; {REMEDY}"
        report.problems.append(Problem("index", what, ROOT))


def _said(index: Index, names: pa.ChunkedArray) -> dict[str, list[object]]:
    """_COMPARED of all rows, by video_id."""
    tables = list(index.blocks(("video_id", "shard", "row", "code")))
    if not tables:
        return {name: [] for name in _COMPARED}
    table = pa.concat_tables(tables)
    failed = np.bitwise_and(table["code"].to_numpy(), np.uint8(FAULT)) != 0
    columns = [
        table["video_id"],
        names.take(table["shard"]),
        table["row"].cast(pa.int32()),
        pc.if_else(pa.array(failed), "failed", "ok"),
    ]
    return dict(pa.table(columns, _COMPARED).sort_by("video_id").to_pydict())


def _first_difference(true: dict[str, list[object]], said: dict[str, list[object]]) -> object:
    rows = zip(zip(*true.values(), strict=True), zip(*said.values(), strict=True), strict=False)
    differing = (a[0] for a, b in rows if a != b)
    return next(differing, "videos that only one of them has")
