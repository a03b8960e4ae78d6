"""What a compacted index takes, on made-up rows of so many videos and one real videos shard."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rich.table import Table

from jobs.benchmark.peak_memory import peak_memory
from jobs.benchmark.resume.times import make_cache, names_of
from pipeline.cache.header import header_bytes
from pipeline.cache.index.compaction import compact
from pipeline.cache.ledger import Ledger
from pipeline.cache.live_rows import VIDEOS
from pipeline.cache.reader import HEADER, TokenCache
from pipeline.cache.schema import SCHEMA_VERSION
from pipeline.keys import ROWS_AT_ONCE, keys_of
from pipeline.storage.lock import cache_lock
from pipeline.storage.stores import LocalStore

FOUND = 200  # videos looked up

Say = Callable[[str], None]


class IndexTimes(TypedDict):
    """What was measured; seconds of the wall, memory in MB by which the process grew at its peak (None: not known).

    Attributes:
        videos, shards: of the index, ``n_bytes`` of its files.
        compact_s: making it from what a run knows at its end.
        open_s, open_mb: opening the cache as a reader does.
        first_s, find_s: finding the first video, and the median of FOUND others.
        row_s: reading a video's whole row.
        find_mb: opening, finding a video and reading its row.
        listing_s: listing all videos shards.
        resume_s, resume_mb: what a run reads before it knows what is left, from the index.
    """

    videos: int
    shards: int
    n_bytes: int
    compact_s: float
    open_s: float
    open_mb: float | None
    first_s: float
    find_s: float
    row_s: float
    find_mb: float | None
    listing_s: float
    resume_s: float
    resume_mb: float | None


def measure(videos: int, videos_per_shard: int, folder: Path, say: Say) -> IndexTimes:
    """Make everything below ``folder`` and measure; ``say`` is told what comes next."""
    store = LocalStore(folder / "cache")
    store.put(HEADER, header_bytes({"schema_version": SCHEMA_VERSION, "identity": {}, "newline": None}))
    say(f"making the rows of {videos:,} videos in shards of {videos_per_shard}")
    make_cache(store, folder, min(videos, videos_per_shard), videos_per_shard)
    ledger = _ledger(store, videos, videos_per_shard)
    say(f"making {len(ledger.names):,} empty files by their names, so that there is something to list")
    for name in ledger.names[1:]:
        (store.root / name).touch()
    say("making the index")
    with cache_lock(store, "benchmark", say) as lock:
        made = compact(store, lock, ledger, texts=_texts)
    del ledger
    say("opening it")
    drawn = random.Random(0).sample(range(videos), min(FOUND, videos))
    ids = [names_of(number, number + 1)[0] for number in drawn]
    open_s, first_s, find_s = _found(store, ids)
    say("resuming with it")
    listing_s = _seconds(partial(store.names, VIDEOS, ".parquet"))[0]
    resume_s, again = _seconds(Ledger(store).refresh)
    assert len(again) == videos and again.index is not None, again.unusable
    del again
    return {
        "videos": videos,
        "shards": made.shards,
        "n_bytes": made.n_bytes,
        "compact_s": made.seconds,
        "open_s": open_s,
        "first_s": first_s,
        "find_s": find_s,
        "open_mb": peak_memory(partial(TokenCache, store.root)),
        "row_s": _seconds(partial(TokenCache(store.root).metadata, names_of(0, 1)[0]))[0],
        "find_mb": peak_memory(lambda: TokenCache(store.root).metadata(names_of(0, 1)[0])),
        "listing_s": listing_s,
        "resume_s": resume_s,
        "resume_mb": peak_memory(lambda: Ledger(store).refresh()),
    }


def _found(store: LocalStore, ids: list[str]) -> tuple[float, float, float]:
    """Open the cache and find videos: seconds to open it, to find the first, and the median of all."""
    open_s, cache = _seconds(partial(TokenCache, store.root))
    times = [_seconds(partial(cache.__contains__, video_id)) for video_id in ids]
    assert all(found for _, found in times)
    return open_s, times[0][0], median(seconds for seconds, _ in times)


def _seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    done = work()
    return time.perf_counter() - started, done


def _ledger(store: LocalStore, videos: int, videos_per_shard: int) -> Ledger:
    """What a run knows at its end; the rows of all shards but the first, a real one, are made up."""
    ledger = Ledger(store).refresh()
    keys = np.concatenate([keys_of(pa.array(names)) for names in _parts(videos)])
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    row = {name: column[:1] for name, column in ledger.columns.items()}
    ledger.columns = {name: np.repeat(value, videos, axis=0) for name, value in row.items()}
    ledger.columns |= {"high": keys[order, 0], "low": keys[order, 1], "place": order.astype(np.uint32)}
    ledger.starts = list(range(0, videos, videos_per_shard))
    draw, run = random.Random(1), "20260101T000000Z-0a1b2c"
    ledger.names += [
        f"{VIDEOS}/{run}-{number:06d}-{draw.getrandbits(128):032x}.parquet" for number in range(1, len(ledger.starts))
    ]
    ledger.failed_rows, ledger.n_rows = [0] * len(ledger.names), videos
    return ledger


def _parts(videos: int) -> list[list[str]]:
    return [names_of(start, min(start + ROWS_AT_ONCE, videos)) for start in range(0, videos, ROWS_AT_ONCE)]


def _texts(place: NDArray[np.int64]) -> pa.Array:
    """The ids of rows, by their numbers."""
    return pa.array([names_of(number, number + 1)[0] for number in place.tolist()], pa.string())


def as_table(found: IndexTimes, title: str) -> Table:
    """What was measured."""
    table = Table(title=title, title_justify="left", show_edge=False)
    for name in ("", f"{found['videos']:,} videos in {found['shards']:,} shards", "memory, MB"):
        table.add_column(name, justify="right" if name else "left")

    def row(what: str, seconds: float, memory: float | None = None) -> None:
        shown = f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
        table.add_row(what, shown, "" if memory is None else f"{memory:,.0f}")

    row("open the cache", found["open_s"], found["open_mb"])
    row("find the first video", found["first_s"])
    row(f"find another (median of {FOUND})", found["find_s"])
    row("open, find and read a video's row", found["open_s"] + found["row_s"], found["find_mb"])
    row("make the index at the end of a run", found["compact_s"])
    row("list the videos shards", found["listing_s"])
    row("what a run that resumes reads of the cache", found["resume_s"], found["resume_mb"])
    table.add_row("bytes of the index", f"{found['n_bytes']:,}", "")
    return table
