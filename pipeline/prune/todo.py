"""The videos that a run processes: those known at its start, and those that a thread finds in archives."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.live import REMOVED, Ledger
from pipeline.errors import RunFailed, UsageError
from pipeline.inputs.indexes import IndexView, remove_members
from pipeline.inputs.named_videos import MANIFEST_SCHEMA
from pipeline.inputs.video_list import VideoList, get_archive_size
from pipeline.prune.config import PruneConfig
from pipeline.prune.resume import ManifestCounts, Remaining, restore_old_ids, select_remaining, select_slice

_LEAVE_S = 5.0  # seconds that a run waits at its end for the current archive


@dataclass(frozen=True)
class TodoSelection:
    """The rule that selects which of the listed videos a run processes, except for ``--limit``."""

    config: PruneConfig
    video_list: VideoList
    ledger: Ledger
    redo: pa.Array | None = None

    def select(self, videos: pa.Table) -> tuple[pa.Table, Remaining]:
        """Return the videos of this run's slice (``--shard``), and those of them that must be processed.

        Also deletes removed videos, of all slices, from the kept indexes of archives.

        Args:
            videos: some of the listed videos, MANIFEST_SCHEMA.

        Raises:
            SourceChanged: a cached video has changed, and ``--on-changed`` is "refuse".
            UsageError: a store does not answer.
        """
        own_videos = restore_old_ids(select_slice(videos, self.config.part()), self.ledger)
        self.forget_removed(videos)
        return own_videos, select_remaining(own_videos, self.ledger, self.config, self.video_list.objects, self.redo)

    def forget_removed(self, videos: pa.Table) -> None:
        """Delete removed videos from the kept indexes of archives, and from the names of left-out files.

        Does nothing if the run keeps no indexes.
        """
        indexes = self.video_list.indexes
        if indexes.store is None or not indexes.keeps or not np.any(self.ledger.columns["state"] == REMOVED):
            return
        videos = restore_old_ids(videos, self.ledger)
        rows = self.ledger.find(videos["video_id"])
        is_removed = rows >= 0
        is_removed[is_removed] = self.ledger.removed(rows[is_removed])
        removed_videos = videos.filter(pa.array(is_removed))
        indexes.left_out.forget(removed_videos["video_id"].to_pylist())
        uris = removed_videos["uri"].filter(removed_videos["source_offset"].is_valid()).to_pylist()
        remove_members(indexes.store, set(uris))


class TodoChunk(NamedTuple):
    """The videos known at the start of a run, or those of an archive that was indexed later.

    Attributes:
        videos: MANIFEST_SCHEMA.
        todo: those that must be processed, TODO_SCHEMA.
        later_bytes: the bytes of the archives that follow; 0 if ``--limit`` is reached.
    """

    videos: pa.Table
    todo: pa.Table
    later_bytes: int


class Todo(AbstractContextManager["Todo"]):
    """The videos that a run processes: one ``Part`` known at the start, then one per archive that is indexed later.

    The ``with`` block starts and ends a thread that indexes these archives. ``--limit`` is applied here: archives
    behind the last video are not indexed, and the last archive is read only far enough, in views of 256 videos, then
    512 and so on.

    Attributes:
        tally: the counts of the videos known at the start, by how they are treated.
        n_archives: the number of archives whose videos were not known at the start.
        n_parts: the final number of parts.
        n_waiting: new videos known so far that the limit leaves for another run.
        n_cut: the number of archives that were read only in part.
    """

    KEY: ClassVar[Sequence[str]] = ("video_id",)

    def __init__(self, known_videos: pa.Table, remaining: Remaining, selection: TodoSelection | None = None) -> None:
        """Take the known videos up to the limit, and prepare the thread.

        Args:
            known_videos: the run's videos known at the start, MANIFEST_SCHEMA.
            remaining: those of them that must be processed.
            selection: selects videos of archives, and has the archives and the limit; None for known videos alone.
        """
        self._list = VideoList(known_videos) if selection is None else selection.video_list
        self._selection = selection
        limit = None if selection is None else selection.config.limit
        self._n_allowed = math.inf if limit is None else limit
        self.tally = remaining.tally
        self.n_waiting = 0
        self.n_cut = 0
        self.n_archives = len(self._list.unindexed)
        self.n_parts = 1 + self.n_archives
        todo = self._take_allowed(remaining.todo)
        self._sizes = [get_archive_size(archive) for archive in self._list.unindexed]
        self._parts = [TodoChunk(known_videos, todo, sum(self._sizes) if self._n_allowed > 0 else 0)]
        self._no_part = TodoChunk(
            known_videos.slice(len(known_videos)), todo.slice(len(todo)), 0
        )  # of an unopened archive
        self._new_part = threading.Condition()
        self._error: Exception | None = None
        self._closing, self._has_ended = False, not self.n_archives
        self._thread = threading.Thread(target=self._run, name="archives", daemon=True)

    @classmethod
    def of(cls, todo: pa.Table) -> Todo:
        """Return a Todo of exactly these videos (TODO_SCHEMA), without archives and without a limit."""
        return cls(MANIFEST_SCHEMA.empty_table(), Remaining(todo, ManifestCounts()))

    def __enter__(self) -> Todo:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the search: wait up to 5 s for the thread, and wake all threads that wait for parts."""
        self._closing = True
        self._list.close()
        self._thread.join(_LEAVE_S)
        self._end()

    def __len__(self) -> int:
        """Return the number of videos to process that are known so far, but at least 1 until the search has ended."""
        n_todo = sum(len(part.todo) for part in self._parts)
        return n_todo if self._has_ended or not self.n_left else max(1, n_todo)

    @property
    def is_complete(self) -> bool:
        """True if all videos of this run are known."""
        return not self.n_left or (self._has_ended and not self._closing and self._error is None)

    @property
    def n_left(self) -> int:
        """The number of archives whose videos are not all known; with a limit, it may never become 0."""
        return self.n_parts - len(self._parts) + self.n_cut

    def fail(self, error: Exception) -> None:
        """Record an error of another thread, which ``check`` raises."""
        self._error = error

    def check(self) -> None:
        """Raise RunFailed if an error was recorded: an archive cannot be indexed, or its videos have changed."""
        if self._error is not None:
            raise RunFailed(str(self._error)) from self._error

    def parts(self) -> Iterator[TodoChunk]:
        """Yield the parts in order, and block until the next one is known.

        An archive that the limit leaves unopened gives an empty part. The iterator ends early if the search was stopped
        or failed; ``check`` raises the error.
        """
        for number in range(self.n_parts):
            with self._new_part:
                self._new_part.wait_for(lambda: len(self._parts) > number or self._has_ended)  # noqa: B023 - called here
                if len(self._parts) <= number and self._n_allowed > 0:
                    return
                part = self._parts[number] if number < len(self._parts) else self._no_part
            yield part

    def estimate_count(self) -> int:
        """Estimate the number of videos to process, at least 1; block until an archive with such videos is indexed.

        The estimate assumes as many videos per byte in all archives as in those indexed so far, and is capped by
        ``--limit``.

        Raises:
            RunFailed: an archive cannot be indexed, or its videos have changed.
        """
        n_known = len(self._parts[0].todo)
        n_indexed = 0
        n_bytes = 0
        for part, size in zip(islice(self.parts(), 1, None), self._sizes, strict=False):
            n_indexed, n_bytes = n_indexed + len(part.todo), n_bytes + size
            if n_indexed:
                break
        self.check()
        if self.is_complete:
            return max(1, len(self))
        scale = sum(self._sizes) / n_bytes if n_bytes else self.n_archives
        return max(1, round(min(n_known + n_indexed * scale, len(self) + self._n_allowed)))

    def wait_for_all(self) -> pa.Table:
        """Block until the search has ended, and return all videos to process (TODO_SCHEMA).

        Raises:
            RunFailed: an archive cannot be indexed, or its videos have changed.
        """
        for _ in self.parts():
            pass
        self.check()
        return self.list_todo()

    def without(self, rows: pa.Table) -> Todo:
        """Wait until the search has ended, and return the videos to process that have no row among ``rows``."""
        todo = self.wait_for_all()
        return Todo.of(todo.filter(pc.invert(pc.is_in(todo["video_id"], rows["video_id"].combine_chunks()))))

    def refuse_empty(self) -> None:
        """Raise UsageError if the list, and each archive opened so far, has no video. A Todo made by ``of`` passes."""
        if self._selection is not None and not len(self.list_videos()):
            config = self._selection.config
            part = "" if config.shard is None else f" of --shard {config.shard}"
            raise UsageError(f"{config.named}: none of the {self.n_archives} archives holds a video{part}")

    def list_todo(self) -> pa.Table:
        """Return the videos to process that are known so far, TODO_SCHEMA."""
        return pa.concat_tables(part.todo for part in [*self._parts])

    def list_videos(self) -> pa.Table:
        """Return all videos of the run that are known so far, MANIFEST_SCHEMA."""
        return pa.concat_tables(part.videos for part in [*self._parts])

    def _run(self) -> None:
        """Index the archives until the limit is reached, then mark the search as ended; runs in the thread.

        An error also ends the search, and is recorded for ``check``.
        """
        try:
            if self._n_allowed > 0:
                with closing(self._list.read_unindexed()) as archives:
                    for view in archives:
                        if self._add_view(view):
                            break
        except Exception as error:  # noqa: BLE001 - the main thread raises it in ``check``
            self.fail(error)
        self._end()

    def _add_view(self, view: IndexView) -> bool:
        """Add the videos of an archive that are still to do, wake waiting readers, and return True at the limit.

        A view of a part of an archive is ignored unless it has enough videos to do to reach the limit; a larger view
        follows. Otherwise the removed videos of the view are forgotten.
        """
        assert self._selection is not None  # without a selection there are no archives
        videos, remaining = self._selection.select(view.videos)
        if not view.is_whole:
            if len(remaining.todo) < self._n_allowed:
                return False
            self._list.count_left_out(view)
            self._selection.forget_removed(view.videos)
        with self._new_part:
            todo = self._take_allowed(remaining.todo)
            is_last = self._n_allowed <= 0
            self.n_cut += not view.is_whole
            later_bytes = 0 if is_last else sum(self._sizes[len(self._parts) :])
            self._parts.append(TodoChunk(videos, todo, later_bytes))
            self._new_part.notify_all()
        return is_last

    def _take_allowed(self, todo: pa.Table) -> pa.Table:
        """Return the first rows of ``todo`` that the limit allows; the others count as waiting if they are new."""
        n_taken = int(min(self._n_allowed, len(todo)))
        self._n_allowed -= n_taken
        self.n_waiting += pc.sum(pc.equal(todo["attempts"].slice(n_taken), 1)).as_py() or 0
        return todo.slice(0, n_taken)

    def _end(self) -> None:
        """Mark the search as ended, and wake all threads that wait for parts."""
        with self._new_part:
            self._has_ended = True
            self._new_part.notify_all()
