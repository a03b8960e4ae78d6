"""A cache goes to other people: whole or in part, with a card, or as tars; and what must not go stays."""

import io
import json
import os
import subprocess
import sys
import tarfile
from datetime import timedelta

import duckdb
import numpy as np
import polars
import pytest
import torch
import yaml

from pipeline import TokenCache
from pipeline.errors import CorruptShard, NotACache, RemovedVideo, UsageError, VideoFault
from pipeline.sharing.export import export, export_tars
from pipeline.storage.stores import LocalStore, ObjectStore
from pipeline.verify.removal import remove_videos
from tests.paths import ROOT
from tests.pipeline.caches import encoded, random_tokens, write_shard
from tests.pipeline.damage import flip, say_what_was_committed, shards
from tests.pipeline.s3 import S3Server
from tests.pipeline.sharing.test_merge import SHAPE, cache_of, quiet
from tests.pipeline.verifying import kinds, verified


@pytest.fixture
def store(tmp_path):
    """A cache of which one video was made twice, one failed and one was removed."""
    store = cache_of(tmp_path / "c", {"a.mp4": 1, "dir/b.mp4": 2, "c": 3, "bad": VideoFault("corrupt", "x"), "gone": 5})
    write_shard(store, "later", encoded("c", random_tokens(7, SHAPE), 0.25, "gstep", attempts=2))
    say_what_was_committed(store)
    remove_videos(store, ["gone"], "licence", quiet, timedelta(0))
    return store


def assert_copied(out, store, ids):
    mine, theirs = TokenCache(out.root), TokenCache(store.root)
    assert mine.video_ids == sorted(ids)
    assert all(torch.equal(mine.get(name).tokens, theirs.get(name).tokens) for name in ids)
    assert (kinds(verified(out)) == [] and not (out.root / "runs").exists()) or not list((out.root / "runs").iterdir())
    # Plain readers of Parquet need no rule: each video has one row.
    rows = polars.read_parquet(f"{out.root}/videos/*.parquet")
    assert (
        sorted(rows.filter(polars.col("status") == "ok")["video_id"]) == sorted(ids)
        and rows["video_id"].is_unique().all()
    )
    counted = duckdb.sql(f"select count(distinct video_id) from read_parquet('{out.root}/tokens/*.parquet')").fetchall()
    assert counted[0][0] >= len(ids)


@pytest.mark.parametrize("again", [1, 2])
def test_a_whole_cache_is_copied_with_a_card(store, tmp_path, again):
    out = LocalStore(tmp_path / "out")
    for _ in range(again):
        found = export(store, out, quiet, licence="cc-by-4.0")
    assert_copied(out, store, ["a.mp4", "dir/b.mp4", "c"])
    assert (found.videos, found.failed, found.files) == (3, 1, 3)
    with pytest.raises(RemovedVideo):
        TokenCache(out.root).get("gone")
    front, card = (out.root / "README.md").read_text().removeprefix("---\n").split("\n---\n", 1)
    described = yaml.safe_load(front)
    assert described["license"] == "cc-by-4.0" and "gstep" in described["tags"]
    assert {one["config_name"]: one["data_files"] for one in described["configs"]} == {
        "videos": "videos/*.parquet", "tokens": "tokens/*.parquet",
    }  # fmt: skip
    assert "3 with tokens, 1 that could not be read" in card and "gstep, 0.25 of the tokens" in card


def test_the_cards_blocks_run(store, tmp_path):
    out = LocalStore(tmp_path / "out")
    export(store, out, quiet)
    card = (out.root / "README.md").read_text().replace("FOLDER", str(out.root))
    python = [block.partition("```")[0] for block in card.split("```python\n")[1:]]
    python[1] += "print(videos.num_rows, sum(1 for _ in tokens), sorted({row['video_id'] for row in tokens}))"
    for block in python:
        done = subprocess.run(
            [sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, check=False,
            env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if block is python[1]:
            n_tokens = sum(TokenCache(out.root).metadata(name)["n_tokens"] for name in ("a.mp4", "dir/b.mp4", "c"))
            assert done.stdout.split(maxsplit=2) == ["5", str(n_tokens), "['a.mp4', 'c', 'dir/b.mp4']\n"]
    sql = card.partition("```sql\n")[2].partition("```")[0]
    assert len(duckdb.sql(sql).fetchall()) == 3
    assert json.loads(card.partition("```json\n")[2].partition("```")[0]) == TokenCache(out.root).identity


def test_a_part_has_its_own_shards_and_no_token_of_others(store, tmp_path):
    out = LocalStore(tmp_path / "out")
    found = export(store, out, quiet, ["c", "bad", "a.mp4"])
    assert_copied(out, store, ["a.mp4", "c"])
    assert (found.videos, found.failed, found.files) == (2, 1, 1)
    tokens = polars.read_parquet(f"{out.root}/tokens/*.parquet")
    assert set(tokens["video_id"]) == {"a.mp4", "c"}
    again = export(store, out, quiet, ["c", "bad", "a.mp4", "dir/b.mp4"])  # goes on with what is new
    assert (again.videos, again.files) == (3, 2)


def test_a_card_follows_the_cache_until_it_is_filled_in(store, tmp_path):
    out, told = LocalStore(tmp_path / "out"), []
    card = out.root / "README.md"
    export(store, out, quiet)
    write_shard(store, "new", encoded("new.mp4", random_tokens(9, SHAPE), 0.25, "gstep"))
    export(store, out, told.append)
    assert "4 with tokens" in card.read_text() and not any("README" in line for line in told)
    mine = card.read_text().replace("to be filled in", "ours")
    card.write_text(mine)
    export(store, out, told.append)
    assert card.read_text() == mine and told[-1].startswith("note: the README.md of ")


def test_a_part_follows_the_cache(store, tmp_path):
    out, part = LocalStore(tmp_path / "out"), ["a.mp4", "dir/b.mp4", "c", "bad"]
    export(store, out, quiet, part)
    remove_videos(store, ["a.mp4"], "asked for", quiet, timedelta(0))
    write_shard(store, "mended", encoded("bad", random_tokens(11, SHAPE), 0.25, "gstep", attempts=2))
    write_shard(store, "redone", encoded("dir/b.mp4", random_tokens(12, SHAPE), 0.25, "gstep", attempts=2))
    for _ in range(2):
        export(store, out, quiet, part)
        assert_copied(out, store, ["bad", "c", "dir/b.mp4"])
        with pytest.raises(RemovedVideo):
            TokenCache(out.root).get("a.mp4")
        assert "a.mp4" not in set(polars.read_parquet(f"{out.root}/tokens/*.parquet")["video_id"])


def test_unknown_ids_and_other_places_are_refused_before_anything_is_written(store, tmp_path):
    with pytest.raises(UsageError, match="no row of 1 of the videos: nope"):
        export(store, LocalStore(tmp_path / "out"), quiet, ["c", "nope"])
    with pytest.raises(NotACache):
        export(LocalStore(tmp_path / "none"), LocalStore(tmp_path / "out"), quiet)
    assert not (tmp_path / "out").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("x")
    with pytest.raises(UsageError, match="is no cache"):
        export(store, LocalStore(tmp_path / "other"), quiet, ["c"])


def test_a_damaged_shard_is_named(store, tmp_path):
    flip(shards(store)[0], 100)
    with pytest.raises(CorruptShard, match="tokens/"):
        export(store, LocalStore(tmp_path / "out"), quiet, ["a.mp4", "c", "dir/b.mp4"])


def test_tars_hold_tokens_by_numbered_keys(store, tmp_path):
    out = LocalStore(tmp_path / "tars")
    found = export_tars(store, out, quiet)
    assert (found.videos, found.files) == (3, 3)
    cache, seen = TokenCache(store.root), {}
    for path in sorted(out.root.glob("*.tar")):
        with tarfile.open(path) as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar}
        for key in {name.partition(".")[0] for name in members}:
            row = json.loads(members[f"{key}.json"])
            arrays = [
                np.load(io.BytesIO(members[f"{key}.{name}.npy"]), allow_pickle=False) for name in ("tokens", "index")
            ]
            seen[row["video_id"]] = arrays
    assert sorted(seen) == ["a.mp4", "c", "dir/b.mp4"]
    for video_id, (tokens, index) in seen.items():
        video = cache.get(video_id)
        assert np.array_equal(tokens, video.tokens.float().numpy()) and np.array_equal(index, video.index.numpy())
    before = {path: path.stat().st_mtime_ns for path in out.root.glob("*.tar")}
    export_tars(store, out, quiet)
    assert {path: path.stat().st_mtime_ns for path in out.root.glob("*.tar")} == before


def test_tars_follow_the_cache(store):
    with S3Server() as server:  # on which a tar that is there is read by ranges
        out = ObjectStore(server.uri("tars"), server.objects())
        export_tars(store, out, quiet)
        remove_videos(store, ["a.mp4"], "asked for", quiet, timedelta(0))
        write_shard(store, "new", encoded("new.mp4", random_tokens(9, SHAPE), 0.25, "gstep"))
        write_shard(store, "once-more", encoded("c", random_tokens(7, SHAPE), 0.25, "gstep", attempts=3))
        for _ in range(2):
            export_tars(store, out, quiet)
            assert sorted(row["video_id"] for row in _rows_in(out)) == ["c", "dir/b.mp4", "new.mp4"]
        export_tars(store, out, quiet, ["new.mp4"])
        assert [row["video_id"] for row in _rows_in(out)] == ["new.mp4"]


def _rows_in(out):
    """The rows of the videos in all tars of a place."""
    for file in out.listed(""):
        with tarfile.open(fileobj=io.BytesIO(out.read(file.name))) as tar:
            yield from (json.load(tar.extractfile(member)) for member in tar if member.name.endswith(".json"))


def test_a_cache_is_no_copy_of_itself(store, tmp_path):
    before = {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()}
    for do in (export, export_tars):
        with pytest.raises(UsageError, match="is the cache itself: name another place with --to"):
            do(store, LocalStore(f"{store.root}/"), quiet)
    assert before == {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()}
