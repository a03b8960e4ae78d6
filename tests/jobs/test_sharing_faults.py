"""jobs.merge and jobs.export where a disk is full, places are wrong, caches were made otherwise, ids were removed."""

import json
from datetime import timedelta

import pytest

from jobs import diff, export, merge
from pipeline import TokenCache
from pipeline.errors import RemovedVideo
from pipeline.storage.stores import LocalStore
from pipeline.verify.removal import remove_videos
from tests.jobs.test_faults_stores import SmallDisk
from tests.pipeline.caches import encoded, random_tokens, write_header, write_shard
from tests.pipeline.damage import say_what_was_committed
from tests.pipeline.sharing.test_merge import cache_of, quiet


def large(place, names, seed):
    """A cache of 160 kB a video."""
    store = write_header(place, hidden_size=512)
    for number, name in enumerate(names):
        write_shard(store, name, encoded(name, random_tokens(seed + number, (10, 64, 512)), 0.25, "gstep"))
    say_what_was_committed(store)
    return store


def commands(tmp_path, out):
    """Each command that copies tokens, with what it must leave."""
    a, b, ids = str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "ids")
    return {
        "merge": (merge, [a, b, "--out", out]),
        "export": (export, [a, "--to", out]),
        "part": (export, [a, "--to", out, "--ids", ids]),
        "tars": (export, [a, "--to", out, "--to-tar"]),
    }


@pytest.mark.parametrize("name", ["merge", "export", "part", "tars"])
def test_a_full_disk_ends_the_command_with_the_path_and_the_same_one_goes_on(tmp_path, capsys, name):
    large(tmp_path / "a", [f"a{number}" for number in range(8)], 0)
    large(tmp_path / "b", ["b0"], 50)
    (tmp_path / "ids").write_text("".join(f"a{number}\n" for number in range(8)))
    out = tmp_path / "disk" / "out"
    command, argv = commands(tmp_path, str(out))[name]
    with SmallDisk(tmp_path / "disk") as disk:
        if not disk.mounted:
            pytest.skip("this user may not mount a small disk")
        assert command.main(argv) == 1
        said = capsys.readouterr().err
        assert "failed: " in said and disk.told in said and "out" in said.rpartition("failed: ")[2]
        assert not list(out.rglob(".tmp-*"))
        disk.grow()
        assert command.main(argv) == 0
        if name == "tars":
            assert len(list(out.glob("*.tar"))) == 8
        else:
            cache = TokenCache(out)
            assert cache.video_ids == sorted([f"a{number}" for number in range(8)] + ["b0"] * (name == "merge"))
            capsys.readouterr()
            diff.main([str(tmp_path / "a"), str(out), "--json"])
            found = json.loads(capsys.readouterr().out)
            assert (found["n_equal"], found["content"]["count"]) == (8, 0)


def test_two_identities_and_wrong_places_are_refused_and_nothing_is_written(tmp_path, capsys):
    cache_of(tmp_path / "a", {"one": 1})
    store = write_header(tmp_path / "b", 0.5, hidden_size=8)
    write_shard(store, "run", encoded("one", random_tokens(1, (4, 16, 8)), 0.5, "gstep"))
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine.txt").write_text("x")
    a, out = str(tmp_path / "a"), str(tmp_path / "out")
    refused = {
        "not made alike": (merge, [a, str(tmp_path / "b"), "--out", out]),
        "is no cache": (merge, [a, "--out", str(tmp_path / "other")]),
        "exists and is no cache": (export, [a, "--to", str(tmp_path / "other")]),
        "retention_ratio": (export, [a, "--to", str(tmp_path / "b")]),
        "cache is a folder": (export, [a, "--to", "ftp://host/place"]),
    }
    for why, (command, argv) in refused.items():
        code, said = command.main(argv), " ".join(capsys.readouterr().err.split())
        assert code == 2 and why in said, (why, said)
    assert not (tmp_path / "out").exists() and [p.name for p in (tmp_path / "other").iterdir()] == ["mine.txt"]
    assert export.main([a, "--to", str(tmp_path / "file")]) in (1, 2) and (tmp_path / "file").read_text() == "x"


def test_a_removed_id_stays_removed_in_every_copy(tmp_path):
    """Merged with a cache that still has it, in either order; exported whole, as a part, and again."""
    kept = cache_of(tmp_path / "kept", {"one": 1, "gone": 2})
    store = cache_of(tmp_path / "removed", {"two": 3, "gone": 2})
    say_what_was_committed(store)
    remove_videos(store, ["gone"], "licence", quiet, timedelta(0))
    (tmp_path / "ids").write_text("gone\ntwo\n")
    for number, (command, argv) in enumerate(
        [
            (merge, [str(kept.root), str(store.root), "--out"]),
            (merge, [str(store.root), str(kept.root), "--out"]),
            (export, [str(store.root), "--to"]),
            (export, [str(store.root), "--ids", str(tmp_path / "ids"), "--to"]),
        ]
    ):
        out = tmp_path / f"out{number}"
        for _ in range(2):
            assert command.main([*argv, str(out)]) == 0
        with pytest.raises(RemovedVideo):
            TokenCache(out).get("gone")
        if command is export:
            shards = LocalStore(out).names("tokens", ".parquet")
            assert shards and not any(b"gone" in (out / name).read_bytes() for name in shards)
