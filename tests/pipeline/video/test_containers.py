"""Only known video containers pass; everything else is refused with a message that says what it looks like."""

import os

import pytest

from pipeline.errors import VideoFault
from pipeline.inputs.listings import VIDEO_SUFFIXES
from pipeline.video.containers import count_missing_bytes, sniff
from tests.pipeline.ffmpeg import ffmpeg
from tests.pipeline.videos import write_clip

# (Muxer of FFmpeg, codec) -> demuxer that reads it, suffixes of such files.
WRITTEN = {
    ("mov", "libx264"): ("mov", ".mp4 .m4v .mov .qt .f4v"),
    ("3gp", "libx264"): ("mov", ".3gp .3g2"),
    ("matroska", "libx264"): ("matroska", ".mkv .mk3d"),
    ("webm", "libvpx"): ("matroska", ".webm"),
    ("avi", "mpeg4"): ("avi", ".avi .divx"),
    ("mpegts", "libx264"): ("mpegts", ".ts .m2t .mts"),
    ("mpegts -mpegts_m2ts_mode 1", "libx264"): ("mpegts", ".m2ts"),
    ("mpeg", "mpeg1video"): ("mpeg", ".mpg .mpeg .mpe"),
    ("vob", "mpeg2video"): ("mpeg", ".vob"),
    ("mpeg1video", "mpeg1video"): ("mpegvideo", ".m1v"),
    ("mpeg2video", "mpeg2video"): ("mpegvideo", ".m2v"),
    ("asf", "wmv2"): ("asf", ".wmv .asf"),
    ("flv", "flv1"): ("flv", ".flv"),
    ("ogg", "libvpx"): ("ogg", ".ogv .ogm"),
    ("h264", "libx264"): ("h264", ".264 .h264 .avc"),
    ("hevc", "libx265"): ("hevc", ".265 .h265 .hevc"),
    ("gif", "gif"): ("gif", ".gif"),
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


def test_a_file_of_every_suffix_is_known_by_its_magic(tmp_path):
    assert {suffix for _, suffixes in WRITTEN.values() for suffix in suffixes.split()} == VIDEO_SUFFIXES
    path = tmp_path / "a.bin"
    for (muxer, codec), (demuxer, _) in WRITTEN.items():
        pixels = () if codec == "gif" else ("-pix_fmt", "yuv420p")
        source = ("-f", "lavfi", "-i", "testsrc2=s=64x64:r=25:d=0.2", *pixels, "-c:v", codec)
        ffmpeg(*source, "-f", *muxer.split(), path)
        assert sniff(path) == demuxer, muxer


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


def test_a_missing_file_whose_name_is_there_in_another_unicode_form_is_named(tmp_path):
    (tmp_path / "cafe\u0301.mp4").touch()
    with pytest.raises(VideoFault, match=r"io: .*No such file or directory \(did you mean .*its Unicode form, NFD:"):
        sniff(tmp_path / "caf\u00e9.mp4")
