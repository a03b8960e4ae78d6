"""Times in every container: shots and --fps take the frames of MP4, and the rate is what the timestamps show."""

import json
from fractions import Fraction
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gstep.backbones import ModelSource, family_of
from pipeline.prune.decode_stage import make_decoding_columns
from pipeline.prune.encode_stage import to_sampled_video
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.probe import VideoIndex
from pipeline.video.sampling import (
    Sampling,
    choose_frames,
    find_clip_range,
    find_clip_rate,
    find_tolerances,
    find_true_times,
)
from tests.builders import clips
from tests.builders.clips import ffmpeg, make_clip, numbers, write_clip
from tests.builders.decoding import decode, facts
from tests.gstep.backbones.encoders import FLOAT32

X264 = ("-c:v", "libx264", "-preset", "ultrafast")
B_FRAMES = ("-c:v", "libx264", "-preset", "veryfast", "-bf", 2)
VP9 = ("-c:v", "libvpx-vp9", "-deadline", "realtime", "-cpu-used", 8)
MPEG2 = ("-c:v", "mpeg2video", "-bf", 2)
CONTAINERS = {
    "a.mp4": X264,
    "b.mp4": B_FRAMES,
    "b.mkv": B_FRAMES,  # its first frame is shown later than 0, and rounded too
    "a.webm": VP9,
    "b.flv": B_FRAMES,
    "a.wmv": ("-c:v", "wmv2"),
    "a.avi": ("-c:v", "mpeg4"),  # a tick is a frame
    "a.ts": X264,
    "b.ts": B_FRAMES,
    "a.mpg": MPEG2,
    "a.ogv": ("-c:v", "libtheora"),
}
RAW = {
    "a.h264": X264,
    "b.h264": B_FRAMES,
    "a.hevc": ("-c:v", "libx265", "-preset", "ultrafast", "-x265-params", "log-level=none:pools=none"),
    "a.m2v": ("-c:v", "mpeg2video"),
}
# Every container at a rate, and at others where ticks are fine, milliseconds, a frame or none.
EVEN = [(name, "24000/1001") for name in (*CONTAINERS, *RAW)]
EVEN += [(name, rate) for name in ("b.mp4", "b.mkv", "a.avi", "a.h264") for rate in ("30", "60")]
COUNT, SHOT = 120, 20
HALF_MS = Fraction(1, 2000)
FAST_S, SLOW_S = 2, 10  # a video of 30 frames a second for two seconds, then of 5


def range_of(index: VideoIndex, start: float | None, end: float | None) -> tuple[int, int]:
    times, *duration = index.find_true_times()
    return find_clip_range(times, start, end, *duration)


def chosen_of(index: VideoIndex, sampling: Sampling, start: float | None = None, end: float | None = None) -> list[int]:
    times, *duration = index.find_true_times()
    return choose_frames(times, sampling, start, end, *duration).tolist()


def index_of(path: Path) -> VideoIndex:
    index = clips.index_of(path)
    index.packets.close()
    return index


@pytest.fixture(scope="module")
def even(tmp_path_factory):
    """The index of COUNT frames in a container at a rate; each is made once."""
    folder, held = tmp_path_factory.mktemp("even"), {}

    def make(name: str, rate: str, count: int = COUNT) -> VideoIndex:
        if (name, rate, count) not in held:
            path = folder / f"{rate.replace('/', '_')}-{count}-{name}"
            source = ("-f", "lavfi", "-i", f"testsrc2=s=64x64:r={rate}", "-frames:v", count)
            ffmpeg(*source, "-threads", 1, *{**CONTAINERS, **RAW}.get(name, ()), path)
            held[name, rate, count] = index_of(path)
        return held[name, rate, count]

    return make


@pytest.mark.parametrize("rate", ["24000/1001", "60"])
@pytest.mark.parametrize(("source", "copy"), [("b.mkv", "c.mp4"), ("b.flv", "c.ts")])
def test_milliseconds_stay_in_a_copy_with_finer_ticks(even, tmp_path, rate, source, copy):
    """As of a recording that was copied to MP4 without encoding: it is no file of variable rate."""
    ffmpeg("-i", even(source, rate).path, "-c", "copy", tmp_path / copy)
    index, exact = index_of(tmp_path / copy), Fraction(rate)
    assert index.fps == pytest.approx(float(exact), rel=1e-6)
    for start in range(0, COUNT, SHOT):
        bounds = (round(float(place / exact), 3) for place in (start, start + SHOT))
        assert range_of(index, *bounds) == (start, start + SHOT)
    assert chosen_of(index, Sampling(None, float(exact), None)) == list(range(COUNT))
    assert chosen_of(index, Sampling(None, 20.0, 7)) == np.linspace(0, COUNT - 1, 7, dtype=int).tolist()


@pytest.mark.parametrize(("rate", "copy"), [("24000/1001", "c.flv"), ("30000/1001", "c.mkv")])
def test_a_rate_that_flv_rounds_is_restored(even, tmp_path, rate, copy):
    """FFmpeg reads 983/41 for 24000/1001, a frame too much in a minute of shots, and copies it to other headers."""
    ffmpeg("-i", even("b.flv", rate, 1500).path, "-c", "copy", tmp_path / copy)
    index, exact = index_of(tmp_path / copy), Fraction(rate)
    assert index.fps == pytest.approx(float(exact), rel=1e-12, abs=0)
    bounds = [round(float(number / exact), 3) for number in range(0, 1501, 12)]
    frames = [chosen_of(index, Sampling(None, float(exact), None), *shot) for shot in pairwise(bounds)]
    assert [*chain(*frames)] == list(range(1500))


def test_a_duration_that_is_a_whole_millisecond_too_long_adds_no_frame():
    """As in a copy from Matroska to MP4: the last frame's time and its duration were both rounded up, to 50.051 s."""
    times, rate = np.round(np.arange(1500) * 1.001 / 30, 3), 30000 / 1001
    assert times[-1] + 0.034 == pytest.approx(50.051, abs=1e-9)
    true_times = find_true_times(times, times[-1] + 0.034, rate, 1 / 16_000)
    assert true_times[1] == pytest.approx(50.05, abs=1e-9)
    frames = choose_frames(true_times[0], Sampling(None, rate, None), None, None, *true_times[1:])
    assert frames.tolist() == [*range(1500)]


@pytest.mark.parametrize(("name", "rate"), EVEN)
def test_a_regular_file_has_its_rate_its_shots_and_the_frames_that_mp4_has_on_screen(even, name, rate):
    index, exact = even(name, rate), Fraction(rate)
    stated = {".mkv": 1e-6, ".webm": 1e-6}  # their headers round the time of a frame
    assert index.fps == pytest.approx(float(exact), rel=stated.get(Path(name).suffix, 1e-15), abs=0)
    exact_times = np.arange(COUNT) / float(exact)
    assert np.abs(index.timestamps - exact_times).max() <= 1.5 * index.tick_s + 1e-6
    times, end, tick_s = index.find_true_times()
    assert np.abs(times - exact_times).max() < 1e-4 and end == pytest.approx(COUNT / exact, rel=1e-4) and tick_s == 0
    # Bounds of shots in milliseconds, as shot detectors write them, and exact ones.
    for digits in (3, 17) if name in CONTAINERS else ():
        bounds = [round(float(number / exact), digits) for number in range(0, COUNT + 1, SHOT)]
        shots = [range_of(index, *shot) for shot in pairwise(bounds)]
        assert shots == [(number, number + SHOT) for number in range(0, COUNT, SHOT)], digits
        if digits == 3:
            frames = [chosen_of(index, Sampling(None, float(exact), None), *shot) for shot in pairwise(bounds)]
            assert [*chain(*frames)] == list(range(COUNT)), "a frame is of the next shot"
    # At k / fps that is frame k * rate / fps, cut to a whole number, half a millisecond ahead.
    for fps in (exact, exact / 2, Fraction(1), Fraction(3), Fraction(7)):
        places = ((k / fps + HALF_MS) * exact for k in range(COUNT) if (k / fps + HALF_MS) * exact < COUNT)
        assert chosen_of(index, Sampling(None, float(fps), None)) == [int(place) for place in places], fps
    assert chosen_of(index, Sampling(None, 20.0, 7)) == np.linspace(0, COUNT - 1, 7, dtype=int).tolist()


@pytest.mark.parametrize("starts", [(0, 0), (5, 0), (4000, 100, 0)])
@pytest.mark.parametrize(("name", "options"), [("a.ts", B_FRAMES), ("m.ts", MPEG2), ("a.mpg", MPEG2)])
def test_recordings_joined_to_one_file_follow_each_other(tmp_path, name, options, starts):
    """FFmpeg takes a jump back by a minute for the wrap of a clock of 33 bits, and adds 26 hours."""
    with (tmp_path / name).open("wb") as joined:
        for i, start in enumerate(starts):
            part = make_clip(tmp_path / f"{i}-{name}", *options, "-output_ts_offset", start, first=32 * i)
            joined.write(part.read_bytes())
    count = 32 * len(starts)
    video = decode(tmp_path / name, count)
    assert facts(video, "fps", "clip_fps", "source_frames") == (25.0, 25.0, count)
    assert video.timestamps == pytest.approx(np.arange(count) / 25)
    assert video.record["duration_s"] == pytest.approx(count / 25)
    late = np.array(numbers(video.frames)) != np.arange(count)
    assert late.sum() <= len(starts) - 1  # FFmpeg may make up a frame at a seam


@pytest.mark.parametrize("name", ["a.ts", "a.mpg"])
def test_a_clock_that_wraps_goes_on(tmp_path, name):
    path = make_clip(tmp_path / name, *MPEG2, "-output_ts_offset", 2**33 / 90_000 - 0.7)
    video = decode(path, 32)
    assert numbers(video.frames) == list(range(32)) and video.record["fps"] == 25.0
    assert video.timestamps == pytest.approx(np.arange(32) / 25, abs=1e-4)


def write_times(path: Path, times: list[int], rate: int) -> Path:
    """Write a frame at each of these milliseconds, which are the encoder's ticks, with this rate in the header."""
    codec = {".webm": "libvpx-vp9", ".wmv": "wmv2", ".avi": "mpeg4"}.get(path.suffix, "libx264")
    return write_clip(path, codec=codec, count=len(times), size=(64, 64), fps=rate, gop=12, pts=times)


def uneven(path: Path) -> Path:
    """Write 60 frames in two seconds and 50 in the ten after these."""
    times = [round(1000 * i / 30) for i in range(30 * FAST_S)]
    times += range(1000 * FAST_S, 1000 * (FAST_S + SLOW_S), 200)
    return write_times(path, times, 1000 if path.suffix == ".avi" else 30)


@pytest.mark.parametrize("name", ["a.mkv", "a.avi"])
def test_a_header_that_states_a_thousand_frames_a_second_is_not_believed(tmp_path, name):
    index = index_of(write_times(tmp_path / name, [40 * number for number in range(50)], 1000))
    assert index.fps == pytest.approx(25.0, abs=1e-9)
    assert find_clip_rate(index.timestamps, index.fps, None, None, index.duration_s, index.tick_s) == index.fps


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.avi", "a.ts"])
def test_a_variable_rate_is_that_of_the_timestamps_and_its_cap_is_even_over_time(tmp_path, name):
    index = index_of(uneven(tmp_path / name))
    n_frames, span = 30 * FAST_S + 5 * SLOW_S, FAST_S + SLOW_S - 0.2
    assert len(index.timestamps) == n_frames
    assert index.fps == pytest.approx((n_frames - 1) / span, rel=1e-3)
    seconds = {(None, None): FAST_S + SLOW_S, (0.0, 2.0): 2, (0.5, 1.5): 1, (4.0, 10.0): 6}
    for clip, length in seconds.items():
        first, stop = range_of(index, *clip)
        rate = find_clip_rate(index.timestamps, index.fps, *clip, index.duration_s, index.tick_s)
        assert rate == pytest.approx((stop - first) / length, rel=0.02)
    chosen = chosen_of(index, Sampling(None, 4.0, 12))
    steps = np.diff(index.timestamps[chosen])
    assert len(chosen) == 12 and (steps > 0.75).all() and (steps < 1.25).all()
    assert chosen_of(index, Sampling(12)) == np.linspace(0, n_frames - 1, 12, dtype=int).tolist()


def extra_of(path: Path, model: str, sampling: Sampling, *clip: float | None) -> dict:
    """What a family's positions go by, of the frames that a run would take."""
    family = family_of(ModelSource.resolve(model))
    video = decode_video(DecodeRequest(path, sampling, family.preprocessor(), *clip))
    start = {} if not clip or clip[0] is None else {"start_s": clip[0]}
    record = json.loads(json.dumps(make_decoding_columns(video, 1)))
    return dict(family.load(FLOAT32).model_extra(to_sampled_video({**record, **start})))


def test_positions_of_a_clip_go_by_its_own_seconds(tmp_path):
    path, sampling = uneven(tmp_path / "a.mkv"), Sampling(None, 1.0, 768)
    for clip in ((0.0, 2.0), (4.0, 10.0), (None, None)):
        extra = extra_of(path, "tiny-qwen2-5-vl", sampling, *clip)
        assert extra["second_per_grid_ts"] == pytest.approx(2.0, rel=0.02), clip
    qwen3 = extra_of(path, "tiny-qwen3-vl", sampling, 4.0, 10.0)
    assert qwen3["patch_timestamps"] == pytest.approx([0.5, 2.5, 4.5], abs=0.002)
    assert "second_per_grid_ts" not in extra_of(path, "tiny", sampling, 4.0, 10.0)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60), st.sampled_from([0.0, 1e-5, 1e-3, 0.01, 1 / 30]), st.data()
)
def test_no_tolerance_reaches_another_frame(steps, tick_s, data):
    """A bound within half a millisecond of a frame means that frame, where frames are two apart; and only its own."""
    times = np.concatenate([[0.0], np.cumsum(steps)]) * (tick_s or 0.001)
    allowed = find_tolerances(times, tick_s)
    assert (times[:-1] + allowed[:-1] < times[1:] - allowed[1:]).all()
    number = data.draw(st.integers(0, len(times) - 1))
    for bound in (times[number] - 0.9 * allowed[number], times[number] + 0.9 * allowed[number]):
        if 0 <= bound < times[-1] + 1:
            assert find_clip_range(times, float(bound), None, times[-1] + 1, tick_s)[0] == number


def test_a_bound_between_frames_of_a_coarse_tick_is_no_frame(even):
    """In AVI half a tick would be half of the way to the next frame."""
    index = even("a.avi", "25")
    assert range_of(index, 0.485, 0.995) == range_of(index, 0.5, 1.0) == (13, 25)
