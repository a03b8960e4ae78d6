"""jobs.merge as a command: what it says, its document, refusals before anything is written, and a full disk."""

import json

import pytest
import torch

from jobs import merge
from pipeline import TokenCache
from tests.builders.caches import encoded, random_tokens, write_header, write_shard
from tests.jobs.test_faults_stores import SmallDisk
from tests.pipeline.damage import say_what_was_committed
from tests.pipeline.rewrite.test_merge import cache_of


def test_two_caches_become_one(tmp_path, capsys):
    cache_of(tmp_path / "a", {"one": 1, "both": 2}, "a")
    cache_of(tmp_path / "b", {"two": 3, "both": 9}, "b")
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert merge.main([a, b, "--out", c, "--on-equal", "refuse"]) == 2
    assert "1 videos have different tokens in several caches (both)" in capsys.readouterr().err
    assert merge.main([a, b, f"{b}/", "--out", c, "--json"]) == 0
    told = capsys.readouterr()
    (tmp_path / "merge.yaml").write_text(f"caches: [{a}, {b}]\nout: {c}\n")
    assert merge.main(["--config", str(tmp_path / "merge.yaml")]) == 0  # a file may give what is required
    assert json.loads(told.out)["linked"] == 3 and "3 videos; of 1 several caches had a row" in told.err
    assert TokenCache(c).video_ids == ["both", "one", "two"]


def large(place, names, seed):
    """A cache of 160 kB a video."""
    store = write_header(place, hidden_size=512)
    for number, name in enumerate(names):
        write_shard(store, name, encoded(name, random_tokens(seed + number, (10, 64, 512)), 0.25, "gstep"))
    say_what_was_committed(store)
    return store


def test_a_full_disk_ends_the_command_with_the_path_and_the_same_one_goes_on(tmp_path, capsys):
    large(tmp_path / "a", [f"a{number}" for number in range(8)], 0)
    large(tmp_path / "b", ["b0"], 50)
    a, b, out = (tmp_path / name for name in ("a", "b", "disk/out"))
    argv = [str(a), str(b), "--out", str(out)]
    with SmallDisk(tmp_path / "disk") as disk:
        if not disk.mounted:
            pytest.skip("this user may not mount a small disk")
        assert merge.main(argv) == 1
        said = capsys.readouterr().err
        assert "failed: " in said and disk.told in said and "out" in said.rpartition("failed: ")[2]
        assert not list(out.rglob(".tmp-*"))
        disk.grow()
        assert merge.main(argv) == 0
        made, source = TokenCache(out), TokenCache(a)
        assert made.video_ids == [*source.video_ids, "b0"]
        assert all(torch.equal(made.get(name).tokens, source.get(name).tokens) for name in source)
