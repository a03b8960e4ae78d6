"""What files state of their colours and pixels is found in every container; the pixels stay as they are stored."""

import numpy as np
import pytest

from tests.builders.clips import ffmpeg, make_clip, shown
from tests.builders.decoding import decode, facts, fault_of

X264 = ("-c:v", "libx264", "-preset", "veryfast", "-pix_fmt", "yuv420p")
X265_8 = ("-c:v", "libx265", "-preset", "ultrafast", "-x265-params", "log-level=none:pools=none")
X265 = (*X265_8, "-pix_fmt", "yuv420p10le")
VP9 = ("-c:v", "libvpx-vp9", "-deadline", "realtime", "-cpu-used", 8, "-pix_fmt", "yuv420p10le")
AV1 = ("-c:v", "libsvtav1", "-preset", 12)
PQ, HLG = "smpte2084", "arib-std-b67"


def stating(transfer):
    return ("-vf", f"setparams=color_primaries=bt2020:color_trc={transfer}:colorspace=bt2020nc")


@pytest.mark.parametrize(
    ("name", "codec", "transfer"),
    [
        ("h264.ts", X264, PQ),
        ("h264.avi", X264, "bt709"),
        ("hevc.mp4", X265, HLG),
        ("vp9.webm", VP9, HLG),
        ("av1.mp4", AV1, PQ),
    ],
)
def test_a_transfer_function_is_told_as_ffmpeg_tells_it(name, codec, transfer, tmp_path):
    path = make_clip(tmp_path / name, *codec, *stating(transfer), count=8)
    said = ffmpeg("-i", path, "-f", "null", "-")
    assert f"/{transfer}" in said or f", {transfer}" in said
    assert decode(path, 4).record["color_transfer"] == transfer


def test_high_dynamic_range_changes_no_pixel(tmp_path):
    """The loaders of the models take PQ and HLG as any other samples; what can change is which matrix a file states."""
    clips = [make_clip(tmp_path / f"{t}.mp4", *X264, *stating(t), count=8) for t in (PQ, HLG, "bt709")]
    pq, hlg, plain = (decode(clip, 4).frames for clip in clips)
    assert np.array_equal(pq, plain) and np.array_equal(hlg, plain)
    assert np.abs(pq - shown(tmp_path / f"{PQ}.mp4").frames[[0, 2, 4, 7]].astype(int)).mean() < 2


#: File, codec and pixels. Every matrix is tried with the first, and one of them with each of the others.
PIXELS = [
    *(("a.mp4", X264, pixels) for pixels in ("yuv420p", "yuvj420p", "yuv444p10le")),
    *(("b.mkv", X265, pixels) for pixels in ("yuv422p", "yuv420p12le")),
    ("c.webm", VP9, "yuv420p10le"),
    ("d.mov", ("-c:v", "prores"), "yuv422p10le"),
    ("e.avi", ("-c:v", "dvvideo", "-r", "30000/1001", "-s", "720x480"), "yuv411p"),
]
MATRICES = [(*PIXELS[0], space) for space in ("bt709", "smpte170m", "smpte240m", "fcc")]
MATRICES += [(*pixels, "bt2020nc") for pixels in PIXELS] + [(*PIXELS[0], "unknown")]


@pytest.mark.parametrize(("name", "codec", "pixels", "space"), [*MATRICES, ("b.mkv", X265, "gbrp10le", "unknown")])
def test_colours_are_those_of_ffmpeg_to_the_bit(name, codec, pixels, space, tmp_path):
    """Whatever the depth, the matrix, and the place that the codec states for the samples of chroma."""
    marks = ("-vf", f"format={pixels},setparams=colorspace={space}")
    path = make_clip(tmp_path / name, *codec, "-pix_fmt", pixels, *marks, count=3)
    video = decode(path, 3)
    assert np.array_equal(video.frames, shown(path).frames[video.frame_indices])


def test_a_matrix_that_ffmpeg_does_not_convert_is_unsupported(tmp_path):
    path = make_clip(tmp_path / "a.mp4", *X264, "-vf", "format=yuv420p,setparams=colorspace=bt2020c", count=3)
    assert "cannot convert the video to RGB from its color matrix" in fault_of(decode, path).message


def test_the_shape_of_pixels_is_told_turns_with_the_picture_and_stretches_nothing(tmp_path):
    whole = make_clip(tmp_path / "whole.mp4", *X264, "-vf", "setsar=16/15", count=8)
    ffmpeg("-display_rotation", 90, "-i", whole, "-c", "copy", tmp_path / "a.mp4")
    for path, shape, size in ((whole, "16:15", (96, 64)), (tmp_path / "a.mp4", "15:16", (64, 96))):
        assert "SAR 16:15 " in ffmpeg("-i", path, "-f", "null", "-")
        video = decode(path, 4)
        assert facts(video, "sample_aspect_ratio", "source_width", "source_height") == (shape, *size)
        assert video.frames.shape[2:0:-1] == size
