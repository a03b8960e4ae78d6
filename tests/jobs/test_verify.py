"""jobs.verify, compact, remove and merge: exit codes, reports, documents, and videos encoded again."""

import json
import shutil
import signal
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from jobs import compact, inspect, merge, prune, remove, verify
from pipeline import TokenCache
from pipeline.cache.merging import merge_table_files
from pipeline.errors import RemovedVideo
from pipeline.storage.stores import LocalStore, ObjectStore
from tests.builders.caches import encoded, random_tokens, write_header, write_shard
from tests.builders.clips import sample
from tests.builders.runs import document_of, forbid_ray, said_by, start, stop
from tests.builders.stores import S3Server
from tests.pipeline.damage import (
    flip,
    other_tokens,
    rewrite_tokens,
    say_what_was_committed,
    stop_at_each_change,
)
from tests.pipeline.rewrite.test_merge import cache_of
from tests.pipeline.verifying import assert_tokens, tokens_of

CLIPS = ("carphone_pristine.mp4", "bikes.mp4")


@pytest.fixture
def cache(tmp_path) -> Path:
    """Three videos in two shards."""
    store = write_header(tmp_path / "c", hidden_size=8)
    a, b, c = (encoded(name, random_tokens(i, (4, 9, 8)), 0.25, "gstep") for i, name in enumerate("abc"))
    write_shard(store, "run", a, b)
    write_shard(store, "run", c)
    return tmp_path / "c"


def test_exit_codes_and_the_report_as_json(cache):
    code, record, said = document_of(verify, [str(cache)])
    assert code == record["exit_code"] == 0 and record["repaired"] is None
    assert "nothing is wrong" in said and "2/2 token shards" in said
    assert record["counts"]["videos"] == 3 and record["bytes_read"] > 0 and record["problems"] == []
    shard = cache / TokenCache(cache).metadata("a")["token_shard"]
    shard.write_bytes(shard.read_bytes()[:-1])
    code, record, said = document_of(verify, [str(cache)])
    assert code == 1 and "1 problems" in said
    (problem,) = record["problems"]
    assert (problem["class"], problem["shard"]) == ("footer", f"tokens/{shard.name}")
    assert problem["videos_shard"].startswith("videos/run-000000-") and problem["remedy"]


def test_a_repair_says_what_it_did_and_what_to_do_next(cache, capsys):
    (cache / TokenCache(cache).metadata("a")["token_shard"]).unlink()
    said = said_by(verify, cache, "--repair")
    assert "2 videos marked for another attempt" in said and "nothing is wrong" in said and "in repaired/" in said
    assert "run the command that made the cache with --retry-failed --max-attempts 2" in said
    assert inspect.main([str(cache), "--failed"]) == 0
    assert [line.split("\t")[:2] for line in capsys.readouterr().out.splitlines()] == [["a", "io"], ["b", "io"]]


@pytest.fixture(scope="module")
def pruned(one_ray, tmp_path_factory) -> Path:
    """A cache that the real job made of two real clips."""
    folder = tmp_path_factory.mktemp("videos")
    for name in CLIPS:
        shutil.copy(sample(name), folder)
    out = folder / "cache"
    said_by(prune, folder / "*.mp4", "--out", out, "--num-frames", "4")
    return out


@pytest.fixture
def out(pruned, tmp_path) -> Path:
    """A copy of that cache."""
    return Path(shutil.copytree(pruned, tmp_path / "c"))


@pytest.mark.slow
def test_live_finds_what_was_changed_with_every_checksum(out, monkeypatch):
    forbid_ray(monkeypatch)
    live_check = [str(out), "--live", "9", "--video-root", "/"]
    code, record, said = document_of(verify, live_check)
    assert code == 0 and f"of 9 videos {len(CLIPS)} are sound" in " ".join(said.split()), said
    live = record["live"]
    assert sorted(item["video_id"] for item in live) == sorted(CLIPS)
    for item in live:
        assert (item["state"], item["same_indices"], item["max_difference"]) == ("same", 1.0, 0.0)
        assert item["versions"] == {}
    rewrite_tokens(LocalStore(out), CLIPS[0], other_tokens)
    said_by(verify, out)  # the bytes are what their checksums say
    code, record, said = document_of(verify, live_check)
    assert code == 1 and "beyond rounding" in said
    assert [problem["video_id"] for problem in record["problems"]] == [CLIPS[0]]
    (changed,) = (item for item in record["live"] if item["state"] == "different")
    assert changed["same_indices"] == 1.0 and changed["relative_difference"] == pytest.approx(2.0)


@pytest.mark.slow
def test_live_says_what_differs_and_what_is_gone(out, tmp_path):
    gone = Path(TokenCache(out).metadata(CLIPS[1])["uri"])
    (file,) = (out / "runs").iterdir()
    run = json.loads(file.read_text())
    run["versions"]["torch"] = "1.0"
    del run["decoding_rules"]  # as records of older versions
    file.write_text(json.dumps(run))
    gone.rename(gone.with_suffix(".away"))
    try:
        code, record, said = document_of(verify, [str(out), "--live", "2", "--video-root", "/"])
    finally:
        gone.with_suffix(".away").rename(gone)
    assert code == 0 and "are sound" not in said, said
    live = {item["video_id"]: item for item in record["live"]}
    assert live[CLIPS[1]]["state"] == "source-gone"
    assert live[CLIPS[0]]["state"] == "same" and list(live[CLIPS[0]]["versions"]) == ["torch", "decoding_rules"]
    code, record, said = document_of(verify, [str(out), "--live", "2", "--video-root", str(tmp_path)])
    assert code == 0 and {item["state"] for item in record["live"]} == {"source-gone"}, said
    assert "only below folders and prefixes that you name" in " ".join(said.split())
    run["config"]["decode_timeout"] = 0.001
    file.write_text(json.dumps(run))
    code, failed, said = document_of(verify, [str(out), "--live", "2", "--video-root", "/"])
    assert code == 1 and {item["state"] for item in failed["live"]} == {"failed"}
    assert {problem["class"] for problem in failed["problems"]} == {"live-failed"} and "timeout" in said
    run["config"] |= {"decode_timeout": 120.0, "model": "tiny-qwen3-vl"}
    file.write_text(json.dumps(run))
    assert "model.type: the cache has 'llava_o" in said_by(verify, out, "--live", 1, "--video-root", "/", code=2)
    said_by(verify, out, "--live", 1, "--video-root", "/", "--model", "tiny")


@pytest.mark.slow
def test_a_repaired_cache_is_whole_again_after_another_attempt(pruned, out):
    before = {name: TokenCache(out).get(name, verify=True).tokens for name in CLIPS}
    shard = out / TokenCache(out).metadata(CLIPS[0])["token_shard"]
    flip(shard, pq.read_metadata(shard).row_group(0).column(4).data_page_offset + 100)
    repaired = document_of(verify, [str(out), "--repair"])[1]["repaired"]
    assert [video["video_id"] for video in repaired["marked"]] == [CLIPS[0]]
    assert TokenCache(out).failed == {CLIPS[0]: "io"}
    argv = [str(pruned.parent / "*.mp4"), "--out", str(out), "--num-frames", "4", "--retry-failed"]
    _, summary, _ = document_of(prune, [*argv, "--max-attempts", "2"])
    assert (summary["n_ok"], summary["n_new"], summary["n_failed"], summary["out"]) == (2, 1, 0, str(out))
    now = TokenCache(out)
    assert now.failed == {} and now.metadata(CLIPS[0])["attempts"] == 2
    assert all(torch.equal(now.get(name, verify=True).tokens, before[name]) for name in CLIPS)
    said_by(verify, out)


@pytest.mark.slow
def test_an_interrupt_ends_it_at_once():
    """While it waits whether a run on another machine, which has the cache, still lives."""
    with S3Server("verify") as server:
        store = write_header(ObjectStore(server.uri("c"), server.objects()))
        note = {"host": "elsewhere", "pid": 1, "run_id": "other", "beat": 1, "checked": True}
        store.put("runs/other.running", json.dumps(note).encode())
        process = start("jobs.verify", server.uri("c"), "--clean", **server.environment())
        assert process.stdout is not None and "waiting" in process.stdout.readline()
        said = stop(process, signal.SIGTERM)
    assert process.returncode == 130 and "interrupted" in said and "Traceback" not in said


def test_files_are_merged_and_then_deleted(cache):
    said = said_by(compact, cache)
    assert "2 files merged into 1 of 3 rows" in said and "2 merged files stay for a while" in said
    code, found, said = document_of(compact, [str(cache), "--keep-minutes", "0"])
    assert (code, found["cache"], len(found["deleted"]), found["read"]) == (0, str(cache), 2, [])
    assert "nothing to merge" in said and TokenCache(cache).video_ids == ["a", "b", "c"]


def test_files_of_others_stop_nothing(cache):
    """A token shard's name without a run's id, and a record that is none, ended the command in a traceback."""
    say_what_was_committed(LocalStore(cache))
    (cache / "tokens" / "all.parquet").write_bytes(b"")
    for number, text in enumerate(("[]", "", "\0")):
        (cache / "runs" / f"{number}.json").write_text(text)
    assert "3 videos of 2 token shards are in 1 now" in said_by(compact, cache, "--tokens", "--keep-minutes", "0")
    assert "2 token shards of earlier joins deleted" in said_by(compact, cache, "--tokens", "--keep-minutes", "0")
    assert (cache / "tokens" / "all.parquet").exists()


def test_damage_changes_nothing(cache):
    (file, *_) = (cache / "videos").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    before = sorted((cache / "videos").iterdir())
    assert "hash in its name" in said_by(compact, cache, code=1) and sorted((cache / "videos").iterdir()) == before


def merge_twice(store):
    """One run merges, the next deletes what was merged."""
    for _ in range(2):
        merge_table_files(store, None, everything=True, keep=timedelta(0))


def test_a_stop_before_any_change_loses_and_doubles_nothing(cache, tmp_path):
    """The first change puts the merged file, the others delete the three files whose rows it has."""
    write_shard(LocalStore(cache), "run2", encoded("d", random_tokens(3, (4, 9, 8)), 0.25, "gstep"))
    before = tokens_of(cache)
    for left in stop_at_each_change(merge_twice, lambda left: shutil.copytree(cache, tmp_path / str(left))):
        assert_tokens(tmp_path / str(left), before)
        merge_twice(LocalStore(tmp_path / str(left)))
        assert_tokens(tmp_path / str(left), before)
        assert len(list((tmp_path / str(left) / "videos").iterdir())) == 1


def test_lost_rows_are_said_and_are_no_success(cache):
    say_what_was_committed(LocalStore(cache))
    assert compact.main([str(cache)]) == compact.main([str(cache), "--keep-minutes", "0"]) == 0
    sorted((cache / "videos").iterdir())[-1].unlink()
    for command in (inspect, compact):
        told = said_by(command, cache, code=1)
        assert "3 committed videos without a row in any file of videos/ (a, b, c)" in told and "--repair" in told
        code, found, _ = document_of(command, [str(cache)])
        assert (code, found["n_lost"]) == (1, 3)


def test_removed_and_replaced_videos_are_not_lost(cache, tmp_path):
    (tmp_path / "ids").write_text("b")
    say_what_was_committed(LocalStore(cache))
    assert remove.main([str(cache), "--ids", str(tmp_path / "ids"), "--reason", "x", "--keep-minutes", "0"]) == 0
    write_shard(LocalStore(cache), "run9", encoded("c", random_tokens(7, (4, 9, 8)), 0.25, "gstep", attempts=2))
    assert compact.main([str(cache)]) == inspect.main([str(cache)]) == 0


def test_a_video_is_removed_by_name(cache, tmp_path):
    (tmp_path / "ids").write_text("\ufeffc\r\n\nc\n")  # as editors on Windows write it
    argv = [str(cache), "--ids", str(tmp_path / "ids"), "--reason", "licence ended", "--keep-minutes", "0"]
    code, found, said = document_of(remove, argv)
    assert (code, found["videos"], found["moved"], found["unknown"]) == (0, 1, 0, [])
    assert "1 videos removed for good" in said
    with pytest.raises(RemovedVideo, match="licence ended"):
        TokenCache(cache).get("c")
    (record,) = [json.loads(file.read_text()) for file in (cache / "runs").glob("*.json")]
    assert inspect.main([str(cache)]) == 0
    assert (record["reason"], record["removed"], record["status"]) == ("licence ended", 1, "finished")


def test_two_caches_become_one(tmp_path):
    cache_of(tmp_path / "a", {"one": 1, "both": 2}, "a")
    cache_of(tmp_path / "b", {"two": 3, "both": 9}, "b")
    a, b, c = (str(tmp_path / name) for name in "abc")
    code, found, said = document_of(merge, [a, b, f"{b}/", "--out", c])
    assert (code, found["linked"]) == (0, 3) and "3 videos; of 1 several caches had a row" in said
    assert TokenCache(c).video_ids == ["both", "one", "two"]
