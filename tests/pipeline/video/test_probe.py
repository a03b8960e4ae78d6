"""What a file holds, found without decoding it: which stream, which frames at which times, and what is refused."""

import struct

import numpy as np
import pytest

from pipeline.errors import VideoFault
from pipeline.video.containers import sniff
from pipeline.video.probe import probe, scan
from tests.pipeline.videos import write_clip


def index_of(path):
    return probe(str(path), sniff(path))


def test_huge_frames_are_refused_before_they_are_decoded(tmp_path):
    path = write_clip(tmp_path / "a.gif", codec="gif", pix_fmt="rgb8", count=2)
    head, rest = path.read_bytes()[:6], path.read_bytes()[10:]
    path.write_bytes(head + struct.pack("<HH", 8192, 8193) + rest)
    with pytest.raises(VideoFault, match="frames of 8192x8193 are larger than") as caught:
        index_of(path)
    assert caught.value.fault_class == "unsupported"


def test_an_index_is_found_without_decoding_and_decoding_finds_the_same(tmp_path):
    index = index_of(write_clip(tmp_path / "a.mp4", count=30, gop=10, fps=25))
    assert (index.codec, index.demuxer, index.stream, index.fps) == ("h264", "mov", 0, 25.0)
    assert np.abs(index.timestamps - np.arange(30) / 25).max() < 1e-6 and index.duration_s == pytest.approx(1.2)
    places = np.searchsorted(index.pts, index.keyframes)  # an encoder may set more than one every 10 frames
    assert len(index.pts) == 30 and np.array_equal(index.pts[places], index.keyframes)
    assert places[0] == 0 and np.diff([*places, 30]).max() <= 10
    decode_frames = scan(index)
    assert np.array_equal(decode_frames.timestamps, index.timestamps) and decode_frames.duration_s == index.duration_s
    assert decode_frames.pts is None  # frames that were counted cannot be told by their times
