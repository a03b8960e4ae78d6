"""Containers and codecs that decoders are known to read wrongly: the frames and times are those of the ffmpeg command.

Every clip is made by ffmpeg, decoded as the pipeline does it, in the child process, and compared frame by frame with
what ffmpeg itself shows of the file.
"""

import struct
from functools import partial
from pathlib import Path

import av
import numpy as np
import pytest

from gstep.backbones.preprocess import FixedSizePreprocessor, PerFramePreprocessor, PerVideoPreprocessor
from gstep.backbones.qwen2_5_vl import Qwen2_5VL
from gstep.backbones.qwen3_vl import Qwen3VL
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from pipeline.video.sandbox import DecodeSandbox
from tests.builders import decoding
from tests.builders.clips import add_stream, encode, ffmpeg, make_clip, shown, two_sizes_clip
from tests.builders.decoding import NEAR, decode, facts, fault_of, request

X264 = ("-c:v", "libx264", "-preset", "veryfast", "-crf", 10, "-g", 16, "-pix_fmt", "yuv420p")
VP9 = ("-c:v", "libvpx-vp9", "-deadline", "realtime", "-cpu-used", 8, "-crf", 10, "-b:v", 0, "-pix_fmt", "yuv420p")
AV1 = ("-c:v", "libaom-av1", "-cpu-used", 8, "-usage", "realtime", "-row-mt", 0, "-crf", 10, "-pix_fmt", "yuv420p")
MPEG2 = ("-c:v", "mpeg2video", "-q:v", 2, "-bf", 2)
TWICE = ("-vf", "settb=1/1000,setpts=floor(N/2)*80", "-fps_mode", "passthrough", "-enc_time_base", "1:1000")
PIPE = ("-seekable", 0)
SIZES = {"odd.mp4": (33, 17), "one-pixel.mkv": (1, 1)}


CLIPS = {
    "open-gop.mp4": (*X264, "-bf", 3, "-x264-params", "open-gop=1:scenecut=0"),
    "vp9.webm": VP9,
    "av1.mp4": AV1,
    "wmv2.wmv": ("-c:v", "wmv2", "-q:v", 2),
    "animated.gif": ("-vf", "split[a][b];[a]palettegen[p];[b][p]paletteuse"),
    # written to a pipe, where no length can be filled in afterwards
    "piped-b-frames.avi": ("-c:v", "mpeg4", "-q:v", 2, "-bf", 2, *PIPE),
    "piped.mkv": (*X264, *PIPE),
    "piped.flv": (*X264, *PIPE),
    # transport and program streams
    "mpeg2.ts": MPEG2,
    # times
    "late.mp4": (*X264, "-output_ts_offset", 1.5),
    "negative.mp4": (*X264, "-output_ts_offset", -0.32, "-avoid_negative_ts", "disabled"),
    "negative-cts.mp4": (*X264, "-bf", 2, "-movflags", "negative_cts_offsets"),
    "two-at-a-time.mkv": (*TWICE, "-c:v", "ffv1"),
    # sizes and pixels
    "odd.mp4": (*X264, "-pix_fmt", "yuv444p"),
    "one-pixel.mkv": ("-c:v", "ffv1"),
    "interlaced.ts": (*MPEG2, "-flags", "+ilme+ildct"),
    "alpha.webm": (*VP9, "-pix_fmt", "yuva420p"),
    "cropped.mp4": (*X264, "-bsf:v", "h264_metadata=crop_right=8:crop_top=8"),
}


@pytest.fixture(scope="module")
def assert_as_shown():
    """Frames and provenance are what ffmpeg shows, in the child process that a run uses."""
    with DecodeSandbox(timeout_s=60) as sandbox:
        yield partial(decoding.assert_as_shown, samplings=(5,), decode=lambda *asked: sandbox.decode(request(*asked)))


@pytest.mark.parametrize("name", CLIPS)
def test_a_clip_as_ffmpeg_makes_it(assert_as_shown, tmp_path, name):
    """AVI stores no presentation times: libraries differ by a frame or two in where it starts."""
    count = 8 if name == "av1.mp4" else 32
    path = make_clip(tmp_path / name, *CLIPS[name], count=count, size=SIZES.get(name, (64, 96)))
    assert_as_shown(path, exact_start=name != "piped-b-frames.avi")


def test_an_edit_list_of_a_cut_without_encoding(assert_as_shown, tmp_path):
    """What lies between the keyframe and the cut is stored and must not be shown."""
    whole = make_clip(tmp_path / "whole.mp4", *X264, "-bf", 2)
    ffmpeg("-ss", 0.41, "-i", whole, "-c", "copy", tmp_path / "cut.mp4")
    assert_as_shown(tmp_path / "cut.mp4")
    assert len(shown(tmp_path / "cut.mp4").frames) == 21


def test_a_turn_that_matroska_states(assert_as_shown, tmp_path):
    whole = make_clip(tmp_path / "whole.mp4", *X264)
    ffmpeg("-display_rotation", 270, "-i", whole, "-c", "copy", tmp_path / "a.mkv")
    assert_as_shown(tmp_path / "a.mkv")


ONE, NOISE = 2**16, 300  # of 16.16 fixed point: a quarter of a degree


@pytest.mark.parametrize(
    "matrix",
    [
        (0, 0, 0, 0),  # written by mistake: it turns nothing
        (-ONE, NOISE, -NOISE, -ONE),
        (NOISE, ONE, -ONE, NOISE),
        (-ONE, NOISE, NOISE, ONE),  # mirrored
    ],
)
def test_a_display_matrix_that_is_not_exact(assert_as_shown, tmp_path, matrix):
    assert_as_shown(write_matrix(tmp_path, matrix))


def test_a_display_matrix_that_turns_by_another_angle_is_refused(tmp_path):
    fault = fault_of(decode, write_matrix(tmp_path, (ONE, ONE // 40, -ONE // 40, ONE)), 5)
    assert fault.fault_class == "unsupported" and "not a multiple of 90 degrees" in fault.message


def write_matrix(folder: Path, matrix: tuple[int, int, int, int]) -> Path:
    """Write a clip with these values (a, b, c, d) in the display matrix of its track."""
    make_clip(folder / "plain.mp4", *X264)
    ffmpeg("-display_rotation", 90, "-i", folder / "plain.mp4", "-c", "copy", folder / "a.mp4")
    data = bytearray((folder / "a.mp4").read_bytes())
    place = data.index(b"tkhd") + 44
    a, b, c, d = matrix
    data[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 2**30)
    (folder / "a.mp4").write_bytes(data)
    return folder / "a.mp4"


@pytest.mark.parametrize(("name", "turns"), [("a.ts", (None, 90)), ("a.mkv", (180, 270)), ("a.mp4", (90, None))])
def test_a_turn_that_the_codec_states_and_that_changes(assert_as_shown, tmp_path, name, turns):
    """A part that states none keeps that of the part before it."""
    parts = []
    for number, turn in enumerate(turns):
        marks = ("-bsf:v", f"h264_metadata=display_orientation=insert:rotate={turn}") if turn else ()
        parts.append(make_clip(tmp_path / f"{number}.h264", *X264, "-bf", 0, *marks, count=15, first=15 * number))
    (tmp_path / "both.h264").write_bytes(b"".join(part.read_bytes() for part in parts))
    ffmpeg("-r", 25, "-i", tmp_path / "both.h264", "-c", "copy", tmp_path / name)
    if turns[1] is None:
        assert_as_shown(tmp_path / name)
        return
    log = ffmpeg("-i", tmp_path / name, "-vf", "showinfo", "-f", "null", "-")
    assert (log.count(" s:96x64"), log.count(" s:64x96")) == (15, 15)
    for start_s, size in ((0.0, (96, 64)), (0.6, (64, 96)), (0.8, (64, 96))):
        video = decode(tmp_path / name, 4, start_s, start_s + 0.4)
        assert facts(video, "source_width", "source_height") == size == video.frames.shape[2:0:-1]


SMALL, LARGE = (64, 96), (128, 192)
SIZES_NOTE = "frame sizes differ: 2 sizes from 96x64 to 192x128"
# The encoder of each; "" for H.264, whose streams are joined.
RESIZED = {
    "a.mp4": "",
    "a.ts": "",
    "hevc.mkv": "libx265",
    "vp8.webm": "libvpx",
    "vp9.webm": "libvpx-vp9",
    "av1.mkv": "libsvtav1",
}


def write_resized(folder: Path, name: str, sizes: list[tuple[int, int]]) -> Path:
    """Write 16 frames of each of these sizes, in one stream."""
    if RESIZED[name]:
        return two_sizes_clip(folder / name, RESIZED[name], sizes=sizes)
    with (folder / "both.h264").open("wb") as both:
        for i, size in enumerate(sizes):
            part = make_clip(folder / f"{i}.h264", *X264, "-bf", 0, count=15, size=size, first=15 * i)
            both.write(part.read_bytes())
    ffmpeg("-fflags", "+genpts", "-r", 25, "-i", folder / "both.h264", "-c", "copy", folder / name)
    return folder / name


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, (SMALL, LARGE)) for name in RESIZED if name != "a.ts"),
        ("a.mp4", (LARGE, SMALL)),
        ("a.ts", (SMALL, LARGE, SMALL)),
        ("vp9.webm", (LARGE, SMALL, LARGE)),
    ],
)
def test_a_size_that_changes_on_the_way(assert_as_shown, tmp_path, name, sizes):
    """The largest of the sampled frames decides, whichever comes first, and the row says that sizes differ."""
    path = write_resized(tmp_path, name, list(sizes))
    assert_as_shown(path, size=LARGE, note=SIZES_NOTE)
    for number, size in enumerate(sizes):
        video = decode(path, 4, 0.6 * number, 0.6 * number + 0.6)
        assert facts(video, "source_height", "source_width") == size
        assert video.record["backend_note"].endswith(SIZES_NOTE) == (size != sizes[0])


def test_models_get_the_size_that_follows_from_the_largest_frame(tmp_path):
    """Frames before it were resized by then."""
    path = write_resized(tmp_path, "a.ts", [SMALL, (640, 480)])
    truth = shown(path, (640, 480)).frames
    for preprocessor in (
        FixedSizePreprocessor((0, 0, 0), (1, 1, 1), height=384, width=384),
        PerFramePreprocessor.from_settings(Qwen2_5VL.pixel_defaults),
        PerVideoPreprocessor.from_settings(Qwen3VL.pixel_defaults),
    ):
        for start_s, end_s in ((None, None), (0.6, 1.2)):
            video = decode_video(DecodeRequest(path, Sampling(5), preprocessor, start_s, end_s))
            size = preprocessor.target_size(5, 640, 480)
            assert video.frames.shape == (5, *size, 3)
            expected = preprocessor.resize(truth[video.frame_indices], size).numpy().astype(int)
            assert np.abs(video.frames - expected).mean(axis=(1, 2, 3)).max() < NEAR


@pytest.mark.parametrize(("name", "default"), [("a.mp4", 1), ("a.mkv", 0), ("a.ts", 1)])
def test_two_video_streams(assert_as_shown, tmp_path, name, default):
    """A small one and a larger, negative one: the default stream is shown, where the container knows of one."""
    both = ("-filter_complex", "[0]split[a][b];[b]scale=192:128,negate[c]", "-map", "[a]", "-map", "[c]")
    marks = (f"-disposition:v:{default}", "default", f"-disposition:v:{1 - default}", 0)
    assert_as_shown(make_clip(tmp_path / name, *both, *X264, *marks))


@pytest.mark.parametrize(("name", "codec"), [("a.mkv", "libx264"), ("a.avi", "mpeg4")])
def test_a_larger_stream_without_any_frame(assert_as_shown, tmp_path, name, codec):
    """As of a camera with a second channel that was off."""
    with av.open(str(tmp_path / name), "w") as out:
        add_stream(out, codec, (240, 320), 25, 10, "yuv420p", None)
        small = add_stream(out, codec, (64, 96), 25, 10, "yuv420p", None)
        for number in range(20):
            encode(out, small, number, (64, 96), None)
        out.mux(small.encode(None))
    assert_as_shown(tmp_path / name)


def test_a_picture_that_starts_later_than_the_sound(assert_as_shown, tmp_path):
    picture = make_clip(tmp_path / "picture.mp4", *X264)
    sound = ("-f", "lavfi", "-i", "sine=duration=2")
    ffmpeg("-itsoffset", 0.5, "-i", picture, *sound, "-c:v", "copy", "-c:a", "aac", tmp_path / "a.mp4")
    assert_as_shown(tmp_path / "a.mp4")
    assert shown(tmp_path / "a.mp4").timestamps[0] > 0.4


X265 = (
    "-c:v",
    "libx265",
    "-preset",
    "ultrafast",
    "-x265-params",
    "log-level=none:pools=none",
    "-pix_fmt",
    "yuv420p10le",
)
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
