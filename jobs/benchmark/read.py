"""The cost of reading a cache, beside plain pyarrow, and on S3 beside plain GETs of the same bytes.

Each way reads all videos of a synthetic cache once a round, in turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from urllib.request import urlopen

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader

from jobs.benchmark.shared import existing_folder, figure_table, machine, machine_line, say
from jobs.command import count
from jobs.frame.json_document import CommandResult
from pipeline import TokenCache, TokenDataset, pack
from pipeline.cache.header import HEADER, CacheHeader, CacheIdentity, fingerprint, serialise_header
from pipeline.cache.schema import SCHEMA_VERSION
from pipeline.cache.token_shard import TokenRows, TokenShard
from pipeline.cache.writer import KeptTokens, VideoItem, commit_records, write_token_shard
from pipeline.errors import RunFailed, UsageError
from pipeline.rows import VideoRecord
from pipeline.storage.s3 import Objects, Slice
from pipeline.storage.stores import LocalStore, ObjectStore, Store

T = TypeVar("T")
STORED, TIER = 0.25, 0.10
BATCH = 8
BUCKET = "read"
_COLUMNS = ("rank", "index", "frame", "token", "merged", "density")
_START_S = 60.0  # time limit for the start of moto
_IDENTITY: CacheIdentity = {
    "model": {"type": "llava_onevision", "weights": "made up"},
    "preprocessing": {},
    "sampling": {"num_frames": 32, "fps": None, "max_frames": None, "snap_s": None},
    "pruner": {"method": "gstep", "params": {}},
    "retention_ratio": STORED,
    "dtype": {"compute": "bfloat16", "stored": "bfloat16"},
}


@dataclass
class TimedReader:
    """A way of reading the cache, and its measurements.

    Attributes:
        name: the name of the way.
        read: reads all videos once.
        beside: the name of its baseline; "" for a baseline.
        n_bytes: bytes of the tokens that it reads.
        seconds: wall seconds of each round.
        cpu_seconds: CPU seconds of this process in each round.
        counted: True if this process makes the requests, so that they are counted.
        requests: the number of requests of a round with open shards; None if they are not counted.
    """

    name: str
    read: Callable[[], object]
    beside: str
    n_bytes: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    counted: bool = False
    requests: int | None = None

    def shares(self, plain: TimedReader | None) -> tuple[str, str]:
        """Format the median ratio of its rate to ``plain``'s in percent, by wall clock and by CPU time.

        Both texts are "" without ``plain``. A ratio compares the same round of both ways.
        """
        if plain is None:
            return "", ""
        size = self.n_bytes / plain.n_bytes
        wall = median(size * p / max(own_s, 1e-9) for p, own_s in zip(plain.seconds, self.seconds, strict=True))
        cpu = median(size * p / max(own_s, 1e-9) for p, own_s in zip(plain.cpu_seconds, self.cpu_seconds, strict=True))
        return f"{wall:.0%}", f"{cpu:.0%}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``read``."""
    parser.add_argument("--videos", type=count, default=66, metavar="N", help="synthetic videos [66]")
    parser.add_argument(
        "--tokens", type=count, default=1568, metavar="K", help="stored tokens of a video, a quarter of all [1568]"
    )
    parser.add_argument("--hidden", type=count, default=3584, metavar="D", help="numbers a token [3584]")
    parser.add_argument("--videos-per-shard", type=count, default=22, metavar="N", help="videos of a token shard [22]")
    parser.add_argument("--repeats", type=count, default=5, metavar="N", help="measure N times, and show medians [5]")
    parser.add_argument(
        "--folder",
        type=existing_folder,
        metavar="DIR",
        help="make the cache in DIR, and remove it at the end [a temporary folder]",
    )
    parser.add_argument("--s3", action="store_true", help="read from an S3 server (moto, a separate process) too")


def run(arguments: argparse.Namespace) -> CommandResult:
    """Make the cache in a temporary folder, read it in every way, and return the table.

    Raises RunFailed, UsageError.
    """
    with TemporaryDirectory(dir=arguments.folder) as temporary, _use_one_thread():
        store = LocalStore(Path(temporary) / "cache")
        say(f"making a cache of {arguments.videos} videos")
        make_cache(store, arguments)
        say("reading it")
        ways = [*_make_pyarrow_readers(store), *_make_cache_readers(store, "")]
        _read_in_turn(ways, arguments.repeats)
        if arguments.s3:
            with _run_s3_server() as (objects, client):
                say("the same on S3")
                remote = ObjectStore(f"s3://{BUCKET}/cache", objects)
                make_cache(remote, arguments)
                on_s3 = [_make_get_reader(remote, client), *_make_cache_readers(remote, "S3: ")]
                _read_in_turn(on_s3, arguments.repeats, objects)
                ways += on_s3
    by_name, rows = {way.name: way for way in ways}, []
    for way in ways:
        wall, cpu = way.shares(by_name.get(way.beside))
        rates = [way.n_bytes / 1e9 / max(median(seconds), 1e-9) for seconds in (way.seconds, way.cpu_seconds)]
        requests = "" if way.requests is None else str(way.requests)
        rows.append((way.name, f"{rates[0]:.2f}", wall, f"{rates[1]:.2f}", cpu, requests))
    title = (
        f"Reading {arguments.videos} videos of {2e-6 * arguments.tokens * arguments.hidden:.1f} MB of tokens each, "
        f"in memory already, {machine_line()}"
    )
    note = "of plain: pyarrow with checksums and memory maps, for the same row groups and columns; on S3 boto3"
    table = figure_table(title, ("", "GB/s", "of plain", "GB a CPU second", "of plain", "GET"), rows, note)
    job = {name: getattr(arguments, name) for name in ("videos", "tokens", "hidden", "videos_per_shard", "repeats")}
    record = [{name: value for name, value in vars(way).items() if name != "read"} for way in ways]
    return CommandResult(0, {"machine": machine(), "job": job, "ways": record}, [table])


def make_cache(store: Store, job: argparse.Namespace) -> None:
    """Write a cache of random bfloat16 tokens in random order of selection, in the layout of GSTEP at 25 %."""
    store.make()
    header: CacheHeader = {"schema_version": SCHEMA_VERSION, "identity": _IDENTITY, "newline": None}
    store.put(HEADER, serialise_header({**header, "hidden_size": job.hidden}))
    numbers, n_total = np.random.default_rng(0), round(job.tokens / STORED)

    def make_video(number: int) -> VideoItem:
        """Make a one-frame video with random tokens, new tokens at each call."""
        record: VideoRecord = {
            "video_id": f"video-{number:06d}",
            "uri": f"/videos/{number:06d}.mp4",
            "status": "ok",
            "attempts": 1,
            "n_frames": 1,
            "tokens_per_frame": n_total,
            "hidden_size": job.hidden,
            "n_tokens": job.tokens,
            "n_total": n_total,
            "retention_ratio": STORED,
            "nested": True,
            "frame_indices": [0],
            "timestamps": [0.0],
            "kept_per_frame": [job.tokens],
        }
        kept_tokens = KeptTokens(
            tokens=numbers.integers(0, 2**14, (job.tokens, job.hidden), dtype=np.int16),
            index=numbers.permutation(n_total)[: job.tokens].astype(np.int32),
            rank=np.arange(job.tokens, dtype=np.int32),
            density=numbers.random(job.tokens, dtype=np.float32),
        )
        return VideoItem(record, kept_tokens)

    for number, start in enumerate(range(0, job.videos, job.videos_per_shard)):
        videos = range(start, min(start + job.videos_per_shard, job.videos))
        rows = write_token_shard([make_video(video) for video in videos], store=store, run_id="read")
        commit_records(store, "read", number, rows, made_with=fingerprint(_IDENTITY))


def _read_in_turn(ways: Sequence[TimedReader], repeats: int, objects: _CountedObjects | None = None) -> None:
    """Read in every way once to warm up, then ``repeats`` times in turn; record the costs in ``ways``.

    Each read after the first adds its wall and CPU seconds. With ``objects``, a counted way keeps the number of
    requests of its last read.
    """
    for way in ways:
        way.read()  # shards are open from here on, and files in memory
    for way in [*ways] * repeats:
        before = 0 if objects is None else objects.requests
        start, cpu_start = time.perf_counter(), time.process_time()
        way.read()
        way.seconds.append(time.perf_counter() - start)
        way.cpu_seconds.append(time.process_time() - cpu_start)
        if objects is not None and way.counted:
            way.requests = objects.requests - before


def _make_pyarrow_readers(store: LocalStore) -> Iterator[TimedReader]:
    """Yield the baselines that read the same row groups and columns with pyarrow alone, from open files."""
    cache = TokenCache(store.root)
    all_rows, tier_rows = (_list_rows(cache, ratio) for ratio in (None, TIER))

    def make_reader(rows_of_videos: Sequence[TokenRows], **options: bool) -> Callable[[], object]:
        """Open the shards with these options of ParquetFile; return a function that reads the rows from them."""
        names = {rows.row["token_shard"] for rows in rows_of_videos}
        files = {name: pq.ParquetFile(store.root / name, **options) for name in names}
        groups = [(files[rows.row["token_shard"]], _list_row_groups(rows)) for rows in rows_of_videos]
        return lambda: _read_all(
            groups, lambda at: at[0].read_row_groups(at[1], columns=list(_COLUMNS), use_threads=False)
        )

    checksums = {"page_checksum_verification": True}
    size = _count_token_bytes(all_rows)
    yield TimedReader("pyarrow, mapped", make_reader(all_rows, memory_map=True, **checksums), "", size)
    yield TimedReader("pyarrow, mapped, no checksums", make_reader(all_rows, memory_map=True), "pyarrow, mapped", size)
    yield TimedReader("pyarrow, not mapped", make_reader(all_rows, **checksums), "pyarrow, mapped", size)
    yield TimedReader(
        "pyarrow, mapped, 10 % of 25 %",
        make_reader(tier_rows, memory_map=True, **checksums),
        "",
        _count_token_bytes(tier_rows),
    )


def _make_cache_readers(store: Store, where: str) -> Iterator[TimedReader]:
    """Yield this package's own ways of reading: single videos, batches, a data loader.

    ``where`` begins their names: "S3: " for a store, "" for a folder.
    """
    cache = TokenCache(str(store), store=store)
    ids = cache.video_ids
    shuffled_ids = [ids[i] for i in np.random.default_rng(1).permutation(len(ids))]
    batches = [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]
    size, tier_size = (_count_token_bytes(_list_rows(cache, ratio)) for ratio in (None, TIER))
    beside = f"{where}boto3, a GET a video" if where else "pyarrow, mapped"
    tier_baseline = beside if where else "pyarrow, mapped, 10 % of 25 %"

    def make_loader_reader(workers: int) -> Callable[[], None]:
        data = DataLoader(TokenDataset(cache), batch_size=BATCH, collate_fn=pack, num_workers=workers)
        return lambda: _read_all(data, lambda batch: None)

    readers: dict[str, Callable[[], None]] = {
        "get, in order of selection": lambda: _read_all(ids, lambda video_id: cache.get(video_id, order="selection")),
        "get, in order of index": lambda: _read_all(ids, cache.get),
        "get, shuffled videos": lambda: _read_all(shuffled_ids, cache.get),
        f"get_many, batches of {BATCH}": lambda: _read_all(batches, cache.get_many),
        f"DataLoader, batches of {BATCH}": make_loader_reader(0),
    }
    for name, read in readers.items():
        yield TimedReader(where + name, read, beside, size, counted=True)
    yield TimedReader(f"{where}DataLoader, 2 workers", make_loader_reader(2), beside, size)
    yield TimedReader(
        f"{where}get, 10 % of 25 %",
        lambda: _read_all(ids, lambda i: cache.get(i, TIER)),
        tier_baseline,
        tier_size,
        counted=True,
    )


def _make_get_reader(store: ObjectStore, client: Any) -> TimedReader:
    """Make the baseline: one S3 GET for each video's bytes and nothing else. The shards' footers are read here."""
    rows_of_videos = _list_rows(TokenCache(store.root, store=store), None)
    footers = {rows.row["token_shard"]: rows.row["footer_hash"] for rows in rows_of_videos}
    shards = {name: TokenShard(store, name, footer_hash) for name, footer_hash in footers.items()}
    prefix = store.root.removeprefix(f"s3://{BUCKET}/")
    places = [
        (f"{prefix}/{rows.row['token_shard']}", shards[rows.row["token_shard"]].spans(rows)[0])
        for rows in rows_of_videos
    ]

    def read(place: tuple[str, tuple[int, int]]) -> object:
        name, (start, end) = place
        return client.get_object(Bucket=BUCKET, Key=name, Range=f"bytes={start}-{end - 1}")["Body"].read()

    size = _count_token_bytes(rows_of_videos)
    return TimedReader("S3: boto3, a GET a video", lambda: _read_all(places, read), "", size, requests=len(places))


def _read_all(items: Iterable[T], read: Callable[[T], object]) -> None:
    """Call ``read`` on each item, and discard the results."""
    for item in items:
        read(item)


def _list_rows(cache: TokenCache, ratio: float | None) -> list[TokenRows]:
    """List the token rows to read at this ratio, for each video of the cache."""
    options = cache.check_options(ratio, "index", (), False)
    return [cache.rows_to_read(cache.metadata(video_id), options) for video_id in cache.video_ids]


def _count_token_bytes(rows_of_videos: Sequence[TokenRows]) -> int:
    """Count the bytes of the bfloat16 tokens in these rows."""
    return sum(2 * rows.keep * int(rows.row["hidden_size"]) for rows in rows_of_videos)


def _list_row_groups(rows: TokenRows) -> list[int]:
    """List the numbers of the row groups that have the rows."""
    ends, first = np.cumsum(rows.row["row_counts"]), rows.row["first_row_group"]
    return list(range(first, first + int(np.searchsorted(ends, rows.keep)) + 1))


class _CountedObjects(Objects):
    """A reader of objects that counts its requests."""

    requests = 0

    def read_slice(self, uri: str, start: int, end: int | None = None) -> Slice:
        self.requests += 1
        return super().read_slice(uri, start, end)

    def fetch(self, uri: str, write: Callable[[bytes], object], limit: int | None = None) -> int:
        self.requests += 1
        return super().fetch(uri, write, limit)


@contextmanager
def _run_s3_server() -> Iterator[tuple[_CountedObjects, Any]]:
    """Run moto's S3 server with an empty bucket; yield a counting reader and boto3's client of it.

    Raises UsageError if moto is not installed, RunFailed if it does not start.
    """
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("boto3") is None:
        raise UsageError("--s3 needs moto and boto3: pip install 'moto[server]' boto3")
    import boto3  # noqa: PLC0415 - only with --s3

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _is_answering(f"{address}/moto-api/"):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RunFailed(f"moto's server did not start: see {' '.join(command)}")
            time.sleep(0.1)
        access: dict[str, Any] = {
            "aws_access_key_id": "read",
            "aws_secret_access_key": "read",
            "region_name": "us-east-1",
        }
        client = boto3.client("s3", endpoint_url=address, **access)
        client.create_bucket(Bucket=BUCKET)
        yield _CountedObjects(patience=1.0, answered=True, endpoint_url=address, **access), client
    finally:
        server.terminate()
        server.wait()


def _is_answering(address: str) -> bool:
    """Return True if a server answers at the address without an error."""
    try:
        with urlopen(address, timeout=5):
            return True
    except OSError:  # it is starting
        return False


@contextmanager
def _use_one_thread() -> Iterator[None]:
    """Limit torch and pyarrow's CPU pool to one thread in this context; threads for reading files stay."""
    threads = torch.get_num_threads(), pa.cpu_count()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads[0])
        pa.set_cpu_count(threads[1])
