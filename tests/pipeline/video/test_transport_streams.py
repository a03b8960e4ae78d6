"""A transport stream whose film goes on under another PID is read as players show it, or says what was not read."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.video.continued_films import iter_packets
from pipeline.video.decode import DecodedVideo, DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.builders.clips import KeepSize, ffmpeg, index_of, make_clip, numbers

RATE, COUNT = 25, 48
X264 = ("-c:v", "libx264", "-preset", "veryfast", "-bf", 2, "-g", 12, "-pix_fmt", "yuv420p")
MPEG2 = ("-c:v", "mpeg2video", "-q:v", 2, "-bf", 2, "-g", 12)
X265 = ("-c:v", "libx265", "-preset", "ultrafast", "-x265-params", "log-level=none:pools=none:keyint=12")
FIRST, SECOND, THIRD = ("-streamid", "0:256"), ("-streamid", "0:300"), ("-streamid", "0:400")
OTHER_PROGRAM = ("-mpegts_service_id", 7, "-mpegts_pmt_start_pid", 5000)
NOISE = ("-vf", "noise=alls=12:allf=t:all_seed=1")


def record(folder: Path, part: int, *options: object, goes_on: bool = True, size: tuple[int, int] = (64, 96)) -> bytes:
    """Return a recording of COUNT frames, which carry the numbers behind those of the recordings before it."""
    start = COUNT * part / RATE if goes_on else 0
    path = folder / f"{part}.ts"
    make_clip(path, *options, "-output_ts_offset", start, count=COUNT, size=size, first=COUNT * part)
    return path.read_bytes()


def write_joined(folder: Path, *parts: bytes, name: str = "joined.ts") -> Path:
    path = folder / name
    path.write_bytes(b"".join(parts))
    return path


def decode(path: Path, num_frames: int, *clip: float, decoder: str = "auto") -> DecodedVideo:
    return decode_video(DecodeRequest(path, Sampling(num_frames), KeepSize(), *clip, decoder=decoder))


def assert_follow_each_other(path: Path, n_parts: int, note: str = "") -> None:
    """All parts are one film, whatever is requested; an encoder may leave out a frame or two at a seam."""
    count = COUNT * n_parts
    for sampling in (Sampling(count), Sampling(7), Sampling(None, 5.0)):
        video = decode_video(DecodeRequest(path, sampling, KeepSize()))
        assert (video.record["source_frames"], video.record["backend_note"]) == (count, note)
        assert video.record["fps"] == pytest.approx(RATE, rel=1e-3) and video.record["duration_s"] == pytest.approx(
            count / RATE, abs=0.05
        )
        late = np.array(numbers(video.frames)) != np.round(video.timestamps * RATE)
        assert late.sum() <= n_parts - 1
    clip = decode(path, 4, COUNT / RATE + 0.4, COUNT / RATE + 1.0)
    assert np.abs(np.array(numbers(clip.frames)) - clip.timestamps * RATE).max() < 1


@pytest.mark.parametrize(
    ("codec", "goes_on"), [(X264, True), (X264, False), (MPEG2, False), (X265, True), (X265, False)]
)
def test_another_pid_goes_on_with_the_film(codec, goes_on, tmp_path):
    first, second = record(tmp_path, 0, *codec, *FIRST), record(tmp_path, 1, *codec, *SECOND, goes_on=goes_on)
    assert_follow_each_other(write_joined(tmp_path, first, second), 2)


@pytest.mark.parametrize("options", [(*THIRD, *OTHER_PROGRAM), FIRST])
def test_a_third_recording_with_its_own_pid_or_that_of_the_first(options, tmp_path):
    pids = (FIRST, SECOND, options)
    parts = [record(tmp_path, part, *X264, *pids[part]) for part in range(3)]
    assert_follow_each_other(write_joined(tmp_path, *parts), 3)


@pytest.mark.parametrize("layout", [188, 192, 204])
def test_packets_of_every_size_between_other_bytes(layout, tmp_path):
    parts = [record(tmp_path, part, *X264, *pid) for part, pid in enumerate((FIRST, SECOND))]
    front, behind = bytes(4 * (layout == 192)), bytes(16 * (layout == 204))
    first, second = (b"".join(front + part[i : i + 188] + behind for i in range(0, len(part), 188)) for part in parts)
    assert_follow_each_other(write_joined(tmp_path, first, bytes(5000), second), 2)


def test_the_other_pid_comes_up_behind_what_ffmpeg_reads_to_open_the_file(tmp_path):
    """More than 5 MB; packets are read again where they are not kept."""
    options = (*NOISE, "-c:v", "libx264", "-preset", "ultrafast", "-qp", 1, "-pix_fmt", "yuv420p", "-g", 12)
    parts = [record(tmp_path, part, *options, *pid, size=(360, 480)) for part, pid in enumerate((FIRST, SECOND))]
    assert len(parts[0]) > 6_000_000
    path = write_joined(tmp_path, *parts)
    assert_follow_each_other(path, 2)
    assert decode(path, 5, decoder="decord").record["source_frames"] == 2 * COUNT
    index, kept = index_of(path, max_kept_bytes=0), index_of(path)
    assert np.array_equal(index.timestamps, kept.timestamps) and len(index.timestamps) == 2 * COUNT
    for number in (COUNT - 1, COUNT + 20):
        again, held = (
            [bytes(packet) for packet in probed.packets.iter_range(number, number + 2)] for probed in (index, kept)
        )
        assert again == held
    index.packets.close()
    kept.packets.close()


@pytest.mark.parametrize("other_first", [True, False])
def test_a_part_of_another_size(other_first, tmp_path):
    sizes = [(128, 192), (64, 96)] if other_first else [(64, 96), (128, 192)]
    parts = [record(tmp_path, i, *X264, *(FIRST, SECOND)[i], size=size) for i, size in enumerate(sizes)]
    assert_follow_each_other(write_joined(tmp_path, *parts), 2, "frame sizes differ: 2 sizes from 96x64 to 192x128")


@pytest.mark.parametrize("other_first", [True, False])
def test_a_part_of_another_codec_is_named(other_first, tmp_path):
    codecs = [MPEG2, X264] if other_first else [X264, MPEG2]
    parts = [record(tmp_path, i, *codec, *(FIRST, SECOND)[i]) for i, codec in enumerate(codecs)]
    video = decode(write_joined(tmp_path, *parts), 8)
    assert (video.record["source_frames"], video.record["decode_warnings"] > 0) == (COUNT, True)
    assert video.record["backend_note"].startswith("only a part was read: ")
    assert "% of the file is another stream of video, " in video.record["backend_note"]


def test_programs_at_the_same_time_stay_apart(tmp_path):
    """Of two programs one is the film; a recording behind them goes on with it."""
    for name, first in (("a.mp4", 0), ("b.mp4", 100)):
        make_clip(tmp_path / name, *X264, count=COUNT, first=first)
    both = ("-i", tmp_path / "a.mp4", "-i", tmp_path / "b.mp4", "-map", "0:v", "-map", "1:v", "-c", "copy")
    ffmpeg(*both, "-program", "title=a:st=0", "-program", "title=b:st=1", tmp_path / "two.ts")
    ffmpeg(*both, tmp_path / "one-program.ts")
    for name in ("two.ts", "one-program.ts"):
        video = decode(tmp_path / name, COUNT)
        assert numbers(video.frames) == list(range(COUNT)) and (
            video.record["backend_note"],
            video.record["decode_warnings"],
        ) == ("", 0)
    joined = write_joined(tmp_path, (tmp_path / "two.ts").read_bytes(), record(tmp_path, 1, *X264, *THIRD))
    assert numbers(decode(joined, 2 * COUNT).frames) == list(range(2 * COUNT))


def test_sound_alone_behind_the_picture_is_no_part_of_the_film(tmp_path):
    picture = record(tmp_path, 0, *X264, *FIRST)
    sound = ("-f", "lavfi", "-i", "sine=d=30", "-c:a", "mp2", "-b:a", "384k", "-streamid", "0:301")
    ffmpeg(*sound, tmp_path / "sound.ts")
    video = decode(write_joined(tmp_path, picture, (tmp_path / "sound.ts").read_bytes()), COUNT)
    assert numbers(video.frames) == list(range(COUNT)) and (
        video.record["backend_note"],
        video.record["decode_warnings"],
    ) == ("", 0)


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
