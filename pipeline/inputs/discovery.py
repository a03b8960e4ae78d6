"""Videos that are found while others are processed: a thread indexes containers, one after the other in their order."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from itertools import islice
from typing import NamedTuple

import pyarrow as pa

from pipeline.errors import RunFailed
from pipeline.inputs.indexes import Indexing, NamedContainer
from pipeline.inputs.named_videos import MANIFEST_SCHEMA
from pipeline.storage.s3 import Objects

_LEAVE_S = 5.0  # how long a run that ends waits for what is being read


class Part(NamedTuple):
    """The videos of a container.

    Attributes:
        videos: all of them, MANIFEST_SCHEMA.
        todo: those to process, TODO_SCHEMA.
        later_bytes: bytes of the containers behind it.
    """

    videos: pa.Table
    todo: pa.Table
    later_bytes: int


class Discovery(AbstractContextManager["Discovery"]):
    """The containers of a run that were never indexed, and their videos, as far as they are found.

    Use it in a ``with`` block, which starts the thread and ends it. Its length is the number of videos to process that
    are known, but at least one before the end.

    Args:
        indexing: makes the indexes; its ``left`` are the containers.
        select: returns the videos of this run (MANIFEST_SCHEMA) among those of a container, and the rows of those to
            process (TODO_SCHEMA).
        known: the videos to process that were known before.
        limit: how many videos are processed at most; then no further container is opened, and of the last one no
            more read than is needed.

    Attributes:
        beyond: the rows of the last container opened that the limit leaves for another run.
    """

    def __init__(
        self,
        indexing: Indexing,
        objects: Objects,
        select: Callable[[pa.Table], tuple[pa.Table, pa.Table]],
        known: pa.Table,
        limit: int | None = None,
    ) -> None:
        self._places, self._indexing, self._objects, self._select = [*indexing.left], indexing, objects, select
        indexing.later = False
        if limit is not None:
            indexing.at_once, indexing.enough = 1, self._enough
        self._sizes = [_size(place) for place in self._places]
        self._room = math.inf if limit is None else limit - len(known)
        self.beyond = known.slice(len(known))
        self._none = Part(MANIFEST_SCHEMA.empty_table(), self.beyond, 0)  # of a container that is not opened
        self._parts = [Part(MANIFEST_SCHEMA.empty_table(), known, sum(self._sizes) if self._room > 0 else 0)]
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._closing, self._ended = False, not self._places
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)

    @classmethod
    def of(cls, todo: pa.Table) -> Discovery:
        """Return videos to process (TODO_SCHEMA) that are all known: nothing is left to be found."""
        return cls(Indexing(), Objects(), lambda videos: (videos, todo.slice(len(todo))), todo)

    def __enter__(self) -> Discovery:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing = True
        self._indexing.stop()
        self._thread.join(_LEAVE_S)
        self._end()

    def __len__(self) -> int:
        found = sum(len(part.todo) for part in self._parts)
        return found if self._ended or not self.n_left else max(1, found)

    @property
    def is_complete(self) -> bool:
        """Whether all videos of this run are known."""
        return not self.n_left or (self._ended and not self._closing and self._error is None)

    @property
    def n_parts(self) -> int:
        """The number of parts that there will be: what was known before, and each container."""
        return 1 + len(self._places)

    @property
    def n_left(self) -> int:
        """The number of containers of which videos are not known."""
        return self.n_parts - len(self._parts) + self._indexing.n_cut

    def fail(self, error: Exception) -> None:
        """Record an error of another thread, which ``check`` raises."""
        self._error = error

    def check(self) -> None:
        """Raise RunFailed where a container cannot be indexed, or its videos have changed, which ends the run."""
        if self._error is not None:
            raise RunFailed(str(self._error)) from self._error

    def parts(self) -> Iterator[Part]:
        """Yield each part once it is found; waits for it. It ends early if the discovery was stopped or failed.

        Of a container that the limit leaves closed the part is empty.
        """
        for number in range(self.n_parts):
            with self._changed:
                self._changed.wait_for(lambda: len(self._parts) > number or self._ended)  # noqa: B023 - called here
                if len(self._parts) <= number and self._room > 0:
                    return
                part = self._parts[number] if number < len(self._parts) else self._none
            yield part

    def expected(self) -> int:
        """Estimate how many videos there are to process, from the bytes of all containers and of the first with any.

        Raises RunFailed.
        """
        known, seen, n_bytes = len(self._parts[0].todo), 0, 0
        for part, size in zip(islice(self.parts(), 1, None), self._sizes, strict=False):
            seen, n_bytes = seen + len(part.todo), n_bytes + size
            if seen:
                break
        self.check()
        if self.is_complete:
            return max(1, len(self))
        scale = sum(self._sizes) / n_bytes if n_bytes else len(self._places)
        return max(1, round(min(known + seen * scale, len(self) + self._room)))

    def all(self) -> Part:
        """Wait for the end, and return all videos of the containers, and all to process. Raises RunFailed."""
        for _ in self.parts():
            pass
        self.check()
        return self.found()

    def found(self) -> Part:
        """Return the videos of the containers that are indexed, and all to process that are known."""
        parts = [*self._parts]
        return Part(pa.concat_tables(part.videos for part in parts), pa.concat_tables(part.todo for part in parts), 0)

    def _run(self) -> None:
        """Index the containers; runs in the thread."""
        try:
            places = self._places if self._room > 0 else []
            with closing(self._indexing.rows(places, self._objects)) as tables:
                left = sum(self._sizes)
                for size, table in zip(self._sizes, tables, strict=False):
                    if self._closing:
                        break
                    left -= size
                    found = self._told_apart(table)
                    if self._indexing.ids is not None:
                        self._indexing.ids.add(found)
                    videos, todo = self._select(found)
                    taken = int(min(self._room, len(todo)))
                    room = self._room - taken
                    with self._changed:
                        self._parts.append(Part(videos, todo.slice(0, taken), left if room > 0 else 0))
                        self._room, self.beyond = room, todo.slice(taken)
                        self._changed.notify_all()
                    if room <= 0:
                        break
        except Exception as error:  # noqa: BLE001 - it is the main thread's
            self.fail(error)
        self._end()

    def _enough(self, videos: pa.Table) -> bool:
        """Return whether the first videos of a container are as many as the limit has room for."""
        return len(self._select(self._told_apart(videos))[1]) >= self._room

    def _told_apart(self, videos: pa.Table) -> pa.Table:
        """Return the videos of a container, with errors for those whose id an earlier one has."""
        return videos if self._indexing.ids is None else self._indexing.ids.told_apart(videos)

    def _end(self) -> None:
        """Let nobody wait for more parts."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _size(place: NamedContainer) -> int:
    """Return the bytes of a container, 0 where they are not known."""
    if place.info is not None:
        return place.info.size
    try:
        return os.path.getsize(place.uri)  # noqa: PTH202 - as manifests have it
    except OSError:
        return 0
