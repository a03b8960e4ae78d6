"""What a file holds, found without decoding it: which stream, which frames at which times, and what is refused."""

import pytest

from pipeline.errors import VideoFault
from pipeline.video.containers import sniff
from pipeline.video.probe import probe
from tests.pipeline.videos import audio_with_cover, write_clip


def index_of(path):
    return probe(str(path), sniff(path))


def test_cover_art_is_no_video(tmp_path):
    with pytest.raises(VideoFault, match="no video stream") as caught:
        index_of(audio_with_cover(tmp_path / "a.mp4"))
    assert caught.value.fault_class == "unsupported"


def test_huge_frames_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    path = write_clip(tmp_path / "a.mp4", count=2)
    monkeypatch.setattr("pipeline.video.probe.MAX_PIXELS", 64 * 96 - 1)
    with pytest.raises(VideoFault, match="larger than") as caught:
        index_of(path)
    assert caught.value.fault_class == "unsupported"
