"""A cache below an S3 prefix: the same bytes as in a folder, for few requests."""

import pytest
import torch

from jobs import inspect
from pipeline.cache.reader import TokenCache
from pipeline.storage.stores import ObjectStore
from tests.pipeline.caches import encoded, make_cache, random_tokens, write_header, write_shard
from tests.pipeline.s3 import S3Server

VIDEOS = {f"v{i}": random_tokens(i, (8, 49, 512)) for i in range(4)}


@pytest.fixture(scope="module")
def server():
    with S3Server() as server:
        yield server


@pytest.fixture
def store(server, request) -> ObjectStore:
    return ObjectStore(server.uri(request.node.name), server.objects())


def kinds(server, call) -> dict[str, int]:
    """The requests that ``call`` makes, by kind."""
    server.requests.clear()
    call()
    return server.counts()


def test_it_reads_what_a_folder_reads(store, tmp_path):
    make_cache(store, VIDEOS)
    make_cache(tmp_path, VIDEOS)
    there, here = TokenCache(store.root, store=store), TokenCache(tmp_path)
    assert there.video_ids == here.video_ids
    for video_id in VIDEOS:
        for ratio in (None, 0.1, 0.2):
            for order in ("index", "selection"):
                far, near = there.get(video_id, ratio, order), here.get(video_id, ratio, order)
                assert torch.equal(far.tokens.view(torch.int16), near.tokens.view(torch.int16))
                assert torch.equal(far.index, near.index) and torch.equal(far.rank, near.rank)
        assert there.metadata(video_id) == here.metadata(video_id) | {"write_s": there.metadata(video_id)["write_s"]}


def test_a_shard_is_one_put_and_so_is_its_commit(server, store):
    write_header(store)
    shard = [encoded(name, tokens, 0.25, "gstep") for name, tokens in VIDEOS.items()]
    of_the_helper = {"LIST": 2, "GET": 1}
    assert kinds(server, lambda: write_shard(store, "run", *shard)) == {"PUT": 2, "HEAD": 2} | of_the_helper


def test_a_video_is_one_get(server, store):
    make_cache(store, VIDEOS)
    opened = []
    assert kinds(server, lambda: opened.append(TokenCache(store.root, store=store))) == {"GET": 2, "LIST": 1}
    (cache,) = opened
    assert kinds(server, lambda: cache.metadata("v0")) == {"GET": 1}  # its videos shard, kept from here on
    assert kinds(server, lambda: cache.get("v0")) == {"GET": 2}  # the token shard's footer, then the tokens
    assert kinds(server, lambda: cache.get("v1")) == {"GET": 1}
    assert kinds(server, lambda: cache.get("v1", 0.1)) == {"GET": 1}


def test_the_environment_leads_to_it(server, store, monkeypatch, capsys):
    make_cache(store, VIDEOS)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    assert TokenCache(store.root).video_ids == sorted(VIDEOS)
    assert inspect.main([store.root, "v1"]) == 0
    assert "98 of 392 tokens kept" in capsys.readouterr().out
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert inspect.main([store.root, "--s3-endpoint", server.url]) == 0
    assert "4 ok" in capsys.readouterr().out


def test_a_store_out_of_reach_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEYKEYKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "HUSHHUSH")
    assert inspect.main(["s3://nowhere/cache", "--s3-endpoint", "http://127.0.0.1:9"]) == 1
    told = capsys.readouterr().err
    assert "EndpointConnectionError" in told and "127.0.0.1" not in told and "Traceback" not in told
