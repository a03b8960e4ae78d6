"""What the driver commits is what lies in its own cache, and stays what it was."""

import os
from dataclasses import replace
from threading import Barrier

import numpy as np
import pytest
import torch

from gstep import PrunedTokens
from pipeline import TokenCache
from pipeline.cache.codecs import CODECS
from pipeline.cache.header import read_fingerprint
from pipeline.cache.token_shard import hash_vectors, read_videos
from pipeline.cache.writer import KeptTokens, commit_records, write_token_shard
from pipeline.errors import RunFailed
from pipeline.storage.stores import LocalStore
from tests.builders.caches import encoded, random_tokens, write_header, write_shard

VIDEO = encoded("v", random_tokens(0), 0.25, "gstep")


@pytest.mark.parametrize("count", [0, 3])
def test_tensors_without_rows_become_arrays_of_their_width(count):
    index = torch.arange(count)
    pruned = PrunedTokens(torch.ones(count, 8), index, index, None, n_total=12, retention_ratio=0.25)
    shapes = {"token_attention": (count, 1), "token_key": (count, 4), "frame_feature": (0, 6)}
    evidence = {name: torch.ones(shape) for name, shape in shapes.items()} | {"token_attention": torch.ones(count)}
    for order in (slice(None), index.flip(0)):
        kept = KeptTokens.of(pruned, [torch.ones(count, 8)], evidence, order)
        assert [values.shape for values in (kept.tokens, *kept.deepstack)] == [(count, 8), (count, 8)]
        assert {name: values.shape for name, values in kept.evidence.items()} == shapes
        assert kept.tokens.dtype == np.int16 and (kept.index.shape, kept.rank.shape) == ((count,), (count,))


def test_tokens_on_a_disk_that_is_not_shared_are_not_committed(tmp_path):
    store = write_header(tmp_path / "drivers")
    rows = write_token_shard([VIDEO], store=write_header(tmp_path / "nodes"), run_id="run")
    with pytest.raises(FileNotFoundError, match="use a folder that all nodes share"):
        commit_records(store, "run", 0, rows, made_with=read_fingerprint(store))
    assert len(TokenCache(tmp_path / "drivers")) == 0


def last_bit(values):
    changed = values.copy()
    if values.dtype == np.float32:
        changed.flat[-1] = np.nextafter(changed.flat[-1], np.float32(np.inf))
    else:
        changed.flat[-1] ^= 1
    return changed


@pytest.mark.parametrize("method", ["gstep", "uniform"])
def test_a_late_write_with_another_last_bit_replaces_nothing(tmp_path, method):
    """A node that was taken for dead computed the same videos on another kind of GPU, and its write comes last."""
    store = write_header(tmp_path, method=method)
    video = encoded("v", random_tokens(0), 0.25, method)
    write_shard(store, "run", video)
    before = TokenCache(tmp_path).get("v", order="selection")
    floats = {"density": last_bit(video.kept.density)} if method == "gstep" else {}
    other = replace(video.kept, tokens=last_bit(video.kept.tokens), **floats)
    (late,) = write_token_shard([replace(video, kept=other)], store=store, run_id="run")
    after = TokenCache(tmp_path).get("v", order="selection", verify=True)
    assert torch.equal(after.tokens.view(torch.int16), before.tokens.view(torch.int16))
    assert late["token_shard"] != after.metadata["token_shard"] and len(store.names("tokens", ".parquet")) == 2


@pytest.mark.parametrize(("method", "columns"), [("gstep", ["rank", "density"]), ("visionzip", ["merged"])])
@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_a_shard_is_named_by_every_byte_of_its_columns_and_a_checksum_is_of_all_vectors(
    tmp_path, method, columns, codec
):
    """One bit anywhere gives another name, and the same bytes the same."""
    store, video = write_header(tmp_path, method=method), encoded("v", random_tokens(0), 0.25, method)
    evidence = {"token_attention": np.arange(len(video.kept.index), dtype=np.int16)[:, None]}
    whole = replace(video.kept, deepstack=[video.kept.tokens ^ np.int16(3)], evidence=evidence)

    def hashes_of(**change) -> tuple[str, str]:
        """Write the video with other columns; return the name of its shard and its checksum."""
        changed = replace(video, kept=replace(whole, **change))
        (row,) = write_token_shard([changed], store=store, run_id="run", codec=CODECS[codec])
        (table,) = read_videos(store, [row])
        assert hash_vectors(table) == row["checksum"]
        return row["token_shard"], row["checksum"]

    vectors = [
        hashes_of(tokens=whole.tokens ^ np.int16(1)),
        hashes_of(deepstack=[whole.deepstack[0] ^ np.int16(256)]),
        hashes_of(evidence={name: last_bit(values) for name, values in evidence.items()}),
    ]
    others = [hashes_of(**{name: last_bit(getattr(whole, name))}) for name in ("index", *columns)]
    first, checksum = hashes_of()
    assert hashes_of() == (first, checksum)
    assert len({first, *(name for name, _ in (*vectors, *others))}) == 1 + len(vectors) + len(others)
    assert len({checksum, *(of_vectors for _, of_vectors in vectors)}) == 1 + len(vectors)
    assert {of_columns for _, of_columns in others} == {checksum}  # which is of the vectors alone


def test_a_commit_of_many_shards_asks_a_distant_store_for_several_at_a_time(tmp_path):
    store, together = write_header(tmp_path), Barrier(2, timeout=60)
    videos = [encoded(video_id, random_tokens(0), 0.25, "gstep") for video_id in "ab"]
    rows = [row for video in videos for row in write_token_shard([video], store=store, run_id="r")]

    class Distant(LocalStore):
        def exists(self, name: str) -> bool:
            together.wait()  # one request at a time would wait for ever
            return super().exists(name)

    commit_records(Distant(tmp_path), "r", 0, rows, made_with=read_fingerprint(store))
    assert list(TokenCache(tmp_path).video_ids) == ["a", "b"]


def test_a_driver_that_was_stopped_in_its_commit_shows_no_video_whose_tokens_were_removed(tmp_path):
    """It goes on when nothing names its tokens any more: before it looks for them, or after it has put the rows."""
    store = write_header(tmp_path)
    made, rows = read_fingerprint(store), write_token_shard([VIDEO], store=store, run_id="run")

    class Stopped(LocalStore):
        def put(self, name, data) -> None:
            store.delete(rows[0]["token_shard"])
            super().put(name, data)

    with pytest.raises(RunFailed, match="was removed before its videos were committed"):
        commit_records(Stopped(tmp_path), "run", 0, rows, made_with=made)
    with pytest.raises(FileNotFoundError, match="removed meanwhile"):
        commit_records(store, "run", 0, rows, made_with=made)
    assert store.names("videos", ".parquet") == [] and len(TokenCache(tmp_path)) == 0


def test_a_commit_never_makes_a_cache_that_is_gone(tmp_path):
    store = write_header(tmp_path / "c")
    made, rows = read_fingerprint(store), write_token_shard([VIDEO], store=store, run_id="run")
    (tmp_path / "c").rename(tmp_path / "old")
    with pytest.raises(FileNotFoundError):
        commit_records(store, "run", 0, rows, made_with=made)
    with pytest.raises(FileNotFoundError):
        store.put("videos/x.parquet", b"x")
    assert not (tmp_path / "c").exists()


class Moved(LocalStore):
    """A cache that is moved away, and begun anew, between the look at the folder and the change of a file in it."""

    moving = False

    def _descriptor(self) -> int:
        held = super()._descriptor()
        if self.moving:
            self.moving = False
            self.root.rename(self.root.with_name("old"))
            write_header(self.root)
            (self.root / "videos").mkdir()
        return held


def test_a_cache_begun_anew_in_mid_write_gets_nothing_of_the_run_before(tmp_path):
    """Whether a token shard, a commit or a deletion is under way: it goes where the cache went, or fails."""
    for what, act in {
        "tokens": lambda store, rows, made: write_token_shard([VIDEO], store=store, run_id="other"),
        "commit": lambda store, rows, made: commit_records(store, "run", 1, rows, made_with=made),
        "delete": lambda store, rows, made: store.delete(*store.names("videos", ".parquet")),
        "afterwards": lambda store, rows, made: store.put("runs/run.json", b"{}"),
    }.items():
        place = tmp_path / what
        store = Moved(write_header(place / "c").root)
        made, rows = read_fingerprint(store), write_token_shard([VIDEO], store=store, run_id="run")
        commit_records(store, "run", 0, rows, made_with=made)
        store.moving = True
        act(store, rows, made)
        os.utime(place / "old", (1, 1))  # clocks tick every few milliseconds: the move was a while ago
        with pytest.raises(FileNotFoundError, match="replaced by another folder"):
            store.put("runs/run.json", b"{}")
        store.delete("cache.json")
        assert [path.name for path in (place / "c").rglob("*") if path.is_file()] == ["cache.json"]
        with pytest.raises(FileNotFoundError):
            commit_records(store, "run", 2, rows, made_with=made)
        assert TokenCache(place / "old").video_ids == ([] if what == "delete" else ["v"])


def test_a_worker_that_comes_to_the_new_folder_cannot_make_the_driver_commit_there(tmp_path):
    """The same settings, so that the header tells nothing: the driver looks for tokens where it has written."""
    driver = write_header(tmp_path / "c")
    driver.put("runs/run.running", b"{}")
    driver.root.rename(tmp_path / "old")
    os.utime(tmp_path / "old", (1, 1))
    anew = write_header(tmp_path / "c")
    rows = write_token_shard([VIDEO], store=anew, run_id="run")
    with pytest.raises(FileNotFoundError):
        commit_records(driver, "run", 0, rows, made_with=read_fingerprint(anew))
    assert not list(tmp_path.glob("*/videos/*"))
