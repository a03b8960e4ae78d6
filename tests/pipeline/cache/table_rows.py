"""Rows of the videos table without tokens, and the rule of the live row in plain Python to hold readers against."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline import TokenCache
from pipeline.cache.live import Ledger
from pipeline.cache.table import build_table, serialize_small
from pipeline.storage.stores import Store
from tests.builders.caches import read_live

ORDER = ("removed", "ok", "failed")
Row = dict[str, Any]


def serialise_rows(run: str, rows: list[Row], made_with: str | None = None) -> tuple[str, pa.Buffer]:
    """Return the name and the content of the small file that commits the rows."""
    table = build_table([{"uri": f"/x/{row['video_id']}", "run_id": run, **row} for row in rows])
    return serialize_small(run, 0, table, made_with)


def commit_rows(store: Store, run: str, rows: list[Row], made_with: str | None = None) -> str:
    """Put rows as a small file, and return its name."""
    name, data = serialise_rows(run, rows, made_with)
    store.put(name, data)
    return name


def commit_failures(store: Store, run: str, ids: Iterable[str], attempts: int = 1, made_with: str | None = None) -> str:
    """Put a failed row of each video as a small file, and return its name."""
    rows = [{"video_id": video_id, "status": "failed", "attempts": attempts} for video_id in ids]
    return commit_rows(store, run, rows, made_with)


def draw_rows(draw: random.Random, run: str) -> list[Row]:
    """Draw rows of some of twelve videos."""
    return [
        {
            "video_id": f"v{number}",
            "run_id": run,
            "status": draw.choices(ORDER, (1, 8, 8))[0],
            "attempts": draw.randint(1, 3),
            "rewritten": draw.randint(0, 1),
            "source_size": draw.randint(1, 2),
        }
        for number in draw.sample(range(12), draw.randint(1, 5))
    ]


class Model:
    """The rule in plain Python: of each video the best row that was ever committed."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def live(self) -> dict[str, tuple[Any, ...]]:
        """Return the status, the attempts and the run of each video's live row."""
        best: dict[str, tuple[Any, ...]] = {}
        for row in build_table([{"uri": f"/x/{row['video_id']}", **row} for row in self.rows]).to_pylist():
            rank = (ORDER.index(row["status"]), -row["attempts"], -row["rewritten"], row["tie_break"])
            if row["video_id"] not in best or rank < best[row["video_id"]][0]:
                best[row["video_id"]] = rank, facts_of(row)
        return {name: facts for name, (_, facts) in best.items()}


def facts_of(row: Row) -> tuple[Any, ...]:
    return row["status"], row["attempts"], row["run_id"]


def live_in(store: Store) -> dict[str, tuple[Any, ...]]:
    """Return what ``Model.live`` returns, as a reader of the store has it."""
    rows = read_live(store, ("video_id", "status", "attempts", "run_id")).to_pylist()
    return {row["video_id"]: facts_of(row) for row in rows}


def assert_all_agree(store: Store, model: Model) -> None:
    """Check that whoever asks for live rows gets the model's: all at once, one by one, or in the ledger of a run."""
    live = model.live()
    assert live_in(store) == live
    cache, ledger = TokenCache(str(store), store=store), Ledger(store).refresh()
    assert cache.video_ids == sorted(name for name, (status, *_) in live.items() if status == "ok")
    assert set(cache.failed) == {name for name, (status, *_) in live.items() if status == "failed"}
    assert len(ledger) == len(live)
    for name, place in zip(live, ledger.find(pa.array(live, pa.string())).tolist(), strict=True):
        row = cache.metadata(name)
        assert facts_of(row) == facts_of(ledger.read(place)) == live[name]
        assert ledger.failed(np.array([place])).item() == (live[name][0] == "failed")
        # A merge may forget attempts on another file with their row; none are made up.
        others = [other for other in model.rows if other["video_id"] == name]
        on_others = [other["attempts"] for other in others if other["source_size"] != row["source_size"]]
        assert ledger.columns["earlier"][place] <= max(on_others, default=0)
