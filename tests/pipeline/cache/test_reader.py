"""The cache: what goes in comes out, bit for bit, for other tools and LLMs too; likely ids for one that it lacks.

Videos of an S3 prefix and of a folder, one or several at once, shared by threads and processes, are the same bytes.
Requests to S3 are few, and no more where threads share a cache.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch

import gstep
from gstep.backbones import ModelSource, choose_runtime, family_of
from gstep.language import Decoding, load_language_model, prompt_builder
from pipeline import FailedVideo, NotACache, RatioNotCached, TokenCache, TokenDataset, UnknownVideo
from pipeline.cache.header import read_fingerprint
from pipeline.cache.live import LiveVideos
from pipeline.cache.merging import merge_table_fully
from pipeline.cache.near_ids import find_similar_ids, suggest_ids
from pipeline.cache.reader import MAX_HINTS, group_runs
from pipeline.cache.token_shard import TokenRequest
from pipeline.errors import (
    CorruptShard,
    RemovedVideo,
    VideoFault,
    describe_similar_name,
    make_printable,
    suggest_file,
    suggest_unicode_form,
)
from pipeline.storage.random_access import LocalFile
from pipeline.storage.stores import LocalStore, ObjectStore
from tests.builders.answers import decode_newline, tiny_cache
from tests.builders.caches import (
    cache_of,
    encode_clip,
    encoded,
    encoded_failure,
    make_cache,
    random_tokens,
    write_header,
    write_shard,
)
from tests.builders.clips import sample
from tests.builders.stores import S3Server
from tests.examples import run_example
from tests.gstep import synthetic
from tests.interpreter import run_python
from tests.pipeline.damage import flip_token, rewrite_row
from tests.pipeline.verifying import kinds, remove, verified


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


VIDEOS = {f"v{i}.mp4": random_tokens(i, (4, 25 + i, 16)) for i in range(3)}


@pytest.mark.parametrize("method", ["none", "gstep", "vidcom2", "visionzip", "holitom", "fastvid"])
def test_every_kind_of_method_comes_back_bit_for_bit(tmp_path, method):
    """Also where tokens are merged, out of order, or more or fewer than the budget; and its rows keep their rules."""
    levels = [random_tokens(seed, (9, 25, 16)) for seed in range(3)]
    most, nested = 1.0 if method == "none" else 0.25, gstep.PRUNERS[method].nested
    store = write_header(tmp_path, most, method, hidden_size=16, deepstack_levels=2)
    write_shard(store, "run", *(encoded(name, levels[0], most, method, levels[1:]) for name in "vw"))
    cache = TokenCache(tmp_path)
    assert cache.video_ids == ["v", "w"] and cache.deepstack_levels == 2
    for ratio in (*((0.10, 0.17, 0.20) if nested else ()), most, None):
        pruned = synthetic.prune(levels[0], ratio or most, method)
        by_index, selected = cache.get("v", ratio), cache.get("v", ratio, order="selection")
        assert torch.equal(bits(by_index.tokens), bits(pruned.tokens))
        for name in ("index", "rank", "merged"):
            ours, expected = getattr(by_index, name), getattr(pruned, name)
            assert (ours is None) == (expected is None) and (ours is None or torch.equal(ours, expected))
        assert not nested or selected.rank.tolist() == list(range(pruned.n_kept))
        for video in (by_index, selected):
            assert torch.equal(video.index.sort().values, pruned.index.sort().values)
            assert torch.equal(video.frame, video.index // 25)
            for vectors, level in zip(video.deepstack, levels[1:], strict=True):
                assert torch.equal(bits(vectors), bits(level.flatten(0, 1)[video.index]))
    row = by_index.metadata
    assert (row["n_tokens"], row["n_total"], row["retention_ratio"]) == (pruned.n_kept, 225, most)
    assert kinds(verified(store)) == []
    if not nested:
        with pytest.raises(RatioNotCached, match="without an order"):
            cache.get("v", retention_ratio=0.10)


def test_a_cache_that_is_open_reads_on_where_a_removal_has_moved_a_video(tmp_path):
    store = write_header(tmp_path)
    names = ("gone", "stays")
    write_shard(store, "run", *(encoded(name, random_tokens(i), 0.25, "gstep") for i, name in enumerate(names)))
    cache = TokenCache(tmp_path)
    before = cache.metadata("stays")["token_shard"]  # whose row is in memory from now on
    remove(store, "gone")
    for video in (cache.get("stays"), *TokenDataset(cache, ["stays"])):
        assert torch.equal(bits(video.tokens), bits(gstep.prune(random_tokens(1), 0.25, "gstep").tokens))
        assert video.metadata["token_shard"] != before
    with pytest.raises(RemovedVideo):
        cache.get("gone")


def test_nan_payloads_survive(tmp_path):
    """Storage moves bits, not numbers: a signalling NaN or a negative zero would show a detour through floats."""
    store = write_header(tmp_path)
    video = encoded("v", random_tokens(0), 0.25, "gstep")
    raw = torch.tensor([0x7F81, 0x8000, 0x0001, 0x7FFF] * 100, dtype=torch.int32).to(torch.int16).view(25, 16).numpy()
    write_shard(store, "run", replace(video, kept=replace(video.kept, tokens=raw)))
    tokens = TokenCache(tmp_path).get("v", order="selection").tokens
    assert np.array_equal(bits(tokens).numpy(), raw)


def test_order_of_selection_is_a_view_without_a_copy(tmp_path):
    """The vectors' memory is Arrow's own: of copies it has none; others may free one video's worth."""
    store = write_header(tmp_path, deepstack_levels=1)
    write_shard(store, "run", encoded("v", random_tokens(0), 0.25, "gstep", [random_tokens(1)]))
    cache = TokenCache(tmp_path)
    gc.collect()  # what earlier tests left is not freed meanwhile
    before = pa.total_allocated_bytes()
    held = [cache.get("v", order="selection") for _ in range(50)]
    grown = pa.total_allocated_bytes() - before
    tensors = [level for video in held[1:] for level in (video.tokens, *video.deepstack)]
    assert grown >= sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("order", ["index", "selection"])
def test_tokens_are_the_caller_s_own(tmp_path, order):
    make_cache(tmp_path, VIDEOS)
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


def test_a_cache_is_opened_and_looked_through_without_torch_or_ray(tmp_path):
    """And the process ends well: Arrow's threads and torch once aborted one in seven at exit, after all its work."""
    make_cache(tmp_path, VIDEOS)
    done = run_python("-c", LIGHT, tmp_path, check=True)
    assert done.stdout.splitlines() == ["[]", "torch.bfloat16"]


class CountingStore(LocalStore):
    """Counts the bytes that a reader asks for; for tests/pipeline/prune/test_evidence.py."""

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


def test_what_cannot_be_served_is_said(tmp_path):
    store = make_cache(tmp_path, {"v": random_tokens(0)})
    write_shard(store, "run2", encoded_failure("bad", VideoFault("corrupt", "moov atom not found")))
    cache = TokenCache(tmp_path)
    assert (len(cache), "v" in cache, "bad" in cache, list(cache)) == (1, True, False, ["v"])
    assert cache.failed == {"bad": "corrupt"}
    for error, words, ask in (
        (RatioNotCached, "larger", lambda: cache.get("v", retention_ratio=0.5)),
        (ValueError, "retention_ratio", lambda: cache.get("v", retention_ratio=0)),
        (ValueError, "order", lambda: cache.get("v", order="rank")),
        (UnknownVideo, r"'nope' is not in the cache .* \(it has \d rows\)", lambda: cache.get("nope")),
        (UnknownVideo, "3 is not in the cache", lambda: cache.get(3)),
        (ValueError, r"video_ids must be a list .*: write \['v'\]", lambda: cache.get_many("v")),
        (ValueError, "evidence must be a list", lambda: cache.get("v", evidence="token_key")),
        (ValueError, "ids must be a list", lambda: TokenDataset(cache, "v")),
        (FailedVideo, "moov atom", lambda: cache.get("bad")),
        (NotACache, "not a pruned-token cache", lambda: TokenCache(tmp_path / "elsewhere")),
    ):
        with pytest.raises(error, match=words):
            ask()


def test_other_bits_than_a_row_s_checksum_says_are_found_by_verify(tmp_path):
    """Every page and the footer are sound, so that only the checksum tells."""
    store = make_cache(tmp_path, {"v": random_tokens(0)})
    assert len(TokenCache(tmp_path).get("v", verify=True).tokens)
    rewrite_row(store, "v", lambda row: row.update(checksum="blake2b:00"))
    assert len(TokenCache(tmp_path).get("v").tokens)
    with pytest.raises(CorruptShard, match="checksum") as caught:
        TokenCache(tmp_path).get("v", verify=True)
    assert caught.value.kind == "checksum"


def test_other_tools_open_it(tmp_path):
    """Token shards, and the table's small files and sorted ones."""
    store = make_cache(tmp_path, VIDEOS)
    counts = "select count(*), min(octet_length(token)), max(octet_length(token)) from read_parquet(?)"
    n_tokens = {name: len(TokenCache(tmp_path).get(name).index) for name in VIDEOS}
    assert duckdb.execute(counts, [f"{tmp_path}/tokens/*.parquet"]).fetchall() == [(sum(n_tokens.values()), 32, 32)]
    for _ in range(2):
        rows = duckdb.execute("select video_id, n_tokens from read_parquet(?)", [f"{tmp_path}/videos/*.parquet"])
        table = pl.read_parquet(f"{tmp_path}/videos/*.parquet").select("video_id", "n_tokens")
        assert dict(rows.fetchall()) == dict(table.rows()) == n_tokens
        merge_table_fully(store, read_fingerprint(store))


IDS = ("a/bikes.mp4", "b/boats.mp4", "b/boat.mp4", "b/cats.webm", "c/cats.mp4", "c/kites.mp4", "c/kites.webm")


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("bikes.mp4", ["a/bikes.mp4"]),
        ("/data/videos/bikes.mp4", ["a/bikes.mp4"]),  # the only base name, whatever stands before it
        ("x/bikes.avi", ["a/bikes.mp4"]),
        ("b/boa", ["b/boats.mp4", "b/boat.mp4"]),  # ids that hold it
        ("cats", ["b/cats.webm", "c/cats.mp4"]),  # the base name of two ids says nothing
        ("a/bikse.mp4", ["a/bikes.mp4"]),
        ("d/cafe\u0301 1.mp4", ["d/caf\u00e9\u202f1.mp4"]),  # another Unicode form, and a space of macOS
        ("d/\ud55c\uad6d.mp4", ["d/\u1112\u1161\u11ab\u1100\u116e\u11a8.mp4"]),
        ("a\\bikes.mp4", ["a/bikes.mp4"]),
        ("nothing of the kind", []),
        ("\ud800", []),
    ],
)
def test_the_likeliest_comes_first(wrong, near):
    other = ["d/caf\u00e9\u202f1.mp4", "d/\u1112\u1161\u11ab\u1100\u116e\u11a8.mp4"]
    assert find_similar_ids(wrong, pa.chunked_array([IDS[:3], IDS[3:], other]))[: max(1, len(near))] == near


LIKE = "(it differs only by blanks, slashes or characters that look alike: "


@pytest.mark.parametrize(
    ("wrong", "near", "words"),
    [
        ("caf\u00e9.mp4", "cafe\u0301.mp4", r"(it differs only by its Unicode form, NFD: 'cafe\u0301.mp4')"),
        ("a 1.mp4", "a\u202f1.mp4", rf"{LIKE}'a\u202f1.mp4')"),
        ("a.mp4 ", "a.mp4", f"{LIKE}'a.mp4')"),
        ("a.mp4", "b.mp4", ""),
    ],
)
def test_a_name_that_looks_the_same_is_described(tmp_path, wrong, near, words):
    """Otherwise a message says that there is no X, and asks for X."""
    assert describe_similar_name(wrong, near) == f"{near} {words}".strip()
    (tmp_path / near).touch()
    for hint in (suggest_ids(wrong, pa.chunked_array([[near]])), suggest_file(tmp_path / wrong)):
        assert make_printable(f"did you mean {near} {words}") in make_printable(hint)
    is_form = "Unicode form" in words
    assert ("its Unicode form" in suggest_unicode_form(str(tmp_path / wrong))) == is_form


def test_a_letter_too_many_too_few_or_wrong_is_found_among_many():
    many = pa.chunked_array([[f"{n % 97:02}/{n * 7919 % 10**8:08}.mp4" for n in range(50_000)]])
    for wrong in ("10/0079190.mp4", "10/100079190.mp4", "10/00079109.mp4", "10/00079191.mp4", "00079190.avi"):
        assert "10/00079190.mp4" in find_similar_ids(wrong, many), wrong


@pytest.mark.parametrize("merged", [False, True])
def test_readers_name_the_likely_id_from_small_and_sorted_files(tmp_path, merged):
    store = tiny_cache(tmp_path / "c", IDS[:4], failed=IDS[4:])
    if merged:
        merge_table_fully(store, read_fingerprint(store))
    cache = TokenCache(tmp_path / "c")
    assert bool(LiveVideos.open(store).sorted) == merged == (len(LiveVideos.open(store).small) == 0)
    for read in (
        cache.get,
        cache.metadata,
        lambda video_id: cache.get_many([IDS[0], video_id]),
        lambda video_id: TokenDataset(cache, [video_id])[0],
        lambda video_id: cache.shards([video_id]),
    ):
        with pytest.raises(UnknownVideo, match=r"has 7 rows\); did you mean a/bikes\.mp4\?$") as error:
            read("bikes.mp4")
        assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)  # noqa: S301
    remove(store, IDS[0])
    with pytest.raises(UnknownVideo) as error:
        TokenCache(tmp_path / "c").get("bikes.mp4")
    assert IDS[0] not in str(error.value)


def test_a_program_that_asks_for_many_reads_the_ids_for_the_first_alone(tmp_path):
    tiny_cache(tmp_path / "c", IDS[:2])
    cache, said = TokenCache(tmp_path / "c"), []
    for number in range(3 * MAX_HINTS):
        with pytest.raises(UnknownVideo) as caught:
            cache.get(f"{number}/bikes.mp4")
        said.append("did you mean" in str(caught.value))
    assert said == [True] * MAX_HINTS + [False] * 2 * MAX_HINTS


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3-vl"])
def test_the_example_answers_as_jobs_generate_does(name, tmp_path, capsys):
    source = ModelSource.resolve(name)
    _, video = encode_clip(source, sample("bikes.mp4"), 4, "gstep", 0.25, video_id="bikes.mp4")
    newline = None if family_of(source).static().newline is None else decode_newline(source)
    cache_of(tmp_path / "cache", source, video, method="gstep", ratio=0.25, newline=newline)
    names = run_example("pipeline/examples/own_llm.py", tmp_path / "cache", "bikes.mp4")
    said = capsys.readouterr().out.strip()
    visual = TokenCache(tmp_path / "cache").get("bikes.mp4", 0.10).visual
    prompt = prompt_builder(source).build("What happens in this video?", [visual])
    model = load_language_model(source, choose_runtime("cpu", "float32"))
    (answer,) = model.generate([prompt], [Decoding(max_new_tokens=32)])
    assert said == answer.text.strip() and said
    assert len(names["visual"].index) == 4 * names["visual"].tokens_per_frame // 10 or name != "tiny"


SHAPE = (8, 49, 512)  # 98 KB of tokens: more than comes with a shard's footer
NAMES = [f"v{i}" for i in range(7)]


def write_cache(place) -> None:
    store = write_header(place)
    videos = [encoded(name, random_tokens(i, SHAPE), 0.25, "gstep") for i, name in enumerate(NAMES)]
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
    assert remote.video_ids == alone.video_ids == NAMES
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

    assert n_requests(*NAMES) == 2 + 2  # the footer of each shard, all tokens of each
    assert n_requests(*NAMES) == 2
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
            cache.get_many(NAMES, order=order)


def test_a_store_that_fails_fails_all(server, remote):
    server.fail("GET", "c/tokens/b-*", 403)
    with pytest.raises(PermissionError):
        remote.get_many(NAMES)
    server._failures.clear()
    assert len(remote.get_many(NAMES)) == 7


def test_a_shard_is_one_put_and_a_video_one_get(server):
    store = write_header(ObjectStore(server.uri("requests"), server.objects()))
    shard = [encoded(name, random_tokens(i, SHAPE), 0.25, "gstep") for i, name in enumerate(NAMES[:2])]
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


def bytes_of(cache: TokenCache, video_id: str) -> bytes:
    return cache.get(video_id).tokens.contiguous().view(torch.int16).numpy().tobytes()


def read_all(caches: list[TokenCache], out) -> None:
    """In a process of its own."""
    out.put([[bytes_of(cache, name) for name in NAMES] for cache in caches])


def test_a_cache_pickles_small_and_reads_the_same(folder, remote):
    for cache in (TokenCache(folder), remote):
        expected = [bytes_of(cache, name) for name in NAMES]
        data = pickle.dumps(cache)  # with its shards open
        other = pickle.loads(data)  # noqa: S301
        assert len(data) < 8192 and [bytes_of(other, name) for name in NAMES] == expected


def test_a_fork_reads_the_same_and_waits_for_no_thread_of_its_parent(folder, remote):
    """It was forked while shards were open and a thread of the parent opened another one, for which others wait."""
    opening, go_on = threading.Event(), threading.Event()

    class Slow(LocalStore):
        def open(self, name):
            if not opening.is_set():
                opening.set()
                go_on.wait(60)
            return super().open(name)

    cache, expected = TokenCache(folder, store=Slow(folder)), [bytes_of(remote, name) for name in NAMES]
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    with ThreadPoolExecutor(1) as pool:
        of_parent = pool.submit(bytes_of, cache, "v0")
        opening.wait(60)
        child = context.Process(target=read_all, args=([cache, remote], out))
        child.start()
        of_child = out.get(timeout=60)
        go_on.set()
        assert of_child == [expected, expected] and of_parent.result() == expected[0]
        child.join()
    assert [bytes_of(remote, name) for name in NAMES] == expected


def test_threads_read_the_same_for_the_requests_of_one(server, remote):
    results = {}
    for n in (1, 4):  # threads, which read all videos four times, each beginning with another
        cache = TokenCache(remote.store.root, store=remote.store)
        start = threading.Barrier(n)

        def read(thread: int, cache=cache, start=start) -> list[bytes]:
            start.wait()
            return [bytes_of(cache, NAMES[(i + thread) % len(NAMES)]) for i in range(len(NAMES))]

        server.requests.clear()
        with ThreadPoolExecutor(n) as pool:
            results[n] = list(pool.map(read, range(4))), len(server.requests)
    assert results[4] == results[1] and results[1][1] <= 4 * len(NAMES) + 2 * 2


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
    assert bytes_of(cache, "v3")
