"""Files of which FFmpeg reads only the first part say so; sound and padding behind the picture are no film."""

import struct

import pytest

from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.builders.clips import KeepSize, ffmpeg, make_clip

COUNT = 48
NOISE = ("-vf", "noise=alls=40:allf=t:all_seed=1", "-pix_fmt", "yuv420p", "-g", 12)
X264, MPEG2, MPEG4 = ("-c:v", "libx264", "-qp", 10, *NOISE), ("-c:v", "mpeg2video", *NOISE), ("-c:v", "mpeg4", *NOISE)
JOINED = {
    "a.mp4": X264,
    "a.mov": MPEG4,
    "faststart.mp4": (*X264, "-movflags", "faststart"),
    "a.flv": X264,
    "a.wmv": ("-c:v", "wmv2", *NOISE),
    "a.mpg": ("-c:v", "mpeg1video", *NOISE),
    "a.vob": MPEG2,
    "a.ts": X264,
}
LONG_SOUND = {
    "a.mp4": (*X264, "-c:a", "aac"),
    "a.mov": (*MPEG4, "-c:a", "pcm_s16le"),
    "faststart.mp4": (*X264, "-c:a", "aac", "-movflags", "faststart"),
    "fragments.mp4": (*X264, "-c:a", "aac", "-movflags", "frag_keyframe+empty_moov"),
    "a.mkv": (*X264, "-c:a", "aac"),
    "a.flv": (*X264, "-c:a", "aac"),
    "a.avi": (*MPEG4, "-c:a", "pcm_s16le"),
    "mp2.mpg": ("-c:v", "mpeg1video", *NOISE, "-c:a", "mp2"),
    "ac3.vob": (*MPEG2, "-c:a", "ac3"),
    "pcm.vob": (*MPEG2, "-c:a", "pcm_s16be"),
    "a.ts": (*X264, "-c:a", "mp2"),
    "a.ogv": ("-c:v", "libtheora", *NOISE, "-c:a", "libvorbis"),
}


def decode(path, decoder="auto"):
    video = decode_video(DecodeRequest(path, Sampling(8), KeepSize(), decoder=decoder))
    assert abs(video.record["source_frames"] - COUNT) <= (
        path.suffix in (".ts", ".wmv")
    )  # the last frame may be cut at the seam
    return video.record["decode_warnings"], video.record["backend_note"]


@pytest.mark.parametrize("name", JOINED)
def test_a_second_film_that_ffmpeg_does_not_reach_is_noted(name, tmp_path):
    path = make_clip(tmp_path / name, *JOINED[name], count=COUNT, size=(128, 192))
    data = second = path.read_bytes()
    assert decode(path) == (0, "")
    if name in ("a.mpg", "a.vob"):
        second = data.replace(b"\0\0\1\xe0", b"\0\0\1\xe1")
    if name == "a.ts":  # packets of another size, with the video's first PID for a table
        m2ts = ("-mpegts_m2ts_mode", 1, "-f", "mpegts")
        second = make_clip(tmp_path / "b.m2ts", *JOINED[name], *m2ts, count=COUNT, size=(128, 192)).read_bytes()
    path.write_bytes(data + second)
    for decoder in ("auto", "decord"):  # decord reads MP4 itself, and leaves the rest to PyAV
        warnings, note = decode(path, decoder)
        assert warnings >= 1 and "only a part was read: video goes on in the last " in note


@pytest.mark.parametrize("name", LONG_SOUND)
def test_sound_that_outlasts_the_picture_is_not_noted(name, tmp_path):
    picture = make_clip(tmp_path / "picture.mkv", *X264, count=COUNT)
    sound = ("-f", "lavfi", "-i", "anoisesrc=d=60:r=48000:seed=1")
    ffmpeg("-i", picture, *sound, "-map", "0:v", "-map", "1:a", *LONG_SOUND[name], "-b:a", "192k", tmp_path / name)
    assert decode(tmp_path / name) == (0, "")


def test_padding_metadata_and_attachments_are_not_noted(tmp_path):
    film = make_clip(tmp_path / "a.mp4", *X264, count=COUNT, size=(128, 192)).read_bytes()
    for kind in (b"free", b"uuid", b"mdat", b"skip"):
        path = tmp_path / f"{kind.decode()}.mp4"
        path.write_bytes(film + struct.pack(">I4s", 8 + len(film), kind) + film[::-1])
        assert decode(path) == (0, ""), kind
    program = make_clip(tmp_path / "a.vob", *MPEG2, count=COUNT, size=(128, 192)).read_bytes()
    for number, kind in enumerate((b"\0\0\1\xbe", b"\0\0\1\xbf")):  # padding, and navigation data
        path = tmp_path / f"{number}.vob"
        path.write_bytes(program + (kind + struct.pack(">H", 2000) + b"\xff" * 2000) * (len(program) // 2000))
        assert decode(path) == (0, ""), kind
    (tmp_path / "a.bin").write_bytes(film)
    attachment = ("-attach", tmp_path / "a.bin", "-metadata:s:t", "mimetype=application/octet-stream")
    ffmpeg("-i", tmp_path / "a.mp4", "-c", "copy", *attachment, tmp_path / "attachment.mkv")
    assert decode(tmp_path / "attachment.mkv") == (0, "")
