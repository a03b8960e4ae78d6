"""Rows of so many made-up videos in sorted files, and what readers and a driver take to go through them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
from rich.table import Table

from jobs.benchmark.peak_memory import peak_memory
from jobs.benchmark.shown import figure_table, say
from jobs.benchmark.timing import seconds_of
from pipeline.cache.header import CacheHeader, CacheIdentity, header_bytes
from pipeline.cache.ledger import Ledger
from pipeline.cache.live_rows import VIDEOS, keyed
from pipeline.cache.merging import WAITING, level_of, merge
from pipeline.cache.reader import HEADER, TokenCache
from pipeline.cache.schema import SCHEMA_VERSION, VIDEO_SCHEMA
from pipeline.cache.table import FILE_ROWS, small_file, sorted_file, table_files
from pipeline.keys import ROWS_AT_ONCE, keys_of
from pipeline.rows import VideoRecord
from pipeline.storage.stores import LocalStore, Store

FOUND = 50  # videos looked up
A_COMMIT = 22  # videos of a commit
_FRAMES = 32


class Step(NamedTuple):
    """Something that is done with the table, in words, and its figures by their names in the record.

    Wall seconds end in ``_s``, requests in ``_requests``, and MB of peak memory growth (None: not known) in ``_mb``.
    """

    what: str
    figures: Mapping[str, float | None]


#: The settings of the made-up rows.
IDENTITY: CacheIdentity = {
    "model": {"type": "llava_onevision", "weights": "made up"},
    "preprocessing": {},
    "sampling": {"num_frames": _FRAMES, "fps": None, "max_frames": None, "snap_s": None},
    "pruner": {"method": "gstep", "params": {}},
    "retention_ratio": 0.25,
    "dtype": {"compute": "bfloat16", "stored": "bfloat16"},
}


class Far:
    """A store in a folder that waits ``seconds`` before each request and counts requests, as a distant store would."""

    def __init__(self, store: LocalStore, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in {"put", "read", "read_slice", "names", "exists", "listed"}:
            return found

        def asked(*arguments: Any) -> Any:
            self.requests += 1
            time.sleep(self._seconds)
            return found(*arguments)

        return asked

    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        """Yield the files one after the other, each after the simulated delay."""
        return map(self.read, names)


def measure(videos: int, request_s: float, folder: Path) -> list[Step]:
    """Make the tables below ``folder`` and measure every step."""
    store = LocalStore(folder)
    begin_cache(store)
    say(f"making the rows of {videos:,} videos")
    make_table(store, range(videos))
    files, n_bytes = len(table_files(store, VIDEOS)), sum(file.size for file in store.listed(VIDEOS))
    ids = [_id(number) for number in random.Random(0).sample(range(videos), min(FOUND, videos))]
    say("opening it and finding videos")
    open_s, cache = seconds_of(partial(TokenCache, folder))
    find_s = median(seconds_of(partial(cache.metadata, video_id))[0] for video_id in ids)
    far, late = Far(store, request_s), f"{1e3 * request_s:g} ms a request"
    far_open_s, far_cache = seconds_of(partial(TokenCache, folder, store=cast(Store, far)))
    opened = far.requests
    far_find_s, _ = seconds_of(partial(far_cache.metadata, ids[0]))
    say("resuming")
    resume_s, ledger = seconds_of(lambda: Ledger(store).refresh())
    assert len(ledger) == videos
    del ledger
    find_mb = peak_memory(lambda: TokenCache(folder).metadata(ids[0]))
    resume_mb = peak_memory(lambda: Ledger(store).refresh())
    say(f"merging {WAITING} commits of {A_COMMIT} videos")
    for number in range(WAITING):
        _commit(store, number, videos + number * A_COMMIT)
    merge_s, _ = seconds_of(partial(merge, store, None))
    opening = {"open_s": open_s, "files": files, "n_bytes": n_bytes}
    return [
        Step(f"open it: {files} files, {n_bytes / 1e9:.2f} GB", opening),
        Step("find a video and read its row", {"find_s": find_s, "find_mb": find_mb}),
        Step(f"open it, {late}", {"far_open_s": far_open_s, "far_open_requests": opened}),
        Step(f"find a video, {late}", {"far_find_s": far_find_s, "far_find_requests": far.requests - opened}),
        Step("what a run that resumes reads", {"resume_s": resume_s, "resume_mb": resume_mb}),
        Step(f"merge {WAITING} commits", {"merge_s": merge_s}),
    ]


def begin_cache(store: Store, hidden: int = 3584) -> None:
    """Make the folder of a cache of made-up videos, and write its header."""
    store.make()
    header: CacheHeader = {"schema_version": SCHEMA_VERSION, "identity": IDENTITY, "newline": None}
    store.put(HEADER, header_bytes({**header, "hidden_size": hidden}))


def _id(number: int) -> str:
    """Return the made-up video id number ``number``."""
    return f"corpus/part-{number % 1000:03d}/video_{number:09d}.mp4"


def _record(number: int, draw: np.random.Generator) -> VideoRecord:
    """Make the row of a pruned video as a run leaves it, of random numbers."""
    shard, frames = number // A_COMMIT, np.sort(draw.integers(0, 9000, _FRAMES))
    return {
        "video_id": _id(number), "uri": f"s3://bucket/{_id(number)}", "run_id": "20260101T000000000Z-0a1b2c",
        "status": "ok", "attempts": 1, "source_size": int(draw.integers(10**7)),
        "source_hash": f"blake2b:{draw.bytes(16).hex()}",
        "backend": "pyav", "backend_version": "18.1.0", "codec": "h264", "decode_warnings": 0,
        "token_shard": f"tokens/20260101T000000000Z-0a1b2c-{shard:016x}-{shard:032x}.parquet",
        "first_row_group": 4 * (number % A_COMMIT), "row_counts": [627, 314, 313, 314],
        "footer_hash": f"blake2b:{shard:032x}", "checksum": f"blake2b:{draw.bytes(16).hex()}",
        "retention_ratio": 0.25, "nested": True, "n_tokens": 1568, "n_total": 6272, "n_frames": _FRAMES,
        "tokens_per_frame": 196, "hidden_size": 3584, "frame_indices": frames.tolist(),
        "timestamps": (frames / 30).tolist(), "fps": 30.0, "duration_s": 300.0, "source_frames": 9000,
        "n_repeated": 0, "source_width": 1280, "source_height": 720, "width": 384, "height": 384,
        "kept_per_frame": draw.integers(0, 98, _FRAMES).tolist(), "temporal_density": draw.random(_FRAMES).tolist(),
        "decode_s": draw.random(), "encode_s": draw.random(), "prune_s": draw.random(), "write_s": draw.random(),
        "manifest": '{"label": "x"}', "runtime": '{"device": "cuda"}', "model_extra": "{}",
    }  # fmt: skip


def _commit(store: LocalStore, number: int, first: int) -> None:
    """Write one commit's small file of random rows, as a run does."""
    draw = np.random.default_rng(first)
    rows = keyed([_record(first + i, draw) for i in range(A_COMMIT)])
    store.put(*small_file(VIDEOS, "run", number, rows, None))


def make_table(
    store: LocalStore, numbered: range, shards: Sequence[str] | None = None, made_with: str | None = None
) -> None:
    """Write one level of sorted files for the videos of these numbers.

    Only ids, keys and, where ``shards`` are given, token shards are each video's own; the other columns repeat those of
    10,000 videos.
    """
    videos, first = len(numbered), numbered.start
    starts = range(0, videos, ROWS_AT_ONCE)
    ids = (pa.array(list(map(_id, numbered[start : start + ROWS_AT_ONCE]))) for start in starts)
    keys = np.concatenate([keys_of(part) for part in ids])
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    draw = np.random.default_rng(0)
    alike = keyed([_record(number, draw) for number in range(min(videos, 10_000))])
    rows_a_file = FILE_ROWS * 3 // 4
    for start in range(0, videos, rows_a_file):
        numbers = order[start : start + rows_a_file]
        rows = alike.take(pa.array(np.arange(len(numbers)) % len(alike)))
        own = {
            "video_id": pa.array([_id(first + number) for number in numbers.tolist()]),
            "id_high": pa.array(keys[numbers, 0]),
            "id_low": pa.array(keys[numbers, 1]),
        }
        if shards is not None:
            own["token_shard"] = pa.array([shards[number // A_COMMIT] for number in numbers.tolist()])
        for name, values in own.items():
            rows = rows.set_column(rows.schema.get_field_index(name), VIDEO_SCHEMA.field(name), values)
        store.put(*sorted_file(VIDEOS, level_of(videos), rows, {}, made_with))


def as_table(found: Sequence[Step], title: str) -> Table:
    """Lay out a row a step."""
    rows = []
    for step in found:
        by_unit = {name.rpartition("_")[2]: value for name, value in step.figures.items()}
        seconds, requests, memory = (by_unit.get(unit) for unit in ("s", "requests", "mb"))
        told = ((seconds, ".3g"), (requests, ".0f"), (memory, ",.0f"))
        rows.append((step.what, *("" if value is None else format(value, form) for value, form in told)))
    return figure_table(title, ("", "seconds", "requests", "memory, MB"), rows)
