"""Zips whose members are videos; one that is stored as it is costs no more than its bytes."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Final

from pipeline.errors import VideoFault
from pipeline.inputs.container import Asked, Member, RandomFile, SeekableFile, fault
from pipeline.inputs.listings import VIDEO_SUFFIXES, suffix_of

_HEADER: Final = struct.Struct("<4s5H3L2H")  # of a member: signature, version, flags, method, ..., two lengths
_SIGNATURE = b"PK\x03\x04"  # the beginning of a member's header
_PIECE = 2**20  # bytes that are read at once
_LEAST = 2**12  # bytes that are read at once behind the expected end of a member
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # compression that is understood


class Zip:
    """A zip that is open; see ``container.Container``. The offset of a member is that of its header."""

    unit = 1

    def __init__(self, file: RandomFile) -> None:
        self._file = file

    def members(self, asked: Asked) -> Iterator[Member]:
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
