"""One TokenCache for several threads and processes: each reads what one alone reads, for no more requests."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pipeline import CorruptShard, TokenCache
from pipeline.cache.writer import VideoItem
from pipeline.storage.stores import ObjectStore
from tests.pipeline.caches import encoded, random_tokens, write_header, write_shard
from tests.pipeline.s3 import S3Server

SHAPE = (8, 49, 256)  # 50 KB of tokens, so that few are in the tail that comes with a shard's footer
IDS = [f"v{i}" for i in range(11)]


@pytest.fixture(scope="module")
def server():
    with S3Server() as server:
        store = write_header(ObjectStore(server.uri("c"), server.objects()))
        for start in range(0, len(IDS), 4):
            write_shard(store, f"run{start}", *map(video, IDS[start : start + 4]))
        yield server


@pytest.fixture
def store(server):
    """On S3, in three shards."""
    return ObjectStore(server.uri("c"), server.objects())


@pytest.fixture
def folder(tmp_path):
    write_shard(write_header(tmp_path), "run", *map(video, IDS))
    return tmp_path


def video(name: str) -> VideoItem:
    return encoded(name, random_tokens(int(name[1:]), SHAPE), 0.25, "gstep")


def bits(cache: TokenCache, video_id: str, order: str = "index") -> bytes:
    return cache.get(video_id, order=order).tokens.contiguous().view(torch.int16).numpy().tobytes()


def read_all(caches: list[TokenCache], out) -> None:
    """In a process of its own."""
    out.put([[bits(cache, name) for name in IDS] for cache in caches])


def test_it_pickles_small_and_reads_the_same(store, folder):
    for cache in (TokenCache(folder), TokenCache(store.root, store=store)):
        expected = [bits(cache, name) for name in IDS]
        data = pickle.dumps(cache)  # with its shards open
        other = pickle.loads(data)  # noqa: S301
        assert len(data) < 8192 and [bits(other, name) for name in IDS] == expected


def test_a_fork_reads_the_same_and_waits_for_no_thread_of_its_parent(store, folder):
    """It was forked while shards were open and a thread of the parent opened another one, for which others wait."""
    cache, remote = TokenCache(folder), TokenCache(store.root, store=store)
    expected = [bits(remote, name) for name in IDS]
    load, opening, go_on = cache._open_shard._load, threading.Event(), threading.Event()

    def slow(*key):
        opening.set()
        go_on.wait(60)
        return load(*key)

    cache._open_shard._load = slow
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    with ThreadPoolExecutor(1) as pool:
        of_parent = pool.submit(bits, cache, "v0")
        opening.wait(60)
        cache._open_shard._load = load
        child = context.Process(target=read_all, args=([cache, remote], out))
        child.start()
        of_child = out.get(timeout=60)
        go_on.set()
        assert of_child == [expected, expected] and of_parent.result() == expected[0]
        child.join()
    assert [bits(remote, name) for name in IDS] == expected


def test_threads_read_the_same_for_the_requests_of_one(server, store):
    def of_threads(n: int) -> tuple[list[list[bytes]], int]:
        """Read all videos four times by so many threads; return what they gave, and the number of requests."""
        cache, start = TokenCache(store.root, store=store), threading.Barrier(n)

        def read(thread: int) -> list[bytes]:
            start.wait()
            return [bits(cache, IDS[(i + thread) % len(IDS)]) for i in range(len(IDS))]

        server.requests.clear()
        with ThreadPoolExecutor(n) as pool:
            results = list(pool.map(read, range(4)))
        return results, len(server.requests)

    (of_one, n_of_one), (of_four, n_of_four) = of_threads(1), of_threads(4)
    assert of_four == of_one and n_of_four == n_of_one <= 4 * len(IDS) + 2 * 3


def test_what_cannot_be_opened_is_tried_again(folder):
    cache = TokenCache(folder)
    (file,) = (folder / "tokens").iterdir()
    data = file.read_bytes()
    file.unlink()
    for _ in range(2):
        with pytest.raises(CorruptShard, match=r"missing \(reading 'v3'\)"):
            cache.get("v3")
    file.write_bytes(data)
    assert bits(cache, "v3")
