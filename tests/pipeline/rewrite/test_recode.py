"""A cache made of another: the same bits that a run would write, refusals, and going on after kills and changes."""

from __future__ import annotations

import signal
from collections import Counter

import pyarrow.parquet as pq
import pytest
import torch

from jobs import recode, reprune
from pipeline import FailedVideo, TokenCache
from pipeline.cache.table import list_table_files, read_file
from pipeline.errors import RemovedVideo, VideoFault
from pipeline.storage.stores import LocalStore
from tests.builders.caches import encoded, encoded_failure, random_tokens, write_header, write_shard
from tests.jobs.faults import die_at_call
from tests.pipeline.damage import flip
from tests.pipeline.verifying import remove, verified

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
