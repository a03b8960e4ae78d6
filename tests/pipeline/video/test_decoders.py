"""Both decoders deliver exactly the frames that were asked for, at their real times, whatever the container does."""

import os

import numpy as np
import pytest

from pipeline.video.containers import sniff
from pipeline.video.decoders import (
    DECODERS,
    DecordDecoder,
    PyavDecoder,
    chunk_length,
    decoders_for,
    load_decoder,
    turned,
)
from pipeline.video.probe import IndexMismatch, Orientation, probe, scan
from tests.pipeline.videos import (
    SAMPLE_LENGTHS,
    SAMPLES,
    numbered_frame,
    numbers,
    sample,
    two_sizes_clip,
    two_streams_clip,
    write_clip,
)

GIF = {"codec": "gif", "pix_fmt": "rgb8"}
SECONDS = [i * i * 7 / 1000 for i in range(30)]  # of a variable rate
# name: (options of the clip, why decord must not read it or "")
CLIPS = {
    "h264.mp4": ({}, ""),
    "h264.mkv": ({}, ""),
    "variable.mp4": ({"pts": [round(1000 * s) for s in SECONDS]}, ""),
    "hevc.mp4": ({"codec": "libx265"}, "before a keyframe"),
    "closed.mp4": ({"codec": "libx265", "codec_options": {"x265-params": "log-level=none:open-gop=0"}}, ""),
    "open.mkv": ({"codec_options": {"x264-params": "open-gop=1:bframes=3:scenecut=0"}}, "before a keyframe"),
    "av1.mp4": ({"codec": "libsvtav1"}, "only the frame size"),
    "vp9.webm": ({"codec": "libvpx-vp9"}, "only the frame size"),
    "vp8.webm": ({"codec": "libvpx", "codec_options": {"b": "500k", "lag-in-frames": "16"}}, "only the frame size"),
    "mpeg4.avi": ({"codec": "mpeg4"}, "neither"),
    "h264.avi": ({}, "no timestamps"),
    "mpeg2.ts": ({"codec": "mpeg2video"}, "neither"),
    "h264.ts": ({}, "neither"),
    "mpeg2.mpg": ({"codec": "mpeg2video"}, "neither"),
    "h264.flv": ({}, "neither"),
    "wmv2.asf": ({"codec": "wmv2"}, "neither"),
    "raw.h264": ({"muxer": "h264"}, "no timestamps"),
    "raw.hevc": ({"muxer": "hevc", "codec": "libx265"}, "no timestamps"),
    "paletted.gif": (GIF, "neither"),
    "odd.mkv": ({"codec": "libvpx-vp9", "size": (33, 17)}, "only the frame size"),
    "odd.mp4": ({"size": (33, 17), "pix_fmt": "yuv444p"}, "its pixels"),
    "ten-bit.mp4": ({"pix_fmt": "yuv420p10le"}, "its pixels"),
    "full-range.mp4": ({"pix_fmt": "yuvj420p"}, "its pixels"),
    "late.mp4": ({"pts": [1500 + 40 * i for i in range(30)]}, "start at 0"),
}


def index_of(path):
    return probe(str(path), sniff(path))


def read_numbers(decoder_name, index, indices):
    decoder = load_decoder(decoder_name)(index)
    try:
        chunks = list(decoder.read(np.asarray(indices)))
    finally:
        decoder.close()
    return [number for chunk in chunks for number in numbers(chunk)]


@pytest.mark.parametrize("name", CLIPS)
def test_every_frame_of_every_kind(name, tmp_path):
    options, not_for_decord = CLIPS[name]
    index = index_of(write_clip(tmp_path / name, **options))
    assert not_for_decord in index.not_for_decord and bool(not_for_decord) == bool(index.not_for_decord)
    assert (index.height, index.width) == options.get("size", (64, 96))
    expected = SECONDS if name == "variable.mp4" else np.arange(30) / 25
    assert np.abs(index.timestamps - expected).max() < 1e-3
    assert index.duration_s >= index.timestamps[-1] + 0.03
    for backend in decoders_for("auto", index):
        for wanted in (range(30), [0, 13, 14, 29], [29], [21, 22]):
            assert read_numbers(backend, index, wanted) == list(wanted), backend


@pytest.mark.parametrize("codec", ["libx264", "libx265", "libvpx-vp9", "libsvtav1", "mpeg4"])
@pytest.mark.parametrize("gop", [1, 7, 40])
def test_seeking_lands_on_the_frame(codec, gop, tmp_path, monkeypatch):
    index = index_of(write_clip(tmp_path / f"a.{'mkv' if gop == 7 else 'mp4'}", codec=codec, count=120, gop=gop))
    rng = np.random.default_rng(gop)
    sets = [np.sort(rng.choice(120, size, replace=False)) for size in (2, 3, 5, 8, 20)]
    for backend in decoders_for("auto", index):
        for wanted in sets:
            assert read_numbers(backend, index, wanted) == wanted.tolist(), backend
    # and each of those frames is, to the pixel, what comes of reading from the start
    monkeypatch.setattr("pipeline.video.decoders._SEEKABLE", ())
    straight = np.concatenate(list(PyavDecoder(index).read(np.arange(120))))
    monkeypatch.undo()
    for wanted in sets:
        assert np.array_equal(np.concatenate(list(PyavDecoder(index).read(wanted))), straight[wanted])


def test_to_write_av1_leaves_the_tests_at_their_priority(tmp_path):
    before = os.sched_getscheduler(0)
    write_clip(tmp_path / "a.mp4", codec="libsvtav1")
    assert os.sched_getscheduler(0) == before


@pytest.mark.parametrize(("name", "length"), list(zip(SAMPLES, SAMPLE_LENGTHS, strict=True)))
def test_decord_and_pyav_agree_on_real_clips(name, length):
    index = index_of(sample(name))
    assert len(index.timestamps) == length and index.not_for_decord == ""
    wanted = np.linspace(0, length - 1, 8, dtype=int)
    with_decord, with_pyav = (
        np.concatenate(list(decoder(index).read(wanted))) for decoder in (DecordDecoder, PyavDecoder)
    )
    assert with_decord.shape == (8, index.height, index.width, 3)
    difference = np.abs(with_decord.astype(int) - with_pyav)
    assert difference.max() <= 2


def test_an_edit_list_hides_frames(tmp_path):
    path = write_clip(
        tmp_path / "a.mp4",
        pts=[40 * i - 400 for i in range(30)],
        muxer_options={"avoid_negative_ts": "disabled", "use_editlist": "1"},
    )
    index = index_of(path)
    assert len(index.timestamps) == 20 and "edit list" in index.not_for_decord
    assert np.abs(index.timestamps - np.arange(20) / 25).max() < 1e-3
    assert read_numbers("pyav", index, range(20)) == list(range(10, 30))


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
def test_frames_that_change_size_are_scaled_to_the_first(name, tmp_path):
    index = index_of(two_sizes_clip(tmp_path / name))
    assert index.not_for_decord
    assert read_numbers("pyav", index, range(30)) == list(range(30))


def test_two_streams_the_default_one_is_read_as_ffmpeg_does(tmp_path):
    index = index_of(two_streams_clip(tmp_path / "a.mp4"))
    assert "several" in index.not_for_decord
    assert read_numbers("pyav", index, range(20)) == list(range(255, 235, -1))


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_rotation_is_applied(name, degrees, tmp_path):
    index = index_of(write_clip(tmp_path / name, rotation=degrees if degrees < 180 else degrees - 360))
    assert "rotated" in index.not_for_decord
    frames = np.concatenate(list(PyavDecoder(index).read(np.arange(30))))
    stored = np.stack([np.rot90(frame, -degrees // 90) for frame in frames])  # set_display_rotation: anticlockwise
    assert numbers(stored) == list(range(30))
    assert frames.shape[1:3] == ((96, 64) if degrees != 180 else (64, 96)) == (index.height, index.width)


def test_turning_covers_mirrored_frames():
    frame = numbered_frame(0b10110, 4, 6)
    assert np.array_equal(turned(frame, Orientation(False, False, True)), frame[:, ::-1])
    assert np.array_equal(turned(frame, Orientation(True, False, False)), frame.transpose(1, 0, 2))


def test_what_packets_do_not_tell_decoding_does(tmp_path):
    clip = write_clip(tmp_path / "a.ts", codec_options={"crf": "10"}, count=60)
    data = clip.read_bytes()
    clip.write_bytes(data[188 * (len(data) * 4 // 10 // 188) :])  # begins in the middle of a group of pictures
    index = index_of(clip)
    with pytest.raises(IndexMismatch):
        read_numbers("pyav", index, [0])
    found = scan(index)
    assert len(found.timestamps) < len(index.timestamps)
    read = read_numbers("pyav", found, range(len(found.timestamps)))
    assert read == list(range(read[0], 60))


def test_chunks_shrink_with_the_frames(tmp_path, monkeypatch):
    assert chunk_length(384, 384) == 8
    assert chunk_length(2160, 3840) == 2
    assert chunk_length(8192, 8192) == 1
    index = index_of(write_clip(tmp_path / "a.mp4"))
    assert [len(chunk) for chunk in PyavDecoder(index).read(np.arange(20))] == [8, 8, 4]
    assert [len(chunk) for chunk in DecordDecoder(index).read(np.arange(20))] == [8, 8, 4]


def test_decoders_go_by_name_or_import_path():
    assert list(DECODERS) == ["decord", "pyav"]
    assert load_decoder("pyav") is PyavDecoder
    assert load_decoder("tests.pipeline.videos:Aborting").version == "0"
    with pytest.raises(KeyError, match="known: decord, pyav"):
        load_decoder("opencv")
