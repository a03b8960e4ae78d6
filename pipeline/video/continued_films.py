"""Films that go on behind what FFmpeg reads: under another PID of a transport stream, or in files that were joined.

FFmpeg makes a stream of each PID of a transport stream, and reads none that comes up late. Players follow the new
tables. So the packets of the later PIDs get the PID of the first while the file is read, and the tables that announce
them are left out. A film behind the first one in other containers is not read: ``goes_on`` finds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.rows import PARTLY_READ
from pipeline.video.containers import open_regular

_RUN = re.compile(rb"G(?:(?:.{187}G){4}|(?:.{191}G){4}|(?:.{203}G){4})", re.DOTALL)
_PACKET_BYTES = 188
_BLOCK_BYTES = 2**23  # read at a time
_KEPT_BYTES = 1024  # of a block without packets, in which the next packets may begin
_NO_PID = 0x1FFF  # of packets that demuxers leave out
# Video by the number of its type in a program's table.
_VIDEO_TYPES = {1: "mpeg1video", 2: "mpeg2video", 0x10: "mpeg4", 0x1B: "h264", 0x24: "hevc", 0x33: "vvc", 0xEA: "vc1"}
_PART_BYTES = 2**15  # of a file, in which it is known where a PID has its first and its last packet
_MAX_OVERLAP = 0.02  # share of a PID's bytes in which it may begin while another one ends
_HEADER_BYTES = 64  # of a block, in which the next header may begin
_MIN_VIDEO = 0.5  # of the bytes behind the last packet that are video; a second film has more, padding and sound less
# Name of the demuxer -> how a file of its container begins. FFmpeg ends, or skips the rest, where it meets another
# one. It reads on in joined Matroska and Ogg files and in elementary streams.
_HEADERS = {
    "mov": rb"\x00\x00\x00[\x10-\x60]ftyp[ -~]{4}",
    "flv": rb"FLV\x01[\x01\x05]\x00\x00\x00\x09\x00{4}",
    "asf": rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9\x00\xaa\x00\x62\xce\x6c",
    "avi": rb"RIFF....AVI LIST",
}
_VIDEO_UNIT = re.compile(rb"\x00\x00\x01[\xe0-\xef\xfd]")  # how a unit of video begins in a transport stream
_PES = re.compile(rb"\x00\x00\x01([\xbb-\xef])(..)", re.DOTALL)  # a packet of a program stream, and its length


class _Video(NamedTuple):
    """A PID that tables announce as video.

    Attributes:
        kind: its type in the tables.
        program: the number of the first program that lists it.
        announced: the position of that program's table in the file, bytes.
        spans: number of a part of the file -> the positions of the first and the last packet in it.
    """

    pid: int
    kind: int
    program: int
    announced: int
    spans: dict[int, list[int]]

    @property
    def first(self) -> int:
        """The position of the first packet, bytes."""
        return min(first for first, _ in self.spans.values())

    @property
    def n_bytes(self) -> int:
        """The bytes of the file between its packets."""
        return sum(last - first for first, last in self.spans.values())


class Continuation(NamedTuple):
    """How a film goes on behind the last packet of its first PID, or before the first.

    Attributes:
        positions: [n] bytes, ascending: the packets that get another PID.
        pids: [n], their new PIDs.
        note: what is not read, for the video's row; empty where nothing is left out.
    """

    positions: NDArray[np.int64]
    pids: NDArray[np.int64]
    note: str


class ContinuedFile:
    """A transport stream, open for reading, whose packets have the PIDs of a ``Continuation``. Close it after use."""

    def __init__(self, path: str | Path, continuation: Continuation) -> None:
        """Open the file. Raises VideoFault where that fails."""
        self._file, self._continuation = open_regular(path), continuation
        self.seek, self.tell, self.close = self._file.seek, self._file.tell, self._file.close

    def read(self, size: int) -> bytes:
        """Read up to ``size`` bytes."""
        start = self._file.tell()
        data = np.frombuffer(bytearray(self._file.read(size)), np.uint8)
        positions, pids, _ = self._continuation
        changed = slice(*np.searchsorted(positions, [start - 2, start + len(data)]))
        for offset, mask, values in ((1, 0xE0, pids[changed] >> 8), (2, 0, pids[changed] & 0xFF)):
            places = positions[changed] + offset - start
            is_inside = (places >= 0) & (places < len(data))
            places = places[is_inside]
            data[places] = (data[places] & mask) | values[is_inside].astype(np.uint8)
        return data.tobytes()


def find_continuation(path: str, pid: int) -> Continuation | None:
    """Find the other PIDs under which the film of one PID is stored before or behind it; None if there are none.

    These are PIDs of the same codec that have packets elsewhere in the file, and that no table lists beside the first
    one. Of several programs the PID's own comes first. The whole file is read. Raises VideoFault where it cannot be.
    """
    videos, together, tables, size = _list_videos(path)
    main = videos.get(pid)
    if main is None:
        return None
    film, others = [main], list[_Video]()
    for video in sorted(videos.values(), key=lambda video: (video.program != main.program, video.first)):
        if all(_alternate(video, part) and frozenset((video.pid, part.pid)) not in together for part in film):
            (film if video.kind == main.kind else others).append(video)
    film.sort(key=lambda video: video.first)
    note = ""
    if others:
        n_bytes = sum(video.n_bytes for video in others)
        kinds = ", ".join(f"{_VIDEO_TYPES[video.kind]} in PID {video.pid}" for video in others)
        note = f"{PARTLY_READ}: {n_bytes / size:.0%} of the file is another stream of video, {kinds}"
    if not film[1:]:
        return Continuation(np.zeros(0, np.int64), np.zeros(0, np.int64), note) if note else None
    announced = min(video.announced for video in film[1:])
    new_pids = np.arange(_NO_PID + 1)
    new_pids[[video.pid for video in film[1:]]] = film[0].pid
    positions, pids = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
    with open_regular(path) as file:
        for places, old_pids, _ in iter_packets(file):
            found = new_pids[old_pids]
            found[np.isin(old_pids, [0, *tables]) & (places >= announced)] = _NO_PID
            changed = found != old_pids
            positions.append(places[changed])
            pids.append(found[changed])
    return Continuation(np.concatenate(positions), np.concatenate(pids), note)


def _alternate(video: _Video, other: _Video) -> bool:
    """Return True if two PIDs never have packets at the same time, but where one ends and the other begins."""
    both = ((video.spans[part], other.spans[part]) for part in video.spans.keys() & other.spans.keys())
    overlap = sum(max(0, min(one[1], two[1]) - max(one[0], two[0])) for one, two in both)
    return overlap <= _MAX_OVERLAP * min(video.n_bytes, other.n_bytes)


def _list_videos(path: str) -> tuple[dict[int, _Video], set[frozenset[int]], set[int], int]:
    """List the video PIDs of a file; return them with the pairs that share a table, the tables' PIDs and its size."""
    announced: dict[int, tuple[int, int, int]] = {}
    spans: dict[int, dict[int, list[int]]] = {}
    together, tables, end = set[frozenset[int]](), set[int](), 1
    with open_regular(path) as file:
        for places, pids, packets in iter_packets(file):
            keys = places // _PART_BYTES << 13 | pids
            for key, number in zip(*np.unique(keys, return_index=True), strict=True):
                spans.setdefault(int(key) & _NO_PID, {}).setdefault(int(key) >> 13, [int(places[number])] * 2)
            for key, number in zip(*np.unique(keys[::-1], return_index=True), strict=True):
                spans[int(key) & _NO_PID][int(key) >> 13][1] = int(places[-1 - number])
            for number in np.flatnonzero((pids == 0) & (packets[:, 1] & 0x40 > 0)):
                tables.update(_read_program_pids(packets[number].tobytes()))
            for number in np.flatnonzero(np.isin(pids, list(tables)) & (packets[:, 1] & 0x40 > 0)):
                program, kinds = _read_program(packets[number].tobytes())
                for pid, kind in kinds.items():
                    announced.setdefault(pid, (kind, program, int(places[number])))
                together.update(frozenset((a, b)) for a in kinds for b in kinds if a < b)
            end = int(places[-1]) + _PACKET_BYTES
    videos = {
        pid: _Video(pid, kind, program, place, spans[pid])
        for pid, (kind, program, place) in announced.items()
        if pid in spans
    }
    return videos, together, tables, end


def iter_packets(
    file: BufferedReader | ContinuedFile,
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]]:
    """Yield packets block by block: positions in the file, [n] bytes, PIDs, [n], and the packets' bytes, [n,188]."""
    start, rest = 0, b""
    while block := file.read(_BLOCK_BYTES):
        data, place = rest + block, 0
        while match := _RUN.search(data, place):
            place, step = match.start(), (len(match[0]) - 1) // 4
            count = (len(data) - place - _PACKET_BYTES) // step + 1
            view = np.frombuffer(data, np.uint8, offset=place)
            packets = np.lib.stride_tricks.as_strided(view, (count, _PACKET_BYTES), (step, 1), writeable=False)
            n_good = _count_good(packets)
            if n_good:
                good = packets[:n_good]
                pids = (good[:, 1].astype(np.int64) & 0x1F) << 8 | good[:, 2]
                yield start + place + step * np.arange(n_good), pids, good
            place += n_good * step
            if n_good == count:
                break
        else:
            place = max(place, len(data) - _KEPT_BYTES)
        start, rest = start + place, data[place:]


def _count_good(packets: NDArray[np.uint8]) -> int:
    """Return how many packets come before the first one without its sync byte; look no further than needed."""
    start, step = 0, 64
    while start < len(packets):
        lost = np.flatnonzero(packets[start : start + step, 0] != ord("G"))
        if len(lost):
            return start + int(lost[0])
        start, step = start + step, 2 * step
    return len(packets)


def _read_section(packet: bytes) -> bytes:
    """Return the section that begins in a packet, behind the length in its header, as far as the packet holds it."""
    payload = packet[4 + (1 + packet[4] if packet[3] & 0x20 else 0) :]
    section = payload[1 + payload[0] :] if payload else b""
    length = int.from_bytes(section[1:3], "big") & 0xFFF
    return section[3 : max(3, 3 + length - 4)]  # a checksum ends it


def _read_program_pids(packet: bytes) -> Iterator[int]:
    """Yield the PIDs of the programs' tables that a packet of the table of programs lists."""
    section = _read_section(packet)
    for place in range(5, len(section) - 3, 4):
        if section[place : place + 2] != b"\0\0":  # the network's own table
            yield int.from_bytes(section[place + 2 : place + 4], "big") & 0x1FFF


def _read_program(packet: bytes) -> tuple[int, Mapping[int, int]]:
    """Return the number of a program and its video, PID -> type, from the packet with the beginning of its table."""
    section, kinds = _read_section(packet), dict[int, int]()
    place = 9 + (int.from_bytes(section[7:9], "big") & 0xFFF)
    while place + 5 <= len(section):
        kind, pid = section[place], int.from_bytes(section[place + 1 : place + 3], "big") & 0x1FFF
        if kind in _VIDEO_TYPES:
            kinds[pid] = kind
        place += 5 + (int.from_bytes(section[place + 3 : place + 5], "big") & 0xFFF)
    return int.from_bytes(section[:2], "big"), kinds


def goes_on(path: str | Path, demuxer: str, place: int, pid: int, continuation: Continuation | None) -> bool:
    """Return True if video follows behind ``place``, the end of the last packet that FFmpeg read from the stream.

    Sound, padding, indexes and attachments there are no video. Only containers in which that can be told apart are
    searched: MP4, FLV, ASF and AVI for another file behind the first one, program streams for any video, and transport
    streams for video of ``pid``, the stream's own PID as ``continuation`` joins it, and of PIDs that are new there.
    Raises VideoFault where the file cannot be read.
    """
    if demuxer == "mpegts":
        return _has_packets(path, place, pid, continuation)
    if demuxer == "mpeg":
        return _is_mostly_video(path, place)
    return demuxer in _HEADERS and _has_header(path, place, _HEADERS[demuxer])


def _has_header(path: str | Path, place: int, pattern: bytes) -> bool:
    """Return True if the bytes behind ``place`` contain the beginning of a file."""
    with open_regular(path) as file:
        file.seek(place)
        rest = b""
        while block := file.read(_BLOCK_BYTES):
            if re.search(pattern, rest + block, re.DOTALL):
                return True
            rest = block[-_HEADER_BYTES:]
    return False


def _is_mostly_video(path: str | Path, place: int) -> bool:
    """Return True if most bytes of a program stream behind ``place`` are in packets of video."""
    with open_regular(path) as file:
        file.seek(place)
        rest, n_bytes, n_video = b"", 0, 0
        while block := file.read(_BLOCK_BYTES):
            data, start = rest + block, 0
            n_bytes += len(block)
            while match := _PES.search(data, start):
                length = 6 + int.from_bytes(match[2], "big")
                n_video += length if match[1] >= b"\xe0" else 0
                start = match.start() + length
                if start > len(data):
                    file.seek(start - len(data), 1)
                    n_bytes += start - len(data)
            rest = data[max(start, len(data) - 5) :]
    return n_video > _MIN_VIDEO * n_bytes


def _has_packets(path: str | Path, place: int, pid: int, continuation: Continuation | None) -> bool:
    """Return True if most bytes of a transport stream behind ``place`` are video of a PID, or of PIDs new there."""
    before, behind = set[int](), set[int]()  # PIDs with video
    counts = np.zeros(2**13, np.int64)
    file = ContinuedFile(path, continuation) if continuation is not None else open_regular(path)
    try:
        for places, pids, packets in iter_packets(file):
            for number in np.flatnonzero(packets[:, 1] & 0x40):
                packet = packets[number].tobytes()
                if _VIDEO_UNIT.match(packet, 4 + (1 + packet[4] if packet[3] & 0x20 else 0)):
                    (behind if places[number] >= place else before).add(int(pids[number]))
            counts += np.bincount(pids[places >= place], minlength=len(counts))
    finally:
        file.close()
    return int(counts[list(behind - (before - {pid}))].sum()) > _MIN_VIDEO * int(counts.sum())
