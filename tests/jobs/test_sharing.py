"""jobs.merge and jobs.diff as commands: what they say, their exit codes, their documents."""

import json

import pytest

from jobs import diff, export, merge
from pipeline import TokenCache
from tests.pipeline.caches import write_header
from tests.pipeline.sharing.test_merge import cache_of


def test_two_caches_become_one_and_differ_from_it(tmp_path, capsys):
    cache_of(tmp_path / "a", {"one": 1, "both": 2}, "a")
    cache_of(tmp_path / "b", {"two": 3, "both": 9}, "b")
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert merge.main([a, b, "--out", c, "--on-equal", "refuse"]) == 2
    assert "1 videos have other tokens in several caches (both)" in capsys.readouterr().err
    assert merge.main([a, b, "--out", c, "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["linked"] == 3 and "3 videos; of 1 several caches had a row" in told.err
    assert TokenCache(c).video_ids == ["both", "one", "two"]
    assert diff.main([a, c]) == 1
    assert "only in the second" in capsys.readouterr().out
    assert diff.main([a, c, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["only_second"]) == (False, {"count": 1, "examples": ["two"]})
    assert diff.main([c, c]) == 0


@pytest.mark.parametrize("command", [merge, diff])
def test_what_is_no_cache_is_refused(command, tmp_path, capsys):
    write_header(tmp_path / "a")
    out = ["--out", str(tmp_path / "c")] if command is merge else []
    assert command.main([str(tmp_path / "a"), str(tmp_path / "none"), *out]) == 2
    assert "no pruned-token cache" in capsys.readouterr().err.replace("not a pruned", "no pruned").replace(
        "neither a pruned", "no pruned"
    )
    assert not (tmp_path / "none").exists() and not (tmp_path / "c").exists()


def test_one_cache_alone_is_nothing_to_merge(tmp_path):
    with pytest.raises(SystemExit) as ended:
        merge.main([str(tmp_path / "a"), "--out", str(tmp_path / "a")])
    assert ended.value.code == 2


def test_a_cache_is_exported_whole_in_part_and_as_tars(tmp_path, capsys):
    cache_of(tmp_path / "c", {"one": 1, "two": 2})
    (tmp_path / "ids").write_text("two\n")
    where = str(tmp_path / "c"), "--to"
    assert export.main([*where, str(tmp_path / "whole"), "--licence", "cc0-1.0", "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["videos"] == 2 and "cc0-1.0" in (tmp_path / "whole/README.md").read_text()
    )
    assert diff.main([str(tmp_path / "c"), str(tmp_path / "whole")]) == 0
    assert export.main([*where, str(tmp_path / "part"), "--ids", str(tmp_path / "ids")]) == 0
    assert TokenCache(tmp_path / "part").video_ids == ["two"]
    assert export.main([*where, str(tmp_path / "tars"), "--to-tar"]) == 0
    assert len(list((tmp_path / "tars").glob("*.tar"))) == 2
    for wrong in (
        ["hf://datasets/me/it"],
        ["hf://datasets/me/it", "--to-tar", "--staging", "s"],
        ["d", "--staging", "s"],
    ):
        with pytest.raises(SystemExit, match="2"):
            export.main([*where, *wrong])
    assert export.main([*where, "hf://models/me/it", "--staging", str(tmp_path / "s")]) == 2
    assert "hf://datasets/OWNER/NAME" in capsys.readouterr().err and not (tmp_path / "s").exists()


@pytest.mark.parametrize("how", [[], ["--to-tar"]])
def test_a_cache_is_not_exported_onto_itself(tmp_path, monkeypatch, capsys, how):
    cache_of(tmp_path / "c", {"one": 1})
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert export.main([str(tmp_path / "c"), "--to", "c", *how]) == 2
    assert "c is the cache itself" in capsys.readouterr().err and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("command", "flag"), [(export, "--to"), (merge, "--out")])
def test_an_empty_name_is_not_this_folder(tmp_path, monkeypatch, capsys, command, flag):
    cache_of(tmp_path / "c", {"one": 1})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert command.main([str(tmp_path / "c"), flag, ""]) == 2
    assert "is empty: name a folder" in capsys.readouterr().err and not list((tmp_path / "here").iterdir())
