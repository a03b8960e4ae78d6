"""Recognition of a file's container by its first bytes, so that only known video containers reach a decoder.

If FFmpeg is not told the format, it guesses one, and some formats (playlists, concat scripts) name other files or hosts
that it would then open. Some demuxers find their stream behind other bytes, such as padding or an ID3 tag. Another
container, an archive or a document is refused even if it contains a stream.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from pipeline.errors import FaultClass, VideoFault, suggest_unicode_form

HEAD_BYTES = 2**20  # bytes that are searched for a stream, as many as FFmpeg searches
_MAGIC_BYTES = 4096  # bytes that are compared with the magic bytes of known formats

# The sample tables of an MP4 file, and the bytes of an entry of each.
_ENTRY_BYTES = {b"stts": 8, b"ctts": 8, b"stsc": 12, b"stsz": 4, b"stco": 4, b"co64": 8, b"stss": 4}
_TABLES = re.compile(b"|".join(_ENTRY_BYTES))
_VIDEO_BOXES = (b"moov", b"mdat", b"moof")
# Magic bytes at the start of the file -> name of FFmpeg's demuxer.
_DEMUXERS: tuple[tuple[bytes, str], ...] = (
    (rb"[\x00-\x08]...(?:ftyp|moov|wide|free|skip|pnot)|....mdat", "mov"),
    (rb"\x1a\x45\xdf\xa3.{1,64}(?:matroska|webm)", "matroska"),
    (rb"RIFF....AVI ", "avi"),
    (rb"\x00\x00\x01\xba", "mpeg"),
    (rb"\x00\x00\x01\xb3", "mpegvideo"),
    (rb"FLV\x01", "flv"),
    (rb"OggS", "ogg"),
    (rb"GIF8[79]a", "gif"),
    (rb"DKIF\x00\x00", "ivf"),
    (rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9\x00\xaa\x00\x62\xce\x6c", "asf"),
    (rb"\x00?\x00\x00\x01(?:[\x27\x47\x67]|\x09[\x10\x30\x50\x70\x90\xb0\xd0\xf0])", "h264"),  # SPS or delimiter first
    (rb"\x00?\x00\x00\x01(?:\x40|\x46)\x01", "hevc"),  # VPS or delimiter first
)
# Other known formats, to name them in errors; "policy" marks formats that make a decoder open other files or hosts.
_REFUSED: tuple[tuple[bytes, FaultClass, str], ...] = (
    (rb"\s*#EXTM3U", "policy", "an HLS playlist"),
    (rb"ffconcat version", "policy", "an FFmpeg concat script"),
    (rb"\s*<\?xml.*<MPD|\s*<MPD", "policy", "a DASH manifest"),
    (rb"(?:\s*file |\s*https?://|\s*\[playlist\]|v=0\r?\n)", "policy", "a list of other files or addresses"),
    (rb"....ftyp(?:heic|heix|heim|heis|mif1|msf1|avif|avis)", "unsupported", "a HEIF or AVIF image"),
    (rb"\xff\xd8\xff", "unsupported", "a JPEG image"),
    (rb"\x89PNG", "unsupported", "a PNG image"),
    (rb"RIFF....WEBP", "unsupported", "a WebP image"),
    (rb"RIFF....WAVE", "unsupported", "WAV audio"),
    (rb"ID3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb]", "unsupported", "MP3 audio"),
    (rb"fLaC|caff\x00\x01|FORM....AIF[FC]|\.snd|#!AMR|MThd|wvpk|MAC |TTA1|DSD ", "unsupported", "audio"),
    (rb"%PDF", "unsupported", "a PDF document"),
    (
        rb"PK(?:\x03\x04|\x05\x06|\x07\x08)|\x1f\x8b|7z\xbc\xaf|Rar!|BZh[1-9]|\xfd7zXZ\x00|\x28\xb5\x2f\xfd|\x04\x22\x4d\x18",
        "unsupported",
        "a compressed archive",
    ),
    (rb".{257}ustar|.{100}(?:[0-7 ]{7}\x00){3}[0-7 ]{11}[\x00 ]", "unsupported", "a tar archive"),
    (rb".{32769}(?:CD001|BEA01|NSR0)", "unsupported", "a disc image"),
    (rb"\x06\x0e\x2b\x34\x02\x05\x01\x01\x0d\x01\x02\x01\x01", "unsupported", "an MXF container"),
    (rb"nut/multimedia container", "unsupported", "a NUT container"),
    (rb"\.RMF|\.RMP", "unsupported", "a RealMedia container"),
    (rb"\xb7\xd8\x00\x20\x37\x49\xda\x11", "unsupported", "a WTV recording"),
    (rb"\x00\x00\x00\x00\x01\xbc", "unsupported", "a GXF container"),
    (rb"\xf5\x46\x7a\xbd", "unsupported", "a TiVo recording"),
    (rb"[FCZ]WS[\x01-\x32]", "unsupported", "a Flash animation"),
    (rb"YUV4MPEG2 ", "unsupported", "uncompressed video (Y4M)"),
    (rb"\x1f\x07\x00[\x3f\xbf]", "unsupported", "a DV recording"),
    (rb"SDPX|XPDS|\x76\x2f\x31\x01|II\*\x00|MM\x00\*|BM....\x00{4}|\x00\x00\x00\x0cjP  ", "unsupported", "an image"),
    (rb"....RED[12]", "unsupported", "an R3D container"),
    (
        rb"NSV[fs]|BIK[a-k]|KB2[a-k]|SMK[24]|MLVI|LEITCH\x00\x00|BBCD\x00|\x00\nSMJPEG|ARRI|\x84\x10\xff{4}",
        "unsupported",
        "another video container",
    ),
    (rb"RIFF(?!....AVI )|RIFX|RF64|FORM", "unsupported", "a RIFF or IFF file of another kind"),
    (rb"\x1a\x45\xdf\xa3(?!.{1,64}(?:matroska|webm))", "unsupported", "an EBML file of another kind"),
    (rb"\x7fELF|MZ.{58}..\x00\x00|\xcf\xfa\xed\xfe|\xca\xfe\xba\xbe", "unsupported", "a program"),
    (rb"SQLite format 3\x00", "unsupported", "an SQLite database"),
    (rb"PAR1|ARROW1|\x89HDF\r\n|\x93NUMPY|Obj\x01", "unsupported", "a table or array of data"),
    (rb"(?i:\s*<(?:!doctype html|html))", "unsupported", "an HTML page"),
)
# (offset of the sync byte, packet size) of transport streams: plain, M2TS, with error correction.
_TS_PACKETS = ((0, 188), (4, 192), (0, 204))
# The pattern that a demuxer looks for behind other bytes -> name of the demuxer. A transport stream is recognized by
# five packets in a row. Other streams contain the headers of elementary streams too, so elementary streams come last.
_STREAMS: tuple[tuple[bytes, str], ...] = (
    (rb"G(?:(?:.{187}G){4}|(?:.{191}G){4}|(?:.{203}G){4})", "mpegts"),
    # A pack header of MPEG-2 or MPEG-1 and the start code behind it.
    (rb"\x00\x00\x01\xba(?:[\x44-\x7f].{8}[\xf8-\xff].{0,7}|[\x21-\x2f].{7})\x00\x00\x01[\xbb-\xef]", "mpeg"),
    # A sequence header with a valid aspect ratio and rate; then an extension, user data, a group or a picture.
    (rb"\x00\x00\x01\xb3...[\x11-\x18\x21-\x28\x31-\x38\x41-\x48].{4,132}?\x00\x00\x01[\x00\xb2\xb5\xb8]", "mpegvideo"),
    # Parameter sets of the sequence, with a known profile and level, and of the pictures.
    (rb"\x00\x00\x01[\x27\x47\x67][BMXdnz\xf4].[\x09-\x3e].{2,256}?\x00\x00\x01[\x28\x48\x68]", "h264"),
    # Parameter sets of the video and of the sequence.
    (rb"\x00\x00\x01\x40\x01.{4,256}?\x00\x00\x01\x42\x01", "hevc"),
)
# Formats (by their names in _REFUSED) whose header FFmpeg skips in front of a stream.
_STREAMS_BEHIND = {"a PNG image": _STREAMS[:1], "a JPEG image": _STREAMS[:1], "MP3 audio": _STREAMS}
_SCRIPT = re.compile(rb"#EXTM3U|ffconcat version|<MPD|c=IN IP|\[playlist\]", re.IGNORECASE)


def sniff(path: str | Path) -> str:
    """Return the name of the FFmpeg demuxer to open a file with, from the file's first MiB.

    Raises:
        VideoFault: "unsupported" for a folder and for anything but a known video container; "policy" for a playlist or
            other list of files, a FIFO, a socket or a device; "io" if the file cannot be opened.
    """
    with open_regular(path) as file:
        return recognize_container(file.read(HEAD_BYTES), path)


def recognize_container(head: bytes, path: str | Path) -> str:
    """Return the name of the FFmpeg demuxer for a file that begins with ``head``; ``path`` only names it in errors.

    Formats in _REFUSED are tried first, then known containers. A stream behind other bytes is searched for only in data
    of unknown format and behind MP3 audio, and a transport stream also behind PNG and JPEG images.

    Args:
        head: the first HEAD_BYTES bytes, or the whole of a smaller file.

    Raises:
        VideoFault: "policy" if the data is a list of other files or addresses, or has one in the searched bytes before
            the stream; "unsupported" for other data that is not a known video container.
    """
    start = head[:_MAGIC_BYTES]
    text = head.removeprefix(b"\xef\xbb\xbf")  # a byte order mark
    refused = next((kind for kind in _REFUSED if re.match(kind[0], text, re.DOTALL)), None)
    if refused is None:
        if container := next((demuxer for magic, demuxer in _DEMUXERS if re.match(magic, start, re.DOTALL)), None):
            return container
        # Every packet must begin with the sync byte, and there must be at least two.
        if any(len(syncs := start[first::step]) >= 2 and set(syncs) == {0x47} for first, step in _TS_PACKETS):
            return "mpegts"
    _, fault_class, looks_like = refused or (b"", "unsupported", _describe_content(start))
    streams = _STREAMS if refused is None else _STREAMS_BEHIND.get(looks_like, ())
    matches = ((re.search(pattern, head, re.DOTALL), demuxer) for pattern, demuxer in streams)
    position, demuxer = next(((match.start(), demuxer) for match, demuxer in matches if match), (len(head), None))
    if streams and _SCRIPT.search(head, 0, position):
        fault_class, looks_like = "policy", "a list of other files or addresses behind other data"
    elif demuxer:
        return demuxer
    raise VideoFault(fault_class, f"{path} is not a video container; it looks like {looks_like}")


def open_regular(path: str | Path) -> BufferedReader:
    """Open a file for reading in binary mode; the caller closes it.

    Raises:
        VideoFault: "io" if it is missing, cannot be opened or has a NUL byte in its name; "unsupported" for a folder;
            "policy" for a FIFO, socket or device.
    """
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - first, since opening a FIFO would block
        if stat.S_ISDIR(mode):
            raise VideoFault("unsupported", f"{path} is a folder, not a video file")
        if not stat.S_ISREG(mode):
            raise VideoFault("policy", f"{path} is a FIFO, socket or device, not a regular file")
        return open(path, "rb")  # noqa: PTH123 - the caller closes it
    except OSError as error:
        raise VideoFault(
            "io", f"{path} cannot be read: {error.strerror or error}{suggest_unicode_form(str(path))}"
        ) from error
    except ValueError as error:  # a NUL byte in the name
        raise VideoFault("io", f"{path!r} cannot be read: {error}") from error


def count_missing_bytes(path: str | Path, demuxer: str) -> int:
    """Return how many bytes a truncated file lacks, according to the lengths stated inside it.

    The result is 0 for a complete file, a file that states no length, and containers other than MP4, Matroska and AVI.
    In MP4, only the boxes moov, mdat and moof count.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        end = 0
        if demuxer == "mov":  # the end of the last box with video, since bytes appended to a file are not a box
            ends = [start + n_bytes for kind, start, n_bytes in _iter_mov_boxes(file, size) if kind in _VIDEO_BOXES]
            end = max(ends, default=0)
        elif demuxer == "matroska":
            end = _find_matroska_end(file)
        elif demuxer == "avi":
            file.seek(4)
            length = int.from_bytes(file.read(4), "little")
            end = 0 if length == 2**32 - 1 else 8 + length  # unknown, as in a file written to a pipe
        return max(0, end - size)


def has_overstated_table(path: str | Path) -> bool:
    """Return True if a sample table of an MP4 file states more entries than it holds.

    Only the first ``moov`` box is read; the result is False without one.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        for kind, start, length in _iter_mov_boxes(file, size):
            if kind == b"moov":
                file.seek(start)
                moov = file.read(length)
                return any(_is_table_overstated(moov, match.start(), size) for match in _TABLES.finditer(moov))
    return False


def _is_table_overstated(moov: bytes, kind_at: int, file_size: int) -> bool:
    """Return True if one sample table states more entries than fit into its box.

    A table of samples of equal size has no entries: the samples must fit into the file instead.

    Args:
        kind_at: the offset of the box's four-letter type in ``moov``.
    """
    kind = moov[kind_at : kind_at + 4]
    box_end = kind_at - 4 + int.from_bytes(moov[kind_at - 4 : kind_at], "big")
    offset = kind_at + 8  # behind the version and the flags
    if kind == b"stsz":
        sample_bytes, offset = int.from_bytes(moov[offset : offset + 4], "big"), offset + 4
        if sample_bytes:  # all samples have this size, and no entries follow
            return int.from_bytes(moov[offset : offset + 4], "big") * sample_bytes > file_size
    return int.from_bytes(moov[offset : offset + 4], "big") * _ENTRY_BYTES[kind] > box_end - offset - 4


def _iter_mov_boxes(file: BufferedReader, size: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (four-letter type, start, length) of each top-level box of an MP4 file, in bytes.

    It ends before a box that states a length below 8 (0: up to the end of the file). The last box may reach beyond
    ``size``, the bytes of the file.
    """
    start = 0
    while start + 8 <= size:
        file.seek(start)
        header = file.read(16)
        length = int.from_bytes(header[:4], "big")
        kind = header[4:8]
        if length == 1:
            length = int.from_bytes(header[8:16], "big")
        if length < 8:  # 0: the box ends with the file
            return
        yield kind, start, length
        start += length


def _find_matroska_end(file: BufferedReader) -> int:
    """Return the offset at which a Matroska file should end; 0 if its segment is missing or states no length."""
    header = file.read(64)
    length, width = _read_ebml_length(header[4:])
    segment = 4 + width + length
    file.seek(segment)
    head = file.read(12)
    if head[:4] != b"\x18\x53\x80\x67":
        return 0
    length, width = _read_ebml_length(head[4:])
    unknown = length == (1 << (7 * width)) - 1
    return 0 if unknown else segment + 4 + width + length


def _read_ebml_length(data: bytes) -> tuple[int, int]:
    """Return the EBML variable-length integer at the beginning of ``data``, and the number of bytes that it takes."""
    width = 9 - data[0].bit_length() if data and data[0] else 8
    return int.from_bytes(data[:width], "big") & ((1 << (7 * width)) - 1), width


def _describe_content(head: bytes) -> str:
    """Describe data of unknown format for an error message: "an empty file", "text" or "unknown binary data".

    Text is printable UTF-8. In a ``head`` of _MAGIC_BYTES (4 KiB) or more, invalid bytes are ignored.
    """
    if not head:
        return "an empty file"
    try:
        text = head.decode("utf-8", "strict" if len(head) < _MAGIC_BYTES else "ignore")
    except UnicodeDecodeError:
        return "unknown binary data"
    return "text" if all(c.isprintable() or c.isspace() for c in text) else "unknown binary data"
