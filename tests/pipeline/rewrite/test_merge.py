"""Caches that were made alike become one: rows by the rule, token shards as they are, and kills harm nothing."""

import hashlib
import json
import shutil
from datetime import timedelta

import pyarrow.parquet as pq
import pytest
import torch

from pipeline import TokenCache
from pipeline.cache.header import compute_fingerprint, has_generated_card, read_fingerprint
from pipeline.cache.merging import merge_table_fully
from pipeline.errors import CorruptShard, IdentityMismatch, NotACache, RemovedVideo, UsageError, VideoFault
from pipeline.rewrite import merge as merge_module
from pipeline.rewrite.merge import merge_caches
from pipeline.rewrite.remove import remove_videos
from pipeline.runner.run_record import list_committed_shards
from pipeline.storage.stores import LocalStore, store_at
from tests.builders.caches import encoded, encoded_failure, random_tokens, write_header, write_shard
from tests.builders.stores import S3Server
from tests.pipeline.damage import Dying, flip, say_what_was_committed, shards
from tests.pipeline.verifying import kinds, verified

SHAPE = (4, 9, 8)


def quiet(_):
    """Take what the user would be told."""


def cache_of(folder, videos, run="run", **more):
    """A cache of videos, each name with a seed, or a fault."""
    store = write_header(folder, hidden_size=8)
    for number, (name, seed) in enumerate(videos.items()):
        failed = isinstance(seed, VideoFault)
        video = (
            encoded_failure(name, seed, **more)
            if failed
            else encoded(name, random_tokens(seed, SHAPE), 0.25, "gstep", **more)
        )
        write_shard(store, f"{run}{number}", video)
    return store


@pytest.fixture
def two(tmp_path):
    fault = VideoFault("corrupt", "cut off")
    return [
        cache_of(tmp_path / "a", {"one": 1, "both": 2, "mended": fault}, "a"),
        cache_of(tmp_path / "b", {"two": 3, "both": 2, "mended": 4}, "b"),
    ]


def bytes_of(store):
    return {
        path.relative_to(store.root): hashlib.sha256(path.read_bytes()).digest()
        for path in store.root.rglob("*")
        if path.is_file()
    }


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
    done = merge_caches(two, out, quiet)
    assert_whole(out, *two)
    assert (done.videos, done.equal, done.linked, done.copied) == (4, 2, 4, 0) and has_generated_card(out)
    assert [bytes_of(store) for store in two] == before
    assert len(shards(out)) == 4 and all(file.stat().st_nlink == 2 for file in shards(out))  # "both" is there once
    again = merge_caches(two, out, quiet)
    assert (again.videos, again.linked) == (4, 0)  # its own rows win, since they are the same
    assert_whole(out, *two)
    into = LocalStore(f"{two[0].root}/")  # as a shell completes it: the cache that takes in another, by its other name
    taken = merge_caches(two, into, quiet)
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
        merge_caches(two, OtherDisk(tmp_path / "c"), quiet)
    flip(shards(two[1], "videos")[0], 500)
    with pytest.raises(CorruptShard):
        merge_caches(two, LocalStore(tmp_path / "d"), quiet)
    assert not (tmp_path / "d").exists()


def test_caches_of_other_settings_are_refused_with_what_differs(two, tmp_path):
    other = write_header(tmp_path / "other", method="random")
    with pytest.raises(IdentityMismatch, match=r"pruner\.method: .*/a has 'gstep', .*/other 'random'"):
        merge_caches([two[0], other], LocalStore(tmp_path / "c"), quiet)
    with pytest.raises(IdentityMismatch, match="were not made alike"):
        merge_caches(two, other, quiet)
    with pytest.raises(NotACache):
        merge_caches([two[0], LocalStore(tmp_path / "none")], LocalStore(tmp_path / "c"), quiet)
    assert not (tmp_path / "c").exists() and not (tmp_path / "none").exists()


def test_equal_ids_with_other_tokens_are_refused_where_that_is_asked_for(two, tmp_path):
    merge_caches(two, LocalStore(tmp_path / "same"), quiet, "refuse")  # "both" has the same tokens in both
    third = cache_of(tmp_path / "third", {"one": 9}, "t")
    with pytest.raises(UsageError, match=r"1 videos have different tokens in several caches \(one\)"):
        merge_caches([*two, third], LocalStore(tmp_path / "c"), quiet, "refuse")
    assert not (tmp_path / "c").exists()


def test_a_removed_video_stays_removed(two, tmp_path):
    remove_videos(two[0], ["two", "both"], "licence", quiet, timedelta(0))
    for number, sources in enumerate((two, two[::-1])):
        out = LocalStore(tmp_path / f"c{number}")
        merge_caches(sources, out, quiet)
        cache = TokenCache(out.root)
        assert cache.video_ids == ["mended", "one"]
        for video_id in ("two", "both"):
            with pytest.raises(RemovedVideo, match="licence"):
                cache.get(video_id)
        assert len(shards(out)) == 2


SECRET = "a caption of the takedown"


def mentions(root, store_with_tokens, video_id):
    """Name the files of a cache that hold a video's caption or tokens, packed or not."""
    values = TokenCache(store_with_tokens).get(video_id, order="selection").tokens
    tokens = values.contiguous().view(torch.int16).numpy().tobytes()
    files = []
    for path in (path for path in root.rglob("*") if path.is_file()):
        data = path.read_bytes()
        text = str(pq.read_table(path).to_pylist()) if path.suffix == ".parquet" else ""
        has_uri = path.suffix != ".parquet" and b"videos/gone" in data
        held = SECRET in text or SECRET.encode() in data or tokens in data or has_uri or "videos/gone" in text
        files += [path.relative_to(root).as_posix()] * held
    return files


def secret_cache(folder, run, *names, attempts=1):
    """A cache with the videos in one token shard, "gone" with a caption, and a record of its run that names it."""
    store = write_header(folder, hidden_size=8)
    more = {"manifest": json.dumps({"caption": SECRET}), "attempts": attempts}
    videos = [
        encoded(name, random_tokens(5, SHAPE), 0.25, "gstep", **(more if name == "gone" else {})) for name in names
    ]
    write_shard(store, run, *videos)
    record = {"run_id": run, "videos": 2, "config": {"videos": ["/videos/gone"]}, "error": "/videos/gone: cut off"}
    store.put(f"runs/{run}.json", json.dumps(record).encode())
    return store


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("into", [False, True])
def test_nothing_stays_of_a_video_that_one_cache_has_removed(tmp_path, order, merged, into):
    """Small files with its caption and shared token shards were linked from the other caches."""
    first = secret_cache(tmp_path / "a", "a", "one", "gone")
    second = secret_cache(tmp_path / "b", "b", "stays", "gone", attempts=2)
    third = secret_cache(tmp_path / "d", "d", "gone")  # the row is superseded, and no token shard of it is taken
    write_shard(third, "d2", encoded("gone", random_tokens(6, SHAPE), 0.25, "gstep", attempts=3))
    before = secret_cache(tmp_path / "before", "b", "stays", "gone", attempts=2).root
    remove_videos(first, ["gone"], "licence", quiet, timedelta(0))
    if merged:
        for store in (first, second, third):
            merge_table_fully(store, read_fingerprint(store))
    tokens = TokenCache(second.root).get("stays").tokens
    sources = [(first, second, third)[number] for number in order]
    out = second if into else LocalStore(tmp_path / "c")
    done = merge_caches(sources, out, quiet)
    assert done.removed == ["gone"] and done.moved == 1
    assert mentions(out.root, before, "gone") == []
    assert TokenCache(out.root).video_ids == ["one", "stays"] and kinds(verified(out)) == []
    assert torch.equal(TokenCache(out.root).get("stays", verify=True).tokens, tokens)
    with pytest.raises(RemovedVideo, match="licence"):
        TokenCache(out.root).get("gone")
    again = merge_caches(sources, out, quiet)
    assert again.moved == 0 and mentions(out.root, before, "gone") == []


def test_files_that_are_deleted_or_may_hold_a_removed_video_are_named(two, tmp_path):
    shutil.copytree(two[1].root, tmp_path / "out")
    out, said = LocalStore(tmp_path / "out"), list[str]()
    out.put("repaired/damaged.parquet", b"PAR1 of nobody knows what PAR1")
    (file, *_) = shards(out, "videos")
    shutil.copy(file, file.with_name("backup.parquet"))
    remove_videos(two[0], TokenCache(two[1].root).video_ids, "asked", quiet, timedelta(0))
    merge_caches([two[0]], out, said.append)
    assert any("files deleted that may hold removed videos: " in line and "repaired/damaged" in line for line in said)
    assert any("videos/backup.parquet is not a file of this cache, and may hold the videos" in line for line in said)
    assert not out.exists("repaired/damaged.parquet") and out.exists("videos/backup.parquet")


def test_an_interrupted_merge_shows_no_removed_video_and_a_rerun_erases_it(tmp_path):
    first, second = secret_cache(tmp_path / "a", "a", "one", "gone"), secret_cache(tmp_path / "b", "b", "stays", "gone")
    before = secret_cache(tmp_path / "before", "b", "gone").root
    remove_videos(first, ["gone"], "licence", quiet, timedelta(0))
    for allowed in range(60):
        out = Dying(tmp_path / f"c{allowed}")
        out.left = allowed
        try:
            merge_caches([second, first], out, quiet)
        except KeyboardInterrupt:
            if (out.root / "cache.json").exists():
                assert "gone" not in TokenCache(out.root)
            merge_caches([second, first], LocalStore(out.root), quiet)
        else:
            break
        assert mentions(out.root, before, "gone") == [] and TokenCache(out.root).video_ids == ["one", "stays"]
    assert allowed > 10


def test_the_same_command_ends_what_was_stopped_anywhere(two, tmp_path):
    """Every write is one before which a merge stops once; what is there then is a cache of whole rows."""
    for store in two:
        say_what_was_committed(store)
    for allowed in range(40):
        out = Dying(tmp_path / "c", spared="runs/.*")
        out.left = allowed
        try:
            merge_caches(two, out, quiet)
        except KeyboardInterrupt:
            if (out.root / "cache.json").exists():
                cache = TokenCache(out.root)
                assert all(len(cache.get(video_id).tokens) for video_id in cache.video_ids)
        else:
            break
    assert allowed > 3
    assert_whole(out, *two)
    assert len(list_committed_shards(out)) == 4


@pytest.mark.parametrize("merged", [False, True])
def test_a_cache_that_is_written_to_meanwhile_is_taken_as_of_one_moment(two, tmp_path, monkeypatch, merged):
    def and_more(held, rows, *rest):
        take(held, rows, *rest)
        if len(shards(two[0])) == 2:  # a run commits, and merges its table
            write_shard(two[0], "later", encoded("later", random_tokens(9, SHAPE), 0.25, "gstep"))
            say_what_was_committed(two[0])
            if merged:
                merge_table_fully(two[0], compute_fingerprint(TokenCache(two[0].root).identity))

    take = merge_module._take_live_tokens
    monkeypatch.setattr(merge_module, "_take_live_tokens", and_more)
    out = LocalStore(tmp_path / "c")
    done = merge_caches(two, out, quiet)
    assert TokenCache(out.root).video_ids == ["both", *["later"] * merged, "mended", "one", "two"]
    assert (done.videos, done.linked) == (4 + merged, 4 + merged)
    report = verified(out)
    assert kinds(report) == [] and report.orphans == []


def test_folders_go_to_s3_and_back(two, tmp_path):
    with S3Server("merge") as server:
        far, back = store_at(server.uri("merged"), server.objects()), LocalStore(tmp_path / "back")
        there, here = merge_caches(two, far, quiet), merge_caches([far], back, quiet)
    assert_whole(back, *two)
    n_bytes = sum(file.stat().st_size for file in shards(back))
    for done in (there, here):  # bytes are copied where no link can be had
        assert (done.linked, done.copied, done.copied_bytes) == (0, 4, n_bytes)
