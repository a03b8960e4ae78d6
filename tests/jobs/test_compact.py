"""jobs.compact, jobs.remove and jobs.merge as commands: what they say, their exit codes, their documents."""

import json
import signal

import pytest
import torch

from jobs import compact, inspect, merge, remove, verify
from pipeline import TokenCache
from pipeline.errors import RemovedVideo
from pipeline.storage.stores import LocalStore
from tests.builders.caches import encoded, random_tokens, write_header, write_shard
from tests.builders.runs import document_of, said_by
from tests.jobs.faults import die_at_call
from tests.jobs.test_faults_stores import SmallDisk
from tests.pipeline.damage import say_what_was_committed
from tests.pipeline.rewrite.test_merge import cache_of


@pytest.fixture
def cache(tmp_path):
    store = write_header(tmp_path / "c", hidden_size=8)
    for number, name in enumerate("abc"):
        write_shard(store, f"run{number}", encoded(name, random_tokens(number, (4, 9, 8)), 0.25, "gstep"))
    return tmp_path / "c"


def test_files_are_merged_and_then_deleted(cache):
    said = said_by(compact, cache)
    assert "3 files merged into 1 of 3 rows" in said and "3 merged files stay for a while" in said
    code, found, said = document_of(compact, [str(cache), "--keep-minutes", "0"])
    assert (code, found["cache"], len(found["deleted"]), found["read"]) == (0, str(cache), 3, [])
    assert "nothing to merge" in said and TokenCache(cache).video_ids == ["a", "b", "c"]


def test_files_of_others_stop_nothing(cache):
    """A token shard's name without a run's id, and a record that is none, ended the command in a traceback."""
    say_what_was_committed(LocalStore(cache))
    (cache / "tokens" / "all.parquet").write_bytes(b"")
    for number, text in enumerate(("[]", "", "\0")):
        (cache / "runs" / f"{number}.json").write_text(text)
    assert "3 videos of 3 token shards are in 1 now" in said_by(compact, cache, "--tokens", "--keep-minutes", "0")
    assert "3 token shards of earlier joins deleted" in said_by(compact, cache, "--tokens", "--keep-minutes", "0")
    assert (cache / "tokens" / "all.parquet").exists()


def test_damage_changes_nothing(cache):
    (file, *_) = (cache / "videos").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    before = sorted((cache / "videos").iterdir())
    assert "hash in its name" in said_by(compact, cache, code=1) and sorted((cache / "videos").iterdir()) == before


@pytest.mark.parametrize("merged", [False, True])
def test_lost_rows_are_said_and_are_no_success(cache, merged):
    say_what_was_committed(LocalStore(cache))
    assert compact.main([str(cache)]) == inspect.main([str(cache)]) == 0
    if merged:
        assert compact.main([str(cache), "--keep-minutes", "0"]) == 0
    for file in sorted((cache / "videos").iterdir())[-1:] if merged else (cache / "videos").glob("*"):
        file.unlink()
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
    (tmp_path / "ids").write_text("\ufeffb\r\n\nb\n")  # as editors on Windows write it
    argv = [str(cache), "--ids", str(tmp_path / "ids"), "--reason", "licence ended", "--keep-minutes", "0"]
    code, found, said = document_of(remove, argv)
    assert (code, found["videos"], found["moved"], found["unknown"]) == (0, 1, 0, [])
    assert "1 videos removed for good" in said
    with pytest.raises(RemovedVideo, match="licence ended"):
        TokenCache(cache).get("b")
    (record,) = [json.loads(file.read_text()) for file in (cache / "runs").glob("*.json")]
    assert inspect.main([str(cache)]) == 0
    assert (record["reason"], record["removed"], record["status"]) == ("licence ended", 1, "finished")


@pytest.mark.slow
@pytest.mark.parametrize("touches", [0, 2, 4])
def test_a_kill_loses_and_doubles_nothing(cache, tmp_path, touches):
    """The first touch puts the merged file, the others delete the three files whose rows it has."""
    before = {name: TokenCache(cache).get(name).tokens for name in "abc"}
    command = ["jobs.compact", str(cache), "--keep-minutes", "0"]
    for _ in range(2):  # one run merges, the next deletes what was merged
        ended = die_at_call(touches, ("put", "delete"), command, tmp_path / "log")
        assert ended in {0, -signal.SIGKILL}, (tmp_path / "log").read_text()
        now = TokenCache(cache)
        assert now.video_ids == ["a", "b", "c"] and all(torch.equal(now.get(name).tokens, before[name]) for name in now)
    assert (ended == 0) == (touches >= 3)
    for _ in range(2):
        assert compact.main([str(cache), "--keep-minutes", "0"]) == verify.main([str(cache)]) == 0
    assert len(list((cache / "videos").iterdir())) == 1


def test_two_caches_become_one(tmp_path):
    cache_of(tmp_path / "a", {"one": 1, "both": 2}, "a")
    cache_of(tmp_path / "b", {"two": 3, "both": 9}, "b")
    a, b, c = (str(tmp_path / name) for name in "abc")
    said = said_by(merge, a, b, "--out", c, "--on-equal", "refuse", code=2)
    assert "1 videos have different tokens in several caches (both)" in said
    code, found, said = document_of(merge, [a, b, f"{b}/", "--out", c])
    (tmp_path / "merge.yaml").write_text(f"caches: [{a}, {b}]\nout: {c}\n")
    said_by(merge, "--config", tmp_path / "merge.yaml")  # a file may give what is required
    assert (code, found["linked"]) == (0, 3) and "3 videos; of 1 several caches had a row" in said
    assert TokenCache(c).video_ids == ["both", "one", "two"]


def large(place, names, seed):
    """A cache of 160 kB a video."""
    store = write_header(place, hidden_size=512)
    for number, name in enumerate(names):
        write_shard(store, name, encoded(name, random_tokens(seed + number, (10, 64, 512)), 0.25, "gstep"))
    say_what_was_committed(store)
    return store


def test_a_full_disk_ends_the_command_with_the_path_and_the_same_one_goes_on(tmp_path):
    large(tmp_path / "a", [f"a{number}" for number in range(8)], 0)
    large(tmp_path / "b", ["b0"], 50)
    a, b, out = (tmp_path / name for name in ("a", "b", "disk/out"))
    argv = [str(a), str(b), "--out", str(out)]
    with SmallDisk(tmp_path / "disk") as disk:
        if not disk.mounted:
            pytest.skip("this user may not mount a small disk")
        said = said_by(merge, *argv, code=1)
        assert "failed: " in said and disk.told in said and "out" in said.rpartition("failed: ")[2]
        assert not list(out.rglob(".tmp-*"))
        disk.grow()
        assert merge.main(argv) == 0
        made, source = TokenCache(out), TokenCache(a)
        assert made.video_ids == [*source.video_ids, "b0"]
        assert all(torch.equal(made.get(name).tokens, source.get(name).tokens) for name in source)
