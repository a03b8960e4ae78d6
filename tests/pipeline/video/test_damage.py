"""Files whose container lists, or states, more than decodes: what is read on, and what is corrupt, in every container.

Clips of 100 numbered frames at 25 a second are made by ffmpeg, and a part of their bytes is overwritten with zeros, as
in a sparse download. How many frames are left is what ffmpeg itself shows.
"""

import os
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest

from pipeline.video import decode as decode_module
from pipeline.video.containers import sniff
from pipeline.video.damage import Hole, check_decodable
from pipeline.video.decode import DecodedVideo, redirect_ffmpeg_log
from pipeline.video.packets import VideoPackets
from pipeline.video.probe import VideoIndex, index_by_decoding
from tests.builders.clips import ffmpeg, index_of, make_clip, numbers, shown, write_clip
from tests.builders.decoding import decode, facts, fault_of

COUNT, RATE = 100, 25
NOISE = ("-vf", "noise=alls=16:allf=t:all_seed=1")  # which makes packets of some KB
X264 = ("-c:v", "libx264", "-preset", "veryfast", "-bf", 2, "-g", 10, "-pix_fmt", "yuv420p")
X265 = ("-c:v", "libx265", "-preset", "ultrafast", "-crf", 22, "-x265-params", "log-level=none:keyint=10:pools=none")
VP9 = ("-c:v", "libvpx-vp9", "-deadline", "realtime", "-cpu-used", 8, "-g", 10, "-pix_fmt", "yuv420p")
AV1 = ("-c:v", "libaom-av1", "-cpu-used", 8, "-usage", "realtime", "-g", 10, "-pix_fmt", "yuv420p")


#: How each clip is made.
CLIPS = {
    "h264.mp4": X264,
    "h264.mkv": (*X264, "-cluster_time_limit", 400),  # of Matroska, which is read on at the next one
    "h264.ts": X264,
    "hevc.mp4": X265,
    "av1.mp4": AV1,
    "av1.webm": AV1,
    "vp9.webm": VP9,
    "mpeg4.avi": ("-c:v", "mpeg4", "-q:v", 2, "-bf", 2, "-g", 10),
    "mpeg2.ts": ("-c:v", "mpeg2video", "-q:v", 2, "-bf", 2, "-g", 10),
    "wmv2.wmv": ("-c:v", "wmv2", "-q:v", 2, "-g", 10),
    "png.mov": ("-c:v", "png"),
}
LISTING = (".mp4", ".mov", ".avi")  # containers that list frames whose data is gone


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Makes each clip once."""
    folder = tmp_path_factory.mktemp("clips")

    def clip(name: str) -> Path:
        path = folder / name
        if not path.exists():
            make_clip(path, *NOISE, *CLIPS[name], count=COUNT, size=(96, 160))
        return path

    return clip


def zeroed(path: Path, into: Path, first: int, stop: int) -> Path:
    """Copy a file with zeros for packets number ``first`` to ``stop`` - 1."""
    data = bytearray(path.read_bytes())
    for place, size in places_of(path)[first:stop]:
        data[place : place + size] = bytes(size)
    into.write_bytes(data)
    return into


def decoded_times(path: Path) -> list[int]:
    """The times of all frames, in the order in which they come out of the decoder."""
    packets = VideoPackets(str(path), sniff(path))
    try:
        return [frame.pts for frame in packets.decode_frames(0, len(packets.table))]
    finally:
        packets.close()


def places_of(path: Path) -> list[tuple[int, int]]:
    """Where the packets of a file lie, as its demuxer tells."""
    with av.open(str(path)) as container:
        return [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]


def assert_true_frames(video: DecodedVideo) -> None:
    """The frames are those of their times, which damage has not shifted; one beside the damage may be concealed.

    AVI states no presentation times: where frames were reordered all of them may be a frame late, as ffmpeg has it.
    """
    late = np.round(video.timestamps * RATE) - np.array(numbers(video.frames))
    assert min((late != 0).sum(), (late != 1).sum()) <= 1, (numbers(video.frames), video.timestamps)


@pytest.mark.parametrize("name", CLIPS)
def test_without_its_last_40_percent(name, clips, tmp_path):
    path = zeroed(clips(name), tmp_path / name, 60, COUNT)
    before = decode(path, 8, 0.0, 2.0)
    assert_true_frames(before)
    assert before.timestamps[-1] > 1.8
    for clip in ((), (2.8, 3.8), (3.2, 3.9)):
        fault = fault_of(decode, path, 8, *clip)
        assert (fault.fault_class, fault.retryable) == ("corrupt", False), (clip, fault.message)
        assert "the file is damaged" in fault.message
    if name.endswith(LISTING):
        said = fault_of(decode, path).message.partition("damaged from ")[2].split()
        assert 2.0 <= float(said[0]) < 2.5 and 3.0 <= float(said[3]) < 5.0
        wrong = fault_of(decode, path, 8, 9.0, 10.0)  # the file itself says that it never was so long
        assert wrong.fault_class == "unsupported" and "starts behind the end" in wrong.message


@pytest.mark.parametrize("name", CLIPS)
def test_with_a_hole_in_the_middle(name, clips, tmp_path):
    """The whole video and the clips on both sides are read as ffmpeg shows them; a clip in the hole is corrupt."""
    path = zeroed(clips(name), tmp_path / name, 40, 55)
    left = len(shown(path).timestamps)
    assert left < COUNT - 10
    for clip in ((0.0, 1.2), (3.0, 3.9)):
        assert_true_frames(decode(path, 8, *clip))
    whole = decode(path, 32)
    assert whole.timestamps[-1] > 3.8
    if name.endswith(LISTING):
        frames, warnings = facts(whole, "source_frames", "decode_warnings")
        assert left - 3 <= frames <= left and warnings > 0  # frames that come late are none
        assert whole.record["backend_note"].startswith("index made by decoding") or name == "mpeg4.avi"
    fault = fault_of(decode, path, 8, 1.76, 2.1)
    assert (fault.fault_class, "the file is damaged" in fault.message) == ("corrupt", True), fault.message


@pytest.mark.parametrize("name", ["h264.mp4", "h264.ts", "late.mkv", "small.mpg"])
def test_a_clip_behind_the_end_of_a_sound_file_is_no_damage(name, clips, tmp_path):
    """A container states the end of its time line; the last packets of a small file are mostly padding."""
    made = {"late.mkv": (*X264, "-output_ts_offset", 1.5), "small.mpg": ("-c:v", "mpeg2video", "-q:v", 2, "-bf", 2)}
    path = make_clip(tmp_path / name, *made[name]) if name in made else clips(name)
    index = index_of(path)
    index.packets.close()
    assert not any(hole.end - hole.start > 0.1 for hole in index.holes) and (name in CLIPS or index.holes == ())
    for clip in ((index.duration_s + 0.1, index.duration_s + 0.5), (9.0, 10.0)):
        fault = fault_of(decode, path, 8, *clip)
        assert fault.fault_class == "unsupported" and "starts behind the end of the video" in fault.message


@pytest.mark.parametrize("name", ["png.mov", "hevc.mp4", "av1.mp4"])
def test_a_frame_that_does_not_decode_costs_no_other(name, clips, tmp_path):
    """Whatever error the decoder has for it: some answer with EPERM, or an error of zlib's."""
    path = zeroed(clips(name), tmp_path / name, 50, 51)
    truth = shown(path)
    video = decode(path, COUNT)
    assert (video.record["source_frames"], video.record["decode_warnings"] > 0) == (len(truth.timestamps), True)
    assert np.abs(video.frames[:40].astype(int) - truth.frames[video.frame_indices[:40]]).mean() < 2


def test_a_line_that_does_not_fit_in_the_log_blocks_nobody(capfd):
    line = b"[h264 @ 0x1] error while decoding MB 1 2\n"
    with redirect_ffmpeg_log() as count:
        subprocess.run([sys.executable, "-c", f"import os; os.write(2, {line!r} * 10**6)"], check=False)  # of 40 MB
        subprocess.run([sys.executable, "-c", f"import os; os.write(2, {line!r})"], check=False)
        n_lines = count()
        assert abs(n_lines - decode_module._MAX_LOG_BYTES // len(line)) <= 1
        os.write(2, line)
        assert count() == n_lines + 1
    os.write(2, b"behind it\n")
    assert capfd.readouterr().err == "behind it\n"


def test_av1_goes_on_behind_an_error_that_its_decoder_does_not_recover_from(tmp_path):
    """2 KB of zeros at the half of 12 s: players that decode in several threads show 275 of 300 frames."""
    path, lavfi = tmp_path / "a.mp4", "testsrc2=s=128x128:r=25:d=12"
    ffmpeg("-f", "lavfi", "-i", lavfi, "-c:v", "libsvtav1", "-preset", 12, "-g", 25, path)
    data = bytearray(path.read_bytes())
    box = data.index(b"mdat")
    at = box + 4 + int.from_bytes(data[box - 4 : box], "big") // 2
    data[at : at + 2048] = bytes(2048)
    path.write_bytes(data)
    video = decode(path, 32)
    assert (video.record["source_frames"], video.timestamps[-1]) == (275, pytest.approx(11.96))
    note, warnings = facts(video, "backend_note", "decode_warnings")
    assert note.endswith("nothing decodes from 6.00 s to 7.00 s") and warnings > 0
    clip = decode(path, 32, 8.0, 12.0)
    assert (clip.timestamps[-1], clip.record["decode_warnings"]) == (pytest.approx(11.96), 0)
    assert fault_of(decode, path, 8, 5.8, 7.0).fault_class == "corrupt"


@pytest.mark.parametrize(("name", "first"), [("av1.mp4", 20), ("av1.webm", 55)])
def test_av1_loses_no_frame_by_going_on(name, first, clips, tmp_path):
    """A flush that is not needed would cost frames that ffmpeg shows."""
    path = zeroed(clips(name), tmp_path / name, first, first + 2)
    assert len(decoded_times(path)) >= len(shown(path).timestamps)


@pytest.mark.parametrize("name", ["h264.ts", "h264.mkv", "wmv2.wmv", "vp9.webm", "mpeg4.avi"])
def test_a_file_whose_end_was_never_written(name, clips, tmp_path):
    """All bytes behind 60 % are zeros, which a transport stream's demuxer answers with "try again"."""
    path, data = tmp_path / name, clips(name).read_bytes()
    there = len(data) * 6 // 10
    path.write_bytes(data[:there] + bytes(max(len(data) - there, 400_000)))
    index = index_of(path)
    index.packets.close()
    assert len(index.timestamps) >= len(shown(path).timestamps) > 30
    assert_true_frames(decode(path, 8, 0.0, 1.0))
    for clip in ((), (3.2, 3.9)):
        fault = fault_of(decode, path, 8, *clip)
        assert (fault.fault_class, "the file is damaged" in fault.message) == ("corrupt", True), (clip, fault.message)


def test_what_is_missing_in_front_of_the_first_frame_is_no_damage(clips, tmp_path):
    """A recording may begin anywhere: its first frames have nothing to refer to."""
    path = zeroed(clips("hevc.mp4"), tmp_path / "a.mp4", 0, 40)
    first = shown(path).timestamps[0]
    assert first > 1.2
    video = decode(path)
    assert video.timestamps[0] == pytest.approx(first) and video.timestamps[-1] == pytest.approx(3.96)
    fault = fault_of(decode, path, 8, 0.0, 0.3)
    assert fault.fault_class == "corrupt" and "0.30 s of the clip [0 s, 0.3 s) do not decode" in fault.message


@pytest.mark.parametrize(
    ("hole", "clip", "warnings", "codec", "corrupt"),
    [
        (Hole(4, 6.5), (None, None), 1, "h264", False),  # a quarter of the video
        (Hole(4, 6.6), (None, None), 1, "h264", True),
        (Hole(4, 6.6), (None, None), 0, "mpeg4", False),  # frames that a codec stores and does not show
        (Hole(4, 6.6), (None, None), 0, "av1", True),  # whose decoder passes over zeros without a word
        (Hole(4, 9.2), (None, None), 0, "mpeg4", True),  # more than half is never so
        (Hole(4, 6), (0, 5), 1, "h264", False),
        (Hole(4, 6), (4.5, 5.5), 0, "h264", True),  # nothing is left of the clip
        (Hole(0, 4), (1, 2), 0, "h264", True),
        (Hole(10, 16, listed=False), (None, None), 1, "h264", True),
        (Hole(10, 16, listed=False), (None, None), 0, "h264", False),  # a header that states too much
        (Hole(10, 16, listed=False), (12, 14), 0, "h264", True),
        (Hole(10, 16, listed=False), (14, 12), 1, "h264", False),  # backwards: what is wrong is the clip
    ],
)
def test_when_a_hole_makes_a_clip_corrupt(hole, clip, warnings, codec, corrupt):
    """Of 10 s at 25 frames a second without those of the hole."""
    times = np.arange(10 * RATE) / RATE
    times = times[(times < hole.start) | (times >= hole.end)]
    index = VideoIndex("a.mp4", "mov", 0, codec, 96, 64, "yuv420p", 25.0, times, 10.0, holes=(hole,))
    if corrupt:
        fault = fault_of(check_decodable, index, clip, warnings)
        assert fault.fault_class == "corrupt" and "the file is damaged" in fault.message
    else:
        check_decodable(index, clip, warnings)


def test_frames_that_come_late_behind_damage_shift_no_other(clips, tmp_path):
    """Behind an error H.264 gives some frames after later ones; counted, all others would be taken for earlier ones."""
    path = zeroed(clips("h264.mp4"), tmp_path / "a.mp4", 40, 55)
    times = decoded_times(path)
    assert times != sorted(times)
    video = decode(path, len(times))
    assert video.record["source_frames"] == sum(time == max(times[: i + 1]) for i, time in enumerate(times))
    assert video.timestamps[-1] == pytest.approx((COUNT - 1) / RATE)
    late = np.array(numbers(video.frames)) != np.round(video.timestamps * RATE)
    assert late.sum() <= 10 and not late[-30:].any()  # those of the damaged group are what FFmpeg makes of it


def test_a_file_that_does_not_hold_what_it_promises_says_where(tmp_path):
    index = index_of(write_clip(tmp_path / "a.mp4", count=30))
    damaged = index_of(zeroed(tmp_path / "a.mp4", tmp_path / "b.mp4", 10, 30))
    found = index_by_decoding(damaged)
    damaged.packets.close()
    index.packets.close()
    assert len(found.timestamps) == 10 and found.holes == (Hole(pytest.approx(0.4), pytest.approx(1.2)),)
    assert index.holes == () and len(index.timestamps) == 30
