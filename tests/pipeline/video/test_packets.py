"""Packets are read once, and only those that a chosen frame needs reach the codec; no frame's pixels change by that.

The index is made from packets, whatever is requested; those that show no frame, and files without presentation times,
have the frames, times and rate that ffmpeg shows.
"""

import struct
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import av
import numpy as np
import pytest

from pipeline.video import decode as decode_module
from pipeline.video import probe
from pipeline.video.containers import sniff
from pipeline.video.decoders import PyavDecoder
from pipeline.video.headers import H264Headers, is_av1_shown, is_vp8_shown, is_vp9_shown, read_clock_bits
from pipeline.video.packets import VideoPackets, open_container
from pipeline.video.probe import IndexMismatch
from tests.builders.clips import ffmpeg, index_of, make_clip, numbers, shown, write_clip
from tests.builders.decoding import assert_as_shown, decode, facts, fault_of

SIZE = (120, 160)  # x265 has no temporal layers in smaller frames
X264 = ("-c:v", "libx264", "-preset", "veryfast", "-pix_fmt", "yuv420p")
X265 = ("-c:v", "libx265", "-preset", "ultrafast", "-pix_fmt", "yuv420p")
LAYERS = "keyint=48:temporal-layers=3:bframes=7:log-level=none"
#: Groups of pictures as encoders make them; the hard ones are those whose frames need what lies outside their group.
GROUPS = {
    "closed.mp4": (*X264, "-g", 12, "-bf", 2, "-x264-params", "scenecut=0"),
    "one-group.mp4": (*X264, "-g", 250, "-bf", 3),
    "open.mp4": (*X264, "-x264-params", "open-gop=1:bframes=3:scenecut=0:keyint=12"),
    "refresh.mp4": (*X264, "-x264-params", "intra-refresh=1:bframes=0:keyint=15"),
    "hevc-open.mp4": (*X265, "-x265-params", "keyint=12:open-gop=1:bframes=4:log-level=none"),
    "hevc-layers.mp4": ("-c:v", "libx265", "-pix_fmt", "yuv420p", "-x265-params", LAYERS),
    "vp9.webm": ("-c:v", "libvpx-vp9", "-g", 20, "-auto-alt-ref", 1, "-lag-in-frames", 25, "-b:v", "200k"),
    "fields.ts": ("-c:v", "mpeg2video", "-g", 12, "-bf", 2, "-flags", "+ilme+ildct"),
    "fragments.mp4": (*X264, "-g", 12, "-movflags", "frag_keyframe+empty_moov"),
}


def chosen(seed, count=90):
    rng = np.random.default_rng(seed)
    return [np.sort(rng.choice(count, size, replace=False)) for size in (1, 3, 8, 40)]


def read(index, wanted):
    return np.concatenate(list(PyavDecoder(index).read(wanted)))


def straight(path):
    """Every frame of the file, decoded from its beginning by nothing but PyAV."""
    with open_container(str(path), sniff(path)) as container:
        frames = sorted(container.decode(video=0), key=lambda frame: frame.pts)
        return np.stack([frame.to_ndarray(format="rgb24", interpolation="BICUBIC") for frame in frames])


@pytest.mark.parametrize("name", GROUPS)
def test_frames_are_those_of_decoding_everything(name, tmp_path, monkeypatch):
    """Also of files beyond the bound on packets, which are read again."""
    mark = "pipeline.video.decoders._ChromaMarkFilter.mark_frame"  # before conversion
    monkeypatch.setattr(mark, lambda marks, frame: frame)
    path = make_clip(tmp_path / name, *GROUPS[name], count=90, size=SIZE)
    everything = straight(path)
    kept, again = index_of(path), index_of(path, max_kept_bytes=0)
    assert len(everything) == len(kept.timestamps) == len(again.timestamps) == 90
    for index, wanted in product((kept, again), chosen(3)):
        try:
            assert np.array_equal(read(index, wanted), everything[wanted])
        except IndexMismatch:  # then the whole file is decoded, and its frames are counted
            assert name.startswith("refresh")


def decoded_count(index, wanted):
    """How many frames came out of the decoder for those that were wanted."""
    times = index.pts[wanted].tolist()
    return sum(1 for run in index.packets.runs(times) for _ in index.packets.decode_frames(*run))


def test_what_no_frame_needs_is_not_decoded(tmp_path):
    index = index_of(make_clip(tmp_path / "a.mp4", *GROUPS["closed.mp4"], count=96, size=(64, 96)))
    assert decoded_count(index, [0, 12, 24, 36]) == 4  # keyframes need nothing else
    assert decoded_count(index, [95]) <= 12
    assert decoded_count(index, np.arange(96)) == 96
    one_group = index_of(make_clip(tmp_path / "b.mp4", *GROUPS["one-group.mp4"], count=96, size=(64, 96)))
    assert 4 <= decoded_count(one_group, [0, 30, 60, 90]) < 80  # frames to which no other refers were left out


@pytest.mark.parametrize("name", ["hevc-layers.mp4", "fields.ts"])
def test_where_it_is_not_known_what_nothing_refers_to_all_is_decoded(name, tmp_path):
    index = index_of(make_clip(tmp_path / name, *GROUPS[name], count=90, size=SIZE))
    (run,) = index.packets.runs([int(index.pts[10])])
    assert run.start == 0 and sum(1 for _ in index.packets.decode_frames(*run)) == run.stop


def test_a_file_is_opened_once(tmp_path):
    path = write_clip(tmp_path / "a.mp4")
    index = index_of(path)
    path.unlink()
    assert numbers(read(index, np.arange(0, 30, 3))) == list(range(0, 30, 3))


def test_a_packet_that_is_wrongly_called_a_keyframe_is_found_out(tmp_path):
    index = index_of(write_clip(tmp_path / "a.mp4", count=60, gop=60, codec_options={"bf": "0", "sc_threshold": "0"}))
    table = index.packets.table
    assert sum(packet.keyframe for packet in table) == 1
    table[30] = table[30]._replace(keyframe=True)
    with pytest.raises(IndexMismatch, match="does not come out"):
        read(index, np.array([2, 40]))


def test_where_seeking_misses_a_group_the_file_is_read_on(tmp_path, monkeypatch):
    index = index_of(write_clip(tmp_path / "a.mp4", count=60, gop=10), max_kept_bytes=0)
    monkeypatch.setattr(index.packets, "_second_file", Astray(open_container(index.path, index.demuxer)))
    assert numbers(read(index, np.array([25, 45]))) == [25, 45]


class Astray:
    """A container that seeks one group too far."""

    def __init__(self, container):
        self._container = container
        self.streams, self.demux, self.close = container.streams, container.demux, container.close

    def seek(self, time, stream):
        self._container.seek(time + 10 * 512, stream=stream)


def test_huge_frames_are_refused_before_they_are_decoded(tmp_path):
    path = write_clip(tmp_path / "a.gif", codec="gif", pix_fmt="rgb8", count=2)
    head, rest = path.read_bytes()[:6], path.read_bytes()[10:]
    path.write_bytes(head + struct.pack("<HH", 8192, 8193) + rest)
    fault = fault_of(index_of, path)
    assert fault.fault_class == "unsupported" and "frames of 8192x8193 are larger than" in fault.message


COUNT, RATE, HIDDEN_SIZE = 96, 25, (48, 64)
REFERENCES = ("-auto-alt-ref", 1, "-lag-in-frames", 16, "-b:v", "300k", "-deadline", "good", "-cpu-used", 4)
VP8, VP9 = ("-c:v", "libvpx", *REFERENCES), ("-c:v", "libvpx-vp9", *REFERENCES)
VP9_PROFILE_3 = (*VP9, "-pix_fmt", "yuv444p10le", "-profile:v", 3)
AV1 = ("-c:v", "libsvtav1", "-preset", 12, "-svtav1-params", "pred-struct=2:lp=1")
NOISE = ("-vf", "noise=alls=8:allf=t:all_seed=1")
# Hidden frames in packets of their own: the name of the file, how it is encoded, how its packets are split.
HIDDEN = {
    "a.webm": (VP8, None),
    "a.ogv": (VP8, None),
    "a.avi": (VP8, None),
    "vp9.mkv": (VP9, "vp9_superframe_split"),
    "vp9.avi": (VP9, "vp9_superframe_split"),
    "profile-3.mkv": (VP9_PROFILE_3, "vp9_superframe_split"),
    "av1.mkv": (AV1, "av1_frame_split"),
}
X264_12, MPEG4 = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-g", 12), ("-c:v", "mpeg4", "-q:v", 2, "-g", 12)
SKIPPED = ("-vf", "select='not(between(n,30,36)+eq(n,50))'", "-fps_mode", "passthrough")
# Files whose container states no presentation times.
TIMELESS = {
    "mpeg4.avi": (*MPEG4, "-bf", 2),
    "skipped.avi": (*SKIPPED, *MPEG4, "-bf", 2),
    "packed-skipped.avi": (*SKIPPED, "-c:v", "libxvid", "-q:v", 2, "-bf", 2, "-g", 12),
    "mpeg1.avi": ("-c:v", "mpeg1video", "-q:v", 2, "-bf", 2, "-g", 12),
    "pyramid.avi": (*X264_12, "-x264-params", "b-pyramid=normal:bframes=8:b-adapt=0"),
    "mpeg2.avi": ("-c:v", "mpeg2video", "-q:v", 2, "-bf", 2, "-g", 12),
    "h264-skipped.avi": (*SKIPPED, *X264_12, "-bf", 2),
    "one-group.h264": (*X264_12, "-g", 1000, "-bf", 3),  # whose order goes beyond the bits that state it
    "stored-order.h264": (*X264_12, "-bf", 0),
    "scaling.h264": ("-c:v", "libx264", "-pix_fmt", "yuv444p", "-g", 12, "-x264-params", "bframes=2:cqm=jvt"),
    "a.h264": (*X264_12, "-bf", 2, "-r", 50),
    "a.asf": (*X264_12, "-bf", 2),
    "a.m1v": ("-c:v", "mpeg1video", "-q:v", 2, "-bf", 2),
}


@pytest.fixture(autouse=True)
def refuse_scans(monkeypatch):
    """Decoding a whole file for its index is an error."""

    def scan(index):
        raise AssertionError(f"{index.path} was decoded as a whole")

    for module in (probe, decode_module):
        monkeypatch.setattr(module, "index_by_decoding", scan)


@cache
def encode_hidden(suffix: str, options: tuple[object, ...]) -> bytes:
    """Return a file with at least one hidden frame, which libvpx makes in two passes."""
    with TemporaryDirectory() as folder:
        log = ("-passlogfile", Path(folder) / "log")
        if options[1] in ("libvpx", "libvpx-vp9"):
            make_clip(Path(folder) / "first.mkv", *NOISE, *options, "-pass", 1, *log, count=COUNT, size=HIDDEN_SIZE)
            options = (*options, "-pass", 2, *log)
        return make_clip(Path(folder) / f"a{suffix}", *NOISE, *options, count=COUNT, size=HIDDEN_SIZE).read_bytes()


def write_hidden(folder: Path, name: str) -> Path:
    """Write a file with hidden packets, at least one."""
    options, splitter = HIDDEN[name]
    path = folder / name
    source = path if splitter is None else folder / "source.mkv"
    source.write_bytes(encode_hidden(source.suffix, options))
    if splitter is not None:
        ffmpeg("-i", source, "-c", "copy", "-bsf:v", splitter, "-fflags", "-autobsf", path)
    return path


@pytest.mark.parametrize("name", HIDDEN)
def test_packets_that_show_no_frame_count_as_none(name, tmp_path):
    path = write_hidden(tmp_path, name)
    packets = VideoPackets(str(path), sniff(path))
    packets.close()
    assert any(packet.hidden for packet in packets.table)
    assert_as_shown(path)


def test_a_parameter_set_that_states_2_to_the_60_bits_costs_no_memory():
    zero, huge, one = "1", "0" * 60 + f"{2**60 + 1:b}", "010"  # in the code of H.264
    bits = f"{66:08b}{0:016b}" + zero + zero + zero + huge + one + "0" + one + one + "1"
    parameters = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
    headers = H264Headers(b"\0\0\1\x67" + parameters)
    assert headers.order_bits == 16 and headers.read(b"\0\0\1\x65" + b"\x88" * 30) is not None


def test_zeros_are_damage_and_no_hidden_frame():
    zeros = memoryview(bytes(100))
    assert is_vp8_shown(zeros) and is_vp9_shown(zeros) and is_av1_shown(zeros)


@pytest.mark.parametrize("max_kept_bytes", [2**20, 0])
def test_a_hidden_packet_at_a_time_of_its_own_changes_neither_rate_nor_frames(max_kept_bytes, tmp_path):
    """As libvpx's own tools write WebM: an alternate reference comes a tick behind the frame before it."""
    source, path = write_hidden(tmp_path, "a.webm"), tmp_path / "b.webm"
    with av.open(str(source)) as container, av.open(str(path), "w") as out:
        stream, last = out.add_stream_from_template(container.streams.video[0]), -1
        for packet in container.demux(video=0):
            if packet.size:
                packet.pts = packet.dts = packet.pts if bytes(packet)[0] & 0x10 else last + 1
                packet.stream, last = stream, packet.pts
                out.mux(packet)
    assert_as_shown(path)
    index = index_of(path, max_kept_bytes)
    assert (index.fps, len(index.timestamps)) == (RATE, COUNT) and len(index.packets.table) > COUNT
    index.packets.close()
    for clip in ((None, None), (1.0, 2.0), (2.52, None)):
        video = decode(path, 4, *clip)
        assert facts(video, "fps", "clip_fps", "source_frames") == (RATE, RATE, COUNT)
        assert numbers(video.frames) == np.round(video.timestamps * RATE).tolist()


@pytest.mark.parametrize("name", ["a.avi", "a.mkv"])
def test_frames_of_mpeg4_without_content_are_none(name, tmp_path):
    """As XviD stores where nothing moves: a header of a few bytes, and the frame before stays on screen."""
    source = make_clip(tmp_path / "source.avi", *MPEG4, count=COUNT)
    with open_container(str(source), "avi") as container, av.open(str(tmp_path / name), "w") as out:
        stream = container.streams.video[0]
        clock_bits = read_clock_bits(stream.codec_context.extradata)
        header = f"0101{'0' * clock_bits}10"  # a P frame in the same second; what follows the clock says: no content
        header = header.ljust(-(-(len(header) + 1) // 8) * 8 - 1, "1").replace(" ", "")
        empty = b"\0\0\1\xb6" + int(header + "1", 2).to_bytes((len(header) + 1) // 8, "big")
        copy = out.add_stream_from_template(stream)
        for number, packet in enumerate(packet for packet in container.demux(stream) if packet.size):
            new = av.Packet(empty if number in (10, 11, 40) else bytes(packet))
            new.pts = new.dts = number
            new.time_base, new.duration, new.is_keyframe, new.stream = stream.time_base, 1, packet.is_keyframe, copy
            out.mux(new)
    assert len(shown(tmp_path / name).frames) == COUNT - 3
    assert_as_shown(tmp_path / name)


@pytest.mark.parametrize("name", TIMELESS)
def test_frames_without_times_are_found_from_headers(name, tmp_path):
    path = make_clip(tmp_path / name, *TIMELESS[name], count=COUNT)
    assert_as_shown(path, exact_start=False)
    for index in (index_of(path, limit) for limit in (2**20, 0)):
        frames = [frame.pts for frame in index.packets.decode_frames(0, len(index.packets.table))]
        assert frames == index.pts.tolist()
        index.packets.close()


@pytest.mark.parametrize("name", ["mpeg4.avi", "pyramid.avi"])
def test_an_avi_file_without_its_index_is_read_as_ffmpeg_reads_it(name, tmp_path):
    path = make_clip(tmp_path / name, *TIMELESS[name], count=COUNT)
    data = path.read_bytes()
    at = data.rindex(b"idx1")
    path.write_bytes(data[:4] + (at - 8).to_bytes(4, "little") + data[8:at])
    assert_as_shown(path, exact_start=False)
