"""Videos that are found during a run: a thread indexes archives, one after the other in their order."""

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
from pipeline.inputs.indexes import Indexing, NamedArchive
from pipeline.inputs.named_videos import MANIFEST_SCHEMA
from pipeline.storage.s3 import Objects

_LEAVE_S = 5.0  # seconds that a run waits at its end for the current archive


class Part(NamedTuple):
    """The videos of an archive.

    Attributes:
        videos: all videos, MANIFEST_SCHEMA.
        todo: the videos to process, TODO_SCHEMA.
        later_bytes: bytes of the archives behind it.
    """

    videos: pa.Table
    todo: pa.Table
    later_bytes: int


class Discovery(AbstractContextManager["Discovery"]):
    """The videos that a run has to process: those known at its start, and those that a thread finds in archives.

    The ``with`` block starts and ends the thread. Its length is the number of videos to process so far, but at least
    one before the end.

    Args:
        indexing: makes the indexes; its ``unindexed`` are the archives.
        select: returns the videos of this run (MANIFEST_SCHEMA) among those of an archive, and the rows of those to
            process (TODO_SCHEMA).
        known_todo: the videos to process that were known before (TODO_SCHEMA).
        limit: how many videos are processed at most; then no further archive is opened, and of the last one no
            more read than is needed.

    Attributes:
        beyond: the rows of the last opened archive that the limit leaves for another run.
    """

    def __init__(
        self,
        indexing: Indexing,
        objects: Objects,
        select: Callable[[pa.Table], tuple[pa.Table, pa.Table]],
        known_todo: pa.Table,
        limit: int | None = None,
    ) -> None:
        """Prepare the search; its thread starts with the ``with`` block.

        ``indexing`` is changed: it skips no archive any more, and with a limit it stops when there are enough videos.
        """
        self._places, self._indexing, self._objects, self._select = [*indexing.unindexed], indexing, objects, select
        indexing.later = False
        if limit is not None:
            indexing.at_once, indexing.enough = 1, self._enough
        self._sizes = [_size(place) for place in self._places]
        self._n_allowed = math.inf if limit is None else limit - len(known_todo)
        self.beyond = known_todo.slice(len(known_todo))
        self._none = Part(MANIFEST_SCHEMA.empty_table(), self.beyond, 0)  # of an archive that is not opened
        self._parts = [Part(MANIFEST_SCHEMA.empty_table(), known_todo, sum(self._sizes) if self._n_allowed > 0 else 0)]
        self._new_part = threading.Condition()
        self._error: Exception | None = None
        self._closing, self._has_ended = False, not self._places
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)

    @classmethod
    def of(cls, todo: pa.Table) -> Discovery:
        """Return a complete discovery of these videos to process (TODO_SCHEMA)."""
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
        n_todo = sum(len(part.todo) for part in self._parts)
        return n_todo if self._has_ended or not self.n_left else max(1, n_todo)

    @property
    def is_complete(self) -> bool:
        """True if all videos of this run are known."""
        return not self.n_left or (self._has_ended and not self._closing and self._error is None)

    @property
    def n_archives(self) -> int:
        """The number of archives that had no index when the run began."""
        return len(self._places)

    @property
    def n_parts(self) -> int:
        """The final number of parts: the videos known before, and each archive."""
        return 1 + self.n_archives

    @property
    def n_left(self) -> int:
        """The number of archives whose videos are not known yet."""
        return self.n_parts - len(self._parts) + self._indexing.n_cut

    def fail(self, error: Exception) -> None:
        """Record an error of another thread, which ``check`` raises."""
        self._error = error

    def check(self) -> None:
        """Raise RunFailed if an archive cannot be indexed, or its videos have changed."""
        if self._error is not None:
            raise RunFailed(str(self._error)) from self._error

    def parts(self) -> Iterator[Part]:
        """Yield each part once it is found; blocks until then. Ends early if the discovery was stopped or failed.

        The part of an archive that the limit leaves closed is empty.
        """
        for number in range(self.n_parts):
            with self._new_part:
                self._new_part.wait_for(lambda: len(self._parts) > number or self._has_ended)  # noqa: B023 - called here
                if len(self._parts) <= number and self._n_allowed > 0:
                    return
                part = self._parts[number] if number < len(self._parts) else self._none
            yield part

    def estimate_count(self) -> int:
        """Estimate the number of videos to process, from the bytes of all archives and of the first with videos.

        Waits until that archive is indexed. The number is at least 1. Raises RunFailed.
        """
        n_known, n_indexed, n_bytes = len(self._parts[0].todo), 0, 0
        for part, size in zip(islice(self.parts(), 1, None), self._sizes, strict=False):
            n_indexed, n_bytes = n_indexed + len(part.todo), n_bytes + size
            if n_indexed:
                break
        self.check()
        if self.is_complete:
            return max(1, len(self))
        scale = sum(self._sizes) / n_bytes if n_bytes else len(self._places)
        return max(1, round(min(n_known + n_indexed * scale, len(self) + self._n_allowed)))

    def wait_for_all(self) -> Part:
        """Wait for the end; return all videos of the archives, and all videos to process. Raises RunFailed."""
        for _ in self.parts():
            pass
        self.check()
        return self.list_found()

    def list_found(self) -> Part:
        """Return the videos of the archives indexed so far, and all known videos to process."""
        parts = [*self._parts]
        return Part(pa.concat_tables(part.videos for part in parts), pa.concat_tables(part.todo for part in parts), 0)

    def _run(self) -> None:
        """Index the archives, and add their parts; runs in the thread. An error is kept for ``check``."""
        try:
            places = self._places if self._n_allowed > 0 else []
            with closing(self._indexing.rows(places, self._objects)) as tables:
                later_bytes = sum(self._sizes)
                for size, table in zip(self._sizes, tables, strict=False):
                    if self._closing:
                        break
                    later_bytes -= size
                    videos_found = self._separate_ids(table)
                    if self._indexing.ids is not None:
                        self._indexing.ids.add(videos_found)
                    videos, todo = self._select(videos_found)
                    n_taken = int(min(self._n_allowed, len(todo)))
                    n_allowed = self._n_allowed - n_taken
                    with self._new_part:
                        self._parts.append(Part(videos, todo.slice(0, n_taken), later_bytes if n_allowed > 0 else 0))
                        self._n_allowed, self.beyond = n_allowed, todo.slice(n_taken)
                        self._new_part.notify_all()
                    if n_allowed <= 0:
                        break
        except Exception as error:  # noqa: BLE001 - the main thread raises it in ``check``
            self.fail(error)
        self._end()

    def _enough(self, videos: pa.Table) -> bool:
        """Return True if the first videos of an archive reach the limit."""
        return len(self._select(self._separate_ids(videos))[1]) >= self._n_allowed

    def _separate_ids(self, videos: pa.Table) -> pa.Table:
        """Return the videos of an archive, with errors for repeated ids."""
        return videos if self._indexing.ids is None else self._indexing.ids.separate_ids(videos)

    def _end(self) -> None:
        """Wake all threads that wait for parts."""
        with self._new_part:
            self._has_ended = True
            self._new_part.notify_all()


def _size(place: NamedArchive) -> int:
    """Return the bytes of an archive, 0 if unknown."""
    if place.info is not None:
        return place.info.size
    try:
        return os.path.getsize(place.uri)  # noqa: PTH202 - as manifests have it
    except OSError:
        return 0
