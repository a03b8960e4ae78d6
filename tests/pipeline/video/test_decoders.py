"""Decoders deliver exactly the frames that were asked for, at their real times, whatever the container does."""

import os
import re
from importlib.metadata import version
from pathlib import Path

import av
import av.filter
import numpy as np
import pytest
import torch

from gstep.backbones.preprocess import resize_frames
from pipeline.video.decoders import PyavDecoder, choose_decoders, find_installed_version, load_decoder
from pipeline.video.decord_decoder import DecordDecoder
from pipeline.video.nvdec_decoder import _CODECS, NvdecDecoder, PyavNvdecDecoder, make_torchcodec_decoder
from pipeline.video.probe import IndexMismatch, index_by_decoding
from pipeline.video.sandbox import DecodeSandbox
from tests.builders.clips import (
    ffmpeg,
    index_of,
    make_clip,
    numbers,
    two_sizes_clip,
    two_streams_clip,
    write_clip,
)
from tests.builders.decoding import decode, facts, request
from tests.gstep.synthetic import needs_cuda
from tests.interpreter import run_python
from tests.paths import ROOT

NEGATIVE = {"avoid_negative_ts": "disabled", "use_editlist": "1"}
X265 = ("-c:v", "libx265", "-preset", "ultrafast", "-x265-params", "log-level=none:pools=none", "-pix_fmt")
# More than 8 bits a sample; H.264 and HEVC state where chroma samples lie.
DEEP = {
    "h264-10.mp4": ("-c:v", "libx264", "-pix_fmt", "yuv420p10le"),
    "hevc-10.mp4": (*X265, "yuv420p10le"),
    "av1-10.mkv": ("-c:v", "libsvtav1", "-preset", 12, "-pix_fmt", "yuv420p10le"),
}
# Its keyframes are recovery points: a frame is whole only some frames later.
REFRESH = ("-c:v", "libx264", "-crf", 10, "-pix_fmt", "yuv420p", "-x264-params", "intra-refresh=1:keyint=12:bframes=0")
SECONDS = [i * i * 7 / 1000 for i in range(30)]  # of a variable rate
# name: (options of the clip, why decord must not read it or "")
CLIPS = {
    "h264.mp4": ({}, ""),
    "variable.mp4": ({"pts": [round(1000 * s) for s in SECONDS]}, ""),
    "hevc.mp4": ({"codec": "libx265"}, "before a keyframe"),
    "closed.mp4": ({"codec": "libx265", "codec_options": {"x265-params": "log-level=none:open-gop=0"}}, ""),
    "open.mkv": ({"codec_options": {"x264-params": "open-gop=1:bframes=3:scenecut=0"}}, "before a keyframe"),
    "av1.mp4": ({"codec": "libsvtav1"}, "neither H.264 nor HEVC"),
    "mpeg4.avi": ({"codec": "mpeg4"}, "neither"),
    "mpeg2.ts": ({"codec": "mpeg2video"}, "neither"),
    "h264.ts": ({}, "neither"),
    "raw.h264": ({"muxer": "h264"}, "neither"),
    "paletted.gif": ({"codec": "gif", "pix_fmt": "rgb8"}, "neither"),
    "ten-bit.mp4": ({"pix_fmt": "yuv420p10le"}, "its pixels"),
    "odd.mp4": ({"size": (33, 17), "pix_fmt": "yuv444p"}, "its pixels"),
    "late.mp4": ({"pts": [1500 + 40 * i for i in range(30)]}, "start at 0"),
}


def frames_of(decoder_class, index, indices):
    decoder = decoder_class(index)
    try:
        size = index.height, index.width  # to which frames of another one are resized here
        return np.concatenate([resize_frames(chunk, size) for chunk in decoder.read(np.asarray(indices))])
    finally:
        decoder.close()


@pytest.mark.parametrize("name", CLIPS)
def test_every_frame_of_every_kind(name, tmp_path):
    options, not_for_decord = CLIPS[name]
    index = index_of(write_clip(tmp_path / name, **options))
    assert (index.height, index.width) == options.get("size", (64, 96))
    expected = SECONDS if name == "variable.mp4" else np.arange(30) / 25
    assert np.abs(index.timestamps - expected).max() < 1e-3
    assert index.duration_s >= index.timestamps[-1] + 0.03
    for wanted in (range(30), [0, 13, 14, 29]):
        assert numbers(frames_of(PyavDecoder, index, wanted)) == list(wanted)
        if not not_for_decord:
            assert np.array_equal(frames_of(DecordDecoder, index, wanted), frames_of(PyavDecoder, index, wanted))
    if not_for_decord:
        with pytest.raises(IndexMismatch, match=not_for_decord):
            DecordDecoder(index)


#: Why decord must not read a file, how the file is made, the numbers of its frames (None: they are turned).
MISREAD = [
    ("edit list", lambda path: write_clip(path, pts=[*range(-400, 800, 40)], muxer_options=NEGATIVE), range(10, 30)),
    (None, two_sizes_clip, range(30)),
    ("several", two_streams_clip, range(255, 235, -1)),
    ("rotated", lambda path: write_clip(path, rotation=90), None),
    ("rotated", lambda path: write_clip(path, rotation=-180), None),
]


@pytest.mark.parametrize(("why", "make", "shown"), MISREAD)
def test_what_decord_would_read_otherwise_is_read_as_ffmpeg_does(tmp_path, why, make, shown):
    index = index_of(make(tmp_path / "a.mp4"))
    with pytest.raises(IndexMismatch, match=why):
        DecordDecoder(index)
    frames = frames_of(PyavDecoder, index, np.arange(len(index.timestamps)))
    turns = 0 if shown is not None else 2 if (index.height, index.width) == (64, 96) else 1
    stored = np.stack([np.rot90(frame, -turns) for frame in frames])  # set_display_rotation: anticlockwise
    assert numbers(stored) == list(range(30) if shown is None else shown)


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_frames_are_the_same_after_later_ones_of_another_size(tmp_path, codec):
    """What a decoder learns of later frames stays with it, and the first ones state nothing of their own."""
    index, number = index_of(two_sizes_clip(tmp_path / "a.mp4", codec)), np.arange(30)
    frames = frames_of(PyavDecoder, index, number)
    assert numbers(frames) == list(range(30))
    assert np.array_equal(frames_of(PyavDecoder, index, number), frames)
    assert np.array_equal(frames_of(PyavDecoder, index_by_decoding(index_of(tmp_path / "a.mp4")), number), frames)


def mark_all_keyframes(path):
    """Take the table of keyframes from an MP4 file: without it, all frames are keyframes."""
    data = path.read_bytes()
    assert data.count(b"stss") == 1
    path.write_bytes(data.replace(b"stss", b"free"))
    return path


@pytest.mark.parametrize("name", ["refresh.mp4", "all-keyframes.mp4", "all-keyframes-hevc.mp4"])
def test_decord_reads_no_file_whose_keyframes_are_none(tmp_path, name):
    if name.startswith("refresh"):
        path, why = make_clip(tmp_path / name, *REFRESH, count=30), "as a keyframe, but it is not one"
    else:
        closed = {"codec": "libx265", "codec_options": {"x265-params": "log-level=none:open-gop=0:bframes=0"}}
        path, why = mark_all_keyframes(write_clip(tmp_path / name, **(closed if "hevc" in name else {}))), "keyframe"
    index = index_of(path)
    with pytest.raises(IndexMismatch, match=why):
        frames_of(DecordDecoder, index, [13, 29])
    for start in (13, 29):
        video = decode(path, 1, start / 25, decoder="decord")
        assert (video.record["backend"], numbers(video.frames)) == ("pyav", [start])


def test_what_packets_do_not_tell_decoding_does(tmp_path):
    clip = write_clip(tmp_path / "a.ts", codec_options={"crf": "10"}, count=60)
    data = clip.read_bytes()
    clip.write_bytes(data[188 * (len(data) * 4 // 10 // 188) :])  # begins in the middle of a group of pictures
    index = index_of(clip)
    with pytest.raises(IndexMismatch):
        frames_of(PyavDecoder, index, [0])
    found = index_by_decoding(index)
    assert len(found.timestamps) < len(index.timestamps)
    read = numbers(frames_of(PyavDecoder, found, range(len(found.timestamps))))
    assert read == list(range(read[0], 60))


def test_interlaced_frames_are_one_picture_as_in_the_loaders_of_the_models(tmp_path):
    marks = ("-flags", "+ilme+ildct", "-x264-params", "tff=1")
    index = index_of(make_clip(tmp_path / "a.mp4", "-c:v", "libx264", "-pix_fmt", "yuv420p", *marks, count=12))
    assert index.packets.decode_first_frame().interlaced_frame
    with_decord, with_pyav = (frames_of(decoder, index, np.arange(12)) for decoder in (DecordDecoder, PyavDecoder))
    assert np.array_equal(with_decord, with_pyav)


def test_torchcodec_gives_the_same_frames_or_leaves_them_to_pyav(tmp_path):
    """In a process of its own, whose loader finds FFmpeg's libraries: those that PyAV carries."""
    for carried in Path(av.__file__).parent.parent.glob("av.libs/*.so.*"):
        name, numbers_of_it = re.fullmatch(r"(lib.+)-\w+(\.so\.\d+).*", carried.name).groups()
        for link in (f"{name}{numbers_of_it}", carried.name):
            (tmp_path / link).symlink_to(carried)
    clips = {"h264.mp4": write_clip(tmp_path / "h264.mp4")}
    clips["mpeg2.ts"] = write_clip(tmp_path / "mpeg2.ts", codec="mpeg2video")
    clips |= {f"{codec}.mkv": write_clip(tmp_path / f"{codec}.mkv", codec=codec) for codec in ("libx265", "libsvtav1")}
    clips["sizes.mp4"] = two_sizes_clip(tmp_path / "sizes.mp4")
    for name, rotation in (("left.mp4", 90), ("upside-down.mkv", 180)):
        clips[name] = write_clip(tmp_path / name, rotation=rotation)
    clips["mirrored.mp4"] = tmp_path / "mirrored.mp4"
    ffmpeg("-display_hflip", "-i", clips["h264.mp4"], "-c", "copy", clips["mirrored.mp4"])
    upside_down = ("-bsf:v", "h264_metadata=display_orientation=insert:rotate=180")
    by_codec = make_clip(tmp_path / "turned-by-codec.mp4", "-c:v", "libx264", "-pix_fmt", "yuv420p", *upside_down)
    clips["turned-by-codec.mp4"] = by_codec
    clips["refresh.mp4"] = make_clip(tmp_path / "refresh.mp4", *REFRESH, count=48)
    clips["all-keyframes.mp4"] = mark_all_keyframes(write_clip(tmp_path / "all-keyframes.mp4", codec="mpeg4"))
    clips |= {name: make_clip(tmp_path / name, *options) for name, options in DEEP.items()}
    program = "import sys; from tests.pipeline.video.test_decoders import compare; compare(*sys.argv[1:])"
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    found = run_python("-c", program, *clips.values(), env=environment)
    assert found.returncode == 0, found.stderr
    served = dict(line.split() for line in found.stdout.splitlines())
    refused = ("mpeg2.ts", "sizes.mp4", "mirrored.mp4", "turned-by-codec.mp4", "refresh.mp4", "all-keyframes.mp4")
    assert served == {name: "pyav" if name in refused else "torchcodec" for name in clips}


def compare(*paths):
    """Print which decoder served each file when torchcodec was asked for, in a child as of a GPU; frames are PyAV's."""
    if not torch.cuda.is_available():
        with pytest.raises(ImportError, match=r"decodes on CPUs only; install both for CUDA"):
            make_torchcodec_decoder()
    with DecodeSandbox(timeout_s=300, memory_mb=1024, on_gpu=True) as sandbox:
        for path in paths:
            for clip in ((0.8, None), ()):
                pair = [request(path, 9, *clip, decoder=name) for name in ("torchcodec", "pyav")]
                by_torchcodec, by_pyav = map(sandbox.decode, pair)
                assert np.array_equal(by_torchcodec.frames, by_pyav.frames), path
            print(Path(path).name, by_torchcodec.record["backend"])


def test_decoders_go_by_name_or_import_path():
    assert find_installed_version("torchcodec") == version("torchcodec")
    assert find_installed_version("nvdec") == find_installed_version("pyav") == version("av")
    assert [choose_decoders(name) for name in ("auto", "pyav", "decord")] == [("pyav",), ("pyav",), ("decord", "pyav")]
    assert load_decoder("pyav") is PyavDecoder
    assert load_decoder("tests.builders.clips:Aborting").version == "0"
    with pytest.raises(KeyError, match="known: pyav, decord, torchcodec, nvdec"):
        load_decoder("opencv")


# What FFmpeg's software gives, and in which layout a GPU gives the same numbers.
LAYOUTS = {"yuv420p": "nv12", "yuvj420p": "nv12", "yuv420p10le": "p010le"}


def without_gpu(index) -> PyavNvdecDecoder:
    """Make the decoder as it is but for the GPU: a core decodes, and frames come in a GPU's layout."""
    decoder = object.__new__(PyavNvdecDecoder)
    PyavDecoder.__init__(decoder, index)
    decoder._unpacker = av.video.reformatter.VideoReformatter()
    return decoder


KINDS = {
    "turned": {"rotation": 90},
    "full range": {"pix_fmt": "yuvj420p"},
    "10 bits": {"codec": "libx265", "pix_fmt": "yuv420p10le"},
    "odd": {"size": (50, 66)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_frames_in_a_gpu_s_layout_have_the_pixels_of_a_core(tmp_path, kind):
    index = index_of(write_clip(tmp_path / "a.mkv", **KINDS[kind]))
    plain, ours = PyavDecoder(index), without_gpu(index)
    layout = LAYOUTS[index.pixel_format]
    for number, frame in enumerate(plain._iter_frames(np.arange(0, len(index.timestamps), 3))):
        packed = frame.reformat(format=layout)
        assert packed.format.name == layout
        assert np.array_equal(ours._pixels(packed), plain._pixels(frame)), number


def test_this_pyav_decodes_on_gpus():
    assert NvdecDecoder is PyavNvdecDecoder is load_decoder("nvdec")
    for codec in _CODECS:
        assert any(config.is_supported for config in av.Codec(codec, "r").hardware_configs), codec


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_core_serves_and_the_row_says_why(clip):
    with DecodeSandbox(on_gpu=True) as sandbox:
        video = sandbox.decode(request(clip, 4, decoder="nvdec"))
    backend, note = facts(video, "backend", "backend_note")
    assert backend == "pyav" and "PyAV finds no NVIDIA GPU with a video decoder here" in note


@needs_cuda
@pytest.mark.parametrize("codec", ["libx264", "libx265", "libvpx-vp9"])
def test_a_gpu_gives_the_frames_of_a_core(tmp_path, codec):
    path = write_clip(tmp_path / "a.mkv", codec=codec, size=(240, 320))
    with DecodeSandbox(timeout_s=120, on_gpu=True) as sandbox:
        there, here = (sandbox.decode(request(path, decoder=name)) for name in ("nvdec", "pyav"))
    assert there.record["backend"] == "nvdec", there.record["backend_note"]
    assert np.array_equal(there.frames, here.frames)
