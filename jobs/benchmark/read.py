"""The cost of reading a cache, beside plain pyarrow, and on S3 beside plain GETs of the same bytes."""

from __future__ import annotations

import argparse
import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader

from gstep import VisualTokens, make_pruner
from jobs.benchmark.shared import Turns, add_flag, make_result, parse_existing_folder, run_in_turn, say
from jobs.benchmark.tokens import make_iid_tokens
from jobs.frame.json_document import CommandResult
from pipeline import TokenCache, TokenDataset, pack
from pipeline.cache.header import HEADER, CacheHeader, CacheIdentity, compute_fingerprint, serialize_header
from pipeline.cache.schema import SCHEMA_VERSION
from pipeline.cache.token_shard import TokenRequest, TokenShard
from pipeline.cache.writer import VideoItem, commit_records, write_token_shard
from pipeline.errors import RunFailed, UsageError
from pipeline.prune.encode_stage import collect_kept_tokens, make_pruning_columns
from pipeline.storage.s3 import Objects, Slice
from pipeline.storage.stores import LocalStore, ObjectStore, Store

T = TypeVar("T")
Ways = dict[
    str, Callable[[], object]
]  # name -> reads all videos once; its result is the number of requests, if counted
STORED, TIER = 0.25, 0.10
OF_TIER = ", 10 % of 25 %"  # end of the names of ways that read a smaller ratio
S3 = "S3: "  # beginning of the names of ways that read from S3
MAPPED, GETS, WORKERS = "pyarrow, mapped", "S3: boto3, a GET a video", "DataLoader, 2 workers"
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


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    add_flag(parser, "--videos", 66, "synthetic videos", "N")
    add_flag(parser, "--tokens", 1568, "stored tokens per video, a quarter of all", "K")
    add_flag(parser, "--hidden", 3584, "hidden size", "D")
    add_flag(parser, "--videos-per-shard", 22, "videos of a token shard", "N")
    add_flag(parser, "--repeats", 5, "measure N times, and show medians", "N")
    place = "make the cache in DIR, and remove it at the end (default: a temporary folder)"
    add_flag(parser, "--folder", None, place, "DIR", parse_existing_folder)
    parser.add_argument("--s3", action="store_true", help="read from an S3 server (moto, a separate process) too")


def run(arguments: argparse.Namespace) -> CommandResult:
    """Make a cache in a temporary folder (and on S3 with ``--s3``), read it in every way, and return the table.

    Limits torch and pyarrow's CPU pool to one thread in this process.

    Raises:
        RunFailed: the S3 server does not start.
        UsageError: the packages for ``--s3`` are not installed.
    """
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    with TemporaryDirectory(dir=arguments.folder) as temporary:
        store = LocalStore(Path(temporary) / "cache")
        say(f"making a cache of {arguments.videos} videos")
        make_cache(store, arguments)
        say("reading it")
        cache = TokenCache(store.root)
        turns = _read_in_turn({**_make_pyarrow_ways(store, cache), **_make_ways(cache)}, arguments.repeats)
        if arguments.s3:
            with _run_s3_server() as (objects, client):
                say("the same on S3")
                remote = ObjectStore(f"s3://{BUCKET}/cache", objects)
                make_cache(remote, arguments)
                turns |= _read_in_turn(_make_s3_ways(remote, objects, client), arguments.repeats)
        n_bytes, n_tier_bytes = (_count_token_bytes(_list_rows(cache, ratio)) for ratio in (None, TIER))
    ways = [
        {
            "name": name,
            "beside": find_baseline(name),
            "n_bytes": n_tier_bytes if name.endswith(OF_TIER) else n_bytes,
            "seconds": runs.wall_s,
            "cpu_seconds": runs.cpu_s,
            "requests": runs.result,
        }
        for name, runs in turns.items()
    ]
    by_name = {way["name"]: way for way in ways}
    return make_result(
        f"Reading {arguments.videos} videos of {2e-6 * arguments.tokens * arguments.hidden:.1f} MB of tokens each, in "
        "memory already",
        ("", "GB/s", "of plain", "GB a CPU second", "of plain", "GET"),
        [make_row(way, by_name.get(way["beside"])) for way in ways],
        "of plain: pyarrow with checksums and memory maps, for the same row groups and columns; on S3 boto3",
        job={name: getattr(arguments, name) for name in ("videos", "tokens", "hidden", "videos_per_shard", "repeats")},
        ways=ways,
    )


def find_baseline(name: str) -> str:
    """Return the name of the plain way that a way is compared with; "" if it is itself such a way."""
    baseline = GETS if name.startswith(S3) else MAPPED + OF_TIER * name.endswith(OF_TIER)
    return "" if name == baseline else baseline


def make_row(way: Mapping[str, Any], plain: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Format the row of a way: GB/s and GB per CPU second, each with its share of ``plain``, and the number of GETs.

    A share is the median over rounds of the ratio of both ways in the same round; "" without ``plain``.
    """

    def compute_rates(of: Mapping[str, Any], clock: str) -> list[float]:
        return [of["n_bytes"] / 1e9 / max(seconds, 1e-9) for seconds in of[clock]]

    cells = []
    for clock in ("seconds", "cpu_seconds"):
        own = compute_rates(way, clock)
        shares = [rate / base for rate, base in zip(own, compute_rates(plain, clock), strict=True)] if plain else []
        cells += [f"{median(own):.2f}", f"{median(shares):.0%}" if shares else ""]
    return (way["name"], *cells, "" if way["requests"] is None else str(way["requests"]))


def make_cache(store: Store, job: argparse.Namespace) -> None:
    """Write a cache of random tokens in the layout of GSTEP at 25 %; all videos have the same tokens."""
    store.make()
    header: CacheHeader = {"schema_version": SCHEMA_VERSION, "identity": _IDENTITY, "newline": None}
    store.put(HEADER, serialize_header({**header, "hidden_size": job.hidden}))
    visual = VisualTokens(make_iid_tokens(1, round(job.tokens / STORED), job.hidden))
    pruned = make_pruner("random").prune(visual, STORED)
    pruned = replace(pruned, density=torch.rand(pruned.n_kept, generator=torch.Generator().manual_seed(0)))
    kept_tokens, columns = collect_kept_tokens(pruned, visual), make_pruning_columns(pruned, visual)
    columns |= {"status": "ok", "attempts": 1, "frame_indices": [0], "timestamps": [0.0]}

    def make_video(number: int) -> VideoItem:
        uri = f"/videos/{number:06d}.mp4"
        return VideoItem({**columns, "video_id": f"video-{number:06d}", "uri": uri}, kept_tokens)

    for number, start in enumerate(range(0, job.videos, job.videos_per_shard)):
        videos = range(start, min(start + job.videos_per_shard, job.videos))
        rows = write_token_shard([make_video(video) for video in videos], store=store, run_id="read")
        commit_records(store, "read", number, rows, made_with=compute_fingerprint(_IDENTITY))


def _read_in_turn(ways: Ways, repeats: int) -> dict[str, Turns]:
    """Read in every way once as a warm-up, which opens shards and fills the page cache, then ``repeats`` times."""
    run_in_turn(ways, 1)
    return run_in_turn(ways, repeats)


def _make_pyarrow_ways(store: LocalStore, cache: TokenCache) -> Ways:
    """Make the plain ways, which read the same row groups and columns with pyarrow alone, from files opened before."""
    all_rows, tier_rows = (_list_rows(cache, ratio) for ratio in (None, TIER))

    def make_way(rows_of_videos: Sequence[TokenRequest], **options: bool) -> Callable[[], object]:
        """Open the shards with these options of ParquetFile, and return a function that reads the rows from them."""
        names = {rows.row["token_shard"] for rows in rows_of_videos}
        files = {name: pq.ParquetFile(store.root / name, **options) for name in names}
        groups = [(files[rows.row["token_shard"]], _list_row_groups(rows)) for rows in rows_of_videos]
        return lambda: _read_all(
            groups, lambda at: at[0].read_row_groups(at[1], columns=list(_COLUMNS), use_threads=False)
        )

    return {
        MAPPED: make_way(all_rows, memory_map=True, page_checksum_verification=True),
        f"{MAPPED}, no checksums": make_way(all_rows, memory_map=True),
        "pyarrow, not mapped": make_way(all_rows, page_checksum_verification=True),
        MAPPED + OF_TIER: make_way(tier_rows, memory_map=True, page_checksum_verification=True),
    }


def _make_ways(cache: TokenCache) -> Ways:
    """Make this package's ways of reading: single videos in two orders, batches, and data loaders."""
    ids = cache.video_ids
    shuffled_ids = [ids[i] for i in np.random.default_rng(1).permutation(len(ids))]
    batches = [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]
    loaders = [
        DataLoader(TokenDataset(cache), batch_size=BATCH, collate_fn=pack, num_workers=workers) for workers in (0, 2)
    ]
    return {
        "get, in order of selection": lambda: _read_all(ids, lambda video_id: cache.get(video_id, order="selection")),
        "get, in order of index": lambda: _read_all(ids, cache.get),
        "get, shuffled videos": lambda: _read_all(shuffled_ids, cache.get),
        f"get_many, batches of {BATCH}": lambda: _read_all(batches, cache.get_many),
        f"DataLoader, batches of {BATCH}": lambda: _read_all(loaders[0], lambda batch: None),
        WORKERS: lambda: _read_all(loaders[1], lambda batch: None),
        f"get{OF_TIER}": lambda: _read_all(ids, lambda video_id: cache.get(video_id, TIER)),
    }


def _make_s3_ways(store: ObjectStore, objects: _CountedObjects, client: Any) -> Ways:
    """Make the plain way, one S3 GET for each video's bytes, and this package's ways, with their requests counted.

    Requests that DataLoader workers make in other processes are not counted.
    """
    cache = TokenCache(store.root, store=store)
    rows_of_videos = _list_rows(cache, None)
    footers = {rows.row["token_shard"]: rows.row["footer_hash"] for rows in rows_of_videos}
    shards = {name: TokenShard(store, name, footer_hash) for name, footer_hash in footers.items()}
    prefix = store.root.removeprefix(f"s3://{BUCKET}/")
    places = [
        (f"{prefix}/{rows.row['token_shard']}", shards[rows.row["token_shard"]].spans(rows)[0])
        for rows in rows_of_videos
    ]

    def get_all() -> int:
        for name, (start, end) in places:
            client.get_object(Bucket=BUCKET, Key=name, Range=f"bytes={start}-{end - 1}")["Body"].read()
        return len(places)

    ways = _make_ways(cache)
    counted = {name: read if name == WORKERS else partial(objects.count, read) for name, read in ways.items()}
    return {GETS: get_all, **{S3 + name: read for name, read in counted.items()}}


def _read_all(items: Iterable[T], read: Callable[[T], object]) -> None:
    """Call ``read`` on each item, and discard the results."""
    for item in items:
        read(item)


def _list_rows(cache: TokenCache, ratio: float | None) -> list[TokenRequest]:
    """List the token rows to read for each video of the cache; the ratio None means all that is stored."""
    options = cache.check_options(ratio, "index", (), False)
    return [cache.make_token_request(cache.metadata(video_id), options) for video_id in cache.video_ids]


def _count_token_bytes(rows_of_videos: Sequence[TokenRequest]) -> int:
    """Return the bytes of the bfloat16 tokens in these rows."""
    return sum(2 * rows.keep * int(rows.row["hidden_size"]) for rows in rows_of_videos)


def _list_row_groups(rows: TokenRequest) -> list[int]:
    """List the numbers of the row groups to read for these rows."""
    ends, first = np.cumsum(rows.row["row_counts"]), rows.row["first_row_group"]
    return list(range(first, first + int(np.searchsorted(ends, rows.keep)) + 1))


class _CountedObjects(Objects):
    """An S3 client that counts its requests in ``requests``."""

    requests = 0

    def count(self, read: Callable[[], object]) -> int:
        """Call ``read``, and return the number of requests that it made."""
        before = self.requests
        read()
        return self.requests - before

    def read_slice(self, uri: str, start: int, end: int | None = None) -> Slice:
        self.requests += 1
        return super().read_slice(uri, start, end)

    def fetch(self, uri: str, write: Callable[[bytes], object], limit: int | None = None) -> int:
        self.requests += 1
        return super().fetch(uri, write, limit)


@contextmanager
def _run_s3_server() -> Iterator[tuple[_CountedObjects, Any]]:
    """Run moto's S3 server with an empty bucket in a child process; yield a counting client and boto3's client.

    Raises:
        UsageError: moto or boto3 is not installed.
        RunFailed: the server does not start within a minute.
    """
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("boto3") is None:
        raise UsageError("--s3 needs moto and boto3: pip install 'moto[server]' boto3")
    import boto3  # noqa: PLC0415 - only with --s3
    from botocore.exceptions import EndpointConnectionError  # noqa: PLC0415 - as above

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    access: dict[str, Any] = {
        "endpoint_url": f"http://127.0.0.1:{port}",
        "aws_access_key_id": "read",
        "aws_secret_access_key": "read",
        "region_name": "us-east-1",
    }
    client, deadline = boto3.client("s3", **access), time.monotonic() + _START_S
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                client.create_bucket(Bucket=BUCKET)
                break
            except EndpointConnectionError as error:  # it is starting
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RunFailed(f"moto's server did not start: see {' '.join(command)}") from error
        yield _CountedObjects(patience=1.0, answered=True, **access), client
    finally:
        server.terminate()
        server.wait()
