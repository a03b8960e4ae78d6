"""How videos travel between stages: the decode actor, bundles, and the write actor, which makes a token shard."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from hashlib import md5
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import TokenCache
from pipeline.cache.header import read_fingerprint
from pipeline.cache.writer import KeptTokens, VideoItem, commit_records, commit_rows
from pipeline.errors import VideoFault
from pipeline.inputs.named_videos import TODO_SCHEMA
from pipeline.keys import hash_mark
from pipeline.prune.batches import (
    BATCH_SCHEMA,
    WRITTEN_SCHEMA,
    pack,
    pack_task,
    pack_written,
    unpack_batch,
    unpack_failed,
    unpack_task,
)
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import Decoder, DecodeSetup, VideoDecoder
from pipeline.prune.recipe import resolve_recipe
from pipeline.prune.resources import PRUNING
from pipeline.prune.write_stage import Writer
from pipeline.rows import VideoRecord, make_failed_video
from pipeline.runner.worker_reports import Worker
from pipeline.storage.stores import LocalStore
from pipeline.video.sampling import Sampling
from pipeline.video.sandbox import DecodeSandbox
from tests.builders.caches import decode_row_of, encoded, encoded_failure, random_tokens, source_record, write_header
from tests.builders.clips import KeepSize, write_clip
from tests.builders.clusters import heartbeats_here
from tests.builders.stores import KEY, SECRET

FRAMES = np.random.default_rng(0).integers(0, 256, (3, 4, 6, 3), dtype=np.uint8)


def record(video_id: str = "v", **more: Any) -> VideoRecord:
    return source_record(video_id, (3, 2, 4), height=4, width=6, **more)


def kept(n: int = 2, width: int = 4, levels: int = 0, **more: Any) -> KeptTokens:
    draw = np.random.default_rng(n)

    def vectors(numbers: int) -> np.ndarray:
        return draw.integers(-(2**15), 2**15, (n, numbers)).astype(np.int16)

    evidence = {name: vectors(numbers) for name, numbers in more.pop("evidence", {}).items()}
    deepstack = [vectors(width) for _ in range(levels)]
    return KeptTokens(vectors(width), np.arange(n, dtype=np.int32), deepstack=deepstack, evidence=evidence, **more)


def assert_same(ours: VideoItem, expected: VideoItem) -> None:
    assert ours.record == expected.record and (ours.kept is None) == (expected.kept is None)
    assert_same_array(ours.frames, None if expected.frames is None else expected.frames.reshape(-1))
    if ours.kept is not None and expected.kept is not None:
        for name in NAMES:
            assert_same_array(getattr(ours.kept, name), getattr(expected.kept, name))
        assert list(ours.kept.evidence) == list(expected.kept.evidence)
        arrays = [[*tokens.deepstack, *tokens.evidence.values()] for tokens in (ours.kept, expected.kept)]
        for array, expected_array in zip(*arrays, strict=True):
            assert_same_array(array, expected_array)


def assert_same_array(ours: np.ndarray | None, expected: np.ndarray | None) -> None:
    assert (ours is None) == (expected is None)
    if ours is not None and expected is not None:
        assert (ours.dtype, ours.shape, ours.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def buffers(array: Any) -> set[int]:
    return {buffer.address for chunk in array.chunks for buffer in chunk.flatten().buffers() if buffer is not None}


NAMES = ("tokens", "index", "rank", "merged", "density")
FULL = {
    "rank": np.arange(5, dtype=np.int32),
    "merged": np.resize([True, False], 5),
    "density": np.resize(np.array([0.5, np.nan], np.float32), 5),
}
FIVE = VideoItem(record(), kept(5, 8, **FULL))
FAILED = VideoItem(make_failed_video(record("bad"), VideoFault("crash", "gone", exit_signal=11)))


def test_arrays_of_a_video_that_is_alone_are_wrapped_without_a_copy_and_frames_come_back_as_views():
    bundle = pack([VideoItem(record(), frames=FRAMES)])
    assert bundle.schema.equals(BATCH_SCHEMA) and len(bundle) == 1
    assert FRAMES.ctypes.data in buffers(bundle["frames"])
    (video,) = unpack_batch(bundle)
    assert_same(video, VideoItem(record(), frames=FRAMES))
    assert video.frames.ctypes.data == FRAMES.ctypes.data and not video.frames.flags.writeable
    bundle = pack([FIVE, VideoItem(record("bad"))])
    for name in NAMES:
        assert getattr(FIVE.kept, name).ctypes.data in buffers(bundle[name]), name


def test_videos_of_many_shapes_and_failures_share_a_bundle_of_one_row():
    """Ray Data cuts blocks between rows, and would make two of what one call gave. Also after the way through a file.

    Records come back exactly."""
    odd = record("\udcff", timestamps=[0.1 + 0.2, 1e-320, 3.0], manifest='{"a": "ü\\n"}', fps=30000 / 1001)
    videos = [
        FAILED,
        VideoItem(record("a"), frames=FRAMES),
        VideoItem(odd, frames=FRAMES[:1]),
        VideoItem(record("b"), kept(2, 4)),
        FAILED,
        VideoItem(record("c"), kept(5, 3, levels=2, evidence={"token_key": 2})),
        encoded("d", random_tokens(0), 0.25, "gstep"),
        VideoItem(record("e"), kept(3, 2, levels=1, evidence={"token_key": 1, "ä": 4})),
        VideoItem(record("f"), kept(1, 1, levels=3)),
        VideoItem(record("g"), kept(0, 4, levels=1, evidence={"token_key": 2})),
        FIVE,
    ]
    bundle = pack(videos)
    sink = pa.BufferOutputStream()
    pq.write_table(bundle, sink)
    for table in (bundle, pq.read_table(pa.BufferReader(sink.getvalue()))):
        assert len(table) == 1
        for ours, expected in zip(unpack_batch(table), videos, strict=True):
            assert_same(ours, expected)


def test_failed_records_come_back_without_the_keys_that_were_absent():
    rows = [{**record("a"), "n_tokens": 0, "backend_note": "", "row_counts": [1, 2]}, FAILED.record]
    batch = pack_written(rows)
    assert batch.schema.equals(WRITTEN_SCHEMA) and batch["status"].to_pylist() == ["ok", "failed"]
    assert unpack_failed(batch) == [FAILED.record]
    assert "start_s" not in unpack_failed(batch)[0]  # a null is an absent key
    assert unpack_failed(pack_written([])) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda row: pack([VideoItem(record()), VideoItem(row, frames=FRAMES)]),
        lambda row: pack([VideoItem(row, kept())]),
        lambda row: pack([VideoItem(row)]),
        lambda row: pack_written([record(), row]),
    ],
)
def test_a_key_that_is_no_column_is_refused(make):
    with pytest.raises(KeyError, match="not columns of the videos table: colour, shape"):
        make({**record(), "shape": 1, "colour": "red"})


def test_a_unit_holds_its_rows_and_no_others():
    rows = [{"video_id": f"v{number}", "uri": "/v.mp4", "attempts": number, "size": number} for number in range(9)]
    todo = pa.Table.from_pylist(rows, TODO_SCHEMA)
    parts = pa.concat_tables([todo.slice(0, 4), todo.slice(4)])
    assert unpack_task(pack_task(parts.slice(2, 5))).to_pylist() == todo.slice(2, 5).to_pylist()
    assert len(pack_task(todo)) == 1 and len(pack_task(todo.slice(0, 1))["videos"][0].as_py()) < 2000


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


SETUP = DecodeSetup(Sampling(num_frames=2), KeepSize())


def todo(*uris, policy=None, size=None):
    rows = [{"video_id": uri, "uri": uri, "policy": policy, "size": size, "attempts": 1} for uri in uris]
    return pa.Table.from_pylist(rows, schema=TODO_SCHEMA)


def test_a_decoder_fetches_with_what_its_setup_holds_and_asks_nothing_else(server, clip, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    uris = [server.upload(f"{number}.mp4", clip.read_bytes()) for number in range(4)]
    setup = replace(SETUP, objects=server.objects())
    assert SECRET not in repr(setup) and KEY not in repr(setup)
    decoder = Decoder(setup)
    table = pa.concat_tables([todo(*uris, str(clip), server.uri("gone.mp4"), size=7), todo("s3://x/y", policy="no")])
    records = [video.record for bundle in decoder.decode(table) for video in unpack_batch(bundle)]
    assert [record["status"] for record in records] == ["ok"] * 5 + ["failed"] * 2
    assert [record["error_class"] for record in records[5:]] == ["io", "policy"]
    assert [record.get("source_size") for record in records] == [clip.stat().st_size] * 5 + [7, None]
    assert {record["source_hash"] for record in records[:5]} == {records[4]["source_hash"]}
    assert {record["source_mark"] for record in records[:4]} == {hash_mark(md5(clip.read_bytes()).hexdigest())}
    assert server.counts() == {"GET": 5}  # each object, and the one that is gone
    decoder.close()


def test_bundles_follow_from_the_rows_whatever_becomes_of_their_videos(clip, tmp_path):
    """Ray counts what a call gave before it was lost, and takes as much from the next one for the same."""
    rows = todo(str(clip), "away", str(clip), "away", "away", str(clip), str(clip))
    other = todo(*["away"] * 7)
    decoder = Decoder(SETUP, videos_per_bundle=3)
    for table in (rows, other):
        bundles = [[video.record["video_id"] for video in unpack_batch(bundle)] for bundle in decoder.decode(table)]
        ids = table["video_id"].to_pylist()
        assert bundles == [ids[:3], ids[3:6], ids[6:]]
    decoder.close()


def test_two_calls_at_a_time_share_one_child(clip):
    decoder = Decoder(SETUP, videos_per_bundle=2)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(lambda: list(decoder.decode(todo(*[str(clip)] * 3)))) for _ in range(2)]
        videos = [video for call in calls for bundle in call.result() for video in unpack_batch(bundle)]
    assert [video.record["status"] for video in videos] == ["ok"] * 6
    assert len({video.frames.tobytes() for video in videos}) == 1
    decoder.close()


def test_the_start_of_the_child_is_no_time_of_a_video_that_fails(tmp_path):
    class StartsForAnHour(DecodeSandbox):
        def decode(self, request, descriptor=None):
            self.starting_s += 3600
            return super().decode(request, descriptor)

    (tmp_path / "a.mp4").write_text("no video")
    with StartsForAnHour() as sandbox:
        decoder = VideoDecoder(SETUP, sandbox)
        record, _ = decode_row_of(decoder, tmp_path / "a.mp4")
    assert record["error_class"] == "unsupported" and -3600 <= record["decode_s"] < 0  # the hour did not pass


FALLING = [*range(0, 2000, 40), *range(2000, 9000, 160)]  # two seconds at 25 frames a second, then at 6
EVEN = list(range(0, 30_000, 40))


@pytest.mark.parametrize(
    ("model", "times", "options", "expected"),
    [
        ("tiny-qwen2-5-vl", FALLING, {"num_frames": 16}, (True, False)),
        ("tiny-qwen2-5-vl", FALLING, {"fps": 8.0}, (False, True)),
        ("tiny-qwen2-5-vl", EVEN, {"fps": 0.5, "snap_to_keyframes": 1.0}, (True, False)),
        ("tiny-qwen3-vl", FALLING, {"num_frames": 8}, (False, False)),  # which counts none
    ],
)
def test_positions_that_do_not_tell_the_times_of_frames_are_counted(model, times, options, expected, tmp_path):
    path = write_clip(tmp_path / "a.mp4", count=len(times), gop=70, pts=times, codec_options={"sc_threshold": "0"})
    config = PruneConfig(videos=[str(path)], model=model, out=str(tmp_path / "c"), retention_ratio=1.0, **options)
    recipe = resolve_recipe(config)
    decoder, encoder = VideoDecoder(recipe.make_decode_setup()), recipe.make_encode_setup("cpu", "float32").encoder()
    with closing(decoder):
        record, frames = decode_row_of(decoder, path)
    done = encoder.encode_video_alone(record, frames).record
    uneven, shared = done.get("uneven_positions"), done.get("shared_positions")
    assert (bool(uneven), bool(shared)) == expected and (uneven is None) == (model == "tiny-qwen3-vl")
    assert not shared or abs(shared - done["n_frames"] / 2) < 1  # at 8 frames a second and 2 positions
