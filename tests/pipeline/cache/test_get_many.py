"""Several videos at once: the same as one by one, shard by shard, and no more requests than stretches."""

from __future__ import annotations

import pytest
import torch

from pipeline import CorruptShard, FailedVideo, RatioNotCached, TokenCache, UnknownVideo
from pipeline.cache.reader import group_runs
from pipeline.cache.token_shard import TokenRows
from pipeline.errors import VideoFault
from pipeline.storage.stores import ObjectStore
from tests.pipeline.caches import encoded, encoded_failure, random_tokens, write_header, write_shard
from tests.pipeline.s3 import S3Server

SHAPE = (8, 49, 512)  # 98 KB of tokens: more than comes with a shard's footer
IDS = [f"v{i}" for i in range(7)]


def make(store) -> None:
    store = write_header(store)
    videos = [encoded(name, random_tokens(i, SHAPE), 0.25, "gstep") for i, name in enumerate(IDS)]
    write_shard(store, "a", *videos[:4])
    write_shard(store, "b", *videos[4:], encoded_failure("bad", VideoFault("corrupt", "moov atom not found")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("cache")
    make(root)
    return root


@pytest.fixture(scope="module")
def server():
    with S3Server() as server:
        make(ObjectStore(server.uri("c"), server.objects()))
        yield server


@pytest.fixture
def remote(server):
    store = ObjectStore(server.uri("c"), server.objects())
    return TokenCache(store.root, store=store)


def rows(shard: str, first: int, keep: int = 10, n_tokens: int = 10) -> TokenRows:
    row = {"token_shard": shard, "first_row_group": first, "row_counts": [6, 4], "n_tokens": n_tokens, "hidden_size": 8}
    return TokenRows(row, keep, ())


def test_neighbours_are_one_run_as_far_as_the_bytes_go():
    wanted = [rows("b", 0), rows("a", 4), rows("a", 0), rows("a", 2), rows("b", 4), rows("a", 4)]
    assert group_runs(wanted) == [[2, 3, 1], [5], [0], [4]]
    assert group_runs(wanted, limit=320) == [[2, 3], [1], [5], [0], [4]]
    assert group_runs([rows("a", 0, keep=6), rows("a", 2, keep=6)]) == [[0], [1]]  # a gap is between them
    assert group_runs([]) == []


@pytest.mark.parametrize("where", ["folder", "remote"])
@pytest.mark.parametrize("verify", [False, True])
def test_they_are_what_each_is_alone(request, where, verify):
    found = request.getfixturevalue(where)
    cache = found if isinstance(found, TokenCache) else TokenCache(found)
    asked = ["v5", "v1", "v0", "v6", "v1", "v3"]
    for ratio, order in ((None, "index"), (0.1, "selection")):
        many = cache.get_many(asked, ratio, order, verify=verify)
        for name, video in zip(asked, many, strict=True):
            alone = cache.get(name, ratio, order)
            assert video.video_id == name and torch.equal(video.index, alone.index)
            assert torch.equal(video.tokens.view(torch.int16), alone.tokens.view(torch.int16))
    assert cache.get_many([]) == []


def test_neighbours_are_one_request(server, remote):
    def requests(*ids: str, ratio: float | None = None) -> int:
        server.requests.clear()
        remote.get_many(ids, ratio)
        return sum("/tokens/" in request.path for request in server.requests)

    assert requests(*IDS) == 2 + 2  # the footer of each shard, all tokens of each
    assert requests(*IDS) == 2
    assert requests("v0", "v2") == 2 and requests("v2", "v1") == 1
    assert requests("v0", "v1", ratio=0.1) == 2  # 40 % of each: the rest lies between


def test_what_a_row_forbids_is_said_before_anything_is_read(server, remote):
    server.requests.clear()
    with pytest.raises(UnknownVideo, match="'nope'"):
        remote.get_many(["v0", "nope", "bad"])
    with pytest.raises(FailedVideo, match="'bad' failed"):
        remote.get_many(["v0", "bad", "nope"])
    with pytest.raises(RatioNotCached, match="'v4'"):
        remote.get_many(["v4", "bad"], 0.5)
    assert not any("/tokens/" in request.path for request in server.requests)


def test_damage_names_its_video(tmp_path):
    make(tmp_path)
    row = TokenCache(tmp_path).metadata("v5")
    file = tmp_path / row["token_shard"]
    data = bytearray(file.read_bytes())
    at = data.find(TokenCache(tmp_path).get("v5", order="selection").tokens[3].view(torch.uint8).numpy().tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    cache = TokenCache(tmp_path)
    assert len(cache.get_many(["v0", "v4", "v6"])) == 3
    for order in ("index", "selection"):
        with pytest.raises(CorruptShard, match=r"\(reading 'v5'\); python -m jobs\.verify"):
            cache.get_many(IDS, order=order)


def test_a_store_that_fails_fails_all(server, remote):
    server.fail_below("GET", "c/tokens/b-", 403)
    with pytest.raises(PermissionError):
        remote.get_many(IDS)
    server._failures.clear()
    assert len(remote.get_many(IDS)) == 7
