"""The forms of archives and tables by the suffixes of their names, and the bytes of their videos."""

from __future__ import annotations

import errno
import shlex
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

from pipeline.errors import VideoFault
from pipeline.inputs.archive import Archive, ArchiveOptions, Member, RandomFile, merge_spans, open_archive
from pipeline.inputs.columns import Table
from pipeline.inputs.listings import find_suffix
from pipeline.inputs.named_videos import Roots, without_secrets
from pipeline.inputs.tar_and_zip import Tar, Zip
from pipeline.keys import mark_key
from pipeline.rows import VideoRow
from pipeline.storage.s3 import Objects

#: To add a form, write a subclass of Archive as those in ``tar_and_zip`` and add a line here.
FORMS: dict[str, Callable[[RandomFile], Archive]] = {
    ".tar": Tar,
    ".zip": Zip,
    ".parquet": Table,
    ".arrow": Table,
    ".feather": Table,
}
#: The forms that need --column to name the column of videos.
OF_COLUMNS = frozenset({".parquet", ".arrow", ".feather"})


class ArchiveMember(NamedTuple):
    """A video in an archive or table: the archive's address, and the member in it."""

    archive: str
    member: Member


def find_member(uri: str, offset: int | None, size: int | None) -> ArchiveMember | None:
    """Return the archive and member of a video; None for a file of its own, which has no offset."""
    archive, _, name = uri.partition("#")
    return None if offset is None else ArchiveMember(archive, Member(name, offset, size))


def make_fetch(
    video: ArchiveMember | None, objects: Objects, mark: int | None = None
) -> Callable[[Callable[[bytes], object], int], int] | None:
    """Return a function that passes the bytes of a video to a writer (``OpenArchives.fetch``); None without a member.

    ``mark`` is as ``OpenArchives.find_again`` takes it.
    """
    if video is None:
        return None

    def fetch(write: Callable[[bytes], object], limit: int) -> int:
        with OpenArchives(objects, [video]) as opened:
            return opened.fetch(video if mark is None else opened.find_again(video, mark), write, limit)

    return fetch


def fetch_again(
    row: VideoRow, objects: Objects, roots: Roots
) -> Callable[[Callable[[bytes], object], int], int] | None:
    """Return ``make_fetch`` for the video of a row of the videos table, at its current position in the archive.

    Call it before anything of a row is read: whoever made the cache chose the address, and this user's credentials
    would be sent there. Raises VideoFault("policy") unless it lies below ``roots``.
    """
    video = find_member(row["uri"], row["source_offset"], row["source_size"])
    uri = row["uri"] if video is None else video.archive
    if not roots.contains(uri):
        folder = (without_secrets(uri) if "://" in uri else uri).rpartition("/")[0] or "/"
        reason = "the sources that a cache names are read only below folders and prefixes that you name"
        raise VideoFault("policy", f"{reason}: for this one --video-root {shlex.quote(folder)}")
    return make_fetch(video, objects, row.get("source_mark"))


class OpenArchives(AbstractContextManager["OpenArchives"]):
    """The archives of some videos; one archive is open at a time. For one thread. Close it after use.

    Args:
        videos: the videos that will be fetched, in this order: neighbours share a request.
    """

    def __init__(self, objects: Objects, videos: Iterable[ArchiveMember | None] = ()) -> None:
        self._objects = objects
        self._videos = [video for video in videos if video is not None]
        self._open: tuple[str, RandomFile, Archive] | None = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the open archive. May be called twice."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def fetch(self, video: ArchiveMember, write: Callable[[bytes], object], limit: int) -> int:
        """Pass the bytes of a video to ``write``; return their number.

        Raises VideoFault, or OSError, with EFBIG for more than ``limit`` bytes.
        """
        n_done = 0
        if (size := video.member.size or 0) > limit:
            raise OSError(errno.EFBIG, f"the member has {size} bytes, more than the {limit} that are allowed")
        for piece in self._open_archive(video.archive).read(video.member):
            n_done += len(piece)
            if n_done > limit:
                raise OSError(errno.EFBIG, f"the member has more than the {limit} bytes that are allowed")
            write(piece)
        return n_done

    def find_again(self, video: ArchiveMember, mark: int) -> ArchiveMember:
        """Return the current member of a video: the same if its archive still has this ``mark_key``.

        In a repacked archive it is found by its name; ``video`` is returned if there is none. Raises as ``fetch``.
        """
        archive = self._open_archive(video.archive)
        assert self._open is not None
        if mark_key(self._open[1].mark) == mark:
            return video
        members = archive.members(ArchiveOptions())
        return ArchiveMember(
            video.archive,
            next((candidate for candidate in members if candidate.name == video.member.name), video.member),
        )

    def sample(self, video: ArchiveMember) -> int | None:
        """Return ``Archive.sample`` of a video. Raises OSError."""
        return self._open_archive(video.archive).sample(video.member)

    def _open_archive(self, uri: str) -> Archive:
        """Return the archive at ``uri``; open it, and close the one before it, unless it is open already.

        Its requests are planned for the videos of this object. Raises VideoFault for an unknown suffix, or OSError.
        """
        if self._open is None or self._open[0] != uri:
            self.close()
            form = FORMS.get(find_suffix(uri))
            if form is None:
                raise VideoFault("unsupported", f"{uri}: its name ends like no archive or table ({' '.join(FORMS)})")
            file = open_archive(uri, self._objects)
            try:
                archive = form(file)
                file.plan(merge_spans(archive.span(video.member) for video in self._videos if video.archive == uri))
            except BaseException:
                file.close()
                raise
            self._open = uri, file, archive
        return self._open[2]
