"""Packets are read once, and only those that a chosen frame needs reach the codec; no frame's pixels change by that."""

import struct
from itertools import product

import numpy as np
import pytest

from pipeline.video.containers import sniff
from pipeline.video.decoders import PyavDecoder
from pipeline.video.packets import open_container
from pipeline.video.probe import IndexMismatch, index_by_decoding
from tests.builders.clips import index_of, make_clip, numbers, write_clip
from tests.builders.decoding import fault_of

SIZE = (120, 160)  # x265 has no temporal layers in smaller frames
X264 = ("-c:v", "libx264", "-preset", "veryfast", "-pix_fmt", "yuv420p")
X265 = ("-c:v", "libx265", "-preset", "ultrafast", "-pix_fmt", "yuv420p")
LAYERS = "keyint=48:temporal-layers=3:bframes=7:log-level=none"
OPEN = (*X264, "-x264-params", "open-gop=1:bframes=3:scenecut=0:keyint=12")
#: Groups of pictures as encoders make them; the hard ones are those whose frames need what lies outside their group.
GROUPS = {
    "closed.mp4": (*X264, "-g", 12, "-bf", 2, "-x264-params", "scenecut=0"),
    "one-group.mp4": (*X264, "-g", 250, "-bf", 3),
    "pyramid.mkv": (*X264, "-g", 40, "-x264-params", "b-pyramid=normal:bframes=8:b-adapt=0"),
    "open.mp4": OPEN,
    "open.ts": OPEN,
    "refresh.mp4": (*X264, "-x264-params", "intra-refresh=1:bframes=0:keyint=15"),
    "hevc-open.mp4": (*X265, "-x265-params", "keyint=12:open-gop=1:bframes=4:log-level=none"),
    "hevc-layers.mp4": ("-c:v", "libx265", "-pix_fmt", "yuv420p", "-x265-params", LAYERS),
    "mpeg2.ts": ("-c:v", "mpeg2video", "-g", 12, "-bf", 2),
    "vp9.webm": ("-c:v", "libvpx-vp9", "-g", 20, "-auto-alt-ref", 1, "-lag-in-frames", 25, "-b:v", "200k"),
    "fields.ts": ("-c:v", "mpeg2video", "-g", 12, "-bf", 2, "-flags", "+ilme+ildct"),
    "fragments.mp4": (*X264, "-g", 12, "-movflags", "frag_keyframe+empty_moov"),
}


def chosen(seed, count=90):
    rng = np.random.default_rng(seed)
    return [np.sort(rng.choice(count, size, replace=False)) for size in (1, 2, 3, 8, 40)]


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


def test_an_index_is_found_without_decoding_and_decoding_finds_the_same(tmp_path):
    index = index_of(write_clip(tmp_path / "a.mp4", count=30, gop=10, fps=25))
    assert (index.codec, index.demuxer, index.stream, index.fps) == ("h264", "mov", 0, 25.0)
    assert np.abs(index.timestamps - np.arange(30) / 25).max() < 1e-6 and index.duration_s == pytest.approx(1.2)
    places = np.searchsorted(index.pts, index.keyframes)  # an encoder may set more than one every 10 frames
    assert len(index.pts) == 30 and np.array_equal(index.pts[places], index.keyframes)
    assert places[0] == 0 and np.diff([*places, 30]).max() <= 10
    decode_frames = index_by_decoding(index)
    assert np.array_equal(decode_frames.timestamps, index.timestamps) and decode_frames.duration_s == index.duration_s
    assert decode_frames.pts is None  # frames that were counted cannot be told by their times
