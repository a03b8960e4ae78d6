"""The location of a video's bytes, and the uri that names it."""

from __future__ import annotations

from typing import NamedTuple


def make_uri(archive: str, member: str) -> str:
    """Return the uri of a member, which ``Location.parse`` reads. An index may have millions of them."""
    return f"{archive}#{member}"


class Location(NamedTuple):
    """The location of a video's bytes: a file of its own, or a member of an archive.

    Attributes:
        file: the path or address of the file or archive. The name of an archive has no "#".
        member: the name of the member; None for a file of its own.
        offset: the position of the member: a byte of an archive or a row of a table.
        size: bytes; None if unknown.
        mark: the ``mark_key`` of the content; None if unknown.
    """

    file: str
    member: str | None = None
    offset: int = 0
    size: int | None = None
    mark: int | None = None

    @classmethod
    def parse(cls, uri: str, offset: int | None, size: int | None = None, mark: int | None = None) -> Location:
        """Return the location that a ``uri`` names.

        Args:
            uri: the ``uri`` of a Location. The name of a file may have a "#" too.
            offset: the position of a member; None for a file of its own.
        """
        if offset is None:
            return cls(uri, size=size, mark=mark)
        archive, _, member = uri.partition("#")
        return cls(archive, member, offset, size, mark)

    @property
    def uri(self) -> str:
        """The uri as users see it: the file, or ARCHIVE#MEMBER."""
        return self.file if self.member is None else make_uri(self.file, self.member)
