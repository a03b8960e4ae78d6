"""The forms of archives and tables by the suffixes of their names, and the bytes of their videos."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

from pipeline.errors import VideoFault
from pipeline.inputs.archive import Archive, ArchiveOptions, Member, RandomFile, merge_spans, open_archive
from pipeline.inputs.columns import Table
from pipeline.inputs.listings import find_suffix
from pipeline.inputs.tar_and_zip import Tar, Zip
from pipeline.keys import mark_key
from pipeline.rows import VideoRow
from pipeline.storage.s3 import Objects

#: To add a form, write a subclass of Archive as those in ``tar_and_zip`` and add a line here.
FORMS: dict[str, Callable[[RandomFile], Archive]] = {".tar": Tar, ".zip": Zip, ".parquet": Table, ".arrow": Table}
#: The forms that need --column to name the column of videos.
OF_COLUMNS = frozenset({".parquet", ".arrow"})


class ArchiveMember(NamedTuple):
    """A video in an archive or table: the file, and the member in it."""

    shard: str
    member: Member


def find_member(uri: str, offset: int | None, size: int | None) -> ArchiveMember | None:
    """Return the archive and member of a video; None for a file of its own, which has no offset."""
    shard, _, name = uri.partition("#")
    return None if offset is None else ArchiveMember(shard, Member(name, offset, size))


def make_fetch(
    spot: ArchiveMember | None, objects: Objects, mark: int | None = None
) -> Callable[[Callable[[bytes], object], int], int] | None:
    """Return a function that passes the bytes of a video to a writer (``OpenArchives.fetch``); None without a member.

    ``mark`` is as ``OpenArchives.find_again`` takes it.
    """
    if spot is None:
        return None

    def fetch(write: Callable[[bytes], object], limit: int) -> int:
        with OpenArchives(objects, [spot]) as opened:
            return opened.fetch(spot if mark is None else opened.find_again(spot, mark), write, limit)

    return fetch


def fetch_again(row: VideoRow, objects: Objects) -> Callable[[Callable[[bytes], object], int], int] | None:
    """Return ``make_fetch`` for the video of a row of the videos table, at its current position in the archive."""
    spot = find_member(row["uri"], row["source_offset"], row["source_size"])
    return make_fetch(spot, objects, row.get("source_mark"))


class OpenArchives(AbstractContextManager["OpenArchives"]):
    """The archives of some videos; one archive is open at a time. For one thread. Close it after use.

    Args:
        spots: the videos that will be fetched, in this order: neighbours share a request.
    """

    def __init__(self, objects: Objects, spots: Iterable[ArchiveMember | None] = ()) -> None:
        self._objects = objects
        self._spots = [spot for spot in spots if spot is not None]
        self._open: tuple[str, RandomFile, Archive] | None = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the open archive. May be called twice."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def fetch(self, spot: ArchiveMember, write: Callable[[bytes], object], limit: int) -> int:
        """Pass the bytes of a video to ``write``; return their number.

        Raises VideoFault, or OSError, with EFBIG for more than ``limit`` bytes.
        """
        n_done = 0
        if (size := spot.member.size or 0) > limit:
            raise OSError(errno.EFBIG, f"the member has {size} bytes, more than the {limit} that are allowed")
        for piece in self._open_archive(spot.shard).read(spot.member):
            n_done += len(piece)
            if n_done > limit:
                raise OSError(errno.EFBIG, f"the member has more than the {limit} bytes that are allowed")
            write(piece)
        return n_done

    def find_again(self, spot: ArchiveMember, mark: int) -> ArchiveMember:
        """Return the current member of a video: the same if its archive still has this ``mark_key``.

        In a repacked archive it is found by its name; ``spot`` is returned if there is none. Raises as ``fetch``.
        """
        archive = self._open_archive(spot.shard)
        assert self._open is not None
        if mark_key(self._open[1].mark) == mark:
            return spot
        members = archive.members(ArchiveOptions())
        return ArchiveMember(
            spot.shard, next((candidate for candidate in members if candidate.name == spot.member.name), spot.member)
        )

    def sample(self, spot: ArchiveMember) -> int | None:
        """Return ``Archive.sample`` of a video. Raises OSError."""
        return self._open_archive(spot.shard).sample(spot.member)

    def _open_archive(self, shard: str) -> Archive:
        """Return the archive ``shard``; open it, and close the one before it, unless it is open already.

        Its requests are planned for the videos of this object. Raises VideoFault for an unknown suffix, or OSError.
        """
        if self._open is None or self._open[0] != shard:
            self.close()
            form = FORMS.get(find_suffix(shard))
            if form is None:
                raise VideoFault("unsupported", f"{shard}: its name ends like no archive or table ({' '.join(FORMS)})")
            file = open_archive(shard, self._objects)
            try:
                archive = form(file)
                file.plan(merge_spans(archive.span(spot.member) for spot in self._spots if spot.shard == shard))
            except BaseException:
                file.close()
                raise
            self._open = shard, file, archive
        return self._open[2]
