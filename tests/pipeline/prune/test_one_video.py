"""Videos in this process: one by one, with a picture of what was kept, and by the stages as callables."""

import json

import numpy as np
import pyarrow as pa
import pytest
import torch

import pipeline
from gstep.backbones import ModelSource
from pipeline.errors import ManifestError, UsageError, VideoFault
from tests.builders.caches import encode_clip
from tests.builders.clips import sample
from tests.builders.runs import forbid_ray

CLIP = sample("bikes.mp4")
OPTIONS = {"num_frames": 5, "retention_ratio": 0.2, "device": "cpu"}


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    forbid_ray(monkeypatch)


@pytest.mark.parametrize(("model", "grid"), [("tiny", (5, 14, 14)), ("tiny-qwen3-vl", (3, 8, 20))])
def test_its_tokens_are_those_that_a_run_would_cache(model, grid):
    video = pipeline.encode_video(CLIP, model=model, start_s=1.0, **OPTIONS)
    frames, row = encode_clip(ModelSource.resolve(model), CLIP, 5, "gstep", 0.2, start_s=1.0)
    pruned = video.pruned
    order = pruned.compute_selection_order()
    assert np.array_equal(pruned.tokens[order].view(torch.int16).numpy(), row.kept.tokens)
    assert np.array_equal(pruned.index[order].numpy(), row.kept.index)
    assert np.array_equal(video.frames, frames)
    for name in ("timestamps", "frame_indices"):
        assert getattr(video, name) == row.record[name] == video.record[name]
    differs = {name for name in video.record if video.record[name] != row.record.get(name)}
    assert differs <= {"video_id", "decode_s", "source_mark"}  # the time of the file, which no source was opened for
    T, rows, columns = video.kept().shape
    assert (T, rows, columns) == grid and video.kept().sum() == pruned.n_kept
    height, width = frames.shape[1:3]
    assert video.picture(columns=T).shape == (height, T * width, 3)


def test_a_picture_is_bright_where_tokens_were_kept_and_dark_elsewhere():
    video = pipeline.encode_video(str(CLIP), model="tiny", **OPTIONS)
    picture = video.picture(columns=3)
    _, height, width, _ = video.frames.shape
    assert picture.shape == (2 * height, 3 * width, 3) and picture.dtype == np.uint8
    assert (picture[height:, 2 * width :] == 255).all()  # five frames in six places: white, not dark as if pruned
    for t, kept in enumerate(video.kept()):
        y, x = t // 3 * height, t % 3 * width
        shown, frame = picture[y : y + height, x : x + width], video.frames[t]
        for row, column in ((0, 0), (7, 3), (13, 13)):
            at = (row * height // 14 + 3, column * width // 14 + 3)
            assert np.array_equal(shown[at], frame[at] if kept[row, column] else frame[at] // 3)
    fewer = video.kept(0.1)
    assert fewer.sum() == 5 * 196 // 10 and (video.kept() | ~fewer).all()
    assert video.picture(0.1, columns=3).sum() < picture.sum()


@pytest.mark.parametrize(
    ("path", "fault"), [("gone.mp4", "io"), ("text.mp4", "unsupported"), ("https://example.org/a.mp4", "io")]
)
def test_a_video_that_cannot_be_read_says_why(tmp_path, monkeypatch, path, fault):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.mp4").write_text("this is no video\n" * 50)
    with pytest.raises(VideoFault) as caught:
        pipeline.encode_video(path, model="tiny", **OPTIONS)
    assert caught.value.fault_class == fault and path.rpartition("/")[2] in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"out": "c"}, r"encode_video\(\) takes no out, which is for the command; it takes attn, decoder"),
        ({"num_frame": 8}, r"did you mean num_frames\?"),
        ({"model": "/gone"}, "gone"),
        ({"pruner": "fastv"}, "selects anew for every question"),
        ({"pruner_param": {"alpha": "x"}}, "alpha must be a number"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, said):
    with pytest.raises(UsageError, match=said):
        pipeline.encode_video(CLIP, **options)


def encoded(stages: pipeline.PruneStages, videos: list[dict]) -> pa.Table:
    decode, encode = pipeline.DecodeVideos(stages), pipeline.EncodeVideos(stages)
    names = dict.fromkeys(name for video in videos for name in video)
    batches = list(decode(pa.table({name: [video.get(name) for video in videos] for name in names})))
    rows = pa.concat_tables([row for batch in batches for row in encode(batch)])  # of one schema, or this raises
    decode.close()
    return rows


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("uri", pa.nulls(2), "videos, row 0: no uri"),
        ("video_id", pa.array([0.5, 1.5]), "videos, row 0: the video_id is 0.5, of type float"),
        ("note", pa.array([b"fine", b"\xff"]).view(pa.string()), "videos: cannot be read as a manifest: .*codec"),
        ("uri", pa.array([b"fine", b"\xff"]).view(pa.string()), "videos: cannot be read as a manifest: Invalid UTF8"),
    ],
)
def test_a_batch_of_no_videos_is_refused(column, values, said):
    batch = {"video_id": pa.array(["a", "b"]), "uri": pa.array([str(CLIP)] * 2), column: values}
    with pytest.raises(ManifestError, match=said):
        list(pipeline.DecodeVideos(pipeline.prune_stages(model="tiny", **OPTIONS))(pa.table(batch)))


@pytest.mark.parametrize("model", ["tiny", "tiny-qwen3-vl"])
def test_a_good_video_is_a_row_of_tokens_and_a_bad_one_says_why(model, tmp_path):
    (tmp_path / "text.mp4").write_text("this is no video\n" * 50)
    videos = [
        {"video_id": "bad", "uri": str(tmp_path / "text.mp4"), "topic": "none"},
        {"video_id": "good", "uri": str(CLIP), "start_s": 1.0, "topic": "bikes"},
        {"video_id": "web", "uri": "https://example.org/a.mp4"},
    ]
    bad, good, web = encoded(pipeline.prune_stages(model=model, **OPTIONS), videos).to_pylist()
    expected = pipeline.encode_video(CLIP, start_s=1.0, model=model, **OPTIONS)
    pruned = expected.pruned
    tokens = torch.frombuffer(bytearray(good["tokens"]), dtype=torch.bfloat16).view(-1, good["hidden_size"])
    assert torch.equal(tokens.view(torch.int16), pruned.tokens.view(torch.int16))
    assert (good["index"], good["rank"]) == (pruned.index.tolist(), pruned.rank.tolist())
    row = json.loads(good["metadata"])
    assert good["frame"] == [i // row["tokens_per_frame"] for i in good["index"]] and good["merged"] is None
    assert (row["manifest"], row["timestamps"]) == ({"topic": "bikes"}, expected.timestamps)
    assert ("deepstack_0" in good) == (model == "tiny-qwen3-vl")
    assert (good["status"], good["error_class"]) == ("ok", None)
    assert (bad["status"], bad["error_class"], bad["tokens"]) == ("failed", "unsupported", None)
    assert web["error_class"] == "policy" and json.loads(bad["metadata"])["manifest"] == {"topic": "none"}
