"""The forms of archives and tables by file suffix, and access to the bytes of their videos."""

from __future__ import annotations

import errno
import shlex
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from pipeline.errors import VideoFault
from pipeline.inputs.archive import Archive, ArchiveOptions, RandomFile, merge_spans, open_archive
from pipeline.inputs.columns import Table
from pipeline.inputs.listings import find_suffix
from pipeline.inputs.named_videos import Roots, remove_secrets
from pipeline.inputs.tar_and_zip import Tar, Zip
from pipeline.keys import hash_mark
from pipeline.rows import VideoRow
from pipeline.storage.location import Location
from pipeline.storage.s3 import Objects

#: To add a form, write a subclass of Archive like those in ``tar_and_zip`` and add a line here.
FORMS: dict[str, Callable[[RandomFile], Archive]] = {
    ".tar": Tar,
    ".zip": Zip,
    ".parquet": Table,
    ".arrow": Table,
    ".feather": Table,
}
#: The forms that are tables: they need --column to name the column of videos.
TABLE_FORMS = frozenset({".parquet", ".arrow", ".feather"})


def make_member_fetcher(
    row: VideoRow, objects: Objects, roots: Roots
) -> Callable[[Callable[[bytes], object], int], int] | None:
    """Return a function ``fetch(write, limit)`` that fetches a row's video from its archive; None for a separate file.

    ``fetch`` finds the member's current position, passes its bytes to ``write``, and returns their number. It raises
    what ``OpenArchives.fetch`` raises. Call ``make_member_fetcher`` before reading any file that a row names: whoever
    made the cache chose the address, and this user's credentials would be sent there.

    Raises:
        VideoFault: "policy" if the row's address is not below ``roots``.
    """
    location = Location.parse(row["uri"], row["source_offset"], row["source_size"], row.get("source_mark"))
    if not roots.contains(location.file):
        shown = remove_secrets(location.file) if "://" in location.file else location.file
        folder = shown.rpartition("/")[0] or "/"
        reason = "the sources that a cache names are read only below folders and prefixes that you name"
        raise VideoFault("policy", f"{reason}: for this one --video-root {shlex.quote(folder)}")
    if location.member is None:
        return None

    def fetch(write: Callable[[bytes], object], limit: int) -> int:
        with OpenArchives(objects, [location]) as opened:
            return opened.fetch(opened.relocate_member(location), write, limit)

    return fetch


class OpenArchives(AbstractContextManager["OpenArchives"]):
    """The archives of some videos, of which one is open at a time; close it after use. Not thread-safe.

    Args:
        locations: the videos that will be fetched, in this order; neighbors share a request. Separate files are
            ignored.
    """

    def __init__(self, objects: Objects, locations: Iterable[Location] = ()) -> None:
        self._objects = objects
        self._members = [location for location in locations if location.member is not None]
        self._open: tuple[str, RandomFile, Archive] | None = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the open archive. Calling this twice is allowed."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def fetch(self, location: Location, write: Callable[[bytes], object], limit: int) -> int:
        """Pass the bytes of a member to ``write``, piece by piece; return their number.

        Raises:
            VideoFault: the member is damaged, has changed, or the suffix of the archive is unknown.
            OSError: the archive cannot be read; with EFBIG if the member has more than ``limit`` bytes, of which some
                may already be written.
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

    def relocate_member(self, location: Location) -> Location:
        """Return the current location of a member, found by its name; ``location`` itself if no member has the name.

        Only its offset and size are updated. ``location`` is also returned, without listing the archive, if it has no
        mark (rows of tables), or for a tar whose mark still equals it. A zip is always listed.

        Raises:
            VideoFault: the suffix of the archive is unknown.
        """
        archive = self._open_archive(location.file)
        assert self._open is not None
        if location.mark is None or hash_mark(self._open[1].mark) == location.mark:
            return location
        members = (member for member in archive.members(ArchiveOptions()) if member.name == location.member)
        return next((location._replace(offset=member.offset, size=member.size) for member in members), location)

    def sample(self, location: Location) -> int | None:
        """Return the ``hash_sample`` of a member's bytes, or None for forms other than tar."""
        return self._open_archive(location.file).sample(location)

    def _open_archive(self, uri: str) -> Archive:
        """Return the archive at ``uri``. If another one is open, close that, open this one, and plan its requests."""
        if self._open is None or self._open[0] != uri:
            self.close()
            form = FORMS.get(find_suffix(uri))
            if form is None:
                raise VideoFault(
                    "unsupported", f"{uri}: its suffix is not that of an archive or table ({' '.join(FORMS)})"
                )
            file = open_archive(uri, self._objects)
            try:
                archive = form(file)
                file.plan(merge_spans(archive.span(member) for member in self._members if member.file == uri))
            except BaseException:
                file.close()
                raise
            self._open = uri, file, archive
        return self._open[2]
