"""Only known video containers pass; everything else is refused with a message that says what it looks like."""

import os

import pytest

from pipeline.errors import VideoFault
from pipeline.video.containers import count_missing_bytes, sniff
from tests.pipeline.videos import write_clip

CLIPS = {
    "a.mp4": ("mov", {}),
    "a.mov": ("mov", {}),
    "a.3gp": ("mov", {}),
    "a.mkv": ("matroska", {}),
    "a.webm": ("matroska", {"codec": "libvpx-vp9"}),
    "a.avi": ("avi", {"codec": "mpeg4"}),
    "a.ts": ("mpegts", {"codec": "mpeg2video"}),
    "a.m2ts": ("mpegts", {"muxer": "mpegts", "muxer_options": {"mpegts_m2ts_mode": "1"}}),
    "a.mpg": ("mpeg", {"codec": "mpeg2video"}),
    "a.flv": ("flv", {}),
    "a.ogv": ("ogg", {"codec": "libvpx", "muxer": "ogg"}),
    "a.gif": ("gif", {"codec": "gif", "pix_fmt": "rgb8"}),
    "a.wmv": ("asf", {"codec": "wmv2", "muxer": "asf"}),
    "a.h264": ("h264", {"muxer": "h264"}),
    "a.hevc": ("hevc", {"codec": "libx265", "muxer": "hevc"}),
    "a.m2v": ("mpegvideo", {"codec": "mpeg2video", "muxer": "mpeg2video"}),
}
REFUSED = {
    "empty": (b"", "unsupported", "an empty file"),
    "text": (b"hello, this is no video\n", "unsupported", "text"),
    "text that names a box": (b"the free world", "unsupported", "text"),
    "random": (bytes(range(255, 0, -1)), "unsupported", "unknown binary data"),
    "hls": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n", "policy", "an HLS playlist"),
    "hls with a byte order mark": (b"\xef\xbb\xbf\n#EXTM3U\n", "policy", "an HLS playlist"),
    "concat": (b"ffconcat version 1.0\nfile /etc/hostname\n", "policy", "an FFmpeg concat script"),
    "concat without a header": (b"file '/etc/hostname'\n", "policy", "a list of other files or addresses"),
    "dash": (b'<?xml version="1.0"?>\n<MPD></MPD>', "policy", "a DASH manifest"),
    "sdp": (b"v=0\r\nc=IN IP4 1.2.3.4\r\n", "policy", "a list of other files or addresses"),
    "jpeg": (b"\xff\xd8\xff\xe0", "unsupported", "a JPEG image"),
    "png": (b"\x89PNG\r\n\x1a\n", "unsupported", "a PNG image"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0", "unsupported", "a HEIF or AVIF image"),
    "wav": (b"RIFF\0\0\0\0WAVEfmt ", "unsupported", "WAV audio"),
    "mp3": (b"ID3\x04\0", "unsupported", "MP3 audio"),
    "mp3 without tags": (b"\xff\xfb\x90\x44", "unsupported", "MP3 audio"),
    "pdf": (b"%PDF-1.7", "unsupported", "a PDF document"),
    "tar": (b"a.mp4".ljust(257, b"\0") + b"ustar\x0000", "unsupported", "a tar archive"),
    "zip": (b"PK\x03\x04", "unsupported", "a compressed archive"),
    "other ebml": (b"\x1a\x45\xdf\xa3\x84\x42\x82\x81\x78", "unsupported", "unknown binary data"),
    "one sync byte": (b"G" + bytes(100), "unsupported", "unknown binary data"),
}


@pytest.mark.parametrize("name", CLIPS)
def test_a_container_is_known_whatever_its_name(name, tmp_path):
    demuxer, options = CLIPS[name]
    path = write_clip(tmp_path / name, count=5, **options)
    assert sniff(path.rename(tmp_path / "renamed.txt")) == demuxer


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused_by_what_it_looks_like(name, tmp_path):
    data, fault_class, looks_like = REFUSED[name]
    path = tmp_path / "video.mp4"
    path.write_bytes(data)
    with pytest.raises(VideoFault, match=looks_like) as caught:
        sniff(path)
    assert caught.value.fault_class == fault_class


def test_what_is_no_file_is_never_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo.mp4")
    for path, fault_class in ((tmp_path / "fifo.mp4", "policy"), ("/dev/zero", "policy"), (tmp_path, "unsupported")):
        with pytest.raises(VideoFault) as caught:
            sniff(path)
        assert caught.value.fault_class == fault_class


@pytest.mark.parametrize("name", ["missing.mp4", "nul\0.mp4", "file.mp4/below.mp4"])
def test_a_file_that_cannot_be_read_is_an_io_fault(name, tmp_path):
    (tmp_path / "file.mp4").touch()
    with pytest.raises(VideoFault, match="cannot be read") as caught:
        sniff(f"{tmp_path}/{name}")
    assert caught.value.fault_class == "io" and caught.value.retryable


@pytest.mark.parametrize("name", ["a.mp4", "faststart.mp4", "fragments.mp4", "a.mkv", "a.avi"])
def test_a_cut_off_file_is_told_by_its_own_lengths(name, tmp_path):
    flags = {"faststart.mp4": "faststart", "fragments.mp4": "frag_keyframe+empty_moov"}.get(name)
    path = write_clip(
        tmp_path / name,
        codec="mpeg4" if name == "a.avi" else "libx264",
        muxer_options={"movflags": flags} if flags else None,
    )
    data, demuxer = path.read_bytes(), sniff(path)
    assert count_missing_bytes(path, demuxer) == 0
    cut = len(data) * 6 // 10
    path.write_bytes(data[:cut])
    missing = count_missing_bytes(path, demuxer)
    assert 0 < missing <= len(data) - cut  # a later box of an MP4 is not known to lack
    path.write_bytes(data + b"appended to the file")
    assert count_missing_bytes(path, demuxer) == 0
