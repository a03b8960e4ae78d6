"""The cache: what goes in comes out, bit for bit, and no more is read than asked for."""

import gc
import io
import shutil
from dataclasses import replace
from datetime import timedelta

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import gstep
from pipeline import FailedVideo, NotACache, RatioNotCached, TokenCache, TokenDataset, UnknownVideo
from pipeline.cache.header import read_fingerprint
from pipeline.cache.merging import merge_table_fully
from pipeline.errors import CorruptShard, RemovedVideo, VideoFault
from pipeline.rewrite.remove import remove_videos
from pipeline.storage.random_access import LocalFile
from pipeline.storage.stores import LocalStore
from tests.builders.caches import encoded, encoded_failure, make_cache, random_tokens, write_header, write_shard
from tests.gstep import synthetic
from tests.interpreter import run_python
from tests.pipeline.damage import rewrite_row
from tests.pipeline.verifying import kinds, verified

RATIOS = (0.10, 0.15, 0.17, 0.20, 0.25)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


@pytest.fixture
def videos():
    return {f"v{i}.mp4": random_tokens(i, (4, 25 + i, 16)) for i in range(3)}


def make_deep_cache(out, videos, method="gstep"):
    """Write a cache of videos with two deepstack levels; return the vectors of each video before pruning."""
    levels = {name: [tokens, -tokens, tokens / 2] for name, tokens in videos.items()}
    store = write_header(out, method=method, hidden_size=16, deepstack_levels=2)
    rows = (encoded(name, tokens, 0.25, method, deep) for name, (tokens, *deep) in levels.items())
    write_shard(store, "run", *rows)
    return levels


@pytest.mark.parametrize("method", ["gstep", "random", "topk", "fps"])
def test_every_nested_ratio_comes_back_bit_for_bit(tmp_path, videos, method):
    levels, cache = make_deep_cache(tmp_path, videos, method), TokenCache(tmp_path)
    assert cache.video_ids == sorted(videos) and cache.deepstack_levels == 2
    for video_id, tokens in videos.items():
        for ratio in (*RATIOS, None):
            expected = gstep.prune(tokens, ratio or 0.25, method)
            by_index, selected = cache.get(video_id, ratio), cache.get(video_id, ratio, order="selection")
            assert torch.equal(by_index.index, expected.index) and torch.equal(by_index.rank, expected.rank)
            assert selected.rank.tolist() == list(range(len(expected.index)))
            for video in (by_index, selected):
                assert torch.equal(video.index.sort().values, expected.index)
                assert torch.equal(video.frame, video.index // tokens.shape[1])
                for vectors, level in zip((video.tokens, *video.deepstack), levels[video_id], strict=True):
                    assert torch.equal(bits(vectors), bits(level.flatten(0, 1)[video.index]))


def test_a_cache_that_is_open_reads_on_where_a_removal_has_moved_a_video(tmp_path):
    store = write_header(tmp_path)
    names = ("gone", "stays")
    write_shard(store, "run", *(encoded(name, random_tokens(i), 0.25, "gstep") for i, name in enumerate(names)))
    cache = TokenCache(tmp_path)
    before = cache.metadata("stays")["token_shard"]  # whose row is in memory from now on
    remove_videos(store, ["gone"], "asked for", lambda line: None, timedelta(0))
    for video in (cache.get("stays"), *TokenDataset(cache, ["stays"])):
        assert torch.equal(bits(video.tokens), bits(gstep.prune(random_tokens(1), 0.25, "gstep").tokens))
        assert video.metadata["token_shard"] != before
    with pytest.raises(RemovedVideo):
        cache.get("gone")


def test_a_token_shard_outside_the_cache_is_not_read(tmp_path, videos):
    store = make_cache(tmp_path / "c", videos)
    name = next(iter(videos))
    shard = store.root / TokenCache(store.root).metadata(name)["token_shard"]
    shutil.copy(shard, tmp_path / "elsewhere.parquet")
    rewrite_row(store, name, lambda row: row.update(token_shard="../elsewhere.parquet"))
    with pytest.raises(CorruptShard, match=r"elsewhere\.parquet', which is no file in tokens/"):
        TokenCache(store.root).get(name)


def test_nan_payloads_survive(tmp_path):
    """Storage moves bits, not numbers: a signalling NaN or a negative zero would show a detour through floats."""
    store = write_header(tmp_path)
    video = encoded("v", random_tokens(0), 0.25, "gstep")
    raw = torch.tensor([0x7F81, 0x8000, 0x0001, 0x7FFF] * 100, dtype=torch.int32).to(torch.int16).view(25, 16).numpy()
    write_shard(store, "run", replace(video, kept=replace(video.kept, tokens=raw)))
    tokens = TokenCache(tmp_path).get("v", order="selection").tokens
    assert np.array_equal(bits(tokens).numpy(), raw)


def assert_views(cache: TokenCache, video_id: str) -> None:
    """Check that the vectors' memory is Arrow's own: of copies it has none; others may free one video's worth."""
    gc.collect()  # what earlier tests left is not freed meanwhile
    before = pa.total_allocated_bytes()
    held = [cache.get(video_id, order="selection") for _ in range(50)]
    grown = pa.total_allocated_bytes() - before
    tensors = [level for video in held[1:] for level in (video.tokens, *video.deepstack)]
    assert grown >= sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_order_of_selection_is_a_view_without_a_copy(tmp_path, videos):
    make_deep_cache(tmp_path, videos)
    assert_views(TokenCache(tmp_path), "v1.mp4")


@pytest.mark.parametrize("order", ["index", "selection"])
def test_tokens_are_the_caller_s_own(tmp_path, videos, order):
    make_cache(tmp_path, videos)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.parquet")}
    cache = TokenCache(tmp_path)
    video, before = cache.get("v1.mp4", order=order), bits(cache.get("v1.mp4").tokens)
    video.tokens.fill_(7)
    assert torch.equal(bits(cache.get("v1.mp4").tokens), before)
    assert files == {path: path.read_bytes() for path in files}


LIGHT = """
import sys
from pipeline import TokenCache
cache = TokenCache(sys.argv[1])
assert cache.video_ids and "v1.mp4" in cache and cache.metadata("v1.mp4")["status"] == "ok" and not cache.failed
print([name for name in ("torch", "ray", "transformers", "av") if name in sys.modules])
print(cache.get("v1.mp4").tokens.dtype)
"""


def test_a_cache_is_opened_and_looked_through_without_torch_or_ray(tmp_path, videos):
    """And the process ends well: Arrow's threads and torch once aborted one in seven at exit, after all its work."""
    make_cache(tmp_path, videos)
    for _ in range(2):
        done = run_python("-c", LIGHT, tmp_path, check=True)
        assert done.stdout.splitlines() == ["[]", "torch.bfloat16"]


class CountingStore(LocalStore):
    """Counts the bytes that a reader asks for."""

    read_bytes = 0

    def open(self, name):
        store = self

        class File(io.FileIO):
            def readinto(self, buffer):
                store.read_bytes += (n := super().readinto(buffer) or 0)
                return n

            def read(self, size=-1):
                data = super().read(size)
                store.read_bytes += len(data)
                return data

        return LocalFile(pa.PythonFile(File(self.root / name)))


@pytest.mark.parametrize("method", [m for m in gstep.PRUNERS if gstep.PRUNERS[m].cacheable])
def test_every_method_that_can_be_cached_comes_back_bit_for_bit(tmp_path, method):
    """Also where tokens are merged, out of order, or more or fewer than the budget; and its rows keep their rules."""
    tokens, level = random_tokens(0, (9, 25, 16)), random_tokens(1, (9, 25, 16))
    ratio = 1.0 if method == "none" else 0.25
    store = write_header(tmp_path, ratio, method, hidden_size=16, deepstack_levels=1)
    write_shard(store, "run", *(encoded(name, tokens, ratio, method, [level]) for name in ("v", "w")))
    video, pruned = TokenCache(tmp_path).get("v", ratio), synthetic.prune(tokens, ratio, method)
    assert torch.equal(bits(video.tokens), bits(pruned.tokens))
    assert torch.equal(bits(video.deepstack[0]), bits(level.flatten(0, 1)[pruned.index]))
    for ours, expected in ((video.index, pruned.index), (video.rank, pruned.rank), (video.merged, pruned.merged)):
        assert (ours is None) == (expected is None)
        assert ours is None or torch.equal(ours, expected)
    row = video.metadata
    assert (row["n_tokens"], row["n_total"], row["retention_ratio"]) == (pruned.n_kept, 225, ratio)
    assert kinds(verified(store)) == []
    if not gstep.PRUNERS[method].nested:
        with pytest.raises(RatioNotCached, match="without an order"):
            TokenCache(tmp_path).get("v", retention_ratio=0.10)


def test_what_cannot_be_served_is_said(tmp_path):
    store = make_cache(tmp_path, {"v": random_tokens(0)})
    write_shard(store, "run2", encoded_failure("bad", VideoFault("corrupt", "moov atom not found")))
    cache = TokenCache(tmp_path)
    assert (len(cache), "v" in cache, "bad" in cache, list(cache)) == (1, True, False, ["v"])
    assert cache.failed == {"bad": "corrupt"}
    with pytest.raises(RatioNotCached, match="larger"):
        cache.get("v", retention_ratio=0.5)
    with pytest.raises(ValueError, match="retention_ratio"):
        cache.get("v", retention_ratio=0)
    with pytest.raises(ValueError, match="order"):
        cache.get("v", order="rank")
    with pytest.raises(UnknownVideo, match=r"'nope' is not in the cache .* \(it has \d rows\)"):
        cache.get("nope")
    with pytest.raises(UnknownVideo, match="3 is not in the cache"):
        cache.get(3)
    with pytest.raises(ValueError, match=r"video_ids must be a list of names, got 'v': write \['v'\]"):
        cache.get_many("v")
    with pytest.raises(ValueError, match="evidence must be a list of names, got 'token_key'"):
        cache.get("v", evidence="token_key")
    with pytest.raises(ValueError, match="ids must be a list of names, got 'v'"):
        TokenDataset(cache, "v")
    with pytest.raises(FailedVideo, match="moov atom") as caught:
        cache.get("bad")
    assert caught.value.fault_class == "corrupt"
    with pytest.raises(NotACache, match="not a pruned-token cache"):
        TokenCache(tmp_path / "elsewhere")


def test_orphans_are_not_visible(tmp_path):
    store = make_cache(tmp_path, {"v": random_tokens(0)})
    orphan = store.read(TokenCache(tmp_path).metadata("v")["token_shard"])
    store.put("tokens/orphan.parquet", orphan)
    (tmp_path / "videos" / ".tmp-torn.parquet-1").write_bytes(b"PAR1 half")
    assert TokenCache(tmp_path).video_ids == ["v"]


def test_a_shard_of_other_bits_under_the_same_name_is_found_by_verify(tmp_path):
    """Every page and the footer are sound, so that only the row's checksum tells."""
    store = make_cache(tmp_path, {"v": random_tokens(0)}, 0.25, "uniform")
    row = TokenCache(tmp_path).metadata("v")
    other = random_tokens(0).view(torch.int16).bitwise_xor(1).view(torch.bfloat16)
    late = make_cache(tmp_path / "late", {"v": other}, 0.25, "uniform")
    found = late.read(TokenCache(tmp_path / "late").metadata("v")["token_shard"])
    good = TokenCache(tmp_path).get("v", verify=True)
    store.put(row["token_shard"], found)
    assert not torch.equal(bits(TokenCache(tmp_path).get("v").tokens), bits(good.tokens))
    with pytest.raises(CorruptShard, match="checksum") as caught:
        TokenCache(tmp_path).get("v", verify=True)
    assert caught.value.kind == "checksum"


def test_other_tools_open_it(tmp_path, videos):
    """Token shards, and the table's small files and sorted ones."""
    store = make_cache(tmp_path, videos)
    counts = "select count(*), min(octet_length(token)), max(octet_length(token)) from read_parquet(?)"
    n_tokens = {name: len(TokenCache(tmp_path).get(name).index) for name in videos}
    assert duckdb.execute(counts, [f"{tmp_path}/tokens/*.parquet"]).fetchall() == [(sum(n_tokens.values()), 32, 32)]
    for _ in range(2):
        rows = duckdb.execute("select video_id, n_tokens from read_parquet(?)", [f"{tmp_path}/videos/*.parquet"])
        table = pl.read_parquet(f"{tmp_path}/videos/*.parquet").select("video_id", "n_tokens")
        assert dict(rows.fetchall()) == dict(table.rows()) == n_tokens
        merge_table_fully(store, read_fingerprint(store))
    meanings = pq.read_schema(next((tmp_path / "tokens").iterdir()))
    assert all(field.metadata[b"meaning"] for field in meanings)


def test_a_shard_without_a_level_that_the_cache_has_is_corrupt(tmp_path):
    store = write_header(tmp_path, hidden_size=16, deepstack_levels=2)
    write_shard(store, "run", encoded("v", random_tokens(0), 0.25, "gstep", [random_tokens(1)]))
    with pytest.raises(CorruptShard, match="has no column deepstack_1"):
        TokenCache(tmp_path).get("v")
