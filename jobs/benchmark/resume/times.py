"""What finding out what is left to do costs a driver, on a made-up manifest and cache of so many videos."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv
from rich.table import Table

from jobs.benchmark.peak_memory import peak_memory
from pipeline.cache.ledger import Ledger
from pipeline.cache.live_rows import VIDEOS, shard_name
from pipeline.cache.schema import VIDEO_SCHEMA, write_parquet
from pipeline.inputs.manifest import read_manifest
from pipeline.prune.config import PruneConfig
from pipeline.prune.resume import remaining
from pipeline.storage.stores import LocalStore

PARTS = ("listing", "manifest", "cache", "remaining")
AT = 100_000_000  # videos to which figures are extended
LISTED = 1000  # keys that one LIST of S3 gives
_HOUR = 3600.0
_DONE = 0.9  # share of the manifest that the cache holds

Say = Callable[[str], None]


@dataclass(frozen=True)
class ResumeTimes:
    """What was measured.

    Attributes:
        videos: rows of the manifest.
        kind: of manifest: parquet, jsonl or csv.
        shards: videos shards of the cache, which holds nine tenths of the videos.
        shard_bytes: of one of them.
        seconds: by PARTS: list the shards, read the manifest, read the cache, tell what is left.
        cpu_seconds: of the processor, likewise: less where this machine had other work, more where threads share it.
        manifest_bytes: a video, of the manifest's Arrow columns.
        ledger_bytes: a cached video, of what the driver keeps of it.
        peak_bytes: a video, by which all of it raised the memory at the peak; None where that cannot be measured.
        memory: bytes that this machine has.
    """

    videos: int
    kind: str
    shards: int
    shard_bytes: int
    seconds: dict[str, float]
    cpu_seconds: dict[str, float]
    manifest_bytes: float
    ledger_bytes: float
    peak_bytes: float | None
    memory: int

    def first_limit(self) -> tuple[float, str]:
        """(videos at which it is met, which it is): an hour for a part, or this machine's memory."""
        limits = [(_HOUR * self.videos / self.seconds[name], f"an hour for: {WORDS[name]}") for name in PARTS]
        peak = self.peak_bytes or self.manifest_bytes + self.ledger_bytes
        return min([*limits, (self.memory / peak, "this machine's memory")])


WORDS = {
    "listing": "list the videos shards",
    "manifest": "read the manifest",
    "cache": "read the videos shards",
    "remaining": "tell what is left, with a look at every cached file",
}


def measure(videos: int, videos_per_shard: int, kind: str, folder: Path, say: Say) -> ResumeTimes:
    """Make the files below ``folder`` and measure; ``say`` is told what comes next."""
    say(f"making a manifest of {videos:,} videos")
    manifest = _make_manifest(folder / f"manifest.{kind}", videos)
    say(f"making a cache of {round(_DONE * videos):,} videos")
    store = LocalStore(folder / "cache")
    shard_bytes = make_cache(store, folder, round(_DONE * videos), videos_per_shard)
    say("reading them")
    times: dict[str, tuple[float, float]] = {}
    table, ledger = _drive(manifest, store, times)
    manifest_bytes = table.get_total_buffer_size() / len(table)
    ledger_bytes = sum(column.nbytes for column in ledger.columns.values()) / len(ledger)
    shards = ledger.n_shards
    del table, ledger
    say("reading them again, for the memory")
    peak = peak_memory(partial(_drive, manifest, store, {}))
    return ResumeTimes(
        videos=videos,
        kind=kind,
        shards=shards,
        shard_bytes=shard_bytes,
        seconds={name: wall for name, (wall, _) in times.items()},
        cpu_seconds={name: cpu for name, (_, cpu) in times.items()},
        manifest_bytes=manifest_bytes,
        ledger_bytes=ledger_bytes,
        peak_bytes=None if peak is None else peak * 1e6 / videos,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def _drive(manifest: Path, store: LocalStore, times: dict[str, tuple[float, float]]) -> tuple[pa.Table, Ledger]:
    """What a driver does before it starts anything; ``times`` gets (wall, CPU) seconds of each part."""

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started, used = time.perf_counter(), time.process_time()
        done = work()
        times[name] = time.perf_counter() - started, time.process_time() - used
        return done

    timed("listing", partial(store.names, VIDEOS, ".parquet"))
    table = timed("manifest", partial(read_manifest, str(manifest)))
    ledger = timed("cache", Ledger(store).refresh)
    left = timed("remaining", partial(remaining, table, ledger, PruneConfig()))
    assert len(left.todo) == len(table) - len(ledger)
    return table, ledger


def names_of(start: int, end: int) -> list[str]:
    """Ids as corpora have them: eleven characters and a clip."""
    return [f"{number * 2654435761 % 2**44:011x}_{number % 97:03d}" for number in range(start, end)]


def _make_manifest(path: Path, videos: int) -> Path:
    def parts() -> Iterator[pa.Table]:
        for start in range(0, videos, 2**16):
            names = names_of(start, min(start + 2**16, videos))
            yield pa.table({"video_id": names, "uri": [f"videos/{name[:2]}/{name}.mp4" for name in names]})

    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([("video_id", pa.string()), ("uri", pa.string())])
    if path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            for part in parts():
                ids, uris = part["video_id"].to_pylist(), part["uri"].to_pylist()
                file.writelines(f'{{"video_id": "{i}", "uri": "{u}"}}\n' for i, u in zip(ids, uris, strict=True))
        return path
    with (csv.CSVWriter if path.suffix == ".csv" else pq.ParquetWriter)(path, schema) as writer:
        for part in parts():
            writer.write_table(part)
    return path


def make_cache(store: LocalStore, folder: Path, videos: int, videos_per_shard: int) -> int:
    """Videos shards as a run commits them, of ok rows of 32 frames each; returns the bytes of one."""
    size = min(videos_per_shard, videos)
    row = {
        **{"run_id": "20260101T000000Z-0a1b2c", "status": "ok", "attempts": 1, "source_size": -1, "video_id": ""},
        **{"uri": "", "n_tokens": 1568, "n_total": 6272, "n_frames": 32, "tokens_per_frame": 196, "hidden_size": 3584},
        **{"frame_indices": list(range(0, 960, 30)), "timestamps": [t / 1.001 for t in range(32)]},
        **{"kept_per_frame": [49] * 32, "temporal_density": np.linspace(0, 1, 32).tolist(), "backend": "decord"},
        **{"row_counts": [627, 314, 313, 314], "checksum": f"blake2b:{'0' * 32}", "retention_ratio": 0.25},
        **{f"{stage}_s": 0.123 for stage in ("decode", "encode", "prune", "write")},
    }
    blank = pa.Table.from_pylist([row] * size, schema=VIDEO_SCHEMA)
    (store.root / VIDEOS).mkdir(parents=True, exist_ok=True)
    data = b""
    for number, start in enumerate(range(0, videos, size)):
        names = names_of(start, min(start + size, videos))
        table = blank.slice(0, len(names))
        uris = [f"{folder.resolve()}/videos/{name[:2]}/{name}.mp4" for name in names]
        for name, column in (("video_id", names), ("uri", uris)):
            table = table.set_column(table.schema.names.index(name), VIDEO_SCHEMA.field(name), [column])
        data = write_parquet(table).to_pybytes()
        # Not by the store: waiting for the disk a hundred thousand times is no part of what is measured.
        (store.root / shard_name(VIDEOS, row["run_id"], number, data)).write_bytes(data)
    return len(data)


def as_table(found: ResumeTimes, title: str) -> Table:
    """What was measured, beside the same for AT videos; the caption names the first limit."""
    table = Table(title=title, title_justify="left", show_edge=False, caption_justify="left")
    for name in ("", f"{found.videos:,} videos", f"{AT:,} videos, extrapolated"):
        table.add_column(name, justify="right" if name else "left")
    times = AT / found.videos
    for name in PARTS:
        wall, cpu = found.seconds[name], found.cpu_seconds[name]
        table.add_row(f"{WORDS[name]}, s (CPU)", f"{wall:.1f} ({cpu:.1f})", f"{wall * times:,.0f} ({cpu * times:,.0f})")
    shards = found.shards
    table.add_row("videos shards", f"{shards:,}", f"{shards * times:,.0f}")
    table.add_row("the same on S3: LIST", f"{-(-shards // LISTED):,}", f"{shards * times / LISTED:,.0f}")
    table.add_row("the same on S3: GET", f"{shards:,}", f"{shards * times:,.0f}")
    table.add_row("bytes of a videos shard", f"{found.shard_bytes:,}", "")
    table.add_row("manifest in memory, bytes a video", f"{found.manifest_bytes:.0f}", "")
    table.add_row("of the cache in memory, bytes a cached video", f"{found.ledger_bytes:.0f}", "")
    if found.peak_bytes is not None:
        mb = found.peak_bytes * found.videos / 1e6
        table.add_row("at the peak, bytes a video", f"{found.peak_bytes:.0f}", "")
        table.add_row("at the peak, MB", f"{mb:,.0f}", f"{mb * times:,.0f}")
    videos, what = found.first_limit()
    table.caption = f"first limit: {what}, at {videos / 1e6:,.0f} million videos"
    return table


def as_record(found: ResumeTimes, **more: object) -> dict[str, object]:
    """For machines, JSON-able."""
    videos, what = found.first_limit()
    return {**more, **asdict(found), "first_limit": {"videos": round(videos), "what": what}}
