"""Ways of reading a cache side by side: each reads all of its videos once a round, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.table import Table
from torch.utils.data import DataLoader

from jobs.benchmark.read.cache import BUCKET, TIER, Counted, ReadJob, make_cache, s3_server
from jobs.benchmark.shown import figure_table, say
from pipeline import TokenCache, TokenDataset, pack
from pipeline.cache.token_shard import Rows, TokenShard
from pipeline.storage.stores import LocalStore, ObjectStore, Store

BATCH = 8
COLUMNS = ("rank", "index", "frame", "token", "merged", "density")


@dataclass
class TimedReader:
    """A way of reading the cache, and its measurements.

    Attributes:
        name: what it does.
        read: read all videos once.
        beside: the way it is compared with; "" for one of those.
        n_bytes: of tokens that it gives.
        seconds: wall clock of each round.
        cpu_seconds: of this process alone, likewise.
        counted: whether this process makes its requests, and they are counted.
        requests: of a round, once shards are open; None where they are not counted.
    """

    name: str
    read: Callable[[], object]
    beside: str
    n_bytes: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    counted: bool = False
    requests: int | None = None

    def rate(self) -> float:
        """Return the median rate in GB/s."""
        return self.n_bytes / statistics.median(self.seconds) / 1e9

    def cpu_rate(self) -> float:
        """Return the median rate in GB per second of this process's CPU time."""
        return self.n_bytes / max(statistics.median(self.cpu_seconds), 1e-9) / 1e9


def measure(job: ReadJob, folder: Path, *, s3: bool = False) -> list[TimedReader]:
    """Make the cache below ``folder`` (and on S3), read it in every way, and return the ways with their times."""
    say(f"making a cache of {job.videos} videos")
    local = LocalStore(folder / "cache")
    make_cache(local, job)
    with _one_thread():
        say("reading it")
        ways = [*_pyarrow(local), *_ways(local, "")]
        _rounds(ways, job.repeats)
        if s3:
            with s3_server() as (objects, client):
                say("the same on S3")
                store = ObjectStore(f"s3://{BUCKET}/cache", objects)
                make_cache(store, job)
                there = [_plain_gets(store, client), *_ways(store, "S3: ")]
                _rounds(there, job.repeats, objects)
                ways += there
    return ways


def _rounds(ways: Sequence[TimedReader], repeats: int, objects: Counted | None = None) -> None:
    """Read in every way once to warm up, then ``repeats`` times in turn, recording seconds and requests."""
    for way in ways:
        way.read()  # shards are open from here on, and files in memory
    for _ in range(repeats):
        for way in ways:
            before = 0 if objects is None else objects.requests
            started, used = time.perf_counter(), time.process_time()
            way.read()
            way.seconds.append(time.perf_counter() - started)
            way.cpu_seconds.append(time.process_time() - used)
            if objects is not None and way.counted:
                way.requests = objects.requests - before


def _pyarrow(store: LocalStore) -> Iterator[TimedReader]:
    """Yield the baselines that read the same row groups and columns with pyarrow alone, from open files."""
    cache = TokenCache(store.root)
    whole, tier = (_wanted(cache, ratio) for ratio in (None, TIER))

    def reading(wanted: Sequence[Rows], **options: bool) -> Callable[[], object]:
        names = {rows.row["token_shard"] for rows in wanted}
        files = {name: pq.ParquetFile(store.root / name, **options) for name in names}
        groups = [(files[rows.row["token_shard"]], _groups(rows)) for rows in wanted]
        return lambda: _each(groups, lambda at: at[0].read_row_groups(at[1], columns=list(COLUMNS), use_threads=False))

    checked = {"page_checksum_verification": True}
    size = _tokens_of(whole)
    yield TimedReader("pyarrow, mapped", reading(whole, memory_map=True, **checked), "", size)
    yield TimedReader("pyarrow, mapped, no checksums", reading(whole, memory_map=True), "pyarrow, mapped", size)
    yield TimedReader("pyarrow, not mapped", reading(whole, **checked), "pyarrow, mapped", size)
    yield TimedReader("pyarrow, mapped, 10 % of 25 %", reading(tier, memory_map=True, **checked), "", _tokens_of(tier))


def _ways(store: Store, where: str) -> Iterator[TimedReader]:
    """Yield this package's own ways of reading: single videos, batches, a data loader."""
    cache = TokenCache(str(store), store=store)
    ids = cache.video_ids
    mixed = [ids[i] for i in np.random.default_rng(1).permutation(len(ids))]
    batches = [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]
    size, tier_size = (_tokens_of(_wanted(cache, ratio)) for ratio in (None, TIER))
    beside = f"{where}boto3, a GET a video" if where else "pyarrow, mapped"
    tier = beside if where else "pyarrow, mapped, 10 % of 25 %"

    def loader(workers: int) -> Callable[[], None]:
        data = DataLoader(TokenDataset(cache), batch_size=BATCH, collate_fn=pack, num_workers=workers)
        return lambda: _each(data, lambda batch: None)

    whole: dict[str, Callable[[], None]] = {
        "get, in order of selection": lambda: _each(ids, lambda video_id: cache.get(video_id, order="selection")),
        "get, in order of index": lambda: _each(ids, cache.get),
        "get, shuffled videos": lambda: _each(mixed, cache.get),
        f"get_many, batches of {BATCH}": lambda: _each(batches, cache.get_many),
        f"DataLoader, batches of {BATCH}": loader(0),
    }
    for name, read in whole.items():
        yield TimedReader(where + name, read, beside, size, counted=True)
    yield TimedReader(f"{where}DataLoader, 2 workers", loader(2), beside, size)
    some = partial(_each, ids, lambda video_id: cache.get(video_id, TIER))
    yield TimedReader(f"{where}get, 10 % of 25 %", some, tier, tier_size, counted=True)


def _plain_gets(store: ObjectStore, client: Any) -> TimedReader:
    """Return the baseline that makes one S3 GET for each video's bytes and nothing else."""
    cache = TokenCache(store.root, store=store)
    prefix = store.root.removeprefix(f"s3://{BUCKET}/")
    wanted = _wanted(cache, None)
    shards = {
        name: TokenShard(store, name, told)
        for name, told in {(r.row["token_shard"], r.row["footer_hash"]) for r in wanted}
    }
    places = [
        (f"{prefix}/{rows.row['token_shard']}", shards[rows.row["token_shard"]].spans(rows)[0]) for rows in wanted
    ]

    def read(place: tuple[str, tuple[int, int]]) -> object:
        name, (start, end) = place
        return client.get_object(Bucket=BUCKET, Key=name, Range=f"bytes={start}-{end - 1}")["Body"].read()

    return TimedReader(
        "S3: boto3, a GET a video", lambda: _each(places, read), "", _tokens_of(wanted), requests=len(places)
    )


def _each(items: Any, read: Callable[[Any], object]) -> None:
    """Call ``read`` on one item after the other, keeping nothing."""
    for item in items:
        read(item)


def _wanted(cache: TokenCache, ratio: float | None) -> list[Rows]:
    """Return the token rows that a read at this ratio takes, for each video of the cache."""
    reading = cache.reading(ratio, "index", (), False)
    return [cache.wanted(cache.metadata(video_id), reading) for video_id in cache.video_ids]


def _tokens_of(wanted: Sequence[Rows]) -> int:
    """Return the bytes of the bfloat16 tokens in these rows."""
    return sum(2 * rows.keep * int(rows.row["hidden_size"]) for rows in wanted)


def _groups(rows: Rows) -> list[int]:
    """Return the row group numbers that hold the wanted rows."""
    ends = np.cumsum(rows.row["row_counts"])
    first = rows.row["first_row_group"]
    return list(range(first, first + int(np.searchsorted(ends, rows.keep)) + 1))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch and pyarrow to one thread inside the context."""
    threads = torch.get_num_threads(), pa.cpu_count()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads[0])
        pa.set_cpu_count(threads[1])


def as_table(found: Sequence[TimedReader], title: str) -> Table:
    """Render the figures as a table; each way's share is relative to the way it is compared with."""
    by_name, rows = {way.name: way for way in found}, []
    for way in found:
        wall, cpu = shares(way, by_name.get(way.beside))
        requests = "" if way.requests is None else str(way.requests)
        rows.append((way.name, f"{way.rate():.2f}", wall, f"{way.cpu_rate():.2f}", cpu, requests))
    note = "of plain: pyarrow with checksums and memory maps, for the same row groups and columns; on S3 boto3"
    return figure_table(title, ("", "GB/s", "of plain", "GB a CPU second", "of plain", "GET"), rows, note)


def shares(way: TimedReader, plain: TimedReader | None) -> tuple[str, str]:
    """Return the shares of wall clock and processor time: medians over rounds of the rate beside ``plain``'s."""
    if plain is None:
        return "", ""
    size = way.n_bytes / plain.n_bytes
    pairs = ((plain.seconds, way.seconds), (plain.cpu_seconds, way.cpu_seconds))
    wall, cpu = (
        statistics.median(size * theirs / max(ours, 1e-9) for theirs, ours in zip(*pair, strict=True)) for pair in pairs
    )
    return f"{wall:.0%}", f"{cpu:.0%}"
