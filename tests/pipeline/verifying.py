"""Small caches to verify, and verification as a test asks for it."""

from __future__ import annotations

import io
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pipeline import TokenCache
from pipeline.cache.writer import VideoItem
from pipeline.errors import VideoFault
from pipeline.rewrite.remove import CacheRemoval, remove_videos
from pipeline.storage.stores import LocalStore, ObjectStore, Store
from pipeline.verify.report import Report
from pipeline.verify.verify import VerifyRequest, verify
from tests.builders.caches import encoded, encoded_failure, random_tokens, write_header, write_shard

NOW = timedelta(0)
SHAPE = (4, 9, 8)


def verified(store: Store, **more: object) -> Report:
    """Verify a cache in which nothing is too young to be deleted."""
    return verify(store, VerifyRequest(**{"keep": NOW, "jobs": 1} | more), Console(file=io.StringIO()))


def remove(store: Store, *video_ids: str, reason: str = "takedown 17") -> CacheRemoval:
    """Remove videos of a cache in which nothing is too young to be deleted."""
    return remove_videos(store, video_ids, reason, print, NOW)


def kinds(report: Report) -> list[str]:
    return [problem.kind for problem in report.problems]


def tokens_of(root: Path) -> dict[str, torch.Tensor]:
    """Read the tokens of all videos, each compared with its checksum."""
    cache = TokenCache(root)
    return {name: cache.get(name, verify=True, order="selection").tokens for name in cache.video_ids}


def assert_tokens(root: Path, expected: dict[str, torch.Tensor]) -> None:
    """Check that a cache has these videos, bit for bit, and that nothing is wrong with it."""
    tokens = tokens_of(root)
    assert tokens.keys() == expected.keys()
    assert all(torch.equal(tokens[name], expected[name]) for name in tokens)
    assert kinds(verified(LocalStore(root))) == []


def video_of(video_id: str, seed: int, method: str = "gstep", **more: object) -> VideoItem:
    return encoded(video_id, random_tokens(seed, SHAPE), 0.25, method, **more)


def six_videos(out: Path) -> LocalStore:
    """Write a, b and c in a shard, d with one that failed, e with f, and f once more in another run."""
    store = write_header(out, hidden_size=8)
    write_shard(store, "run", *(video_of(name, seed) for seed, name in enumerate("abc")))
    write_shard(store, "run", video_of("d", 3), encoded_failure("bad", VideoFault("corrupt", "x")))
    write_shard(store, "run", video_of("e", 4), video_of("f", 20))
    write_shard(store, "run2", video_of("f", 5, attempts=2))
    return store


def two_shards(out: Path) -> LocalStore:
    """Write the videos a and b in a shard each, of one run, and one that failed."""
    store = write_header(out, hidden_size=8)
    write_shard(store, "run", video_of("a", 0))
    write_shard(store, "run", video_of("b", 1), encoded_failure("bad", VideoFault("corrupt", "moov atom not found")))
    return store


def copy_to_s3(store: LocalStore, server: Any) -> ObjectStore:
    """Copy a cache to a prefix of the server."""
    far = ObjectStore(server.uri("c"), server.objects())
    for file in (file for folder in ("", "tokens", "videos") for file in store.list_files(folder)):
        far.put(file.name, store.read(file.name))
    return far
