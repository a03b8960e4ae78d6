"""What a cache says of removed videos outside its tables: kept indexes, records and logs of runs, replaced files.

The tables forget by themselves: a removal moves the other videos and deletes what held the removed ones.
"""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa

from pipeline.cache.bounds import read_bounded
from pipeline.cache.schema import TOKENS, VIDEOS
from pipeline.cache.table import is_table_name
from pipeline.cache.token_shard import has_shard_form
from pipeline.inputs.indexes import forget_members
from pipeline.runner.redaction import delete_unfinished, forget_in_runs
from pipeline.runner.run_record import RUNS
from pipeline.storage.stores import INDEXES, Store
from pipeline.verify.report import KEPT_IN

_FOLDERS = ("", TOKENS, VIDEOS, RUNS, INDEXES, KEPT_IN)
_MAGIC = b"PAR1"


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


def list_strays_with(store: Store, ids: Collection[str]) -> list[str]:
    """List files in the folders of tables that are none of the cache's, as copies and backups, and may hold the videos.

    Their names are not a table's file's or a token shard's. Raises OSError.
    """
    names = []
    for folder, is_own in ((VIDEOS, is_table_name), (TOKENS, has_shard_form)):
        for file in store.list_files(folder):
            if file.size and not is_own(file.name):
                data = store.read(file.name)
                is_parquet = data.startswith(_MAGIC)
                if _may_hold(data, ids) if is_parquet else any(video_id.encode() in data for video_id in ids):
                    names.append(file.name)
    return names


def _may_hold(data: bytes, ids: Collection[str]) -> bool:
    """Return True if a Parquet file has a row of one of the videos, or cannot be read."""
    try:
        table = read_bounded(data, ["video_id"])
    except (pa.ArrowException, OSError, ValueError):
        return True
    return "video_id" in table.column_names and not set(ids).isdisjoint(table["video_id"].to_pylist())
