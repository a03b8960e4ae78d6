"""One video in this process: the tokens of a run, and a picture of what was kept."""

import numpy as np
import pytest
import torch

import pipeline
from gstep.backbones import ModelSource
from pipeline.errors import UsageError, VideoFault
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
