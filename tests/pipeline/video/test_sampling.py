"""Which frames are chosen: lmms-eval's linspace, the frame on screen at a time, and the least of a short clip."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gstep.backbones import ModelSource, family_of
from gstep.errors import ModelError
from pipeline.errors import FAULTS, VideoFault
from pipeline.prune.config import PruneConfig
from pipeline.prune.recipe import make_sampling
from pipeline.video.decode import DecodedVideo, DecodeRequest, decode_video
from pipeline.video.sampling import Sampling, choose_frames, find_clip_range, snap_frames
from tests.builders.clips import write_clip, write_jpegs
from tests.gstep.stock import stock_frames

TS = np.arange(250) / 25  # 10 s at 25 frames a second


@pytest.mark.parametrize(("total", "count"), [(250, 32), (32, 32), (7, 32), (100, 1)])
def test_uniform_is_the_integer_linspace_of_lmms_eval(total, count):
    chosen = choose_frames(np.arange(total) / 25, Sampling(num_frames=count))
    assert chosen.dtype == np.int64
    assert chosen.tolist() == np.linspace(0, total - 1, count, dtype=int).tolist()
    assert len(set(chosen.tolist())) == min(count, total)


def test_a_clip_is_half_open_and_sampled_on_its_own():
    assert find_clip_range(TS, 2.0, 4.0, 10.0) == (50, 100)
    chosen = choose_frames(TS, Sampling(num_frames=5), 2.0, 4.0)
    assert chosen.tolist() == (50 + np.linspace(0, 49, 5, dtype=int)).tolist()
    assert find_clip_range(TS, None, None, 10.0) == (0, 250)
    assert find_clip_range(TS, 9.0, 99.0, 10.0) == (225, 250)  # an end behind the video is its end


@pytest.mark.parametrize("fps", [0.5, 3.0, 30.0])
def test_fps_takes_the_frame_on_screen(fps):
    chosen = choose_frames(TS, Sampling(num_frames=None, fps=fps), 1.0, 5.0)
    assert chosen.tolist() == [int(25 + k * 25 / fps + 1e-6) for k in range(int(4 * fps))]


def test_fps_follows_the_real_times_of_a_variable_rate():
    times = np.array([0.0, 0.1, 0.2, 5.0, 5.1, 9.0])
    chosen = choose_frames(times, Sampling(num_frames=None, fps=1.0), duration_s=10.0)
    assert chosen.tolist() == [0, 2, 2, 2, 2, 3, 4, 4, 4, 5]
    assert len(chosen) - len(set(chosen.tolist())) == 5
    # the frame on screen at 5.05 s came up at 5.0 s
    assert choose_frames(times, Sampling(num_frames=None, fps=1.0), 5.05, 6.0).tolist() == [3]


def test_fps_beyond_the_limit_is_spread_evenly():
    sampling = Sampling(num_frames=None, fps=5.0, max_frames=16)
    assert choose_frames(TS, sampling).tolist() == np.linspace(0, 249, 16, dtype=int).tolist()
    assert len(choose_frames(TS, Sampling(num_frames=None, fps=1e12, max_frames=16))) == 16
    assert len(choose_frames(TS, Sampling(num_frames=None, fps=5.0, max_frames=None))) == 50


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        (10.0, None, "behind the end"),
        (-1.0, 5.0, "start at 0"),
        (5.0, 2.0, "end after its start"),
        (2.001, 2.002, "holds no frame"),
        (float("nan"), None, "start at 0"),
        (0.0, float("nan"), "end after its start"),
    ],
)
def test_a_clip_that_cannot_be_is_named_with_the_duration(start, end, message):
    with pytest.raises(VideoFault, match=rf"(?s)10\.000 s.*{message}") as caught:
        choose_frames(TS, Sampling(num_frames=4), start, end, 10.0)
    assert caught.value.fault_class == "unsupported"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"fps": 1.0}, None),
        ({"num_frames": None}, None),
        ({"num_frames": 0}, None),
        ({"num_frames": None, "fps": -1.0}, None),
        ({"max_frames": 0}, None),
        ({"rule": "nearest"}, "rule must be one of truncate, round-even, got 'nearest'"),
        ({"num_frames": None, "fps": 1.0, "rule": "round-even"}, "round-even applies only to num_frames"),
    ],
)
def test_sampling_goes_one_way_only(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)


@pytest.mark.parametrize("count", [2, 33, 768])
def test_rounded_places_are_those_of_torch(count):
    """qwen-vl-utils: ``torch.linspace(0, n - 1, k).round().long()`` with k even, at least 2 and at most n."""
    for total in [*range(1, 70, 3), 333, 107_892]:
        k = max(2, min(count, total) // 2 * 2)
        expected = torch.linspace(0, total - 1, k).round().long().tolist()
        timestamps = np.arange(total) / 25
        assert choose_frames(timestamps, Sampling(num_frames=count, rule="round-even")).tolist() == expected, total


def test_rounding_is_of_the_clip_and_differs_from_cutting():
    cut, rounded = (choose_frames(TS, Sampling(num_frames=32, rule=rule)) for rule in ("truncate", "round-even"))
    assert len(cut) == len(rounded) == 32 and (cut != rounded).any()
    assert choose_frames(TS, Sampling(num_frames=4, rule="round-even"), 2.0, 2.11).tolist() == [50, 52]


def test_frames_move_to_keyframes_and_never_two_to_one():
    times, keyframes = np.arange(100) / 10, np.array([0, 20, 40, 60, 80])
    for frames, within_s, moved in (
        ([0, 33, 66, 99], 1.0, [0, 40, 60, 99]),
        ([0, 33, 66, 99], 5.0, [0, 40, 60, 80]),
        ([0, 33, 66, 99], 0.5, [0, 33, 66, 99]),
        ([39, 40], 1.5, [39, 40]),  # the nearer one has it
        ([38, 41], 1.0, [38, 40]),
        ([38, 41], 2.0, [20, 40]),
    ):
        assert snap_frames(np.array(frames), times, keyframes, within_s).tolist() == moved


@given(st.sets(st.integers(0, 99), min_size=1), st.sets(st.integers(0, 99)), st.floats(0.01, 20))
def test_snapping_keeps_frames_apart_and_near(chosen, keys, within_s):
    times, places, keyframes = np.arange(100) / 10, np.array(sorted(chosen)), np.array(sorted(keys), dtype=np.int64)
    moved = snap_frames(places, times, keyframes, within_s)
    assert len(set(moved.tolist())) == len(places) and (np.diff(moved) > 0).all()
    assert np.abs(times[moved] - times[places]).max() <= within_s + 1e-9
    assert set(moved.tolist()) <= keys | chosen


STOCK = {
    "tiny-qwen2-5-vl": ("qwen2_vl/video_processing_qwen2_vl", "Qwen2VLVideoProcessor"),
    "tiny-qwen3-vl": ("qwen3_vl/video_processing_qwen3_vl", "Qwen3VLVideoProcessor"),
}


def sampling_for(model: str, **options) -> Sampling:
    family = family_of(ModelSource.resolve(model))
    return make_sampling(PruneConfig(**options), family.default_max_frames, family.min_frames(), family.min_rule)


def decode_for(model: str, path: Path, *clip: float | None, **options) -> DecodedVideo:
    preprocessor = family_of(ModelSource.resolve(model)).preprocessor()
    return decode_video(DecodeRequest(path, sampling_for(model, fps=1.0, **options), preprocessor, *clip))


def with_least(model: str, min_frames: int | None) -> ModelSource:
    source = ModelSource.resolve(model)
    return replace(source, preprocessor={**source.preprocessor, "min_frames": min_frames})


@pytest.mark.parametrize("model", STOCK)
def test_the_least_frames_are_where_the_stock_processor_puts_them(model):
    family = family_of(ModelSource.resolve(model))
    for total in range(2, 76, 3):  # up to 3 s: fewer by time than the least
        least = 4 + 3 * (total % 2)
        expected = stock_frames(*STOCK[model], total, 25.0, 1.0, least)
        sampling = Sampling(None, 1.0, 768, min_frames=least, min_rule=family.min_rule)
        assert choose_frames(np.arange(total) / 25, sampling).tolist() == expected, total


def test_the_least_is_the_checkpoints_own_and_llava_has_none():
    for model, least in (("tiny", 1), ("tiny-qwen2-5-vl", 4), ("tiny-qwen3-vl", 4)):
        assert family_of(ModelSource.resolve(model)).min_frames() == least
        assert sampling_for(model, fps=1.0).min_frames == least
        assert sampling_for(model, num_frames=2).min_frames == 1  # as many as are asked for
    for stated, expected in ((8, 8), (None, 4)):
        assert family_of(with_least("tiny-qwen3-vl", stated)).min_frames() == expected
    with pytest.raises(ModelError, match="min_frames=0"):
        family_of(with_least("tiny-qwen2-5-vl", 0)).min_frames()


@pytest.mark.parametrize(("name", "codec"), [("a.mp4", "libx264"), ("a.avi", "mpeg4")])
@pytest.mark.parametrize("model", ["tiny", *STOCK])
def test_a_short_clip_gets_the_least_in_every_container(tmp_path, name, codec, model):
    path = write_clip(tmp_path / name, codec=codec, count=50)
    for clip, count in (((1.0, 1.52), 13), ((0.0, 1.0), 25), ((0.0, 1.1), 28), ((None, None), 50)):
        first = round(25 * (clip[0] or 0))
        places = stock_frames(*STOCK[model], count, 25.0, 1.0, 4) if model in STOCK else range(0, min(count, 50), 25)
        expected = [first + place for place in places]
        assert decode_for(model, path, *clip).frame_indices.tolist() == expected


def test_fewer_frames_than_the_least_are_taken_all_or_in_pairs(tmp_path):
    path = write_clip(tmp_path / "a.mp4", count=50)
    for model, clip, more, frames in (
        ("tiny-qwen3-vl", (0.4, 0.52), {}, [10, 11, 12]),
        ("tiny-qwen2-5-vl", (0.4, 0.52), {}, [10, 11]),
        ("tiny-qwen3-vl", (), {"max_frames": 2}, [0, 25]),
    ):
        assert decode_for(model, path, *clip, **more).frame_indices.tolist() == frames


def test_a_still_is_too_short_for_qwen3_vl_alone(tmp_path):
    folder = write_jpegs(tmp_path / "frames_fps3" / "still", 1)
    video = write_clip(tmp_path / "still.mp4", count=1)
    for path in (folder, video):
        for model in ("tiny", "tiny-qwen2-5-vl"):
            assert decode_for(model, path).frame_indices.tolist() == [0]
        with pytest.raises(VideoFault, match="no video of fewer than 2 sampled frames, this one has 1") as caught:
            decode_for("tiny-qwen3-vl", path)
        assert (caught.value.fault_class, caught.value.retryable) == ("too-short", False)
    assert "longer clip" in FAULTS["too-short"].remedy and "no video" not in FAULTS["too-short"].remedy
