"""The forms of containers by the ends of their names, and the bytes of the videos in them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

from pipeline.errors import VideoFault
from pipeline.inputs.archives import Tar, Zip
from pipeline.inputs.columns import Table
from pipeline.inputs.container import Container, ContainerOptions, Member, RandomFile, merged, open_container
from pipeline.inputs.listings import suffix_of
from pipeline.keys import mark_key
from pipeline.rows import VideoRow
from pipeline.storage.s3 import Objects

#: To add a form, write a subclass of Container as those in ``archives`` and add a line here.
FORMS: dict[str, Callable[[RandomFile], Container]] = {".tar": Tar, ".zip": Zip, ".parquet": Table, ".arrow": Table}
#: Those that hold videos only where --column says in which column.
OF_COLUMNS = frozenset({".parquet", ".arrow"})


class Spot(NamedTuple):
    """Where a video lies: its container, and what that one's form knows it by."""

    shard: str
    member: Member


def spot_of(uri: str, offset: int | None, size: int | None) -> Spot | None:
    """Return where a video lies in a container, or None where it is a file of its own, which has no offset."""
    shard, _, name = uri.partition("#")
    return None if offset is None else Spot(shard, Member(name, offset, size))


def fetch_of(
    spot: Spot | None, objects: Objects, mark: int | None = None
) -> Callable[[Callable[[bytes], object], int], int] | None:
    """Return a function that hands the bytes of a single video to a writer (``Containers.fetch``); None for no spot.

    ``mark`` is as ``Containers.find_again`` takes it.
    """
    if spot is None:
        return None

    def fetch(write: Callable[[bytes], object], limit: int) -> int:
        with Containers(objects, [spot]) as opened:
            return opened.fetch(spot if mark is None else opened.find_again(spot, mark), write, limit)

    return fetch


def fetch_again(row: VideoRow, objects: Objects) -> Callable[[Callable[[bytes], object], int], int] | None:
    """Return ``fetch_of`` the video that a row of the videos table is of, wherever in its container it lies now."""
    spot = spot_of(row["uri"], row["source_offset"], row["source_size"])
    return fetch_of(spot, objects, row.get("source_mark"))


class Containers(AbstractContextManager["Containers"]):
    """The containers that some videos lie in, of which one is open at a time; for one thread. Close it after use.

    Args:
        spots: the videos that will be asked for, in this order: neighbours share a request.
    """

    def __init__(self, objects: Objects, spots: Iterable[Spot | None] = ()) -> None:
        self._objects = objects
        self._spots = [spot for spot in spots if spot is not None]
        self._open: tuple[str, RandomFile, Container] | None = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the open container. May be called twice."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def fetch(self, spot: Spot, write: Callable[[bytes], object], limit: int) -> int:
        """Hand the bytes of a video to ``write``; returns their number.

        Raises VideoFault, or OSError, with EFBIG for more than ``limit`` bytes.
        """
        done = 0
        if (size := spot.member.size or 0) > limit:
            raise OSError(errno.EFBIG, f"the member has {size} bytes, more than the {limit} that are allowed")
        for piece in self._open_container(spot.shard).read(spot.member):
            done += len(piece)
            if done > limit:
                raise OSError(errno.EFBIG, f"the member has more than the {limit} bytes that are allowed")
            write(piece)
        return done

    def find_again(self, spot: Spot, mark: int) -> Spot:
        """Return where the video of a spot lies now: the spot itself where its container still has this ``mark_key``.

        A container that was packed anew holds it elsewhere, by its name. Raises as ``fetch``.
        """
        container = self._open_container(spot.shard)
        assert self._open is not None
        if mark_key(self._open[1].mark) == mark:
            return spot
        members = container.members(ContainerOptions())
        return Spot(spot.shard, next((one for one in members if one.name == spot.member.name), spot.member))

    def sample(self, spot: Spot) -> int | None:
        """Return ``Container.sample`` of a video. Raises OSError."""
        return self._open_container(spot.shard).sample(spot.member)

    def _open_container(self, shard: str) -> Container:
        """Open a container in place of the one in hand, with requests planned for its spots, unless it is that one.

        Raises VideoFault where its name ends like no form, or OSError.
        """
        if self._open is None or self._open[0] != shard:
            self.close()
            form = FORMS.get(suffix_of(shard))
            if form is None:
                raise VideoFault("unsupported", f"{shard}: its name ends like no container ({' '.join(FORMS)})")
            file = open_container(shard, self._objects)
            container = form(file)
            file.plan(merged(container.span(spot.member) for spot in self._spots if spot.shard == shard))
            self._open = shard, file, container
        return self._open[2]
