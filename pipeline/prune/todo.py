"""The videos that a run processes: those known at its start, and those that a thread finds in archives meanwhile.

Rows of MANIFEST_SCHEMA go in (``pipeline.inputs.video_list``), and rows of TODO_SCHEMA come out, in parts.
"""

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
from pipeline.inputs.indexes import View, forget_members
from pipeline.inputs.named_videos import MANIFEST_SCHEMA
from pipeline.inputs.video_list import VideoList, find_size
from pipeline.prune.config import PruneConfig
from pipeline.prune.resume import ManifestCounts, Remaining, restore_old_ids, select_remaining, select_shard

_LEAVE_S = 5.0  # seconds that a run waits at its end for the current archive


@dataclass(frozen=True)
class TodoSelection:
    """What decides which of the listed videos a run processes, but for ``--limit``.

    Attributes:
        config: the options of the run.
        video_list: the list of the videos, and the indexes of its archives.
        ledger: the rows of the cache.
        redo: the ids of ``--redo``; None without it.
    """

    config: PruneConfig
    video_list: VideoList
    ledger: Ledger
    redo: pa.Array | None = None

    def select(self, videos: pa.Table) -> tuple[pa.Table, Remaining]:
        """Return the videos of this run's shard among some videos (MANIFEST_SCHEMA), and which of them to process.

        To process are new videos, failed videos that are retried, and videos that are done again. It also deletes
        removed videos, of all shards, from the indexes in the cache. Raises SourceChanged for a changed video that
        ``--on-changed`` refuses; UsageError if the store does not answer.
        """
        own_videos = restore_old_ids(select_shard(videos, self.config.part()), self.ledger)
        self.forget_removed(videos)
        return own_videos, select_remaining(own_videos, self.ledger, self.config, self.video_list.objects, self.redo)

    def forget_removed(self, videos: pa.Table) -> None:
        """Delete removed videos again from the kept indexes of archives, and from the names of left-out files.

        An index that is made after jobs.remove lists all members of its archive, removed videos too. Does nothing if
        the run keeps no index.
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
        forget_members(indexes.store, set(uris))


class Part(NamedTuple):
    """The videos known at the start, or the videos of an archive that was not indexed then.

    Attributes:
        videos: the run's videos, MANIFEST_SCHEMA.
        todo: those to process, TODO_SCHEMA.
        later_bytes: the bytes of the archives behind it.
    """

    videos: pa.Table
    todo: pa.Table
    later_bytes: int


class Todo(AbstractContextManager["Todo"]):
    """The videos that a run processes: a part known at the start, then a part for each archive not indexed by then.

    The ``with`` block starts and ends a thread that goes through these archives. The rows of a run are cut at
    ``--limit`` here only. Behind the last video no archive is indexed, and the last archive is read until a view with
    that video: the first view has 256 videos, each later view twice as many. Which archives are indexed before the
    start, with a limit or without, is the decision of ``pipeline.inputs.video_list.plan_indexing``.

    The length is the number of videos to process so far, but at least one before the end.

    Attributes:
        KEY: the column of a committed row that tells its video.
        tally: the numbers of new, cached, failed and changed videos among those known at the start.
        n_archives: the number of archives whose videos were not known at the start.
        n_parts: the final number of parts.
        n_waiting: new videos known so far that the limit leaves for another run.
        n_cut: the number of archives that were read in part.
    """

    KEY: ClassVar[Sequence[str]] = ("video_id",)

    def __init__(self, known_videos: pa.Table, remaining: Remaining, selection: TodoSelection | None = None) -> None:
        """Prepare the thread, which the ``with`` block starts.

        Args:
            known_videos: the run's videos known at the start, MANIFEST_SCHEMA.
            remaining: which of them are to be processed.
            selection: selects from the archives of its list, up to the limit of its options; None if all videos are
                known.
        """
        self._list = VideoList(known_videos) if selection is None else selection.video_list
        self._selection = selection
        limit = None if selection is None else selection.config.limit
        self._n_allowed = math.inf if limit is None else limit
        self.tally, self.n_waiting, self.n_cut = remaining.tally, 0, 0
        self.n_archives = len(self._list.unindexed)
        self.n_parts = 1 + self.n_archives
        todo = self._take(remaining.todo)
        self._sizes = [find_size(archive) for archive in self._list.unindexed]
        self._parts = [Part(known_videos, todo, sum(self._sizes) if self._n_allowed > 0 else 0)]
        self._no_part = Part(known_videos.slice(len(known_videos)), todo.slice(len(todo)), 0)  # of an unopened archive
        self._new_part = threading.Condition()
        self._error: Exception | None = None
        self._closing, self._has_ended = False, not self.n_archives
        self._thread = threading.Thread(target=self._run, name="archives", daemon=True)

    @classmethod
    def of(cls, todo: pa.Table) -> Todo:
        """Return these videos to process (TODO_SCHEMA), all known."""
        return cls(MANIFEST_SCHEMA.empty_table(), Remaining(todo, ManifestCounts()))

    def __enter__(self) -> Todo:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing = True
        self._list.close()
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
    def n_left(self) -> int:
        """The number of archives whose videos are not all known; the limit leaves some unknown for good."""
        return self.n_parts - len(self._parts) + self.n_cut

    def fail(self, error: Exception) -> None:
        """Record an error of another thread, which ``check`` raises."""
        self._error = error

    def check(self) -> None:
        """Raise RunFailed if an archive cannot be indexed, or its videos have changed."""
        if self._error is not None:
            raise RunFailed(str(self._error)) from self._error

    def parts(self) -> Iterator[Part]:
        """Yield each part once it is found; blocks until then. Ends early if the search was stopped or failed.

        The part of an archive that the limit leaves closed is empty.
        """
        for number in range(self.n_parts):
            with self._new_part:
                self._new_part.wait_for(lambda: len(self._parts) > number or self._has_ended)  # noqa: B023 - called here
                if len(self._parts) <= number and self._n_allowed > 0:
                    return
                part = self._parts[number] if number < len(self._parts) else self._no_part
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
        scale = sum(self._sizes) / n_bytes if n_bytes else self.n_archives
        return max(1, round(min(n_known + n_indexed * scale, len(self) + self._n_allowed)))

    def wait_for_all(self) -> pa.Table:
        """Wait for the end, and return all videos to process (TODO_SCHEMA). Raises RunFailed."""
        for _ in self.parts():
            pass
        self.check()
        return self.list_todo()

    def without(self, rows: pa.Table) -> Todo:
        """Wait for the end, and return the videos that have no row among ``rows``. Raises RunFailed."""
        todo = self.wait_for_all()
        return Todo.of(todo.filter(pc.invert(pc.is_in(todo["video_id"], rows["video_id"].combine_chunks()))))

    def refuse_empty(self) -> None:
        """Raise UsageError if no opened archive holds a video, and no other video is named."""
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
        """Go through the archives until the limit is reached; runs in the thread. An error is kept for ``check``."""
        try:
            if self._n_allowed > 0:
                with closing(self._list.read_unindexed()) as archives:
                    for view in archives:
                        if self._add(view):
                            break
        except Exception as error:  # noqa: BLE001 - the main thread raises it in ``check``
            self.fail(error)
        self._end()

    def _add(self, view: View) -> bool:
        """Add the part of an archive; return True if the limit is reached.

        Videos that do not reach the limit are not added before all of their archive are known.
        """
        assert self._selection is not None  # else there are no archives
        videos, remaining = self._selection.select(view.videos)
        if not view.is_whole:
            if len(remaining.todo) < self._n_allowed:
                return False
            self._list.count_left_out(view)
            self._selection.forget_removed(view.videos)
        with self._new_part:
            todo = self._take(remaining.todo)
            is_last = self._n_allowed <= 0
            self.n_cut += not view.is_whole
            later_bytes = 0 if is_last else sum(self._sizes[len(self._parts) :])
            self._parts.append(Part(videos, todo, later_bytes))
            self._new_part.notify_all()
        return is_last

    def _take(self, todo: pa.Table) -> pa.Table:
        """Return the videos that the limit still allows; the others wait for another run."""
        n_taken = int(min(self._n_allowed, len(todo)))
        self._n_allowed -= n_taken
        self.n_waiting += pc.sum(pc.equal(todo["attempts"].slice(n_taken), 1)).as_py() or 0
        return todo.slice(0, n_taken)

    def _end(self) -> None:
        """Wake all threads that wait for parts."""
        with self._new_part:
            self._has_ended = True
            self._new_part.notify_all()
