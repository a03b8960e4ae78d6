"""Only known video containers pass; everything else is refused with a message that says what it looks like."""

import os

import pytest

from pipeline.video.containers import count_missing_bytes, sniff
from tests.builders.clips import ffmpeg, make_clip, numbers, shown, write_clip
from tests.builders.decoding import decode, fault_of

# Muxer of FFmpeg and codec -> demuxer that reads it.
WRITTEN = {
    ("mov", "libx264"): "mov",
    ("3gp", "libx264"): "mov",
    ("matroska", "libx264"): "matroska",
    ("webm", "libvpx"): "matroska",
    ("avi", "mpeg4"): "avi",
    ("mpegts", "libx264"): "mpegts",
    ("mpegts -mpegts_m2ts_mode 1", "libx264"): "mpegts",
    ("mpeg", "mpeg1video"): "mpeg",
    ("mpeg1video", "mpeg1video"): "mpegvideo",
    ("mpeg2video", "mpeg2video"): "mpegvideo",
    ("asf", "wmv2"): "asf",
    ("flv", "flv1"): "flv",
    ("ogg", "libvpx"): "ogg",
    ("h264", "libx264"): "h264",
    ("hevc", "libx265"): "hevc",
    ("gif", "gif"): "gif",
    ("ivf", "libvpx"): "ivf",
}
PACKETS = 20 * (b"G" + bytes(187))
REFUSED = {
    "empty": (b"", "unsupported", "an empty file"),
    "text": (b"hello, this is no video\n", "unsupported", "text"),
    "hls": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n", "policy", "an HLS playlist"),
    "hls with a byte order mark": (b"\xef\xbb\xbf\n#EXTM3U\n", "policy", "an HLS playlist"),
    "concat": (b"ffconcat version 1.0\nfile /etc/hostname\n", "policy", "an FFmpeg concat script"),
    "concat without a header": (b"file '/etc/hostname'\n", "policy", "a list of other files or addresses"),
    "dash": (b'<?xml version="1.0"?>\n<MPD></MPD>', "policy", "a DASH manifest"),
    "sdp": (b"v=0\r\nc=IN IP4 1.2.3.4\r\n", "policy", "a list of other files or addresses"),
    "jpeg": (b"\xff\xd8\xff\xe0", "unsupported", "a JPEG image"),
    "mp3": (b"ID3\x04\0", "unsupported", "MP3 audio"),
    "mp3 without tags": (b"\xff\xfb\x90\x44", "unsupported", "MP3 audio"),
    "one sync byte": (b"G" + bytes(100), "unsupported", "unknown binary data"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0", "unsupported", "a HEIF or AVIF image"),
    "hls with packets": (b"#EXTM3U\nfile:///etc/hostname\n" + PACKETS, "policy", "an HLS playlist"),
    "hls behind zeros": (bytes(500) + b"#EXTM3U\nfile:///etc/hostname\n", "policy", "a list of other files"),
    "concat with packets": (b"ffconcat version 1.0\n" + PACKETS, "policy", "an FFmpeg concat script"),
    "hls behind zeros, in front of packets": (bytes(500) + b"#EXTM3U\n" + PACKETS, "policy", "a list of other files"),
    "dash behind a PNG image": (b"\x89PNG\r\n\x1a\n<MPD></MPD>" + PACKETS, "policy", "a list of other files"),
    "sdp behind an ID3 tag": (b"ID3\x04\0c=IN IP4 1.2.3.4\r\n", "policy", "a list of other files"),
    "packets in an archive": (b"Rar!\x1a\x07\0" + PACKETS, "unsupported", "a compressed archive"),
    "four packets behind others": (b"\xff" * 9 + PACKETS[: 4 * 188], "unsupported", "unknown binary data"),
}
# How files of known kinds begin in which a stream may stand; none of them is searched for it.
FOREIGN = {
    "a tar archive": bytes(257) + b"ustar\x0000",
    "a tar archive$": b"a.ts".ljust(100, b"\0") + b"000644 \0" * 3 + b"00000001234 ",  # before POSIX
    "an MXF container": bytes.fromhex("060e2b34020501010d010201010204"),
    "a NUT container": b"nut/multimedia container\0",
    "a RealMedia container": b".RMF\0\0\0\x12",
    "a WTV recording": bytes.fromhex("b7d800203749da11a64e0007e95ead8d"),
    "a DV recording": b"\x1f\x07\0\xbf",
    "an image": b"SDPX",
    "WAV audio": b"RIFF\0\0\0\0WAVEfmt ",
    "a compressed archive": b"\x28\xb5\x2f\xfd",
    "a RIFF or IFF file of another kind": b"RIFF\0\0\0\0AMV LIST",
    "a compressed archive$": b"PK\x03\x04",
    "a PDF document": b"%PDF-1.7\n",
    "a program": b"\x7fELF",
    "a disc image": bytes(32769) + b"CD001",
    "a table or array of data": b"PAR1",
    "an EBML file of another kind": b"\x1a\x45\xdf\xa3\x84\x42\x82\x81\x78",
}
# Streams that FFmpeg finds behind other bytes: name -> options of ffmpeg.
STREAMS = {
    "a.ts": ("-c:v", "libx264", "-bf", 2, "-g", 10),
    "a204.ts": ("-c:v", "libx264", "-g", 10),
    "a.mpg": ("-c:v", "mpeg2video", "-bf", 2, "-g", 10),
    "a.h264": ("-c:v", "libx264", "-bf", 2, "-g", 10),
    "a.hevc": ("-c:v", "libx265", "-x265-params", "keyint=10:log-level=none:pools=none"),
    "a.m2v": ("-c:v", "mpeg2video", "-g", 10),
}
# What may stand in front of a stream, or the share of it that is cut off there.
FRONTS = {
    "zeros": bytes(64),
    "ones": b"\xff" * 1000,
    "an ID3 tag": b"ID3\x04\0\0\0\0\0\x0fTIT2\0\0\0\x05\0\0\0abcd",
    "one byte less": 0.0,
    "a cut": 0.3,
}
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\6\0\0\0\x1f\x15\xc4\x89"


def test_a_file_of_every_kind_is_known_by_its_magic(tmp_path):
    path = tmp_path / "a.bin"
    for (muxer, codec), demuxer in WRITTEN.items():
        pixels = () if codec == "gif" else ("-pix_fmt", "yuv420p")
        source = ("-f", "lavfi", "-i", "testsrc2=s=64x64:r=25:d=0.2", *pixels, "-c:v", codec)
        ffmpeg(*source, "-f", *muxer.split(), path)
        assert sniff(path) == demuxer, muxer


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused_by_what_it_looks_like(name, tmp_path):
    data, fault_class, looks_like = REFUSED[name]
    path = tmp_path / "video.mp4"
    path.write_bytes(data)
    fault = fault_of(sniff, path)
    assert fault.fault_class == fault_class and looks_like in fault.message


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_behind_other_bytes_or_without_its_beginning_is_read_as_ffmpeg_reads_it(name, tmp_path):
    options = (*STREAMS[name], "-vf", "noise=alls=16:allf=t:all_seed=1", "-pix_fmt", "yuv420p")
    whole, path = make_clip(tmp_path / name, *options, count=40), tmp_path / "a.bin"
    data, demuxer = whole.read_bytes(), sniff(whole)
    if name == "a204.ts":  # as a receiver stores packets: with their error correction
        data = b"".join(data[i : i + 188] + bytes(range(16)) for i in range(0, len(data), 188))
    fronts = FRONTS | ({"a PNG header": PNG} if demuxer == "mpegts" else {})
    for kind, front in fronts.items():
        path.write_bytes(data[1 + int(front * len(data)) :] if isinstance(front, float) else front + data)
        assert sniff(path) == demuxer, kind
        video = decode(path)
        if kind == "a cut":
            assert abs(video.record["source_frames"] - len(shown(path).frames)) <= 1
        else:
            assert video.record["source_frames"] == 40 and len(set(numbers(video.frames))) == 8, kind


@pytest.mark.parametrize("name", ["a.ts", "a.mpg", "a.h264"])
def test_a_stream_inside_a_file_of_another_kind_is_not_read(name, tmp_path):
    stream, path = make_clip(tmp_path / name, *STREAMS[name], "-pix_fmt", "yuv420p").read_bytes(), tmp_path / "a.mp4"
    for looks_like, start in FOREIGN.items():
        for behind in (b"", stream):
            path.write_bytes(start.ljust(512, b"\0") + behind)
            fault = fault_of(sniff, path)
            assert fault.fault_class == "unsupported" and f"looks like {looks_like.strip('$')}" in fault.message


@pytest.mark.parametrize(
    ("name", "front", "looks_like"),
    [
        *(("a.mxf", b"", "an MXF container"), ("a.nut", b"", "a NUT container"), ("a.wtv", b"", "a WTV recording")),
        ("a.mpg", PNG, "a PNG image"),
        *((f"a.{container}", bytes(64), "unknown binary data") for container in ("mp4", "mkv", "avi")),
    ],
)
def test_a_container_that_ffmpeg_is_not_to_read_or_does_not_find_is_named(name, front, looks_like, tmp_path):
    codec = "mpeg4" if looks_like.startswith("unknown") else "mpeg2video"
    path = make_clip(tmp_path / name, "-c:v", codec, "-pix_fmt", "yuv420p", count=8)
    path.write_bytes(front + path.read_bytes())
    assert looks_like in fault_of(sniff, path).message


@pytest.mark.parametrize(
    ("name", "fault_class", "message"),
    [
        ("fifo.mp4", "policy", ""),
        ("/dev/zero", "policy", ""),
        ("", "unsupported", ""),  # a folder
        *((name, "io", "cannot be read") for name in ("missing.mp4", "nul\0.mp4", "file.mp4/below.mp4")),
        ("caf\u00e9.mp4", "io", "No such file or directory (did you mean "),  # it is there in another form of Unicode
    ],
)
def test_what_is_no_file_is_never_opened(name, fault_class, message, tmp_path):
    os.mkfifo(tmp_path / "fifo.mp4")
    for there in ("file.mp4", "cafe\u0301.mp4"):
        (tmp_path / there).touch()
    fault = fault_of(sniff, name if name.startswith("/") else f"{tmp_path}/{name}")
    assert fault.fault_class == fault_class and message in fault.message and fault.retryable == (fault_class == "io")
    assert ("its Unicode form, NFD:" in fault.message) == name.startswith("caf")


@pytest.mark.parametrize("name", ["a.mp4", "faststart.mp4", "fragments.mp4", "a.mkv", "a.avi"])
def test_a_cut_off_file_is_told_by_its_own_lengths(name, tmp_path):
    flags = {"faststart.mp4": "faststart", "fragments.mp4": "frag_keyframe+empty_moov"}
    options = {"movflags": flags[name]} if name in flags else None
    path = write_clip(tmp_path / name, codec="mpeg4" if name == "a.avi" else "libx264", muxer_options=options)
    data, demuxer = path.read_bytes(), sniff(path)
    assert count_missing_bytes(path, demuxer) == 0
    cut = len(data) * 6 // 10
    path.write_bytes(data[:cut])
    missing = count_missing_bytes(path, demuxer)
    assert 0 < missing <= len(data) - cut  # a later box of an MP4 is not known to lack
    path.write_bytes(data + b"appended to the file")
    assert count_missing_bytes(path, demuxer) == 0
