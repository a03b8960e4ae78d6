"""Tars and zips as archives of videos.

The index of a tar is made from its headers and small carried members, that of a zip from its directory.
"""

from __future__ import annotations

import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from pipeline.errors import VideoFault
from pipeline.inputs.archive import Archive, ArchiveOptions, Member, RandomFile, SeekableFile, format_fault
from pipeline.inputs.left_out import APPLE_DOUBLE, OTHER_FILES, LeftOut, is_apple_double
from pipeline.inputs.listings import VIDEO_SUFFIXES, accept_or_count_file, find_suffix
from pipeline.inputs.tables import UserValue, parse_json, serialize_carried
from pipeline.keys import hash_sample, list_sample_spans
from pipeline.storage.location import Location

_BLOCK: Final = tarfile.BLOCKSIZE
_MAX_HEADER_BYTES = 2**20  # bytes of an extended header; real ones have a few hundred
_MAX_CARRIED_BYTES = 2**16  # bytes of a carried member
_MAX_RESYNC_BYTES = 2**28  # bytes after a broken header that are searched for the next one
_MAX_RECORD_BYTES = 2**14  # a tar is padded to a multiple of its record size, by default 20 blocks
_PIECE_BYTES = 2**20  # bytes of a video that are read at once
_MIN_PAX_SIZE = 2**33  # sizes from here on are stored in an extended header
_LONG_NAME, _PAX = b"L", (b"x", b"X")
_EXTENDED = (_LONG_NAME, b"K", *_PAX, b"g")  # kinds of headers that describe the next member
_UNKNOWN = b"?"  # the kind of an entry for a place without a member
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes
_CARRIED_SUFFIXES = (".json", ".txt", ".cls")  # suffixes of members that are carried along
_NO_FILE = "the member is a link, a device or no file; pack the file itself"
_INFO = ".info"  # before .json in file names of yt-dlp


class _MemberEntry(NamedTuple):
    """A member as its headers describe it, with the ``offset`` of its data.

    ``wrong`` is its fault, or None.
    """

    name: str
    offset: int
    size: int
    kind: bytes = tarfile.REGTYPE
    wrong: str | None = None


class Tar(Archive):
    """An open tar."""

    def __init__(self, file: RandomFile) -> None:
        self._file = file
        self._left_out = LeftOut()
        self._sidecars = _Sidecars()

    def members(self, options: ArchiveOptions) -> Iterator[Member]:
        """Yield the videos in order; a break in the tar is a member with a fault, named by its offset ("@512").

        Carried members (.json, .txt and .cls), of which those of up to 64 KiB are read, and left-out members are
        collected for ``pair_sidecars``. A link, device or folder with the suffix of a video has a fault; others are
        ignored, and so are the ``options``.
        """
        self._left_out = LeftOut()
        self._sidecars = _Sidecars()
        for entry in self._iter_entries():
            name = entry.name.removeprefix("./")
            if is_apple_double(name):
                self._left_out.add(APPLE_DOUBLE, name)
            elif find_suffix(name) in VIDEO_SUFFIXES or entry.kind == _UNKNOWN:
                wrong = entry.wrong or (None if entry.kind in _FILES else format_fault("policy", _NO_FILE))
                yield Member(name, entry.offset, entry.size, fault=wrong)
            elif entry.kind not in _FILES:
                continue
            elif (suffix := find_suffix(name)) in _CARRIED_SUFFIXES:
                if entry.size > _MAX_CARRIED_BYTES:
                    self._left_out.add(f"{suffix[1:]} of more than {_MAX_CARRIED_BYTES >> 10} KiB", name)
                self._sidecars.add(name, None if entry.wrong else self._read_carried(entry, suffix))
            else:
                self._left_out.add(OTHER_FILES, name)

    def pair_sidecars(self, videos: Sequence[Member]) -> tuple[list[Member], LeftOut]:
        sidecars, unpaired_names = self._sidecars.pair_with_videos([video.name for video in videos])
        left_out = LeftOut(self._left_out.as_record())
        for name in unpaired_names:
            left_out.add(f"{find_suffix(name)[1:]} without a video", name)
        return [video._replace(carried=text) for video, text in zip(videos, sidecars, strict=True)], left_out

    def span(self, location: Location) -> tuple[int, int]:
        return location.offset - _BLOCK, location.offset + (location.size or 0)

    def read(self, location: Location) -> Iterator[bytes]:
        """Yield a member's bytes in pieces of at most 1 MiB.

        Raises:
            VideoFault: "io" if the tar has changed: it is too short, or no header of this size (compared below 8 GiB)
                is before the data.
        """
        offset, end = self.span(location)
        header = _parse_header(self._file.read(offset, offset + _BLOCK))
        huge = (location.size or 0) >= _MIN_PAX_SIZE  # the size field of a header is too small for it
        if header is None or (header.size != location.size and not huge) or end > self._file.size:
            raise VideoFault("io", f"{self._file.uri} has changed since it was indexed; rerun the command")
        for start in range(location.offset, end, _PIECE_BYTES):
            piece = self._file.read(start, min(start + _PIECE_BYTES, end))
            if not piece:
                raise VideoFault("io", f"{self._file.uri} ends before the member does; rerun the command")
            yield piece

    def sample(self, location: Location) -> int:
        size = location.size or 0
        spans = [(location.offset + start, location.offset + end) for start, end in list_sample_spans(size)]
        return hash_sample(size, [self._file.read(*span) for span in spans])

    def _read_carried(self, entry: _MemberEntry, suffix: str) -> UserValue:
        """Return the content of a .json, .txt or .cls member, parsed unless it is a .txt; None if it is over 64 KiB.

        Content that ``parse_json`` refuses is returned as stripped text.
        """
        if entry.size > _MAX_CARRIED_BYTES:
            return None
        text = self._file.read(entry.offset, entry.offset + entry.size).decode("utf-8", "backslashreplace")
        if suffix == ".txt":
            return text
        try:
            return parse_json(text)
        except ValueError:
            return text.strip()

    def _iter_entries(self) -> Iterator[_MemberEntry]:
        """Yield the members as their headers describe them, up to the end mark of the tar.

        An invalid header becomes a faulty entry named by its offset ("@512"), after which reading continues at the next
        valid header. A missing end mark, and an end mark that another tar follows, also become an entry.
        """
        offset = 0
        size = self._file.size
        cut = False
        extended_header = _ExtendedHeader()
        while offset < size:
            block = self._file.read(offset, offset + _BLOCK)
            if len(block) == _BLOCK and not any(block):  # the end mark
                if self._has_header_after(offset):
                    problem = "another tar lies behind the end of this one: unpack it with tar -i, and pack it again"
                    yield _MemberEntry(f"@{offset}", offset, 0, _UNKNOWN, format_fault("corrupt", problem))
                return
            header = _parse_header(block)
            if header is None:
                problem = "the tar is cut off in a header" if len(block) < _BLOCK else "a header is damaged or missing"
                yield _MemberEntry(f"@{offset}", offset, 0, _UNKNOWN, format_fault("corrupt", problem))
                offset, extended_header, cut = self._find_next_header(offset + _BLOCK), _ExtendedHeader(), True
            elif header.type in _EXTENDED:
                extended_header.take(header, self._file, offset + _BLOCK)
                offset += _BLOCK + _pad_size(header.size)
            else:
                entry = self._make_entry(block, header, offset + _BLOCK, extended_header)
                yield entry
                offset = entry.offset + _pad_size(entry.size)
                extended_header = _ExtendedHeader()
                cut = entry.offset + entry.size > size
        if not cut:
            yield _MemberEntry(
                f"@{size}", size, 0, _UNKNOWN, format_fault("corrupt", "the tar has no end: members may be missing")
            )

    def _make_entry(
        self, block: bytes, header: tarfile.TarInfo, data: int, extended_header: _ExtendedHeader
    ) -> _MemberEntry:
        """Return the member of a header, with a fault if it is sparse, cut off, or has two sizes.

        The name and size of extended headers take precedence. A link, device, folder or pipe has size 0.

        Args:
            block: the bytes of the header.
            data: the offset after the header.
        """
        wrong = extended_header.wrong
        records = extended_header.records
        if header.type == tarfile.GNUTYPE_SPARSE or any(word.startswith("GNU.sparse.") for word in records):
            wrong = wrong or format_fault("unsupported", "a sparse member is not read; pack the tar without --sparse")
            more = block[482:483] if header.type == tarfile.GNUTYPE_SPARSE else b""
            while more.strip(b"\0"):
                more = self._file.read(data, data + _BLOCK)[504:505]
                data += _BLOCK
        size_text = records.get("size", "")
        size = int(size_text) if size_text.isdecimal() and len(size_text) < 20 else header.size
        size = 0 if header.type in _WITHOUT_DATA else size
        if size != header.size and header.type in _FILES and size < _MIN_PAX_SIZE:
            wrong = wrong or format_fault("corrupt", "its two headers state different sizes")
        if (n_missing := data + size - self._file.size) > 0:
            wrong = format_fault("corrupt", f"the tar is cut off: {n_missing:,} bytes of this member are missing")
        return _MemberEntry(records.get("path") or extended_header.name or header.name, data, size, header.type, wrong)

    def _has_header_after(self, end: int) -> bool:
        """Return True if a valid ustar header is within 16 KiB after the end mark at ``end``."""
        padding = self._file.read(end, end + _MAX_RECORD_BYTES)
        blocks = (padding[start : start + _BLOCK] for start in range(0, len(padding), _BLOCK))
        return any(block[257:262] == b"ustar" and _parse_header(block) is not None for block in blocks)

    def _find_next_header(self, offset: int) -> int:
        """Return the offset of the next valid ustar header, ``offset`` or a multiple of 512 bytes after it.

        If there is none within 256 MiB, the size of the tar is returned.
        """
        end = self._file.size
        for start in range(offset, min(offset + _MAX_RESYNC_BYTES, end), _BLOCK):
            block = self._file.read(start, start + _BLOCK)
            if block[257:262] == b"ustar" and _parse_header(block) is not None:
                return start
        return end


class _ExtendedHeader:
    """What the extended headers before a member's own header say; ``wrong`` is a fault."""

    def __init__(self) -> None:
        self.name = ""
        self.records = dict[str, str]()
        self.wrong: str | None = None

    def take(self, header: tarfile.TarInfo, file: RandomFile, data: int) -> None:
        """Read an extended header if it may state the name or size; its data starts at ``data``.

        A header of more than 1 MiB is not read, and sets ``wrong``.
        """
        if header.size > _MAX_HEADER_BYTES:
            self.wrong = format_fault(
                "unsupported", f"its extended header has {header.size:,} bytes; pack the tar again"
            )
        elif header.type == _LONG_NAME:
            name = file.read(data, data + header.size).partition(b"\0")[0]
            self.name = name.decode("utf-8", "surrogateescape")
        elif header.type in _PAX:
            self.records = _parse_pax(file.read(data, data + header.size))


def _parse_header(block: bytes) -> tarfile.TarInfo | None:
    """Parse a header; return None if it is not valid."""
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return None
    return header if header.size >= 0 else None


def _pad_size(size: int) -> int:
    """Round a size up to whole blocks of 512 bytes."""
    return -(-size // _BLOCK) * _BLOCK


def _parse_pax(data: bytes) -> dict[str, str]:
    """Return the records "LENGTH KEY=VALUE" of an extended header, up to the first malformed one."""
    records = dict[str, str]()
    offset = 0
    while space := data.find(b" ", offset, offset + 20) + 1:
        length = data[offset : space - 1]
        if not length.isdigit() or int(length) < 5:
            break
        word, _, value = data[space : offset + int(length) - 1].partition(b"=")
        records[word.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        offset += int(length)
    return records


def _get_sample_key(name: str) -> str:
    """Return WebDataset's key of a sample: the path up to the first dot of the file name."""
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"


class _Sidecars:
    """The members of a tar that are carried with its videos, by name.

    A video gets the members with its own stem: a.b.json goes with a.b.mp4, or a.b.info.json if there is no a.b.json.
    For a suffix without these, it gets that of its WebDataset key, the name up to the first dot: a.json goes with
    a.left.mp4 and a.right.mp4, unless a.mp4 is in the tar too.
    """

    def __init__(self) -> None:
        self._values = dict[tuple[str, str], tuple[str, UserValue]]()  # (stem, suffix) -> name and value

    def add(self, name: str, value: UserValue) -> None:
        """Add a member; of several with the same name, the last counts."""
        self._values[_remove_suffix(name), find_suffix(name)] = name, value

    def pair_with_videos(self, videos: Sequence[str]) -> tuple[list[str | None], list[str]]:
        """Return the carried members of each of the ``videos`` as JSON, and the names of members without a video.

        The JSON maps the suffix to the content: {"json": ..., "txt": ...}, null for a member that was not read. A video
        without members has None.
        """
        stems = {_remove_suffix(name) for name in videos}
        paired_names = set[str]()
        texts = list[str | None]()
        for video in videos:
            stem = _remove_suffix(video)
            key = _get_sample_key(video)
            values = dict[str, UserValue]()
            for suffix in _CARRIED_SUFFIXES:
                keys = [(stem, suffix)]
                if suffix == ".json":
                    keys.append((f"{stem}{_INFO}", suffix))
                if key not in stems:
                    keys.append((key, suffix))
                if (sidecar := next((self._values[each] for each in keys if each in self._values), None)) is not None:
                    name, values[suffix[1:]] = sidecar
                    paired_names.add(name)
            texts.append(serialize_carried(values) if values else None)
        return texts, [name for name, _ in self._values.values() if name not in paired_names]


def _remove_suffix(name: str) -> str:
    """Return a name without its suffix."""
    return name[: -len(suffix)] if (suffix := find_suffix(name)) else name


# The header of a member: signature, version, flags, method, time, date, CRC-32, two sizes, two lengths.
_HEADER: Final = struct.Struct("<4s5H3L2H")
_SIGNATURE = b"PK\x03\x04"  # the beginning of a member's header
# An entry of the directory at the end: signature, flags, and lengths of the name, extra fields and comment.
_ENTRY: Final = struct.Struct("<4s4xH18x3H12x")
_ENTRY_SIGNATURE, _FLAGS_OFFSET = b"PK\x01\x02", 8
_MIN_READ_BYTES = 2**12  # bytes that are read at a time after the expected end of a member
_FIELD: Final = struct.Struct("<HH")  # an extra field of a member: kind, length
_UTF8_FLAG, _DESCRIPTOR_FLAG, _UNICODE_PATH = 0x800, 8, 0x7075
_DOS = 0  # the system of old Windows tools, some of which write backslashes between folders
_UNIX = 3  # the system whose file modes are in a member's attributes
_ZIP64 = 0xFFFFFFFF  # the size is stored elsewhere
_ENCODING = "name their encoding, e.g. --zip-encoding gbk"
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # supported compression


class Zip(Archive):
    """An open zip. The offset of a member is that of its header."""

    def __init__(self, file: RandomFile) -> None:
        self._file = file
        self._left_out = LeftOut()

    def members(self, options: ArchiveOptions) -> Iterator[Member]:
        """Yield the videos in the order of the directory at the end of the zip, and count other files as left out.

        A member that is encrypted, a link or device, or neither stored nor deflated has a fault. A zip without a valid
        directory gives a single member "@0" with a fault. This sets ``note`` if the encoding of a name is unknown.
        ``zip_encoding`` is the only option that is used.
        """
        self._left_out = LeftOut()
        try:
            entries = _list_entries(self._file)
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
            yield Member("@0", 0, fault=format_fault("corrupt", f"the directory of the zip cannot be read: {error}"))
            return
        for info in entries:
            name, exact, wrong = _decode_name(info, options.zip_encoding)
            shown_name = name
            if info.create_system == _DOS and "/" not in name:  # the rule of Info-ZIP's unzip
                shown_name = name.replace("\\", "/")
            if shown_name.endswith("/"):
                continue
            if not accept_or_count_file(shown_name, VIDEO_SUFFIXES, self._left_out):
                continue
            if info.flag_bits & 1 or info.compress_type not in _METHODS:
                wrong = format_fault("unsupported", "the member is encrypted or not deflated; use zip -0")
            kind = stat.S_IFMT(info.external_attr >> 16) if info.create_system == _UNIX else 0
            if kind not in (0, stat.S_IFREG):  # 0: written by a tool without modes
                wrong = format_fault("policy", _NO_FILE)
            if not exact and wrong is None:
                self.note = f"names that are not UTF-8 are read as cp437, e.g. {name}; if that is garbled, {_ENCODING}"
            mark = f"crc-{info.CRC:08x}"
            member = Member(name, info.header_offset, info.file_size, fault=wrong, mark=mark)
            yield member if shown_name == name else member._replace(shown_name=shown_name)

    def pair_sidecars(self, videos: Sequence[Member]) -> tuple[list[Member], LeftOut]:
        return [*videos], self._left_out

    def span(self, location: Location) -> tuple[int, int]:
        # The name and extra fields before the data have any length. A deflated member has fewer bytes than this.
        return location.offset, location.offset + (location.size or 0) + _MIN_READ_BYTES

    def read(self, location: Location) -> Iterator[bytes]:
        """Yield a member's bytes, decompressed, in pieces of at most 1 MiB.

        Raises:
            VideoFault: "io" if the header at the offset is missing or has another size; "corrupt" if the data is
                damaged, has another size than indexed, or another CRC-32 than the header states, which is not checked
                if the size follows the data.
        """
        size = location.size or 0
        header = self._file.read(location.offset, location.offset + _HEADER.size).ljust(_HEADER.size)
        signature, _, flags, method, _, _, crc, _, stated_size, name_length, extra_length = _HEADER.unpack(header)
        has_sizes = stated_size > 0 and not flags & _DESCRIPTOR_FLAG  # otherwise they are stored after the data
        if signature != _SIGNATURE or (has_sizes and stated_size not in (size, _ZIP64)):
            raise VideoFault("io", f"{self._file.uri} has changed since it was indexed; rerun the command")
        offset = location.offset + _HEADER.size + name_length + extra_length
        crc_read = 0
        inflater = zlib.decompressobj(-15) if method == zipfile.ZIP_DEFLATED else None
        expected_end = self.span(location)[1]
        while size > 0:
            # A deflated member marks its own end, which is seldom after the expected one.
            max_bytes = max(expected_end - offset, _MIN_READ_BYTES) if inflater else size
            raw = (
                b""
                if inflater and inflater.unconsumed_tail
                else self._file.read(offset, offset + min(_PIECE_BYTES, max_bytes))
            )
            offset += len(raw)
            try:
                piece = inflater.decompress(inflater.unconsumed_tail + raw, _PIECE_BYTES) if inflater else raw
            except zlib.error as error:
                raise VideoFault("corrupt", f"the zip's member is damaged: {error}") from error
            if not piece and (not raw or (inflater and inflater.eof)):
                raise VideoFault("corrupt", f"the zip's member ends {size:,} bytes too early")
            size -= len(piece)
            if size < 0:
                raise VideoFault("corrupt", "the zip's member has more bytes than the zip states")
            crc_read = zlib.crc32(piece, crc_read)
            if not size and has_sizes and crc_read != crc:
                raise VideoFault("corrupt", "the zip's member is damaged: it has another CRC-32 than the zip states")
            yield piece


def _list_entries(file: RandomFile) -> list[zipfile.ZipInfo]:
    """Return the entries of a zip's directory, without UTF-8 flags if one of them is wrong.

    Raises:
        ValueError, BadZipFile, struct.error, NotImplementedError: the directory is invalid or unsupported.
    """
    try:
        return zipfile.ZipFile(SeekableFile(file)).infolist()
    except UnicodeDecodeError:
        return zipfile.ZipFile(_WithoutUtf8Flags(file)).infolist()


class _WithoutUtf8Flags(SeekableFile):
    """A zip file whose directory entries, when read, have no UTF-8 flag."""

    def read(self, size: int = -1) -> bytes:
        """Read bytes, and clear the UTF-8 flag of the directory entries with which they begin."""
        data = bytearray(super().read(size))
        offset = 0
        while offset + _ENTRY.size <= len(data):
            signature, flags, *lengths = _ENTRY.unpack_from(data, offset)
            if signature != _ENTRY_SIGNATURE:
                break
            data[offset + _FLAGS_OFFSET : offset + _FLAGS_OFFSET + 2] = (flags & ~_UTF8_FLAG).to_bytes(2, "little")
            offset += _ENTRY.size + sum(lengths)
        return bytes(data)


def _decode_name(info: zipfile.ZipInfo, encoding: str | None) -> tuple[str, bool, str | None]:
    """Return the name of a member, True if it is known how to decode it, and its fault or None.

    That is known if the name is ASCII, has the UTF-8 flag or a Unicode field of Info-ZIP, is valid UTF-8, or is valid
    in ``encoding`` (--zip-encoding). Other names are decoded by cp437; they have a fault if ``encoding`` is given.
    """
    name = info.orig_filename
    if info.flag_bits & _UTF8_FLAG or name.isascii():
        return name, True, None
    raw = name.encode("cp437")  # zipfile decoded it so
    if (unicode_name := _find_unicode_name(info.extra, raw)) is not None:
        return unicode_name, True, None
    try:
        return raw.decode(), True, None
    except UnicodeDecodeError:
        if encoding is None:
            return name, False, None
    try:
        return raw.decode(encoding), True, None
    except UnicodeDecodeError:
        return name, False, format_fault("unsupported", f"the member's name is not valid {encoding} (--zip-encoding)")


def _find_unicode_name(extra: bytes, raw: bytes) -> str | None:
    """Return the name in the Unicode path field 0x7075 of ``extra``, or None.

    None is returned if there is no such field, it is not UTF-8, or its CRC-32 is not that of ``raw``.
    """
    while len(extra) >= _FIELD.size:
        kind, length = _FIELD.unpack_from(extra)
        data, extra = extra[_FIELD.size : _FIELD.size + length], extra[_FIELD.size + length :]
        if kind == _UNICODE_PATH and len(data) > 5 and data[0] == 1:
            if int.from_bytes(data[1:5], "little") != zlib.crc32(raw):
                return None  # the member was renamed by a tool that does not know the field
            try:
                return data[5:].decode()
            except UnicodeDecodeError:
                return None
    return None
