"""The forms of archives and tables by the suffixes of their names, and the bytes of their videos."""

from __future__ import annotations

import errno
import shlex
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from pipeline.errors import VideoFault
from pipeline.inputs.archive import Archive, ArchiveOptions, RandomFile, merge_spans, open_archive
from pipeline.inputs.columns import Table
from pipeline.inputs.listings import find_suffix
from pipeline.inputs.named_videos import Roots, without_secrets
from pipeline.inputs.tar_and_zip import Tar, Zip
from pipeline.keys import mark_key
from pipeline.rows import VideoRow
from pipeline.storage.location import Location
from pipeline.storage.s3 import Objects

#: To add a form, write a subclass of Archive as those in ``tar_and_zip`` and add a line here.
FORMS: dict[str, Callable[[RandomFile], Archive]] = {
    ".tar": Tar,
    ".zip": Zip,
    ".parquet": Table,
    ".arrow": Table,
    ".feather": Table,
}
#: The forms that are tables: they need --column to name the column of videos.
TABLE_FORMS = frozenset({".parquet", ".arrow", ".feather"})


def fetch_again(
    row: VideoRow, objects: Objects, roots: Roots
) -> Callable[[Callable[[bytes], object], int], int] | None:
    """Return a function that fetches the video of a row of the videos table from its archive; None for other files.

    It reads the video at its current position (``OpenArchives.find_again``).

    Call it before anything of a row is read: whoever made the cache chose the address, and this user's credentials
    would be sent there. Raises VideoFault("policy") unless it lies below ``roots``.
    """
    location = Location.parse(row["uri"], row["source_offset"], row["source_size"], row.get("source_mark"))
    if not roots.contains(location.file):
        shown = without_secrets(location.file) if "://" in location.file else location.file
        folder = shown.rpartition("/")[0] or "/"
        reason = "the sources that a cache names are read only below folders and prefixes that you name"
        raise VideoFault("policy", f"{reason}: for this one --video-root {shlex.quote(folder)}")
    if location.member is None:
        return None

    def fetch(write: Callable[[bytes], object], limit: int) -> int:
        with OpenArchives(objects, [location]) as opened:
            return opened.fetch(opened.find_again(location), write, limit)

    return fetch


class OpenArchives(AbstractContextManager["OpenArchives"]):
    """The archives of some videos; one archive is open at a time. For one thread. Close it after use.

    Args:
        locations: the videos that will be fetched, in this order: neighbors share a request. Files that are in no
            archive are ignored.
    """

    def __init__(self, objects: Objects, locations: Iterable[Location] = ()) -> None:
        self._objects = objects
        self._members = [location for location in locations if location.member is not None]
        self._open: tuple[str, RandomFile, Archive] | None = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the open archive. May be called twice."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def fetch(self, location: Location, write: Callable[[bytes], object], limit: int) -> int:
        """Pass the bytes of a member to ``write``; return their number.

        Raises VideoFault, or OSError, with EFBIG for more than ``limit`` bytes.
        """
        n_done = 0
        if (size := location.size or 0) > limit:
            raise OSError(errno.EFBIG, f"the member has {size} bytes, more than the {limit} that are allowed")
        for piece in self._open_archive(location.file).read(location):
            n_done += len(piece)
            if n_done > limit:
                raise OSError(errno.EFBIG, f"the member has more than the {limit} bytes that are allowed")
            write(piece)
        return n_done

    def find_again(self, location: Location) -> Location:
        """Return the current location of a member, found by its name; ``location`` itself if no member has the name.

        A tar with the ``mark`` of ``location`` is not listed again. A zip always is, since the mark of its members is a
        CRC-32. Without a mark, as of a table's rows, ``location`` is returned.

        Raises VideoFault for an unknown suffix, or OSError.
        """
        archive = self._open_archive(location.file)
        assert self._open is not None
        if location.mark is None or mark_key(self._open[1].mark) == location.mark:
            return location
        members = (member for member in archive.members(ArchiveOptions()) if member.name == location.member)
        return next((location._replace(offset=member.offset, size=member.size) for member in members), location)

    def sample(self, location: Location) -> int | None:
        """Return ``Archive.sample`` of a member. Raises OSError."""
        return self._open_archive(location.file).sample(location)

    def _open_archive(self, uri: str) -> Archive:
        """Return the archive at ``uri``; open it, and close the one before it, unless it is open already.

        Its requests are planned for the locations of this object. Raises VideoFault for an unknown suffix, or OSError.
        """
        if self._open is None or self._open[0] != uri:
            self.close()
            form = FORMS.get(find_suffix(uri))
            if form is None:
                raise VideoFault("unsupported", f"{uri}: its name ends like no archive or table ({' '.join(FORMS)})")
            file = open_archive(uri, self._objects)
            try:
                archive = form(file)
                file.plan(merge_spans(archive.span(member) for member in self._members if member.file == uri))
            except BaseException:
                file.close()
                raise
            self._open = uri, file, archive
        return self._open[2]
