"""Small caches to verify, and verification as a test asks for it."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from rich.console import Console

from pipeline import TokenCache
from pipeline.cache.writer import VideoItem
from pipeline.errors import VideoFault
from pipeline.storage.stores import LocalStore, ObjectStore
from pipeline.verify.report import Report
from pipeline.verify.verify import VerifyRequest, verify
from tests.builders.caches import encoded, encoded_failure, make_identity, random_tokens, write_header, write_shard

SHAPE = (4, 9, 8)


def verified(store: LocalStore | ObjectStore, **more: object) -> Report:
    return verify(store, VerifyRequest(**more), Console(file=io.StringIO()))


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


def video_of(video_id: str, seed: int, **more: object) -> VideoItem:
    return encoded(video_id, random_tokens(seed, SHAPE), 0.25, "gstep", **more)


def six_videos(out: Path) -> LocalStore:
    """Write a, b and c in a shard, d with one that failed, e with f, and f once more in another run."""
    store = write_header(out, hidden_size=8)
    write_shard(store, "run", *(video_of(name, seed) for seed, name in enumerate("abc")))
    write_shard(store, "run", video_of("d", 3), encoded_failure("bad", VideoFault("corrupt", "x")))
    write_shard(store, "run", video_of("e", 4), video_of("f", 20))
    write_shard(store, "run2", video_of("f", 5, attempts=2))
    assert isinstance(store, LocalStore)
    return store


def two_shards(out: Path) -> LocalStore:
    """Write the videos a and b in a shard each, of one run, and one that failed."""
    store = write_header(out, hidden_size=8)
    write_shard(store, "run", video_of("a", 0))
    write_shard(store, "run", video_of("b", 1), encoded_failure("bad", VideoFault("corrupt", "moov atom not found")))
    assert isinstance(store, LocalStore)
    return store


def by_an_own_method(out: Path, **pruner: object) -> LocalStore:
    """Write a cache of random tokens that names a method whose module is not importable here."""
    identity = make_identity(pruner={"method": "not_here:Mine", **pruner})
    store = write_header(out, hidden_size=8, identity=identity)
    write_shard(store, "run", encoded("a", random_tokens(0, SHAPE), 0.25, "random"))
    assert isinstance(store, LocalStore)
    return store


def check_damage(
    store: LocalStore, act: Callable[[LocalStore], object], expected: set[str], blamed: Collection[str | None]
) -> None:
    """Check that damage of ``two_shards`` is found as problems of these classes, which blame nothing else."""
    act(store)
    report = verified(store)
    assert set(kinds(report)) == expected and report.exit_code == 1, report.problems
    for problem in report.problems:
        record = problem.as_record()
        assert record["class"] == problem.kind and record["what"] and record["shard"] and record["remedy"]
        assert problem.video_id in blamed
