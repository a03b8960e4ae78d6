"""A made-up cache to read, in a folder or on a server of the S3 protocol on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobs.benchmark.server import served
from jobs.benchmark.table.times import IDENTITY, begin_cache
from pipeline.cache.header import fingerprint
from pipeline.cache.writer import KeptTokens, PrunedVideo, commit, write_token_shard
from pipeline.errors import UsageError
from pipeline.rows import VideoRecord
from pipeline.storage.s3 import Objects, Slice
from pipeline.storage.stores import Store

STORED, TIER = 0.25, 0.10
BUCKET = "read"
_START_S = 60.0


@dataclass(frozen=True)
class ReadJob:
    """The size of a made-up cache, and how often it is read; of each video a quarter is stored, ``tokens``."""

    videos: int
    tokens: int
    hidden: int
    videos_per_shard: int
    repeats: int


def make_cache(store: Store, job: ReadJob) -> None:
    """Write random bfloat16 tokens in random order of selection, as a run of GSTEP at 25 % does."""
    begin_cache(store, job.hidden)
    numbers = np.random.default_rng(0)
    for number, start in enumerate(range(0, job.videos, job.videos_per_shard)):
        places = range(start, min(start + job.videos_per_shard, job.videos))
        rows = write_token_shard([_video(place, job, numbers) for place in places], store=store, run_id="read")
        commit(store, "read", number, rows, made_with=fingerprint(IDENTITY))


def _video(place: int, job: ReadJob, numbers: np.random.Generator) -> PrunedVideo:
    """Make one video with random tokens in random order of selection."""
    n_total = round(job.tokens / STORED)
    record: VideoRecord = {
        "video_id": f"video-{place:06d}",
        "uri": f"/videos/{place:06d}.mp4",
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
    kept = KeptTokens(
        tokens=numbers.integers(0, 2**14, (job.tokens, job.hidden), dtype=np.int16),
        index=numbers.permutation(n_total)[: job.tokens].astype(np.int32),
        rank=np.arange(job.tokens, dtype=np.int32),
        density=numbers.random(job.tokens, dtype=np.float32),
    )
    return PrunedVideo(record, kept)


class Counted(Objects):
    """A reader of objects that counts its requests."""

    requests = 0

    def read_slice(self, uri: str, start: int, end: int | None = None) -> Slice:
        self.requests += 1
        return super().read_slice(uri, start, end)

    def fetch(self, uri: str, write: Callable[[bytes], object], limit: int | None = None) -> int:
        self.requests += 1
        return super().fetch(uri, write, limit)


@contextmanager
def s3_server() -> Iterator[tuple[Counted, Any]]:
    """Run moto's S3 server with an empty bucket; yield a counting reader of it and boto3's client of it.

    Raises UsageError where moto is missing.
    """
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("boto3") is None:
        raise UsageError("--s3 needs moto and boto3: pip install 'moto[server]' boto3")
    import boto3  # noqa: PLC0415 - only with --s3

    settings = {"aws_access_key_id": "read", "aws_secret_access_key": "read", "region_name": "us-east-1"}
    with served("moto.server", "-H", "127.0.0.1", "-p", ready="/moto-api/", patience_s=_START_S) as address:
        settings["endpoint_url"] = address
        client = boto3.client("s3", **settings)
        client.create_bucket(Bucket=BUCKET)
        yield Counted(patience=1.0, **settings), client
