"""Caches made of others, merged, coded or pruned: the bits that a run would write; kills and changes harm nothing."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from jobs import recode, reprune
from pipeline import FailedVideo, TokenCache
from pipeline.cache.header import has_generated_card, read_fingerprint
from pipeline.cache.merging import merge_table_fully
from pipeline.cache.table import list_table_files, read_file
from pipeline.errors import CorruptShard, IdentityMismatch, NotACache, RemovedVideo, UsageError, VideoFault
from pipeline.rewrite import merge as merge_module
from pipeline.rewrite.merge import merge_caches
from pipeline.runner.run_record import list_committed_shards
from pipeline.storage.stores import LocalStore, store_at
from tests.builders.caches import encoded, encoded_failure, random_tokens, write_header, write_shard
from tests.builders.stores import S3Server
from tests.jobs.faults import die_at_call
from tests.paths import read_all
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
    before, out = [read_all(store.root) for store in two], LocalStore(tmp_path / "c")
    done = merge(two, out)
    assert_whole(out, *two)
    assert (done.videos, done.equal, done.linked, done.copied) == (4, 2, 4, 0) and has_generated_card(out)
    assert [read_all(store.root) for store in two] == before
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


SHAPE = (4, 20, 48)
NAMES = "abcde"
NAN, HUGE = 0x7FC0, 0x7F00  # the bits of bfloat16 numbers, the second 2**127
TOKENS = {name: random_tokens(i, SHAPE) for i, name in enumerate(NAMES)}
LEVELS = {name: [random_tokens(10 + i, SHAPE)] for i, name in enumerate(NAMES)}


def cache(out, method="none", ratio=1.0, codec="bfloat16"):
    """Write the videos a to e, two and three a shard, one that failed and one that was removed."""
    store = write_header(out, ratio, method, codec=codec, hidden_size=48, deepstack_levels=1)
    for number, part in enumerate(("ab", "cde")):
        videos = [encoded(name, TOKENS[name], ratio, method, LEVELS[name], manifest='{"é":1}') for name in part]
        write_shard(store, f"run{number}", *videos)
    write_shard(store, "run2", encoded_failure("bad", VideoFault("corrupt", "torn")))
    remove(store, "gone", reason="asked")
    return store


def same(one, other):
    assert one.video_ids == other.video_ids == list(NAMES)
    for name in one.video_ids:
        video, found = one.get(name, order="selection"), other.get(name, order="selection", verify=True)
        for given, stored in zip((video.tokens, *video.deepstack), (found.tokens, *found.deepstack), strict=True):
            assert torch.equal(given.view(torch.int16), stored.view(torch.int16))
        for field in ("index", "rank", "frame", "merged", "density"):
            given, stored = getattr(video, field), getattr(found, field)
            assert (given is None) == (stored is None) and (given is None or torch.equal(given, stored))
        own = {"run_id", "token_shard", "footer_hash", "tie_break", "first_row_group", "prune_s", "write_s"}
        for key in video.metadata.keys() - own:
            assert found.metadata[key] == video.metadata[key], key
    assert other.failed == {"bad": "corrupt"}
    with pytest.raises(FailedVideo):
        other.get("bad")
    with pytest.raises(RemovedVideo, match="asked"):
        other.get("gone")
    assert verified(other.store).exit_code == 0


@pytest.mark.parametrize(
    ("command", "made_of", "made", "argv"),
    [
        (recode, {"method": "gstep", "ratio": 0.25}, {"codec": "int8"}, ["--token-codec", "int8"]),
        (reprune, {}, {"method": "gstep", "ratio": 0.25}, ["--pruner", "gstep", "--retention-ratio", "0.25"]),
        (reprune, {}, {"method": "vidcom2", "ratio": 0.25}, ["--pruner", "vidcom2", "--retention-ratio", "0.25"]),
    ],
)
def test_tokens_are_those_that_a_run_writes(tmp_path, command, made_of, made, argv):
    """Methods that look at evidence are in tests/jobs/test_prune.py, beside real runs."""
    cache(tmp_path / "whole", **made_of)
    cache(tmp_path / "expected", **made_of | made)
    argv = [str(tmp_path / "whole"), *argv, "--out", str(tmp_path / "out")]
    assert command.main(argv) == 0
    expected, out = TokenCache(tmp_path / "expected"), TokenCache(tmp_path / "out")
    assert out.header["schema_version"] == expected.header["schema_version"]
    assert out.retention_ratio == 0.25 and out.identity["pruner"]["method"] == expected.identity["pruner"]["method"]
    assert command is reprune or out.identity == expected.identity
    same(expected, out)
    before = sorted((tmp_path / "out" / "tokens").iterdir())
    assert command.main(argv) == 0 and sorted((tmp_path / "out" / "tokens").iterdir()) == before


def test_pruned_and_coded_at_once_is_pruned_then_coded(sources, tmp_path):
    whole, both, pruned, out = (str(place) for place in (sources / "whole", *(tmp_path / name for name in "bpo")))
    assert reprune.main([whole, "--token-codec", "int4", "--out", both]) == reprune.main([whole, "--out", pruned]) == 0
    assert recode.main([pruned, "--token-codec", "int4", "--out", out]) == 0
    assert TokenCache(both).identity == TokenCache(out).identity
    same(TokenCache(both), TokenCache(out))


def test_what_was_done_again_in_the_source_is_taken_in_and_what_was_removed_stays_so(tmp_path):
    source = cache(tmp_path / "whole", "gstep", 0.25)
    argv = [str(tmp_path / "whole"), "--token-codec", "int4", "--out", str(tmp_path / "out")]
    assert recode.main(argv) == 0
    other = random_tokens(99, SHAPE)
    again = encoded("bad", other, 0.25, "gstep", [other], attempts=2)
    more = encoded("f", TOKENS["a"], 0.25, "gstep", LEVELS["a"])
    write_shard(source, "run3", again, more)
    remove(LocalStore(tmp_path / "out"), "c")
    assert recode.main([*argv, "--json"]) == 0
    found = TokenCache(tmp_path / "out")
    assert found.video_ids == ["a", "b", "bad", "d", "e", "f"] and found.failed == {}
    whole = TokenCache(tmp_path / "whole").get("bad")
    assert torch.equal(found.get("bad").index, whole.index)
    remove(source, "d")
    assert recode.main(argv) == 0 and "d" not in TokenCache(tmp_path / "out")
    for file in (tmp_path / "out").rglob("*.parquet"):  # its tokens and its row stayed
        rows = pq.read_table(file).select(["video_id", *({"uri"} & {*pq.read_schema(file).names})]).to_pylist()
        assert not [row for row in rows if row["video_id"] == "d" and row.get("uri") != ""]


@pytest.mark.parametrize(
    ("command", "number", "more"), [(reprune, NAN, []), (reprune, HUGE, ["--token-codec", "int4"]), (recode, NAN, [])]
)
def test_a_video_that_cannot_be_pruned_or_coded_gets_an_error_row(tmp_path, capsys, command, number, more):
    store = write_header(tmp_path / "whole", 1.0, "none", hidden_size=48)
    good, bad = (encoded(name, TOKENS[name], 1.0, "none") for name in "ab")
    bad.kept.tokens[0, :] = number
    write_shard(store, "run", good, bad)
    assert command.main([str(tmp_path / "whole"), "--out", str(tmp_path / "out"), *more]) == 1
    assert "1 of them failed" in capsys.readouterr().err
    found = TokenCache(tmp_path / "out")
    assert found.video_ids == ["a"] and found.failed == {"b": "internal"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder of caches: of all tokens, coded and pruned; and a folder that is none."""
    folder = tmp_path_factory.mktemp("sources")
    cache(folder / "whole")
    cache(folder / "coded", codec="int8")
    cache(folder / "pruned", "gstep", 0.25)
    (folder / "full").mkdir()
    (folder / "full" / "file").touch()
    return folder


@pytest.mark.parametrize(
    ("command", "argv", "said"),
    [
        (recode, "coded --token-codec int4 --out out", "stores int8 tokens already"),
        (reprune, "coded --out out", "stores int8 tokens already"),
        (reprune, "pruned --out out", "not all tokens"),
        (reprune, "whole --out out --pruner cdpruner", "anew for every question"),
        (reprune, "whole --out out --pruner visionzip", "--evidence visionzip"),
        (reprune, "whole --out out --pruner none-such", "unknown method"),
        (reprune, "whole --out out --pruner-param alpha=7", "alpha"),
        (recode, "whole --out out --token-codec bfloat16", "invalid choice"),
        (recode, "whole --token-codec int4 --out full", "is no cache"),
        (recode, "whole --token-codec int4 --out whole", "dtype.stored: the cache has 'bfloat16', this run 'int4'"),
        (recode, "--out out", "arguments are required: CACHE"),
        (reprune, "--out out", "arguments are required: WHOLE"),
    ],
)
def test_refusals_start_nothing(sources, capsys, monkeypatch, command, argv, said):
    monkeypatch.chdir(sources)
    try:
        code = command.main(argv.split())
    except SystemExit as end:  # a flag's own check
        code = end.code
    assert code == 2 and said in capsys.readouterr().err and not (sources / "out").exists()


def test_damage_in_the_source_ends_it_and_is_never_carried_on(tmp_path, capsys):
    store = cache(tmp_path / "whole", "gstep", 0.25)
    for name in store.names("tokens", ".parquet"):
        flip(tmp_path / "whole" / name, (tmp_path / "whole" / name).stat().st_size // 4)
    assert recode.main([str(tmp_path / "whole"), "--out", str(tmp_path / "out")]) == 1
    assert "jobs.verify" in capsys.readouterr().err and TokenCache(tmp_path / "out").video_ids == []


@pytest.mark.slow
def test_a_kill_at_any_write_doubles_and_loses_nothing(tmp_path):
    """The writes are note, header and record, then tokens and rows of each of four bundles, and the record again."""
    cache(tmp_path / "whole")
    log, argv = tmp_path / "log", ["jobs.reprune", str(tmp_path / "whole"), "--token-codec", "int4", "--out"]
    assert die_at_call(99, ("put",), [*argv, str(tmp_path / "once")], log) == 0, log.read_text()
    once, killed, puts = TokenCache(tmp_path / "once"), 0, 1
    while True:
        ended = die_at_call(puts, ("put",), [*argv, str(tmp_path / "out")], log)
        assert ended in {0, -signal.SIGKILL}, log.read_text()
        if (tmp_path / "out" / "cache.json").exists():
            now = TokenCache(tmp_path / "out")
            assert all(torch.equal(now.get(name).tokens, once.get(name).tokens) for name in now)
        if ended == 0:
            break
        killed, puts = killed + 1, puts + 2
    assert killed > 3
    same(once, now)
    store = LocalStore(tmp_path / "out")
    rows = [row for file in list_table_files(store) for row in read_file(store, file, ("video_id",)).to_pylist()]
    assert set(Counter(row["video_id"] for row in rows).values()) == {1}
