"""Videos of an S3 prefix and of a folder, one or several at once, shared by threads and processes: the same bytes.

Requests to S3 are few, and no more where threads share a cache.
"""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pipeline import CorruptShard, FailedVideo, RatioNotCached, TokenCache
from pipeline.cache.reader import group_runs
from pipeline.cache.token_shard import TokenRequest
from pipeline.errors import VideoFault
from pipeline.storage.stores import LocalStore, ObjectStore
from tests.builders.caches import encoded, encoded_failure, make_cache, random_tokens, write_header, write_shard
from tests.builders.stores import S3Server
from tests.pipeline.damage import flip_token

SHAPE = (8, 49, 512)  # 98 KB of tokens: more than comes with a shard's footer
IDS = [f"v{i}" for i in range(7)]


def write_cache(place) -> None:
    store = write_header(place)
    videos = [encoded(name, random_tokens(i, SHAPE), 0.25, "gstep") for i, name in enumerate(IDS)]
    write_shard(store, "a", *videos[:4])
    write_shard(store, "b", *videos[4:], encoded_failure("bad", VideoFault("corrupt", "moov atom not found")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("cache")
    write_cache(root)
    return root


@pytest.fixture(scope="module")
def server():
    with S3Server() as server:
        write_cache(ObjectStore(server.uri("c"), server.objects()))
        yield server


@pytest.fixture
def remote(server):
    store = ObjectStore(server.uri("c"), server.objects())
    return TokenCache(store.root, store=store)


def test_neighbours_are_one_run_as_far_as_the_bytes_go():
    def rows(shard: str, first: int, keep: int = 10) -> TokenRequest:
        counts = {"row_counts": [6, 4], "n_tokens": 10, "hidden_size": 8}
        return TokenRequest({"token_shard": shard, "first_row_group": first, **counts}, keep, ())

    videos = [rows("b", 0), rows("a", 4), rows("a", 0), rows("a", 2), rows("b", 4), rows("a", 4)]
    assert group_runs(videos) == [[2, 3, 1], [5], [0], [4]]
    assert group_runs(videos, limit=320) == [[2, 3], [1], [5], [0], [4]]
    assert group_runs([rows("a", 0, keep=6), rows("a", 2, keep=6)]) == [[0], [1]]  # a gap is between them
    assert group_runs([]) == []


def test_several_videos_of_either_store_are_as_each_alone_in_a_folder(folder, remote):
    alone, ids = TokenCache(folder), ["v5", "v1", "v0", "v6", "v1", "v3"]
    assert remote.video_ids == alone.video_ids == IDS
    for ratio, order, verify in ((None, "index", False), (0.1, "selection", True), (0.2, "index", True)):
        videos = [alone.get(name, ratio, order) for name in ids]
        for cache in (alone, remote):
            for video, other in zip(videos, cache.get_many(ids, ratio, order, verify=verify), strict=True):
                assert video.video_id == other.video_id
                assert torch.equal(video.tokens.view(torch.int16), other.tokens.view(torch.int16))
                assert torch.equal(video.index, other.index) and torch.equal(video.rank, other.rank)
                assert video.metadata == other.metadata | {"write_s": video.metadata["write_s"]}
            assert cache.get_many([]) == []


def test_neighbours_are_one_request(server, remote):
    def n_requests(*ids: str, ratio: float | None = None) -> int:
        server.requests.clear()
        remote.get_many(ids, ratio)
        return sum("/tokens/" in request.path for request in server.requests)

    assert n_requests(*IDS) == 2 + 2  # the footer of each shard, all tokens of each
    assert n_requests(*IDS) == 2
    assert n_requests("v0", "v2") == 2 and n_requests("v2", "v1") == 1
    assert n_requests("v0", "v1", ratio=0.1) == 2  # 40 % of each: the rest lies between


def test_what_a_row_forbids_is_said_before_anything_is_read(server, remote):
    server.requests.clear()
    with pytest.raises(FailedVideo, match="'bad' failed"):
        remote.get_many(["v0", "bad", "nope"])
    with pytest.raises(RatioNotCached, match="'v4'"):
        remote.get_many(["v4", "bad"], 0.5)
    assert not any("/tokens/" in request.path for request in server.requests)


def test_damage_names_its_video(tmp_path):
    write_cache(tmp_path)
    flip_token(tmp_path, "v5")
    cache = TokenCache(tmp_path)
    assert len(cache.get_many(["v0", "v4", "v6"])) == 3
    for order in ("index", "selection"):
        with pytest.raises(CorruptShard, match=r"\(reading 'v5'\); python -m jobs\.verify .* add --repair"):
            cache.get_many(IDS, order=order)


def test_a_store_that_fails_fails_all(server, remote):
    server.fail("GET", "c/tokens/b-*", 403)
    with pytest.raises(PermissionError):
        remote.get_many(IDS)
    server._failures.clear()
    assert len(remote.get_many(IDS)) == 7


def test_a_shard_is_one_put_and_a_video_one_get(server):
    store = write_header(ObjectStore(server.uri("requests"), server.objects()))
    shard = [encoded(name, random_tokens(i, SHAPE), 0.25, "gstep") for i, name in enumerate(IDS[:2])]
    cache = []
    for act, requests in (
        (lambda: write_shard(store, "run", *shard), {"PUT": 2, "HEAD": 2, "LIST": 2, "GET": 1}),  # some of the helper
        (lambda: cache.append(TokenCache(store.root, store=store)), {"GET": 2, "LIST": 1}),
        (lambda: cache[0].metadata("v0"), {"GET": 1}),  # its videos shard, kept from here on
        (lambda: cache[0].get("v0"), {"GET": 2}),  # the token shard's footer, then the tokens
        (lambda: cache[0].get("v1"), {"GET": 1}),
        (lambda: cache[0].get("v1", 0.1), {"GET": 1}),
    ):
        server.requests.clear()
        act()
        assert server.counts() == requests


def bits(cache: TokenCache, video_id: str) -> bytes:
    return cache.get(video_id).tokens.contiguous().view(torch.int16).numpy().tobytes()


def read_all(caches: list[TokenCache], out) -> None:
    """In a process of its own."""
    out.put([[bits(cache, name) for name in IDS] for cache in caches])


def test_a_cache_pickles_small_and_reads_the_same(folder, remote):
    for cache in (TokenCache(folder), remote):
        expected = [bits(cache, name) for name in IDS]
        data = pickle.dumps(cache)  # with its shards open
        other = pickle.loads(data)  # noqa: S301
        assert len(data) < 8192 and [bits(other, name) for name in IDS] == expected


def test_a_fork_reads_the_same_and_waits_for_no_thread_of_its_parent(folder, remote):
    """It was forked while shards were open and a thread of the parent opened another one, for which others wait."""
    opening, go_on = threading.Event(), threading.Event()

    class Slow(LocalStore):
        def open(self, name):
            if not opening.is_set():
                opening.set()
                go_on.wait(60)
            return super().open(name)

    cache, expected = TokenCache(folder, store=Slow(folder)), [bits(remote, name) for name in IDS]
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    with ThreadPoolExecutor(1) as pool:
        of_parent = pool.submit(bits, cache, "v0")
        opening.wait(60)
        child = context.Process(target=read_all, args=([cache, remote], out))
        child.start()
        of_child = out.get(timeout=60)
        go_on.set()
        assert of_child == [expected, expected] and of_parent.result() == expected[0]
        child.join()
    assert [bits(remote, name) for name in IDS] == expected


def test_threads_read_the_same_for_the_requests_of_one(server, remote):
    results = {}
    for n in (1, 4):  # threads, which read all videos four times, each beginning with another
        cache = TokenCache(remote.store.root, store=remote.store)
        start = threading.Barrier(n)

        def read(thread: int, cache=cache, start=start) -> list[bytes]:
            start.wait()
            return [bits(cache, IDS[(i + thread) % len(IDS)]) for i in range(len(IDS))]

        server.requests.clear()
        with ThreadPoolExecutor(n) as pool:
            results[n] = list(pool.map(read, range(4))), len(server.requests)
    assert results[4] == results[1] and results[1][1] <= 4 * len(IDS) + 2 * 2


def test_what_cannot_be_opened_is_tried_again(tmp_path):
    make_cache(tmp_path, {"v3": random_tokens(3)})
    cache = TokenCache(tmp_path)
    (file,) = (tmp_path / "tokens").iterdir()
    data = file.read_bytes()
    file.unlink()
    for _ in range(2):
        with pytest.raises(CorruptShard, match=r"missing \(reading 'v3'\)"):
            cache.get("v3")
    file.write_bytes(data)
    assert bits(cache, "v3")
