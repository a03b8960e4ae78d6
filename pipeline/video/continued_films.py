"""Films that continue where FFmpeg stops reading: under another PID of a transport stream, or in joined files.

FFmpeg ignores a PID that first appears late in a transport stream; ``ContinuedFile`` gives its packets the film's first
PID. In other containers, a film behind the first one is only detected, by ``has_more_film``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.rows import READ_IN_PART
from pipeline.video.containers import open_regular

_RUN = re.compile(rb"G(?:(?:.{187}G){4}|(?:.{191}G){4}|(?:.{203}G){4})", re.DOTALL)
_PACKET_BYTES = 188
_BLOCK_BYTES = 2**23  # read at a time
_KEPT_BYTES = 1024  # end of a block without packets, in which the next packets may begin
_NO_PID = 0x1FFF  # the PID of packets that demuxers ignore
# Stream types of video in a program's table -> codec.
_VIDEO_TYPES = {1: "mpeg1video", 2: "mpeg2video", 0x10: "mpeg4", 0x1B: "h264", 0x24: "hevc", 0x33: "vvc", 0xEA: "vc1"}
_PART_BYTES = 2**15  # bytes of a block; each PID's first and last packet in it are recorded
_MAX_OVERLAP = 0.02  # share of a PID's bytes that may overlap the end of another PID
_HEADER_BYTES = 64  # end of a block, in which the next header may begin
_MIN_VIDEO = 0.5  # share of video behind the last packet: a second film has more, padding and sound have less
# Name of the demuxer -> the beginning of a file in its container. FFmpeg ends or skips the rest where another file
# begins, but reads on in joined Matroska and Ogg files and in elementary streams.
_HEADERS = {
    "mov": rb"\x00\x00\x00[\x10-\x60]ftyp[ -~]{4}",
    "flv": rb"FLV\x01[\x01\x05]\x00\x00\x00\x09\x00{4}",
    "asf": rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9\x00\xaa\x00\x62\xce\x6c",
    "avi": rb"RIFF....AVI LIST",
}
_VIDEO_UNIT = re.compile(rb"\x00\x00\x01[\xe0-\xef\xfd]")  # the beginning of a unit of video in a transport stream
_PES = re.compile(rb"\x00\x00\x01([\xbb-\xef])(..)", re.DOTALL)  # a packet of a program stream, and its length


class _VideoPid(NamedTuple):
    """A PID that the tables of a transport stream announce as video.

    Attributes:
        kind: the stream type in the tables, a key of _VIDEO_TYPES.
        program: the number of the first program that lists the PID.
        announced: the position of that program's table in the file, in bytes.
        spans: number of a block of 32 KiB -> positions of the PID's first and last packet in that block.
    """

    pid: int
    kind: int
    program: int
    announced: int
    spans: dict[int, list[int]]

    @property
    def first(self) -> int:
        """The position of the first packet, in bytes."""
        return min(first for first, _ in self.spans.values())

    @property
    def n_bytes(self) -> int:
        """The bytes that the spans cover, an estimate of the size of the PID's video."""
        return sum(last - first for first, last in self.spans.values())


class Continuation(NamedTuple):
    """The packets of a transport stream that must get another PID so that FFmpeg reads the whole film.

    Attributes:
        positions: [n] positions of these packets in the file, in bytes, ascending.
        pids: [n] their new PIDs.
        note: text for the video's row about video that is not read; empty if nothing is left out.
    """

    positions: NDArray[np.int64]
    pids: NDArray[np.int64]
    note: str


class ContinuedFile:
    """A readable file object over a transport stream in which a ``Continuation`` replaces PIDs. Close it after use."""

    def __init__(self, path: str | Path, continuation: Continuation) -> None:
        """Open the file; raise VideoFault if that fails."""
        self._file = open_regular(path)
        self._continuation = continuation
        self.seek, self.tell, self.close = self._file.seek, self._file.tell, self._file.close

    def read(self, size: int) -> bytes:
        """Read up to ``size`` bytes and replace the PIDs in them; return b"" at the end of the file."""
        start = self._file.tell()
        data = np.frombuffer(bytearray(self._file.read(size)), np.uint8)
        positions, pids, _ = self._continuation
        changed = slice(*np.searchsorted(positions, [start - 2, start + len(data)]))
        for offset, mask, values in ((1, 0xE0, pids[changed] >> 8), (2, 0, pids[changed] & 0xFF)):
            targets = positions[changed] + offset - start
            is_inside = (targets >= 0) & (targets < len(data))
            targets = targets[is_inside]
            data[targets] = (data[targets] & mask) | values[is_inside].astype(np.uint8)
        return data.tobytes()


def find_continuation(path: str, pid: int) -> Continuation | None:
    """Find the other PIDs of a transport stream that carry the same film as ``pid``, before or behind it.

    They have the same codec, overlap each PID of the film by at most 2 % of the smaller one's bytes, and never share a
    table with one. If several compete, those of the PID's own program come first, then those that begin earlier. All
    get the PID of the earliest one; tables are hidden (PID 0x1FFF) from the first announcement of another PID on. PIDs
    of another codec are only named in ``note``.

    Returns:
        None if ``pid`` is not announced as video, or nothing was found. If there is only a note, the arrays are empty.
    """
    videos, together, tables, size = _list_videos(path)
    main = videos.get(pid)
    if main is None:
        return None
    film = [main]
    others = list[_VideoPid]()
    for video in sorted(videos.values(), key=lambda video: (video.program != main.program, video.first)):
        if all(
            _are_alternating(video, member) and frozenset((video.pid, member.pid)) not in together for member in film
        ):
            (film if video.kind == main.kind else others).append(video)
    film.sort(key=lambda video: video.first)
    note = ""
    if others:
        n_bytes = sum(video.n_bytes for video in others)
        kinds = ", ".join(f"{_VIDEO_TYPES[video.kind]} in PID {video.pid}" for video in others)
        note = f"{READ_IN_PART}: {n_bytes / size:.0%} of the file is another stream of video, {kinds}"
    if not film[1:]:
        return Continuation(np.zeros(0, np.int64), np.zeros(0, np.int64), note) if note else None
    announced = min(video.announced for video in film[1:])
    new_pids = np.arange(_NO_PID + 1)
    new_pids[[video.pid for video in film[1:]]] = film[0].pid
    positions, pids = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
    with open_regular(path) as file:
        for offsets, old_pids, _ in iter_packets(file):
            packet_pids = new_pids[old_pids]
            packet_pids[np.isin(old_pids, [0, *tables]) & (offsets >= announced)] = _NO_PID
            changed = packet_pids != old_pids
            positions.append(offsets[changed])
            pids.append(packet_pids[changed])
    return Continuation(np.concatenate(positions), np.concatenate(pids), note)


def _are_alternating(video: _VideoPid, other: _VideoPid) -> bool:
    """Return True if two PIDs take turns: they overlap by at most _MAX_OVERLAP of the smaller one."""
    shared_spans = ((video.spans[block], other.spans[block]) for block in video.spans.keys() & other.spans.keys())
    overlap = sum(max(0, min(span_a[1], span_b[1]) - max(span_a[0], span_b[0])) for span_a, span_b in shared_spans)
    return overlap <= _MAX_OVERLAP * min(video.n_bytes, other.n_bytes)


def _list_videos(path: str) -> tuple[dict[int, _VideoPid], set[frozenset[int]], set[int], int]:
    """Scan a transport stream for the PIDs that its program map tables announce as video.

    Returns:
        PID -> video as first announced, for PIDs that have packets; the pairs of PIDs that share a table; the PIDs of
        the program map tables; and the end of the last packet in bytes (1 without packets).
    """
    announced: dict[int, tuple[int, int, int]] = {}
    spans: dict[int, dict[int, list[int]]] = {}
    together = set[frozenset[int]]()
    tables = set[int]()
    end = 1
    with open_regular(path) as file:
        for offsets, pids, packets in iter_packets(file):
            keys = offsets // _PART_BYTES << 13 | pids
            for key, number in zip(*np.unique(keys, return_index=True), strict=True):
                spans.setdefault(int(key) & _NO_PID, {}).setdefault(int(key) >> 13, [int(offsets[number])] * 2)
            for key, number in zip(*np.unique(keys[::-1], return_index=True), strict=True):
                spans[int(key) & _NO_PID][int(key) >> 13][1] = int(offsets[-1 - number])
            for number in np.flatnonzero((pids == 0) & (packets[:, 1] & 0x40 > 0)):
                tables.update(_read_program_pids(packets[number].tobytes()))
            for number in np.flatnonzero(np.isin(pids, list(tables)) & (packets[:, 1] & 0x40 > 0)):
                program, kinds = _read_program(packets[number].tobytes())
                for pid, kind in kinds.items():
                    announced.setdefault(pid, (kind, program, int(offsets[number])))
                together.update(frozenset((a, b)) for a in kinds for b in kinds if a < b)
            end = int(offsets[-1]) + _PACKET_BYTES
    videos = {
        pid: _VideoPid(pid, kind, program, offset, spans[pid])
        for pid, (kind, program, offset) in announced.items()
        if pid in spans
    }
    return videos, together, tables, end


def iter_packets(
    file: BufferedReader | ContinuedFile,
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]]:
    """Yield the packets of a transport stream, block by block, from the current position of ``file``.

    Bytes in which fewer than five packets follow each other are skipped.

    Yields:
        Positions relative to the start, [n]; PIDs, [n]; and a read-only view of the packets, [n, 188].
    """
    start = offset = 0  # the position of ``data``, and where in it the next packet is looked for
    step = 0  # from packet to packet in a run that may go on in the next block; 0 if a run is looked for
    rest = b""
    while block := file.read(_BLOCK_BYTES):
        data = rest + block
        while True:
            if not step:
                match = _RUN.search(data, offset)
                if match is None:
                    offset = max(offset, len(data) - _KEPT_BYTES)
                    break
                offset, step = match.start(), (len(match[0]) - 1) // 4
            count = max(0, (len(data) - offset - _PACKET_BYTES) // step + 1)
            view = np.frombuffer(data, np.uint8)[offset:]
            packets = np.lib.stride_tricks.as_strided(view, (count, _PACKET_BYTES), (step, 1), writeable=False)
            n_good = _count_good(packets)
            if n_good:
                good = packets[:n_good]
                pids = (good[:, 1].astype(np.int64) & 0x1F) << 8 | good[:, 2]
                yield start + offset + step * np.arange(n_good), pids, good
            offset += n_good * step
            if n_good == count:
                break
            step = 0
        end = min(offset, len(data))  # the next packet may begin some bytes into the next block
        start, rest, offset = start + end, data[end:], offset - end


def _count_good(packets: NDArray[np.uint8]) -> int:
    """Return the number of packets before the first one without a sync byte; all of them if none lacks it."""
    start, step = 0, 64
    while start < len(packets):
        lost = np.flatnonzero(packets[start : start + step, 0] != ord("G"))
        if len(lost):
            return start + int(lost[0])
        start, step = start + step, 2 * step
    return len(packets)


def _read_section(packet: bytes) -> bytes:
    """Return the table section that begins in a packet, without its 3-byte header and its checksum.

    Only the bytes in this packet are returned, b"" if it has no payload.
    """
    payload = packet[4 + (1 + packet[4] if packet[3] & 0x20 else 0) :]
    section = payload[1 + payload[0] :] if payload else b""
    length = int.from_bytes(section[1:3], "big") & 0xFFF
    return section[3 : max(3, 3 + length - 4)]  # a checksum ends it


def _read_program_pids(packet: bytes) -> Iterator[int]:
    """Yield the PIDs of the program tables that a packet of the program association table lists."""
    section = _read_section(packet)
    for offset in range(5, len(section) - 3, 4):
        if section[offset : offset + 2] != b"\0\0":  # the network's own table
            yield int.from_bytes(section[offset + 2 : offset + 4], "big") & 0x1FFF


def _read_program(packet: bytes) -> tuple[int, Mapping[int, int]]:
    """Parse the packet that begins a program's table.

    Returns:
        The program's number, and PID -> stream type of its video streams, as far as the packet lists them.
    """
    section = _read_section(packet)
    kinds = dict[int, int]()
    offset = 9 + (int.from_bytes(section[7:9], "big") & 0xFFF)
    while offset + 5 <= len(section):
        kind = section[offset]
        pid = int.from_bytes(section[offset + 1 : offset + 3], "big") & 0x1FFF
        if kind in _VIDEO_TYPES:
            kinds[pid] = kind
        offset += 5 + (int.from_bytes(section[offset + 3 : offset + 5], "big") & 0xFFF)
    return int.from_bytes(section[:2], "big"), kinds


def has_more_film(path: str | Path, demuxer: str, place: int, pid: int, continuation: Continuation | None) -> bool:
    """Return True if more of the film follows behind the last packet that FFmpeg read from the stream.

    MP4, FLV, ASF and AVI files are searched for the beginning of another file. More than half of the rest of a program
    stream must be video; in a transport stream, video of ``pid`` or of PIDs that are new there. The result is False for
    other containers.

    Args:
        place: the end of that last packet, in bytes.
        continuation: the PIDs to replace in a transport stream.
    """
    if demuxer == "mpegts":
        return _has_video_packets(path, place, pid, continuation)
    if demuxer == "mpeg":
        return _is_mostly_video(path, place)
    return demuxer in _HEADERS and _has_header(path, place, _HEADERS[demuxer])


def _has_header(path: str | Path, place: int, pattern: bytes) -> bool:
    """Return True if ``pattern``, the beginning of a file, matches anywhere behind the offset ``place``."""
    with open_regular(path) as file:
        file.seek(place)
        rest = b""
        while block := file.read(_BLOCK_BYTES):
            if re.search(pattern, rest + block, re.DOTALL):
                return True
            rest = block[-_HEADER_BYTES:]
    return False


def _is_mostly_video(path: str | Path, place: int) -> bool:
    """Return True if more than half of a program stream's bytes behind the offset ``place`` are in video packets."""
    with open_regular(path) as file:
        file.seek(place)
        rest = b""
        n_bytes = 0
        n_video = 0
        while block := file.read(_BLOCK_BYTES):
            data = rest + block
            start = 0
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


def _has_video_packets(path: str | Path, place: int, pid: int, continuation: Continuation | None) -> bool:
    """Return True if over half of a transport stream's packets from ``place`` on are of PIDs that go on with the film.

    These have video there, and are ``pid`` or had no video before. PIDs are those after the replacements of
    ``continuation``, if it is given.
    """
    before, behind = set[int](), set[int]()  # PIDs with video
    counts = np.zeros(2**13, np.int64)
    file = ContinuedFile(path, continuation) if continuation is not None else open_regular(path)
    try:
        for offsets, pids, packets in iter_packets(file):
            for number in np.flatnonzero(packets[:, 1] & 0x40):
                packet = packets[number].tobytes()
                if _VIDEO_UNIT.match(packet, 4 + (1 + packet[4] if packet[3] & 0x20 else 0)):
                    (behind if offsets[number] >= place else before).add(int(pids[number]))
            counts += np.bincount(pids[offsets >= place], minlength=len(counts))
    finally:
        file.close()
    return int(counts[list(behind - (before - {pid}))].sum()) > _MIN_VIDEO * int(counts.sum())
