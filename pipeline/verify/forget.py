"""What a cache says of removed videos outside its tables: kept indexes, records and logs of runs, replaced files.

The tables forget by themselves: a removal moves the other videos and deletes what held the removed ones.
"""

from __future__ import annotations

import io
from collections.abc import Collection

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.cache.schema import TOKENS, VIDEOS
from pipeline.inputs.indexes import forget_members
from pipeline.runner.forget import delete_unfinished, forget_in_runs
from pipeline.runner.run_record import RUNS
from pipeline.storage.stores import INDEXES, Store
from pipeline.verify.report import KEPT_IN

_FOLDERS = ("", TOKENS, VIDEOS, RUNS, INDEXES, KEPT_IN)


def forget_videos(store: Store, ids: Collection[str], uris: Collection[str]) -> list[str]:
    """Take ids, addresses and carried texts of videos out of all files but the tables; return the deleted files.

    Records and logs of runs get "(removed)" instead. Kept indexes lose the members, or are deleted. Replaced files with
    a row of the videos are deleted, and so are all unfinished files.

    ``uris`` are the places that rows had; where an earlier removal has deleted the rows, ``ids`` alone tell. No run may
    be writing. Raises OSError.
    """
    deleted_names = forget_members(store, uris, ids)
    forget_in_runs(store, ids, uris)
    deleted_names += delete_unfinished(store, _FOLDERS)
    for file in store.list_files(KEPT_IN):
        if _may_hold(store.read(file.name), ids):
            store.delete(file.name)
            deleted_names.append(file.name)
    return deleted_names


def _may_hold(data: bytes, ids: Collection[str]) -> bool:
    """Return True if a file of the videos table has a row of one of the videos, or cannot be read."""
    try:
        table = pq.read_table(io.BytesIO(data), columns=["video_id"])
    except (pa.ArrowException, OSError, ValueError):
        return True
    return not set(ids).isdisjoint(table["video_id"].to_pylist())
