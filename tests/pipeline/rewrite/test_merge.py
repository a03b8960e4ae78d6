"""Caches that were made alike become one: rows by the rule, token shards as they are, and kills harm nothing."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from pipeline import TokenCache
from pipeline.cache.header import has_generated_card, read_fingerprint
from pipeline.cache.merging import merge_table_fully
from pipeline.errors import CorruptShard, IdentityMismatch, NotACache, RemovedVideo, UsageError, VideoFault
from pipeline.rewrite import merge as merge_module
from pipeline.rewrite.merge import merge_caches
from pipeline.runner.run_record import list_committed_shards
from pipeline.storage.stores import LocalStore, store_at
from tests.builders.caches import encoded_failure, write_header, write_shard
from tests.builders.stores import S3Server
from tests.pipeline.damage import flip, say_what_was_committed, shards, stop_at_each_change
from tests.pipeline.verifying import kinds, remove, verified, video_of


def merge(sources, out, say=print, **how):
    """Merge caches, the output given as a store or a folder."""
    return merge_caches(sources, LocalStore(out) if isinstance(out, Path) else out, say, **how)


def cache_of(folder, videos, run="run"):
    """A cache of videos, each name with a seed, or a fault."""
    store = write_header(folder, hidden_size=8)
    for number, (name, seed) in enumerate(videos.items()):
        make = encoded_failure if isinstance(seed, VideoFault) else video_of
        write_shard(store, f"{run}{number}", make(name, seed))
    return store


@pytest.fixture
def two(tmp_path):
    fault = VideoFault("corrupt", "cut off")
    return [
        cache_of(tmp_path / "a", {"one": 1, "both": 2, "mended": fault}, "a"),
        cache_of(tmp_path / "b", {"two": 3, "both": 2, "mended": 4}, "b"),
    ]


def bytes_of(store):
    return {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()}


def assert_whole(out, *sources):
    """Each video is that of a source, bit for bit, and nothing is wrong with the cache."""
    cache = TokenCache(out.root)
    assert cache.video_ids == ["both", "mended", "one", "two"] and cache.failed == {}
    for video_id in cache.video_ids:
        holders = [held for held in map(TokenCache, (s.root for s in sources)) if video_id in held.video_ids]
        assert any(torch.equal(cache.get(video_id).tokens, held.get(video_id).tokens) for held in holders)
    report = verified(out)
    assert kinds(report) == [] and report.orphans == [] == report.superseded


def test_the_union_is_by_the_rule_and_leaves_its_sources_as_they_are(two, tmp_path):
    before, out = [bytes_of(store) for store in two], LocalStore(tmp_path / "c")
    done = merge(two, out)
    assert_whole(out, *two)
    assert (done.videos, done.equal, done.linked, done.copied) == (4, 2, 4, 0) and has_generated_card(out)
    assert [bytes_of(store) for store in two] == before
    assert len(shards(out)) == 4 and all(file.stat().st_nlink == 2 for file in shards(out))  # "both" is there once
    again = merge(two, out)
    assert (again.videos, again.linked) == (4, 0)  # its own rows win, since they are the same
    assert_whole(out, *two)
    taken = merge(two, LocalStore(f"{two[0].root}/"))  # as a shell completes the cache that takes in another
    assert (taken.equal, taken.linked) == (2, 2)
    assert_whole(two[0], *two)


class OtherDisk(LocalStore):
    """No link leads here."""

    def link(self, name, file):
        return False


def test_what_is_damaged_is_not_taken_in(two, tmp_path):
    """A flip in a token shard is found as it is copied, and in the table before anything is written."""
    flip(shards(two[1])[0], 100)
    with pytest.raises(CorruptShard, match=r"/b/tokens/.* hash in its name"):
        merge(two, OtherDisk(tmp_path / "c"))
    flip(shards(two[1], "videos")[0], 500)
    with pytest.raises(CorruptShard):
        merge(two, tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_what_does_not_go_together_is_refused_before_anything_is_written(two, tmp_path):
    other, third = write_header(tmp_path / "other", method="random"), cache_of(tmp_path / "third", {"one": 9}, "t")
    merge(two, tmp_path / "same", on_equal="refuse")  # "both" has the same tokens in both
    for sources, out, how, error, words in (
        ([two[0], other], "c", {}, IdentityMismatch, r"pruner\.method: .*/a has 'gstep', .*/other 'random'"),
        (two, "other", {}, IdentityMismatch, "were not made alike"),
        ([two[0], LocalStore(tmp_path / "none")], "c", {}, NotACache, "none"),
        ([*two, third], "c", {"on_equal": "refuse"}, UsageError, r"1 videos have different tokens .* \(one\)"),
    ):
        with pytest.raises(error, match=words):
            merge(sources, tmp_path / out, **how)
    assert not (tmp_path / "c").exists() and not (tmp_path / "none").exists()


def test_a_removed_video_stays_removed_whichever_source_comes_first(two, tmp_path):
    remove(two[0], "two", "both", reason="licence")
    for number, sources in enumerate((two, two[::-1])):
        out = LocalStore(tmp_path / f"c{number}")
        merge(sources, out)
        cache = TokenCache(out.root)
        assert cache.video_ids == ["mended", "one"] and len(shards(out)) == 2
        with pytest.raises(RemovedVideo, match="licence"):
            cache.get("two")


SECRET = "a caption of the takedown"


def mentions(root, holder, video_id):
    """Name the files of a cache that hold a video's caption, uri or tokens, packed or not."""
    values = TokenCache(holder).get(video_id, order="selection").tokens
    tokens = values.contiguous().view(torch.int16).numpy().tobytes()
    files = []
    for path in (path for path in root.rglob("*") if path.is_file()):
        data = path.read_bytes()
        data += str(pq.read_table(path).to_pylist()).encode() if path.suffix == ".parquet" else b""
        files += [path.name] * any(part in data for part in (SECRET.encode(), b"videos/gone", tokens))
    return files


def secret_cache(folder, run, *names, attempts=1):
    """A cache with the videos in one token shard, "gone" with a caption, and a record of its run that names it."""
    store = write_header(folder, hidden_size=8)
    more = {"gone": {"manifest": json.dumps({"caption": SECRET}), "attempts": attempts}}
    write_shard(store, run, *(video_of(name, 5, **more.get(name, {})) for name in names))
    record = {"run_id": run, "videos": 2, "config": {"videos": ["/videos/gone"]}, "error": "/videos/gone: cut off"}
    store.put(f"runs/{run}.json", json.dumps(record).encode())
    return store


@pytest.mark.parametrize(
    ("order", "merged", "into"), [((0, 1, 2), False, False), ((2, 1, 0), True, False), ((1, 0, 2), False, True)]
)
def test_nothing_stays_of_a_video_that_one_cache_has_removed(tmp_path, order, merged, into):
    """Small files with its caption and shared token shards were linked from the other caches."""
    first = secret_cache(tmp_path / "a", "a", "one", "gone")
    second = secret_cache(tmp_path / "b", "b", "stays", "gone", attempts=2)
    third = secret_cache(tmp_path / "d", "d", "gone")  # the row is superseded, and no token shard of it is taken
    write_shard(third, "d2", video_of("gone", 6, attempts=3))
    before = secret_cache(tmp_path / "before", "b", "stays", "gone", attempts=2).root
    remove(first, "gone", reason="licence")
    if merged:
        for store in (first, second, third):
            merge_table_fully(store, read_fingerprint(store))
    tokens = TokenCache(second.root).get("stays").tokens
    sources = [(first, second, third)[number] for number in order]
    out = second if into else LocalStore(tmp_path / "c")
    done = merge(sources, out)
    assert done.removed == ["gone"] and done.moved == 1
    assert mentions(out.root, before, "gone") == []
    assert TokenCache(out.root).video_ids == ["one", "stays"] and kinds(verified(out)) == []
    assert torch.equal(TokenCache(out.root).get("stays", verify=True).tokens, tokens)
    with pytest.raises(RemovedVideo, match="licence"):
        TokenCache(out.root).get("gone")
    again = merge(sources, out)
    assert again.moved == 0 and mentions(out.root, before, "gone") == []


def test_files_that_are_deleted_or_may_hold_a_removed_video_are_named(two, tmp_path):
    shutil.copytree(two[1].root, tmp_path / "out")
    out, said = LocalStore(tmp_path / "out"), list[str]()
    out.put("repaired/damaged.parquet", b"PAR1 of nobody knows what PAR1")
    shutil.copy(shards(out, "videos")[0], out.root / "videos" / "backup.parquet")
    remove(two[0], *TokenCache(two[1].root).video_ids)
    merge([two[0]], out, said.append)
    assert any("files deleted that may hold removed videos: " in line and "repaired/damaged" in line for line in said)
    assert any("videos/backup.parquet is not a file of this cache, and may hold the videos" in line for line in said)
    assert not out.exists("repaired/damaged.parquet") and out.exists("videos/backup.parquet")


def test_an_interrupted_merge_shows_no_removed_video_and_a_rerun_erases_it(tmp_path):
    first, second = secret_cache(tmp_path / "a", "a", "one", "gone"), secret_cache(tmp_path / "b", "b", "stays", "gone")
    before = secret_cache(tmp_path / "before", "b", "gone").root
    remove(first, "gone", reason="licence")

    for allowed in stop_at_each_change(lambda out: merge([second, first], out), lambda n: tmp_path / f"c{n}"):
        out = tmp_path / f"c{allowed}"
        if (out / "cache.json").exists():
            assert "gone" not in TokenCache(out)
        if allowed % 6 == 0:
            merge([second, first], out)
            assert mentions(out, before, "gone") == [] and TokenCache(out).video_ids == ["one", "stays"]
    assert allowed > 10


def test_the_same_command_ends_what_was_stopped_anywhere(two, tmp_path):
    """Every write is one before which a merge stops once; what is there then is a cache of whole rows."""
    for store in two:
        say_what_was_committed(store)
    out = LocalStore(tmp_path / "c")
    for _ in stop_at_each_change(lambda out: merge(two, out), lambda _: out.root, spared="runs/.*"):
        if out.exists("cache.json"):
            cache = TokenCache(out.root)
            assert all(len(cache.get(video_id).tokens) for video_id in cache.video_ids)
    assert_whole(out, *two)
    assert len(list_committed_shards(out)) == 4


def test_a_cache_that_is_written_to_meanwhile_is_taken_as_of_one_moment(two, tmp_path, monkeypatch):
    def and_more(held, rows, *rest):
        take(held, rows, *rest)
        if len(shards(two[0])) == 2:  # a run commits, and merges its table
            write_shard(two[0], "later", video_of("later", 9))
            say_what_was_committed(two[0])
            merge_table_fully(two[0], read_fingerprint(two[0]))

    take = merge_module._take_live_tokens
    monkeypatch.setattr(merge_module, "_take_live_tokens", and_more)
    out = LocalStore(tmp_path / "c")
    done = merge(two, out)
    assert TokenCache(out.root).video_ids == ["both", "later", "mended", "one", "two"]
    assert (done.videos, done.linked) == (5, 5)
    report = verified(out)
    assert kinds(report) == [] and report.orphans == []


def test_folders_go_to_s3_and_back(two, tmp_path):
    with S3Server("merge") as server:
        far, back = store_at(server.uri("merged"), server.objects()), LocalStore(tmp_path / "back")
        there, here = merge(two, far), merge([far], back)
    assert_whole(back, *two)
    assert (there.linked, there.copied) == (here.linked, here.copied) == (0, 4)


def test_bytes_are_copied_where_no_link_can_be_had(two, tmp_path):
    out = OtherDisk(tmp_path / "c")
    done = merge(two, out)
    assert_whole(out, *two)
    n_bytes = sum(file.stat().st_size for file in shards(out))
    assert (done.linked, done.copied, done.copied_bytes) == (0, 4, n_bytes)
