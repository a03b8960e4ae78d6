"""Represent the location of a video's bytes and the URI that names it."""

from __future__ import annotations

from typing import NamedTuple


def make_uri(archive: str, member: str) -> str:
    """Return ARCHIVE#MEMBER, the URI of a member of an archive."""
    return f"{archive}#{member}"


class Location(NamedTuple):
    """The location of a video's bytes: a separate file, or a member of an archive.

    Attributes:
        file: the path or URI of the file or archive. The name of an archive has no "#".
        member: the name of the member; None for a separate file.
        offset: the position of the member: a byte of a tar or zip, or a row of a table.
        size: the number of bytes; None if unknown.
        mark: the ``hash_mark`` of the content; None if unknown.
    """

    file: str
    member: str | None = None
    offset: int = 0
    size: int | None = None
    mark: int | None = None

    @classmethod
    def parse(cls, uri: str, offset: int | None, size: int | None = None, mark: int | None = None) -> Location:
        """Build the location that a URI names.

        Args:
            uri: the path or URI of a file, whose name may have a "#" too, or ARCHIVE#MEMBER.
            offset: the position of the member; None says that ``uri`` is a separate file.
        """
        if offset is None:
            return cls(uri, size=size, mark=mark)
        archive, _, member = uri.partition("#")
        return cls(archive, member, offset, size, mark)

    @property
    def uri(self) -> str:
        """The URI that users see: the file, or ARCHIVE#MEMBER."""
        return self.file if self.member is None else make_uri(self.file, self.member)
