"""What an engine's workers read by themselves: the rows that prompts would have brought, and nothing else."""

import base64
import threading
from functools import partial

import pytest
import torch

from pipeline import TokenCache
from pipeline.errors import CorruptShard, RatioNotCached, UnknownVideo
from pipeline.generate.engines.cached_rows import RowName, RowReader, read_outline
from pipeline.generate.held_videos import n_bytes
from pipeline.storage.stores import ObjectStore
from tests.pipeline.caches import encoded, make_cache, random_tokens, write_shard
from tests.pipeline.s3 import S3Server

SHAPE = (4, 49, 64)


def reader_of(*folders, limit=2**30):
    return RowReader({str(i) if i else "": partial(TokenCache, folder) for i, folder in enumerate(folders)}, limit)


def named(folder, video_id, ratio=None, order="index", name=""):
    cache = TokenCache(folder)
    return read_outline(cache, cache.metadata(video_id), ratio, order, name)


@pytest.fixture
def cache(tmp_path):
    make_cache(tmp_path / "c", {name: random_tokens(i, SHAPE) for i, name in enumerate("ab")})
    return tmp_path / "c"


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("levels", [0, 2])
@pytest.mark.parametrize(("order", "ratio"), [("index", None), ("index", 0.1), ("selection", None), ("selection", 0.1)])
def test_an_outline_and_its_rows_are_the_video(tmp_path, codec, levels, order, ratio):
    newline = None if levels else base64.b64encode(bytes(range(128))).decode()
    store = make_cache(tmp_path / "c", {}, codec=codec, deepstack_levels=levels, newline=newline)
    tokens, *deepstack = (random_tokens(i, SHAPE) for i in range(1 + levels))
    write_shard(store, "run", encoded("a b/ñ", tokens, 0.25, "gstep", deepstack))
    whole = TokenCache(tmp_path / "c").get("a b/ñ", ratio, order).visual
    outline = named(tmp_path / "c", "a b/ñ", ratio, order)
    assert torch.equal(outline.index, whole.index) and n_bytes(outline) == outline.index.nbytes
    assert (outline.tokens.shape, len(outline.deepstack)) == (whole.tokens.shape, len(whole.deepstack))
    assert (outline.extra, outline.fps, list(outline.frame_indices)) == (
        whole.extra,
        whole.fps,
        list(whole.frame_indices),
    )
    rows = reader_of(tmp_path / "c").find(outline.rows).result()
    assert torch.equal(rows.unpacked("cpu", torch.float32), whole.placeholder_rows.float())
    width = {"bfloat16": 128, "int8": 64 + 2 + 32, "int4": 32 + 4 + 32}[codec]  # what is held, and crosses to a GPU
    assert rows.n_bytes == len(whole.index) * width * (1 + levels)


def test_all_that_ask_together_share_one_read(cache):
    reader, name, found = reader_of(cache), named(cache, "a").rows, []
    threads = [threading.Thread(target=lambda: found.append(reader.find(name).result())) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reader.n_read == 1 and len({id(rows) for rows in found}) == 1 and len(found) == 100


def test_memory_has_its_limit(tmp_path):
    ids = [f"v{i:02}" for i in range(20)]
    make_cache(tmp_path / "c", {name: random_tokens(i, SHAPE) for i, name in enumerate(ids)})
    names = [named(tmp_path / "c", video_id).rows for video_id in ids]
    one = reader_of(tmp_path / "c").find(names[0]).result().n_bytes
    reader = reader_of(tmp_path / "c", limit=3 * one)
    for _ in range(2):
        for name in names:
            reader.find(name).result()
            assert reader.held_bytes <= 3 * one
    assert reader.n_read == 40
    reader.find(names[-2]).result()
    assert reader.n_read == 40


def test_a_name_is_looked_up_and_never_opened(cache, tmp_path):
    make_cache(tmp_path / "other", {"c": random_tokens(7, SHAPE)})
    reader, good = reader_of(cache), RowName.parse(named(cache, "a").rows)
    foreign = [
        good._replace(cache=str(tmp_path / "other")),
        good._replace(cache="../other"),
        good._replace(video_id="../../etc/passwd"),
        RowName.parse(named(tmp_path / "other", "c").rows),
        good._replace(checksum="blake2b:0"),
        good._replace(keep=50),
        good._replace(keep=0),
        good._replace(keep=-1),
    ]
    for name in foreign:
        with pytest.raises((ValueError, UnknownVideo)):
            reader.find(str(name)).result()
    for text in (
        "",
        "cached-rows:",
        "/etc/passwd",
        "cached-rows:/a/x/many/index",
        f"{good}/x",
        f"{good}"[:-5] + "other",
    ):
        with pytest.raises(ValueError, match=r"invalid literal|no name of cached rows"):
            reader.find(text).result()
    assert reader.n_read == 0
    assert reader.find(str(good)).result().hidden_size == 64


def test_a_name_outlives_a_redo_and_a_move_of_the_file(cache):
    """Whoever asks for rows that were replaced just now gets those; rows that only moved have the same name."""
    reader, old = reader_of(cache), named(cache, "a")
    expected = TokenCache(cache).get("a").visual.placeholder_rows.float()
    write_shard(TokenCache(cache).store, "redo", encoded("a", random_tokens(9, SHAPE), 0.25, "gstep", attempts=2))
    new = named(cache, "a")
    assert new.rows != old.rows
    redone = TokenCache(cache).get("a").visual.placeholder_rows.float()
    for name, rows in ((new.rows, redone), (old.rows, expected)):
        assert torch.equal(reader.find(name).result().unpacked("cpu", torch.float32), rows)
    again = encoded("a", random_tokens(9, SHAPE), 0.25, "gstep", attempts=3)
    write_shard(TokenCache(cache).store, "moved", again)
    assert named(cache, "a").rows == new.rows
    for shard in (cache / "tokens").glob("redo-*"):
        shard.unlink()
    late = reader_of(cache)
    assert torch.equal(late.find(new.rows).result().unpacked("cpu", torch.float32), redone)


def test_what_is_away_or_damaged_is_said_and_asked_again(cache):
    reader, name = reader_of(cache), named(cache, "b").rows
    cache.rename(cache.with_name("away"))
    with pytest.raises(Exception, match=r"missing|not a pruned-token cache"):
        reader.find(name).result()
    cache.with_name("away").rename(cache)
    assert reader.find(name).result().hidden_size == 64
    (shard,) = (cache / "tokens").iterdir()
    data = bytearray(shard.read_bytes())
    data[400:1400] = bytes(1000)
    shard.write_bytes(data)
    with pytest.raises(CorruptShard):
        reader_of(cache).find(named(cache, "a").rows).result()


def test_a_share_that_is_not_stored_has_no_outline(cache):
    with pytest.raises(RatioNotCached):
        named(cache, "a", 0.9)


def test_rows_below_an_s3_prefix_are_the_same_and_prompts_fetch_none(tmp_path):
    videos = {name: random_tokens(i, (8, 49, 512)) for i, name in enumerate("ab")}
    make_cache(tmp_path / "c", videos)
    near = TokenCache(tmp_path / "c").get("a").visual
    with S3Server() as server:
        make_cache(store := ObjectStore(server.uri("c"), server.objects()), videos)
        cache = TokenCache(store.root, store=store)
        server.requests.clear()
        outline = read_outline(cache, cache.metadata("a"), None, "index")
        # The row, the shard's footer, and the index in each of the four row groups: small ones, and none of vectors.
        assert server.counts() == {"GET": 6}
        rows = RowReader({"": lambda: cache}, 2**30).find(outline.rows).result()
        assert torch.equal(rows.unpacked("cpu", torch.float32), near.placeholder_rows.float())
