"""Which frames are chosen: lmms-eval's linspace, and the frame on screen at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import VideoFault
from pipeline.video.sampling import Sampling, choose_frames, find_clip_range, snap_frames

TS = np.arange(250) / 25  # 10 s at 25 frames a second


@pytest.mark.parametrize(("total", "count"), [(250, 32), (132, 8), (32, 32), (7, 32), (1, 3), (100, 1)])
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


@pytest.mark.parametrize("fps", [0.5, 1.0, 3.0, 10.0, 25.0, 30.0])
def test_fps_takes_the_frame_on_screen(fps):
    chosen = choose_frames(TS, Sampling(num_frames=None, fps=fps), 1.0, 5.0)
    expected = [
        max(i for i in range(250) if 25 * 1000 + k * 25000 / fps + 1e-3 >= i * 1000) for k in range(int(4 * fps))
    ]
    assert chosen.tolist() == expected


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
        (99.0, 100.0, "behind the end"),
        (-1.0, 5.0, "start at 0"),
        (5.0, 5.0, "end after its start"),
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
    "wrong",
    [{"fps": 1.0}, {"num_frames": None}, {"num_frames": 0}, {"num_frames": None, "fps": -1.0}, {"max_frames": 0}],
)
def test_sampling_goes_one_way_only(wrong):
    with pytest.raises(ValueError):
        Sampling(**wrong)


@pytest.mark.parametrize("count", [2, 3, 8, 32, 33, 64, 768])
def test_rounded_places_are_those_of_torch(count):
    """qwen-vl-utils: ``torch.linspace(0, n - 1, k).round().long()`` with k even, at least 2 and at most n."""
    for total in [*range(1, 70), 100, 333, 900, 4500, 54_001, 107_892]:
        k = max(2, min(count, total) // 2 * 2)
        expected = torch.linspace(0, total - 1, k).round().long().tolist()
        timestamps = np.arange(total) / 25
        assert choose_frames(timestamps, Sampling(num_frames=count, rule="round-even")).tolist() == expected, total


def test_rounding_is_of_the_clip_and_differs_from_cutting():
    cut, rounded = (choose_frames(TS, Sampling(num_frames=32, rule=rule)) for rule in ("truncate", "round-even"))
    assert len(cut) == len(rounded) == 32 and (cut != rounded).any()
    assert choose_frames(TS, Sampling(num_frames=4, rule="round-even"), 2.0, 2.11).tolist() == [50, 52]
    with pytest.raises(ValueError, match="rule must be one of truncate, round-even, got 'nearest'"):
        Sampling(rule="nearest")
    with pytest.raises(ValueError, match="round-even applies only to num_frames"):
        Sampling(None, fps=1.0, rule="round-even")


def test_frames_move_to_keyframes_and_never_two_to_one():
    times, keyframes = np.arange(100) / 10, np.array([0, 20, 40, 60, 80])
    assert snap_frames(np.array([0, 33, 66, 99]), times, keyframes, 1.0).tolist() == [0, 40, 60, 99]
    assert snap_frames(np.array([0, 33, 66, 99]), times, keyframes, 5.0).tolist() == [0, 40, 60, 80]
    assert snap_frames(np.array([0, 33, 66, 99]), times, keyframes, 0.5).tolist() == [0, 33, 66, 99]
    assert snap_frames(np.array([39, 40]), times, keyframes, 1.5).tolist() == [39, 40]  # the nearer one has it
    assert snap_frames(np.array([38, 41]), times, keyframes, 1.0).tolist() == [38, 40]
    assert snap_frames(np.array([38, 41]), times, keyframes, 2.0).tolist() == [20, 40]


@given(st.sets(st.integers(0, 99), min_size=1), st.sets(st.integers(0, 99)), st.floats(0.01, 20))
def test_snapping_keeps_frames_apart_and_near(chosen, keys, within_s):
    times, places, keyframes = np.arange(100) / 10, np.array(sorted(chosen)), np.array(sorted(keys), dtype=np.int64)
    moved = snap_frames(places, times, keyframes, within_s)
    assert len(set(moved.tolist())) == len(places) and (np.diff(moved) > 0).all()
    assert np.abs(times[moved] - times[places]).max() <= within_s + 1e-9
    assert set(moved.tolist()) <= keys | chosen
