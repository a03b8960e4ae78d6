"""Films that go on behind the last packet that FFmpeg reads: joined files, and streams under another number."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from pipeline.video.containers import open_regular
from pipeline.video.transport_streams import Continuation, ContinuedFile, iter_packets, read_pids

_BLOCK_BYTES = 2**23  # read at a time
_KEPT_BYTES = 64  # of a block, in which the next header may begin
_MIN_SHARE = 0.5  # of the bytes behind the last packet that are video; a second film has more, padding and sound less
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
            rest = block[-_KEPT_BYTES:]
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
    return n_video > _MIN_SHARE * n_bytes


def _has_packets(path: str | Path, place: int, pid: int, continuation: Continuation | None) -> bool:
    """Return True if most bytes of a transport stream behind ``place`` are video of a PID, or of PIDs new there."""
    before, behind = set[int](), set[int]()  # PIDs with video
    counts = np.zeros(2**13, np.int64)
    file = ContinuedFile(path, continuation) if continuation is not None else open_regular(path)
    try:
        for places, packets in iter_packets(file):
            pids = read_pids(packets)
            for number in np.flatnonzero(packets[:, 1] & 0x40):
                packet = packets[number].tobytes()
                if _VIDEO_UNIT.match(packet, 4 + (1 + packet[4] if packet[3] & 0x20 else 0)):
                    (behind if places[number] >= place else before).add(int(pids[number]))
            counts += np.bincount(pids[places >= place], minlength=len(counts))
    finally:
        file.close()
    return int(counts[list(behind - (before - {pid}))].sum()) > _MIN_SHARE * int(counts.sum())
