"""A folder of JPEG frames is a video whose path says how many a second they are; a clip has the published frames."""

import os
import shutil
from pathlib import Path

import av
import numpy as np
import pytest

from pipeline.video.frame_folders import JPEGS, count_source_bytes, find_frame_rate, is_frame_folder
from tests.builders.clips import numbers, write_jpegs
from tests.builders.decoding import decode, facts, fault_of

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
    assert video.record["source_size"] == size == count_source_bytes(str(frames))
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
        (3.4, 3.9, 10, 12),
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


@pytest.mark.parametrize(("start_s", "end_s"), [(11.0, 12.0), (5.0, 4.0), (-1.0, 4.0), (10.5, None)])
def test_a_clip_that_holds_no_frame_is_refused(frames, start_s, end_s):
    assert fault_of(decode, frames, 8, start_s, end_s).fault_class == "unsupported"


def test_how_many_a_second_is_said_by_the_path(tmp_path):
    rates = {
        "/d/tvqa/frames_fps3_hq/x": 3.0,
        "/d/frames_fps3/x": 3.0,
        "/fps25/frames_fps3_hq/x": 3.0,  # the last one
        "/d/x.fps12.5": 12.5,
        "/d/frames_fps0/x": None,
        "/d/fpsx/offps3/x": None,
        "/d/frames/x": None,
    }
    assert {path: find_frame_rate(path) for path in rates} == rates
    folder = write_jpegs(tmp_path / "frames" / "x", 2)
    fault = fault_of(decode, folder)
    assert fault.fault_class == "unsupported" and "must state their rate" in fault.message
    assert not is_frame_folder(str(folder)) and not is_frame_folder(str(tmp_path / "frames_fps3"))


def replace_by_link(path: Path) -> None:
    target = path.rename(path.parent.parent / "elsewhere.jpg")
    path.symlink_to(target)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("number", "spoil", "fault_class", "message"),
    [
        (2, Path.unlink, "corrupt", "none is called 00002.jpg"),
        (1, lambda path: shutil.rmtree(path.parent) or path.parent.mkdir(), "unsupported", "none is called 00001.jpg"),
        (2, lambda path: path.write_text("x"), "unsupported", "not a JPEG image"),
        (3, lambda path: path.write_bytes(path.read_bytes()[:-40]), "corrupt", "00003.jpg is cut off"),
        (3, replace_by_link, "policy", "00003.jpg is a link"),
        (3, replace_by_pipe, "policy", "not a regular file"),
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
