"""jobs.compact and jobs.remove as commands: what they say, their exit codes, their documents."""

import json

import pytest

from jobs import compact, remove
from pipeline import TokenCache
from pipeline.errors import RemovedVideo
from tests.pipeline.caches import encoded, random_tokens, write_header, write_shard


@pytest.fixture
def cache(tmp_path):
    store = write_header(tmp_path / "c", hidden_size=8)
    for number, name in enumerate("abc"):
        write_shard(store, f"run{number}", encoded(name, random_tokens(number, (4, 9, 8)), 0.25, "gstep"))
    return tmp_path / "c"


def test_files_are_merged_and_then_deleted(cache, capsys):
    assert compact.main([str(cache)]) == 0
    said = capsys.readouterr().err
    assert "3 files merged into 1 of 3 rows" in said and "3 merged files stay for a while" in said
    assert compact.main([str(cache), "--keep-minutes", "0", "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert (found["cache"], len(found["deleted"]), found["read"]) == (str(cache), 3, [])
    assert "nothing to merge" in told.err and TokenCache(cache).video_ids == ["a", "b", "c"]


def test_damage_changes_nothing(cache, capsys):
    (file, *_) = (cache / "videos").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    before = sorted((cache / "videos").iterdir())
    assert compact.main([str(cache)]) == 1
    assert "hash in its name" in capsys.readouterr().err and sorted((cache / "videos").iterdir()) == before


@pytest.mark.parametrize("command", [[compact], [remove, "--ids", "ids", "--reason", "x"]])
def test_what_is_no_cache_is_refused(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids").write_text("a\n")
    assert command[0].main([str(tmp_path / "none"), *command[1:]]) == 2
    assert "not a pruned-token cache" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_a_video_is_removed_by_name(cache, tmp_path, capsys):
    (tmp_path / "ids").write_text("b\r\n\nb\n")
    argv = [str(cache), "--ids", str(tmp_path / "ids"), "--reason", "licence ended", "--keep-minutes", "0", "--json"]
    assert remove.main(argv) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert (found["videos"], found["moved"], found["unknown"]) == (1, 0, [])
    assert "1 videos removed for good" in told.err
    with pytest.raises(RemovedVideo, match="licence ended"):
        TokenCache(cache).get("b")
    (record,) = [json.loads(file.read_text()) for file in (cache / "runs").glob("*.json")]
    assert (record["reason"], record["removed"], record["status"]) == ("licence ended", 1, "finished")


@pytest.mark.parametrize(("text", "told"), [("\n \n", "names no video"), (None, "cannot be read")])
def test_ids_that_are_none_are_refused(cache, tmp_path, capsys, text, told):
    if text is not None:
        (tmp_path / "ids").write_text(text)
    assert remove.main([str(cache), "--ids", str(tmp_path / "ids"), "--reason", "x"]) == 2
    assert told in capsys.readouterr().err
