"""A file or a folder of JPEG frames in, frames and their provenance or one typed fault out."""

import hashlib
import os
import pickle
import shutil
import sys
from pathlib import Path

import av
import numpy as np
import pytest

from gstep.backbones.preprocess import PerFramePreprocessor
from gstep.backbones.qwen2_5_vl import Qwen2_5VL
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.frame_folders import (
    JPEGS,
    compute_file_sample,
    find_frame_rate,
    is_frame_folder,
)
from pipeline.video.sampling import Sampling
from pipeline.video.source import SourceStates
from tests.builders.clips import audio_with_cover, numbers, sample, write_clip, write_jpegs
from tests.builders.decoding import decode, facts, fault_of


def convert_error(path, *clip, **options):
    fault = fault_of(decode, path, *clip, **options)
    assert fault.message.isprintable() and len(fault.message.encode()) <= 1024
    assert str(pickle.loads(pickle.dumps(fault))) == str(fault)  # noqa: S301 - our own bytes
    return fault


def test_a_real_clip_with_its_provenance():
    path = sample("bikes.mp4")
    video = decode(path, 8)
    assert video.frames.shape == (8, 272, 640, 3) and video.frames.dtype == np.uint8
    assert video.frames.flags.c_contiguous
    assert video.frame_indices.tolist() == np.linspace(0, 249, 8, dtype=int).tolist()
    assert np.allclose(video.timestamps, video.frame_indices / 25)
    assert video.attempts == 1 and video.record["decode_s"] > 0
    digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    decoded = {"decode_s": video.record["decode_s"], "decode_warnings": 0, "frames_by_rate": None, "n_repeated": 0}
    by = {"backend": "pyav", "backend_version": av.__version__, "backend_note": ""}
    times = {"fps": 25.0, "clip_fps": 25.0, "duration_s": 10.0, "source_frames": 250, "clip_frames": 250}
    pixels = {"source_width": 640, "source_height": 272, "color_transfer": None, "sample_aspect_ratio": "1:1"}
    source = {"source_size": path.stat().st_size, "source_hash": f"blake2b:{digest}", "codec": "h264"}
    sample_hash = compute_file_sample(str(path))
    assert video.record == {**decoded, **by, **times, **pixels, **source, "source_sample": sample_hash}


def test_a_clip_and_repeats(tmp_path):
    path = write_clip(tmp_path / "a.mp4")
    video = decode(path, 8, 0.4, 0.6)
    assert video.frame_indices.tolist() == [10, 10, 11, 11, 12, 12, 13, 14]
    assert numbers(video.frames) == video.frame_indices.tolist()
    assert facts(video, "n_repeated", "clip_frames", "source_frames") == (3, 5, 30)
    assert convert_error(path, 8, 9.0).fault_class == "unsupported"


def test_backends_are_recorded_and_what_decord_cannot_read_pyav_does(tmp_path):
    videos = [decode(sample("carphone_pristine.mp4"), decoder=name) for name in ("decord", "pyav")]
    assert facts(videos[0], "backend", "backend_note") == ("decord", "")
    assert np.array_equal(videos[0].frames, videos[1].frames)
    video = decode(write_clip(tmp_path / "b.mp4", codec="libsvtav1"), 30, decoder="decord")  # which still may fail
    backend, note = facts(video, "backend", "backend_note")
    assert backend == "pyav" and note.startswith("decord: IndexMismatch: its codec is neither")
    assert numbers(video.frames) == list(range(30))


@pytest.mark.parametrize("name", ["decord", "torchcodec"])
def test_a_decoder_that_is_missing_is_replaced_and_named(name, monkeypatch):
    """As on a worker without it: its package is not there."""
    for module in [module for module in sys.modules if module.startswith(f"{name}.")]:  # another test has imported it
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"pipeline.video.{name}_decoder", raising=False)
    path = sample("carphone_pristine.mp4")
    video, by_pyav = decode(path, decoder=name), decode(path)
    assert (video.record["backend"], np.array_equal(video.frames, by_pyav.frames)) == ("pyav", True)
    assert video.record["backend_note"].startswith(f"{name}: ModuleNotFoundError: ")


def test_damaged_data_is_counted_and_ends_no_decoding(tmp_path, capfd):
    path = write_clip(tmp_path / "a.ts", count=60, size=(240, 320))
    data = bytearray(path.read_bytes())
    for start in range(len(data) // 3, len(data) // 2, 188):
        data[start + 40 : start + 60] = bytes(20)
    path.write_bytes(data)
    video = decode(path)
    assert video.record["decode_warnings"] > 0 and len(video.frames) == 8
    print("to the real stderr", file=sys.stderr)
    assert capfd.readouterr().err == "to the real stderr\n"  # and nothing of FFmpeg's


def test_a_truncated_file_is_corrupt_and_sound_with_a_cover_no_video(tmp_path):
    for moov in ({"movflags": "faststart"}, None):
        path = write_clip(tmp_path / "a.mp4", muxer_options=moov)
        path.write_bytes(path.read_bytes()[:-900])
        assert convert_error(path).fault_class == "corrupt"
    assert convert_error(audio_with_cover(tmp_path / "d.mp4")).fault_class == "unsupported"


def test_a_shape_that_the_model_does_not_take_is_unsupported(tmp_path):
    wide = write_clip(tmp_path / "wide.mp4", size=(8, 1616), count=4)
    preprocessor = PerFramePreprocessor.from_settings(Qwen2_5VL.pixel_defaults)
    fault = fault_of(decode_video, DecodeRequest(wide, Sampling(4), preprocessor))
    assert (fault.fault_class, fault.retryable) == ("unsupported", False)
    assert "frames of 1616x8 pixels have an aspect ratio of 202" in fault.message


def test_the_unforeseen_in_a_users_decoder_is_its_own_printable_and_keeps_no_credentials(tmp_path):
    path = write_clip(tmp_path / "a.mp4", count=5)
    fault = convert_error(path, decoder="Raising")
    assert fault.fault_class == "own-code" and fault.backend == "tests.builders.clips:Raising"
    assert "ValueError" in fault.message and "s3://host" in fault.message and "secret" not in fault.message


def test_frames_that_move_to_keyframes_have_the_times_at_which_they_are_shown(tmp_path):
    path = write_clip(tmp_path / "a.mp4", count=100, gop=25, codec_options={"bf": "2", "sc_threshold": "0"})
    for within_s, clip, places in (
        (0.3, (), [0, 33, 66, 99]),  # too far away, all but the first, which is one
        (0.4, (), [0, 25, 75, 99]),
        (9.0, (1.2, 3.2), [30, 50, 62, 75]),  # of the clip's own keyframes
    ):
        sampling = Sampling(num_frames=4, snap_to_keyframes_s=within_s)
        video = decode(path, sampling, *clip)
        assert video.frame_indices.tolist() == places == numbers(video.frames)
        assert np.allclose(video.timestamps, video.frame_indices / 25)


N_FRAMES = 30


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    """30 frames: the first ten seconds of a video."""
    return write_jpegs(tmp_path_factory.mktemp("tvqa") / "frames_fps3_hq" / "castle_clip_14", N_FRAMES)


@pytest.fixture
def few(tmp_path):
    """Three frames to do something to."""
    return write_jpegs(tmp_path / "frames_fps3" / "x", 3)


def test_the_whole_folder_with_its_provenance(frames):
    video = decode(frames, N_FRAMES)
    assert numbers(video.frames) == list(range(1, N_FRAMES + 1))
    assert video.frame_indices.tolist() == list(range(N_FRAMES))
    assert np.allclose(video.timestamps, np.arange(1, N_FRAMES + 1) / 3)
    assert facts(video, "fps", "source_frames", "clip_frames") == (3.0, N_FRAMES, N_FRAMES)
    assert facts(video, "source_width", "source_height", "codec", "decode_warnings") == (96, 64, "mjpeg", 0)
    assert facts(video, "backend", "backend_version", "backend_note") == (JPEGS, av.__version__, "")
    size = sum(path.stat().st_size for path in frames.iterdir())
    assert [video.record["source_size"]] == [size] == SourceStates().of([str(frames)])
    assert video.record["source_hash"].startswith("blake2b:")


def test_frames_of_several_sizes_get_the_largest(few, tmp_path):
    larger = write_jpegs(tmp_path / "larger", 3, (128, 192))
    (larger / "00003.jpg").rename(few / "00003.jpg")
    video = decode(few, 3)
    assert numbers(video.frames) == [1, 2, 3] and video.frames.shape == (3, 128, 192, 3)
    note = "frame sizes differ: 2 sizes from 96x64 to 192x128"
    assert facts(video, "source_width", "source_height", "backend_note") == (192, 128, note)


@pytest.mark.parametrize(
    ("start_s", "end_s", "first", "last"),
    [
        (0.0, 9.9, 1, 30),
        (0.0, 2.0, 1, 6),  # there is no frame 0
        (1.5, 5.0, 4, 15),  # 4.5 is rounded to even
        (2.5, 5.0, 8, 15),  # so is 7.5
        (4.0, 4.1, 12, 12),
        (None, 1.0, 1, 3),
        (9.0, None, 27, 30),
        (9.0, 99.0, 27, 30),
    ],
)
def test_a_clip_goes_from_the_frame_nearest_to_its_start_to_the_one_nearest_to_its_end(
    frames, start_s, end_s, first, last
):
    expected = list(range(first, last + 1))
    video = decode(frames, len(expected), start_s, end_s)
    assert numbers(video.frames) == expected and video.record["clip_frames"] == len(expected)
    if start_s is not None and end_s is not None:  # as the published reader has it
        assert (max(1, round(start_s * 3)), min(round(end_s * 3), N_FRAMES)) == (first, last)
    for none in ((11.0, 12.0), (5.0, 4.0), (-1.0, 4.0), (10.5, None)):
        assert fault_of(decode, frames, 8, *none).fault_class == "unsupported"


def test_how_many_a_second_is_said_by_the_path(tmp_path):
    rates = {"/d/tvqa/frames_fps3_hq/x": 3.0, "/d/frames_fps3/x": 3.0, "/d/x.fps12.5": 12.5}
    rates |= {"/fps25/frames_fps3_hq/x": 3.0}  # the last one
    rates |= dict.fromkeys(("/d/frames_fps0/x", "/d/fpsx/offps3/x", "/d/frames/x"))
    assert {path: find_frame_rate(path) for path in rates} == rates
    folder = write_jpegs(tmp_path / "frames" / "x", 2)
    fault = fault_of(decode, folder)
    assert fault.fault_class == "unsupported" and "must state their rate" in fault.message
    assert not is_frame_folder(str(folder)) and not is_frame_folder(str(tmp_path / "frames_fps3"))


@pytest.mark.parametrize(
    ("number", "spoil", "fault_class", "message"),
    [
        (2, Path.unlink, "corrupt", "none is called 00002.jpg"),
        (1, lambda path: shutil.rmtree(path.parent) or path.parent.mkdir(), "unsupported", "none is called 00001.jpg"),
        (2, lambda path: path.write_text("x"), "unsupported", "not a JPEG image"),
        (3, lambda path: path.write_bytes(path.read_bytes()[:-40]), "corrupt", "00003.jpg is cut off"),
        (3, lambda path: path.symlink_to(path.rename(path.with_suffix(".x"))), "policy", "00003.jpg is a link"),
        (3, lambda path: path.unlink() or os.mkfifo(path), "policy", "not a regular file"),
        (1, lambda path: path.write_bytes(b"\xff\xd8\xff" + b"\0" * 99 + b"\xff\xd9"), "corrupt", ""),
    ],
)
def test_what_is_wrong_with_a_folder_is_said_by_the_frame(few, number, spoil, fault_class, message):
    spoil(few / f"{number:05}.jpg")
    fault = fault_of(decode, few)
    assert fault.fault_class == fault_class and message in fault.message


def test_only_frames_count_of_which_content_order_and_length_are_in_the_hash(few):
    for name in ("00003.png", "notes.txt", ".DS_Store", "1.jpg"):
        (few / name).write_text("x")
    before = decode(few, 3)
    assert is_frame_folder(str(few)) and before.record["source_frames"] == 3
    for old, new in (("00001.jpg", "x"), ("00002.jpg", "00001.jpg"), ("x", "00002.jpg")):
        (few / old).rename(few / new)
    assert decode(few, 3).record["source_hash"] != before.record["source_hash"]
