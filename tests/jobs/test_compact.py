"""jobs.compact, jobs.remove and jobs.merge as commands: what they say, their exit codes, their documents."""

import json
import shutil
from datetime import timedelta

import pytest

from jobs import compact, inspect, merge, remove
from pipeline import TokenCache
from pipeline.cache.merging import merge_table_files
from pipeline.errors import RemovedVideo
from pipeline.storage.stores import LocalStore
from tests.builders.caches import encoded, random_tokens, write_header, write_shard
from tests.builders.runs import document_of, said_by
from tests.pipeline.damage import say_what_was_committed, stop_at_each_change
from tests.pipeline.rewrite.test_merge import cache_of
from tests.pipeline.verifying import assert_tokens, tokens_of


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


def merge_twice(store):
    """One run merges, the next deletes what was merged."""
    for _ in range(2):
        merge_table_files(store, None, everything=True, keep=timedelta(0))


def test_a_stop_before_any_change_loses_and_doubles_nothing(cache, tmp_path):
    """The first change puts the merged file, the others delete the three files whose rows it has."""
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


def test_two_caches_become_one(tmp_path):
    cache_of(tmp_path / "a", {"one": 1, "both": 2}, "a")
    cache_of(tmp_path / "b", {"two": 3, "both": 9}, "b")
    a, b, c = (str(tmp_path / name) for name in "abc")
    code, found, said = document_of(merge, [a, b, f"{b}/", "--out", c])
    assert (code, found["linked"]) == (0, 3) and "3 videos; of 1 several caches had a row" in said
    assert TokenCache(c).video_ids == ["both", "one", "two"]
