"""Check files in ``videos/`` without a name of the videos table: copies, renamed files and unrelated files.

A stray file is ignored if its rows would not change any live row. Otherwise reading the cache fails: the file may be a
renamed file of the table, whose rows must not be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.bounds import read_bounded
from pipeline.cache.live import RULE_COLUMNS, find_live_indices, make_rule_columns
from pipeline.cache.schema import MADE_WITH, VIDEOS, hash_bytes_to_hex
from pipeline.cache.table import TableFile, VideosTable, make_small_name
from pipeline.storage.stores import Store


class StrayFault(NamedTuple):
    """The reason why a stray file cannot be ignored.

    Attributes:
        message: the error message, with the remedy.
        has_rows: True if it has rows that would be live; False if it cannot be read as a file of the table.
    """

    message: str
    has_rows: bool


def find_stray_fault(store: Store, name: str, files: Sequence[TableFile]) -> StrayFault | None:
    """Return why a stray file cannot be ignored, or None if it can be.

    It can be ignored if it is gone by now, has the content of one of ``files``, or has no row that would be live beside
    their rows. A file that is not Parquet or lacks video_id or one of RULE_COLUMNS cannot be ignored.

    Args:
        files: the files of the videos table; all are read unless the stray file is a copy of one.

    Raises:
        CorruptShard: one of ``files`` is damaged.
        FileNotFoundError: one of ``files`` was merged and deleted meanwhile.
        OSError: the store failed.
    """
    try:
        data = store.read(name)
    except FileNotFoundError:  # moved or deleted since it was listed
        return None
    if any(file.name.endswith(f"-{hash_bytes_to_hex(data)}.parquet") for file in files):
        return None
    columns = ("video_id", *RULE_COLUMNS)
    try:
        try:
            rows = read_bounded(data, columns).select(columns)
        except OSError as error:  # a damaged page; the file is in memory, so the store has not failed
            raise ValueError(error) from error
        ids = _find_outranking_ids(store, rows, files)
    except (pa.ArrowException, ValueError, KeyError) as error:
        return StrayFault(f"{store}/{name} is no file of the videos table ({error}): move it out of {VIDEOS}/", False)
    if not ids:
        return None
    own_name = make_small_name(VIDEOS, "renamed", 0, data)
    message = (
        f"{store}/{name} does not have the name of a file of the videos table, and no such file has {len(ids):,} of "
        f"its rows, e.g. of {ids[0]!r}: rename it to {own_name} if its rows belong to this cache, or move it out of "
        f"{VIDEOS}/"
    )
    return StrayFault(message, True)


def _find_outranking_ids(store: Store, rows: pa.Table, files: Sequence[TableFile]) -> list[str]:
    """Return the sorted ids of ``rows`` that would be live beside the rows of ``files`` with the same identity.

    A row that is in the table too is not reported.

    Args:
        rows: video_id and RULE_COLUMNS, with the fingerprint of their identity in the metadata. Without a fingerprint
            the rows of all files count.
    """
    made_with = (rows.schema.metadata or {}).get(MADE_WITH.encode())
    videos = VideosTable(store, None if made_with is None else made_with.decode())
    rows = rows.replace_schema_metadata(None)
    tables = [
        part for _, part in videos.read_small([file.name for file in files if not file.is_sorted], rows.column_names)
    ]
    for sorted_file in videos.iter_open_sorted(files):
        tables += sorted_file.parts(rows.column_names)
    tables = [table.filter(pc.is_in(table["id_high"], value_set=rows["id_high"].combine_chunks())) for table in tables]
    table_rows = pa.concat_tables([rows.schema.empty_table(), *tables])
    live, _ = find_live_indices(make_rule_columns(pa.concat_tables([table_rows, rows]).combine_chunks()))
    strays = live[live >= len(table_rows)] - len(table_rows)  # of equal rows, the first is live
    return sorted(set(rows["video_id"].take(pa.array(strays)).to_pylist()))
