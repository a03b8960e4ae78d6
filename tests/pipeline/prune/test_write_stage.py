"""The write actor: some videos become one token shard, and a disk that fails is no video's fault."""

import pyarrow as pa
import pytest

from pipeline import TokenCache
from pipeline.cache.header import read_fingerprint
from pipeline.cache.writer import commit_records, commit_rows
from pipeline.errors import VideoFault
from pipeline.prune.batches import WRITTEN_SCHEMA, pack
from pipeline.prune.resources import PRUNING
from pipeline.prune.write_stage import Writer
from pipeline.runner.worker_reports import Worker
from pipeline.storage.stores import LocalStore
from tests.builders.caches import encoded, encoded_failure, random_tokens, write_header
from tests.builders.clusters import heartbeats_here


def test_videos_become_one_shard_whoever_writes_them_that_can_be_committed_and_read(tmp_path):
    store = write_header(tmp_path)
    good = [encoded(name, random_tokens(i), 0.25, "gstep") for i, name in enumerate("ab")]
    failure = encoded_failure("bad", VideoFault("corrupt", "torn"))
    written = Writer(store, "run").write(pack([good[0], failure]), pack([good[1]]))
    assert written.schema.equals(WRITTEN_SCHEMA)
    rows = written.to_pylist()
    assert [(row["video_id"], row["status"]) for row in rows] == [("a", "ok"), ("bad", "failed"), ("b", "ok")]
    again = Writer(store, "run").write(pack([good[0], failure]), pack([good[1]]))
    assert again["footer_hash"] == written["footer_hash"]  # the same file
    assert len(store.names("tokens", ".parquet")) == 1 and rows[1]["token_shard"] is None
    commit_rows(
        store, "run", 0, pa.concat_tables([written.slice(0, 1), written.slice(1)]), made_with=read_fingerprint(store)
    )
    commit_records(store, "run", 0, rows, made_with=read_fingerprint(store))
    assert len(store.names("videos", ".parquet")) == 1  # to the byte the same file, whose name has a hash of it
    cache = TokenCache(tmp_path)
    assert cache.failed == {"bad": "corrupt"}
    for video in good:
        found = cache.get(video.record["video_id"], order="selection")
        assert found.index.tolist() == video.kept.index.tolist()


def test_a_disk_that_fails_ends_the_run_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "tokens").write_text("in the way")
    actor, handle = heartbeats_here(monkeypatch, tuple(PRUNING.stages), Worker("w1", "h1", "n1"))
    video = encoded("a", random_tokens(0), 0.25, "gstep")
    with pytest.raises(OSError, match=r"exists|directory"):
        Writer(LocalStore(tmp_path), "run", handle).write(pack([video]))
    assert actor.read().failure.partition(":")[0] in {"FileExistsError", "NotADirectoryError"}
