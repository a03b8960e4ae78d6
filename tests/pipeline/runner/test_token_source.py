"""A cache as a source of Ray Data: a row a video, bit for bit, from a folder and from S3."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from pipeline import TokenCache
from pipeline.storage.stores import ObjectStore
from tests.builders.caches import encoded, random_tokens, write_header, write_shard
from tests.builders.clusters import PLAIN, ray_here
from tests.builders.stores import S3Server

IDS = [f"v{i}" for i in range(6)]


def make(store, **more) -> None:
    store = write_header(store, hidden_size=16, **more)
    for start in (0, 2, 3):
        shard = [(name, random_tokens(int(name[1:]), (4, 25, 16))) for name in IDS[start : {0: 2, 2: 3, 3: 6}[start]]]
        levels = [[tokens] * more.get("deepstack_levels", 0) for _, tokens in shard]
        videos = [encoded(n, t, 0.25, "gstep", deep) for (n, t), deep in zip(shard, levels, strict=True)]
        write_shard(store, f"run{start}", *videos)


def tokens_of(row) -> torch.Tensor:
    return torch.frombuffer(bytearray(row["tokens"]), dtype=torch.bfloat16).view(-1, int(row["hidden_size"]))


def check(rows, cache: TokenCache, ratio: float | None) -> None:
    assert [row["video_id"] for row in rows] == IDS
    for row in rows:
        video = cache.get(row["video_id"], ratio)
        assert torch.equal(tokens_of(row).view(torch.int16), video.tokens.view(torch.int16))
        assert np.array_equal(row["index"], video.index) and np.array_equal(row["rank"], video.rank)
        assert np.array_equal(row["frame"], video.frame) and row["merged"] is None
        assert np.array_equal(row["density"], video.density) and json.loads(row["metadata"]) == video.metadata


@pytest.mark.slow
def test_ray_reads_what_the_cache_holds(tmp_path):
    from pipeline import ray_dataset  # noqa: PLC0415

    make(tmp_path)
    with S3Server() as server, ray_here(*PLAIN):
        store = ObjectStore(server.uri("c"), server.objects())
        make(store)
        here, there = TokenCache(tmp_path), TokenCache(store.root, store=store)
        data = ray_dataset(tmp_path, retention_ratio=0.1, blocks=2)
        check(sorted(data.take_all(), key=lambda row: row["video_id"]), here, 0.1)
        check(sorted(ray_dataset(there).take_all(), key=lambda row: row["video_id"]), there, None)
        assert ray_dataset(here, IDS[:3]).count() == 3
