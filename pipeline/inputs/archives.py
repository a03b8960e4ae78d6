"""Tars and zips as containers of videos.

Tars are as WebDataset has them: each video is a member; .json, .txt and .cls members of its key are carried along. The
index of a tar is made from headers alone. A member's data is a stretch of the tar; a worker reads it alone, and
the header before it tells whether the tar is still the indexed file. A zip's member that is stored without
compression is read likewise.
"""

from __future__ import annotations

import json
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from pipeline.errors import VideoFault
from pipeline.inputs.container import ContainerOptions, Member, RandomFile, SeekableFile, fault
from pipeline.inputs.listings import VIDEO_SUFFIXES, suffix_of
from pipeline.inputs.tables import UserValue, carried_json

_BLOCK: Final = tarfile.BLOCKSIZE
_MOST_HEADER = 2**20  # bytes of an extended header; a real one has some hundred
_MOST_CARRIED = 2**16  # bytes of a carried member
_RESYNC = 2**28  # bytes in which the next header is looked for behind a broken one
_PIECE = 2**20  # bytes of a video that are read at once
_STATED = 2**33  # bytes from which on a size stands in an extended header
_LONG_NAME, _PAX = b"L", (b"x", b"X")
_EXTENDED = (_LONG_NAME, b"K", *_PAX, b"g")  # kinds of headers that say more of the next member
_UNKNOWN = b"?"  # of what is no member
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes
_CARRIED = ("json", "txt", "cls")  # suffixes of members that are carried along


class _MemberEntry(NamedTuple):
    """A member as its headers have it; ``wrong`` says why its data cannot be read."""

    name: str
    offset: int
    size: int
    kind: bytes = tarfile.REGTYPE
    wrong: str | None = None


class Tar:
    """A tar that is open; see ``container.Container``."""

    unit = 1

    def __init__(self, file: RandomFile) -> None:
        self._file = file

    def members(self, asked: ContainerOptions) -> Iterator[Member]:
        """Yield the videos in their order, those of one key once its last member was seen."""
        key, videos, carried = "", list[Member](), dict[str, UserValue]()
        for entry in self._entries():
            name = entry.name.removeprefix("./")
            if _key(name) != key:
                yield from _with_carried(videos, carried)
                key, videos, carried = _key(name), [], {}
            if suffix_of(name) in VIDEO_SUFFIXES or entry.kind == _UNKNOWN:
                videos.append(_video(entry, name))
            elif (kind := name.rpartition("/")[2].partition(".")[2]) in _CARRIED and entry.kind in _FILES:
                carried[kind] = None if entry.wrong else self._carried(entry, kind)
        yield from _with_carried(videos, carried)

    def span(self, member: Member) -> tuple[int, int]:
        return member.offset - _BLOCK, member.offset + (member.size or 0)

    def read(self, member: Member) -> Iterator[bytes]:
        """Yield a member's bytes. Raises VideoFault("io") where the tar is another one now."""
        place, end = self.span(member)
        header = _parsed(self._file.read(place, place + _BLOCK))
        huge = (member.size or 0) >= _STATED  # a header has no room for such a size
        if header is None or (header.size != member.size and not huge) or end > self._file.size:
            raise VideoFault("io", f"{self._file.uri} has changed since it was indexed; run the same command again")
        for start in range(member.offset, end, _PIECE):
            piece = self._file.read(start, min(start + _PIECE, end))
            if not piece:
                raise VideoFault("io", f"{self._file.uri} ends before the member does; run the same command again")
            yield piece

    def _carried(self, entry: _MemberEntry, kind: str) -> UserValue:
        """Return what a .json, .txt or .cls member holds; None of one that is too large to be carried."""
        if entry.size > _MOST_CARRIED:
            return None
        text = self._file.read(entry.offset, entry.offset + entry.size).decode("utf-8", "backslashreplace")
        if kind == "txt":
            return text
        try:
            value: UserValue = json.loads(text)
            return value
        except (ValueError, RecursionError):
            return text.strip()

    def _entries(self) -> Iterator[_MemberEntry]:
        """Yield the members by their headers. What cannot be understood is an entry named by its place, "@512"."""
        place, size, cut = 0, self._file.size, False
        extended = _Extended()
        while place < size:
            block = self._file.read(place, place + _BLOCK)
            if len(block) == _BLOCK and not any(block):
                return  # the mark of the end
            header = _parsed(block)
            if header is None:
                what = "the tar is cut off in a header" if len(block) < _BLOCK else "no header where one belongs"
                yield _MemberEntry(f"@{place}", place, 0, _UNKNOWN, fault("corrupt", what))
                place, extended, cut = self._next_header(place + _BLOCK), _Extended(), True
            elif header.type in _EXTENDED:
                extended.take(header, self._file, place + _BLOCK)
                place += _BLOCK + _padded(header.size)
            else:
                entry = self._entry(block, header, place + _BLOCK, extended)
                yield entry
                place, extended = entry.offset + _padded(entry.size), _Extended()
                cut = entry.offset + entry.size > size
        if not cut:
            yield _MemberEntry(
                f"@{size}", size, 0, _UNKNOWN, fault("corrupt", "the tar has no end: members may be missing")
            )

    def _entry(self, block: bytes, header: tarfile.TarInfo, data: int, extended: _Extended) -> _MemberEntry:
        """Return the member of a header ``block`` whose data begins at ``data``, or behind more headers."""
        wrong, told = extended.wrong, extended.told
        if header.type == tarfile.GNUTYPE_SPARSE or any(word.startswith("GNU.sparse.") for word in told):
            wrong = wrong or fault("unsupported", "a sparse member is not read; pack the tar without --sparse")
            more = block[482:483] if header.type == tarfile.GNUTYPE_SPARSE else b""
            while more.strip(b"\0"):
                more = self._file.read(data, data + _BLOCK)[504:505]
                data += _BLOCK
        stated = told.get("size", "")
        size = int(stated) if stated.isdecimal() and len(stated) < 20 else header.size
        size = 0 if header.type in _WITHOUT_DATA else size
        if size != header.size and header.type in _FILES and size < _STATED:
            wrong = wrong or fault("corrupt", "its two headers state different sizes")
        if (missing := data + size - self._file.size) > 0:
            wrong = fault("corrupt", f"the tar is cut off: {missing:,} bytes of this member are missing")
        return _MemberEntry(told.get("path") or extended.name or header.name, data, size, header.type, wrong)

    def _next_header(self, place: int) -> int:
        """Return the place of the next header behind a broken one, or the end of the file."""
        end = self._file.size
        for start in range(place, min(place + _RESYNC, end), _BLOCK):
            block = self._file.read(start, start + _BLOCK)
            if block[257:262] == b"ustar" and _parsed(block) is not None:
                return start
        return end


class _Extended:
    """The facts about a member that the headers in front of its own give."""

    def __init__(self) -> None:
        self.name, self.told = "", dict[str, str]()
        self.wrong: str | None = None

    def take(self, header: tarfile.TarInfo, file: RandomFile, data: int) -> None:
        """Take in a header whose data begins at ``data``; one that is absurdly long is left unread."""
        if header.size > _MOST_HEADER:
            self.wrong = fault("unsupported", f"its extended header has {header.size:,} bytes; pack the tar anew")
        elif header.type == _LONG_NAME:
            name = file.read(data, data + header.size).partition(b"\0")[0]
            self.name = name.decode("utf-8", "surrogateescape")
        elif header.type in _PAX:
            self.told = _pax(file.read(data, data + header.size))


def _parsed(block: bytes) -> tarfile.TarInfo | None:
    """Parse a header; None where it is none."""
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return None
    return header if header.size >= 0 else None


def _padded(size: int) -> int:
    """Return the bytes that ``size`` bytes take in a tar, whose blocks are filled up."""
    return -(-size // _BLOCK) * _BLOCK


def _pax(data: bytes) -> dict[str, str]:
    """Return the records "LENGTH KEY=VALUE" of an extended header, as far as they are well formed."""
    found, place = dict[str, str](), 0
    while space := data.find(b" ", place, place + 20) + 1:
        length = data[place : space - 1]
        if not length.isdigit() or int(length) < 5:
            break
        word, _, value = data[space : place + int(length) - 1].partition(b"=")
        found[word.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        place += int(length)
    return found


def _key(name: str) -> str:
    """Return what WebDataset takes for the key of a sample: the name up to the first dot behind its folder."""
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"


def _video(entry: _MemberEntry, name: str) -> Member:
    """Return the member of a video, with what is wrong with it."""
    wrong = entry.wrong
    if entry.kind not in _FILES and not wrong:
        wrong = fault("policy", "the member is a link, a device or no file; pack the file itself")
    return Member(name, entry.offset, entry.size, fault=wrong)


def _with_carried(videos: list[Member], carried: dict[str, UserValue]) -> Iterator[Member]:
    """Yield the videos of one key, each with the same carried members as JSON."""
    text = carried_json(carried) if carried else None
    yield from (video._replace(carried=text) for video in videos)


_HEADER: Final = struct.Struct("<4s5H3L2H")  # of a member: signature, version, flags, method, ..., two lengths
_SIGNATURE = b"PK\x03\x04"  # the beginning of a member's header
_LEAST = 2**12  # bytes that are read at once behind the expected end of a member
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # compression that is understood


class Zip:
    """A zip that is open; see ``container.Container``. The offset of a member is that of its header."""

    unit = 1

    def __init__(self, file: RandomFile) -> None:
        self._file = file

    def members(self, asked: ContainerOptions) -> Iterator[Member]:
        """Yield the videos that the directory at the end lists. Raises OSError where there is none."""
        try:
            listed = zipfile.ZipFile(SeekableFile(self._file)).infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
            yield Member("@0", 0, fault=fault("corrupt", f"the directory of the zip cannot be read: {error}"))
            return
        for info in listed:
            if suffix_of(info.filename) not in VIDEO_SUFFIXES or info.is_dir():  # which fails of an empty name
                continue
            able = not info.flag_bits & 1 and info.compress_type in _METHODS
            wrong = None if able else fault("unsupported", "the member is encrypted or not deflated; use zip -0")
            yield Member(info.filename, info.header_offset, info.file_size, fault=wrong)

    def span(self, member: Member) -> tuple[int, int]:
        # The name and extra fields before the data are of any length; a deflated member has fewer bytes than this.
        return member.offset, member.offset + (member.size or 0) + _LEAST

    def read(self, member: Member) -> Iterator[bytes]:
        """Yield a member's bytes. Raises VideoFault where the zip is another one now, or the data is damaged."""
        header = self._file.read(member.offset, member.offset + _HEADER.size)
        if len(header) < _HEADER.size or header[:4] != _SIGNATURE:
            raise VideoFault("io", f"{self._file.uri} has changed since it was indexed; run the same command again")
        _, _, _, method, *_, name_length, extra_length = _HEADER.unpack(header)
        place = member.offset + _HEADER.size + name_length + extra_length
        size = member.size or 0
        left = zlib.decompressobj(-15) if method == zipfile.ZIP_DEFLATED else None
        expected = self.span(member)[1]
        while size > 0:
            # A deflated member tells its end itself, seldom behind the one that is expected.
            most = max(expected - place, _LEAST) if left else size
            raw = b"" if left and left.unconsumed_tail else self._file.read(place, place + min(_PIECE, most))
            place += len(raw)
            try:
                piece = left.decompress(left.unconsumed_tail + raw, _PIECE) if left else raw
            except zlib.error as error:
                raise VideoFault("corrupt", f"the zip's member is damaged: {error}") from error
            if not piece and (not raw or (left and left.eof)):
                raise VideoFault("corrupt", f"the zip's member ends {size:,} bytes too early")
            size -= len(piece)
            if size < 0:
                raise VideoFault("corrupt", "the zip's member has more bytes than the zip states")
            yield piece
