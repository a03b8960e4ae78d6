"""Files of which FFmpeg reads only a part say so; a film that goes on under another PID is read as players show it."""

import struct
from pathlib import Path

import numpy as np
import pytest

from pipeline.video.continued_films import iter_packets
from pipeline.video.sampling import Sampling
from tests.builders.clips import ffmpeg, index_of, make_clip, numbers
from tests.builders.decoding import decode, facts

RATE, COUNT = 25, 48
GRAIN = ("-vf", "noise=alls=40:allf=t:all_seed=1", "-pix_fmt", "yuv420p", "-g", 12)
X264_QP, MPEG2_GRAIN = ("-c:v", "libx264", "-qp", 10, *GRAIN), ("-c:v", "mpeg2video", *GRAIN)
MPEG4_GRAIN = ("-c:v", "mpeg4", *GRAIN)
JOINED = {
    "a.mp4": X264_QP,
    "a.mov": MPEG4_GRAIN,
    "faststart.mp4": (*X264_QP, "-movflags", "faststart"),
    "a.flv": X264_QP,
    "a.wmv": ("-c:v", "wmv2", *GRAIN),
    "a.mpg": ("-c:v", "mpeg1video", *GRAIN),
    "a.vob": MPEG2_GRAIN,
    "a.ts": X264_QP,
}
COPIED = ("-c:v", "copy")
LONG_SOUND = {
    "fragments.mp4": (*COPIED, "-c:a", "aac", "-movflags", "frag_keyframe+empty_moov"),
    "a.mkv": (*COPIED, "-c:a", "aac"),
    "a.flv": (*COPIED, "-c:a", "aac"),
    "a.avi": (*MPEG4_GRAIN, "-c:a", "pcm_s16le"),
    "mp2.mpg": ("-c:v", "mpeg1video", *GRAIN, "-c:a", "mp2"),
    "pcm.vob": (*MPEG2_GRAIN, "-c:a", "pcm_s16be"),
    "a.ts": (*COPIED, "-c:a", "mp2"),
    "a.ogv": ("-c:v", "libtheora", *GRAIN, "-c:a", "libvorbis"),
}


def warnings_of(path, decoder="auto"):
    video = decode(path, decoder=decoder)
    lost = path.suffix in (".ts", ".wmv")  # the last frame, cut at the seam
    assert abs(video.record["source_frames"] - COUNT) <= lost
    return facts(video, "decode_warnings", "backend_note")


@pytest.mark.parametrize("name", JOINED)
def test_a_second_film_that_ffmpeg_does_not_reach_is_noted(name, tmp_path):
    path = make_clip(tmp_path / name, *JOINED[name], count=COUNT)
    data = second = path.read_bytes()
    assert warnings_of(path) == (0, "")
    if name in ("a.mpg", "a.vob"):
        second = data.replace(b"\0\0\1\xe0", b"\0\0\1\xe1")
    if name == "a.ts":  # packets of another size, with the video's first PID for a table
        m2ts = ("-mpegts_m2ts_mode", 1, "-f", "mpegts")
        second = make_clip(tmp_path / "b.m2ts", *JOINED[name], *m2ts, count=COUNT).read_bytes()
    path.write_bytes(data + second)
    for decoder in ("auto", "decord"):  # decord reads MP4 itself, and leaves the rest to PyAV
        warnings, note = warnings_of(path, decoder)
        assert warnings >= 1 and "only a part was read: video goes on in the last " in note


@pytest.mark.parametrize("name", LONG_SOUND)
def test_sound_that_outlasts_the_picture_is_not_noted(name, tmp_path):
    picture = make_clip(tmp_path / "picture.mkv", *X264_QP, count=COUNT)
    sound = ("-f", "lavfi", "-i", "anoisesrc=d=10:r=48000:seed=1")
    ffmpeg("-i", picture, *sound, "-map", "0:v", "-map", "1:a", *LONG_SOUND[name], "-b:a", "192k", tmp_path / name)
    assert warnings_of(tmp_path / name) == (0, "")


def test_padding_metadata_and_attachments_are_not_noted(tmp_path):
    film = make_clip(tmp_path / "a.mp4", *X264_QP, count=COUNT).read_bytes()
    for kind in (b"free", b"uuid", b"mdat", b"skip"):
        path = tmp_path / f"{kind.decode()}.mp4"
        path.write_bytes(film + struct.pack(">I4s", 8 + len(film), kind) + film[::-1])
        assert warnings_of(path) == (0, ""), kind
    program = make_clip(tmp_path / "a.vob", *MPEG2_GRAIN, count=COUNT).read_bytes()
    for number, kind in enumerate((b"\0\0\1\xbe", b"\0\0\1\xbf")):  # padding, and navigation data
        path = tmp_path / f"{number}.vob"
        path.write_bytes(program + (kind + struct.pack(">H", 2000) + b"\xff" * 2000) * (len(program) // 2000))
        assert warnings_of(path) == (0, ""), kind
    (tmp_path / "a.bin").write_bytes(film)
    attachment = ("-attach", tmp_path / "a.bin", "-metadata:s:t", "mimetype=application/octet-stream")
    ffmpeg("-i", tmp_path / "a.mp4", "-c", "copy", *attachment, tmp_path / "attachment.mkv")
    assert warnings_of(tmp_path / "attachment.mkv") == (0, "")


X264 = ("-c:v", "libx264", "-preset", "veryfast", "-bf", 2, "-g", 12, "-pix_fmt", "yuv420p")
MPEG2 = ("-c:v", "mpeg2video", "-q:v", 2, "-bf", 2, "-g", 12)
X265 = ("-c:v", "libx265", "-preset", "ultrafast", "-x265-params", "log-level=none:pools=none:keyint=12")
FIRST, SECOND, THIRD = ("-streamid", "0:256"), ("-streamid", "0:300"), ("-streamid", "0:400")
OTHER_PROGRAM = ("-mpegts_service_id", 7, "-mpegts_pmt_start_pid", 5000)


def record(folder: Path, part: int, *options: object, goes_on: bool = True, size: tuple[int, int] = (64, 96)) -> bytes:
    """Return a recording of COUNT frames, which carry the numbers behind those of the recordings before it."""
    start = COUNT * part / RATE if goes_on else 0
    path = folder / f"{part}.ts"
    make_clip(path, *options, "-output_ts_offset", start, count=COUNT, size=size, first=COUNT * part)
    return path.read_bytes()


def write_joined(folder: Path, *parts: bytes) -> Path:
    (folder / "joined.ts").write_bytes(b"".join(parts))
    return folder / "joined.ts"


def assert_follow_each_other(path: Path, n_parts: int, note: str = "") -> None:
    """All parts are one film, whatever is requested; an encoder may leave out a frame or two at a seam."""
    count = COUNT * n_parts
    for sampling in (Sampling(count), Sampling(None, 5.0)):
        video = decode(path, sampling)
        assert facts(video, "source_frames", "backend_note") == (count, note)
        assert facts(video, "fps", "duration_s") == pytest.approx((RATE, count / RATE), rel=1e-3, abs=0.025)
        late = np.array(numbers(video.frames)) != np.round(video.timestamps * RATE)
        assert late.sum() <= n_parts - 1
    clip = decode(path, 4, COUNT / RATE + 0.4, COUNT / RATE + 1.0)
    assert np.abs(np.array(numbers(clip.frames)) - clip.timestamps * RATE).max() < 1


@pytest.mark.parametrize(
    ("codec", "goes_on", "pids"),
    [
        (X264, True, (FIRST, SECOND)),
        (MPEG2, False, (FIRST, SECOND)),
        (X265, False, (FIRST, SECOND)),
        (X264, True, (FIRST, SECOND, (*THIRD, *OTHER_PROGRAM))),
        (X264, True, (FIRST, SECOND, FIRST)),
    ],
)
def test_another_pid_goes_on_with_the_film(codec, goes_on, pids, tmp_path):
    parts = [record(tmp_path, part, *codec, *pid, goes_on=goes_on) for part, pid in enumerate(pids)]
    assert_follow_each_other(write_joined(tmp_path, *parts), len(pids))


@pytest.mark.parametrize("layout", [188, 192, 204])
def test_packets_of_every_size_between_other_bytes(layout, tmp_path):
    parts = [record(tmp_path, part, *X264, *pid) for part, pid in enumerate((FIRST, SECOND))]
    front, behind = bytes(4 * (layout == 192)), bytes(16 * (layout == 204))
    first, second = (b"".join(front + part[i : i + 188] + behind for i in range(0, len(part), 188)) for part in parts)
    assert_follow_each_other(write_joined(tmp_path, first, bytes(5000), second), 2)


def test_the_other_pid_comes_up_behind_what_ffmpeg_reads_to_open_the_file(tmp_path):
    """More than 5 MB; packets are read again where they are not kept."""
    noise = ("-vf", "noise=alls=16:allf=t:all_seed=1", "-pix_fmt", "yuv420p", "-g", 12)
    options = (*noise, "-c:v", "libx264", "-preset", "ultrafast", "-qp", 1)
    parts = [record(tmp_path, part, *options, *pid, size=(288, 384)) for part, pid in enumerate((FIRST, SECOND))]
    assert len(parts[0]) > 6_000_000
    path = write_joined(tmp_path, *parts)
    assert_follow_each_other(path, 2)
    index, kept = index_of(path, max_kept_bytes=0), index_of(path)
    assert np.array_equal(index.timestamps, kept.timestamps) and len(index.timestamps) == 2 * COUNT
    for number in (COUNT - 1, COUNT + 20):
        again, held = (map(bytes, one.packets.iter_range(number, number + 2)) for one in (index, kept))
        assert [*again] == [*held]
    index.packets.close()
    kept.packets.close()


def test_a_part_of_another_size(tmp_path):
    sizes = ((64, 96), (128, 192))
    parts = [record(tmp_path, i, *X264, *(FIRST, SECOND)[i], size=size) for i, size in enumerate(sizes)]
    assert_follow_each_other(write_joined(tmp_path, *parts), 2, "frame sizes differ: 2 sizes from 96x64 to 192x128")


def test_a_part_of_another_codec_is_named(tmp_path):
    parts = [record(tmp_path, i, *codec, *(FIRST, SECOND)[i]) for i, codec in enumerate((MPEG2, X264))]
    video = decode(write_joined(tmp_path, *parts), 8)
    frames, warnings, note = facts(video, "source_frames", "decode_warnings", "backend_note")
    assert frames == COUNT and warnings > 0
    assert note.startswith("only a part was read: ") and "% of the file is another stream of video, " in note


def test_programs_at_the_same_time_stay_apart(tmp_path):
    """Of two programs one is the film; a recording behind them goes on with it."""
    for name, first in (("a.mp4", 0), ("b.mp4", 100)):
        make_clip(tmp_path / name, *X264, count=COUNT, first=first)
    both = ("-i", tmp_path / "a.mp4", "-i", tmp_path / "b.mp4", "-map", "0:v", "-map", "1:v", "-c", "copy")
    ffmpeg(*both, "-program", "title=a:st=0", "-program", "title=b:st=1", tmp_path / "two.ts")
    ffmpeg(*both, tmp_path / "one-program.ts")
    for name in ("two.ts", "one-program.ts"):
        video = decode(tmp_path / name, COUNT)
        assert numbers(video.frames) == list(range(COUNT))
        assert facts(video, "backend_note", "decode_warnings") == ("", 0)
    joined = write_joined(tmp_path, (tmp_path / "two.ts").read_bytes(), record(tmp_path, 1, *X264, *THIRD))
    assert numbers(decode(joined, 2 * COUNT).frames) == list(range(2 * COUNT))


def test_sound_alone_behind_the_picture_is_no_part_of_the_film(tmp_path):
    picture = record(tmp_path, 0, *X264, *FIRST)
    sound = ("-f", "lavfi", "-i", "sine=d=30", "-c:a", "mp2", "-b:a", "384k", "-streamid", "0:301")
    ffmpeg(*sound, tmp_path / "sound.ts")
    video = decode(write_joined(tmp_path, picture, (tmp_path / "sound.ts").read_bytes()), COUNT)
    assert numbers(video.frames) == list(range(COUNT)) and facts(video, "backend_note", "decode_warnings") == ("", 0)


@pytest.mark.parametrize(("layout", "front"), [(188, 0), (192, 4), (204, 0)])
def test_packets_are_found_where_they_are_across_the_blocks_that_are_read(layout, front, tmp_path):
    path = tmp_path / "long.ts"
    n_packets = 3 * 2**23 // layout + 3  # a few behind the last whole block
    path.write_bytes((bytes(front) + b"G" + bytes(layout - front - 1)) * n_packets)
    with path.open("rb") as file:
        found = np.concatenate([positions for positions, *_ in iter_packets(file)])
    assert np.array_equal(found, front + layout * np.arange(n_packets))


def test_where_the_sync_is_lost_often_each_packet_is_looked_at_a_few_times(tmp_path, monkeypatch):
    find, sizes = np.flatnonzero, list[int]()
    monkeypatch.setattr(np, "flatnonzero", lambda values: sizes.append(values.size) or find(values))
    packet = b"G" + bytes(187)
    for run in (5, 63, 64, 65, 192, 193):  # packets up to a stray byte
        path = tmp_path / f"{run}.ts"
        path.write_bytes((packet * run + b"\0") * (10_000 // run))
        sizes.clear()
        with path.open("rb") as file:
            found = sum(len(places) for places, *_ in iter_packets(file))
        assert found == 10_000 // run * run and sum(sizes) < 20 * found, run
