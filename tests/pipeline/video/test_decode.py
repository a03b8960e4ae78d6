"""A file in, frames and their provenance or one typed fault out."""

import hashlib
import pickle
import sys

import av
import numpy as np
import pytest

from gstep.backbones.preprocess import PerFramePreprocessor
from gstep.backbones.qwen2_5_vl import Qwen2_5VL
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.frame_folders import compute_file_sample
from pipeline.video.sampling import Sampling
from tests.builders.clips import audio_with_cover, numbers, sample, write_clip
from tests.builders.decoding import decode, facts, fault_of


def convert_error(path, *clip, **options):
    fault = fault_of(decode, path, *clip, **options)
    assert fault.message.isprintable() and len(fault.message.encode()) <= 1024
    assert str(pickle.loads(pickle.dumps(fault))) == str(fault)  # noqa: S301 - our own bytes
    return fault


def test_a_real_clip_with_its_provenance():
    path = sample("bikes.mp4")
    video = decode(path, 32)
    assert video.frames.shape == (32, 272, 640, 3) and video.frames.dtype == np.uint8
    assert video.frames.flags.c_contiguous
    assert video.frame_indices.tolist() == np.linspace(0, 249, 32, dtype=int).tolist()
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


@pytest.mark.parametrize("moov", ["first", "last"])
def test_a_truncated_file_is_corrupt(moov, tmp_path):
    path = write_clip(tmp_path / "a.mp4", muxer_options={"movflags": "faststart"} if moov == "first" else None)
    path.write_bytes(path.read_bytes()[:-900])
    assert convert_error(path).fault_class == "corrupt"


def test_sound_with_a_cover_is_no_video(tmp_path):
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
