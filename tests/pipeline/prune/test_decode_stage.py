"""The decode actor: a row in, a row out, whatever the video is."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from hashlib import md5

import pyarrow as pa
import pytest

from pipeline.inputs.named_videos import TODO_SCHEMA
from pipeline.keys import hash_mark
from pipeline.prune.batches import unpack_batch
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import Decoder, DecodeSetup, VideoDecoder
from pipeline.prune.recipe import resolve_recipe
from pipeline.video.sampling import Sampling
from pipeline.video.sandbox import DecodeSandbox
from tests.builders.caches import decode_row_of
from tests.builders.clips import KeepSize, write_clip
from tests.builders.stores import KEY, SECRET

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
