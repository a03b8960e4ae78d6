"""Ways to damage a cache in a folder, some of them consistent: with the right checksums and hashes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pipeline import TokenCache
from pipeline.cache.header import read_fingerprint
from pipeline.cache.merging import merge_table_fully
from pipeline.cache.schema import VIDEOS, hash_bytes, slice_footer, write_parquet
from pipeline.cache.table import make_small_name
from pipeline.cache.token_shard import join_vectors, parse_run_id, parse_shard_id
from pipeline.runner.run_record import COMMITTED_KEY, format_now
from pipeline.storage.s3 import Slice
from pipeline.storage.stores import LocalStore

Row = dict[str, Any]


class Dying(LocalStore):
    """A store whose process ends at a write, a link or a removal, counted down: ``left`` more are done.

    Files whose names match ``spared`` are not counted.
    """

    def __init__(self, root: Path, left: int, error: BaseException | None = None, spared: str = "") -> None:
        super().__init__(root)
        self.left, self._error, self._spared = left, error or KeyboardInterrupt(), spared

    def put(self, name, data) -> None:
        self._count(name)
        super().put(name, data)

    def link(self, name, file) -> bool:
        self._count(name)
        return super().link(name, file)

    def delete(self, name) -> None:
        self._count(name)
        super().delete(name)

    def _count(self, name: str) -> None:
        if not re.fullmatch(self._spared, name):
            self.left -= 1
            if self.left < 0:
                raise self._error


def stop_at_each_change(
    act: Callable[[LocalStore], object], root_of: Callable[[int], Path], ends: Any = KeyboardInterrupt, **how: Any
) -> Iterator[int]:
    """Let ``act`` end before the first change of a store, before the second ... until it comes through.

    Gives after each stop how many changes were made.

    Args:
        root_of: gives the folder of the store for that number.
        ends: what ``act`` raises when it is stopped.
        how: for the store.
    """
    for left in range(60):
        try:
            act(Dying(root_of(left), left, **how))
        except ends:
            pass
        else:
            break
        yield left
    assert 3 < left < 59


class Merging(LocalStore):
    """A store whose videos table another process merges, and deletes what was merged, before one of the reads of it.

    ``reads`` are done before that.
    """

    def __init__(self, root: Path, reads: int) -> None:
        super().__init__(root)
        self._left, self.is_merged = reads, False

    def read(self, name) -> bytes:
        self._count(name)
        return super().read(name)

    def read_slice(self, name, start, end=None) -> Slice:
        self._count(name)
        return super().read_slice(name, start, end)

    def _count(self, name: str) -> None:
        if name.startswith(VIDEOS):
            self._left -= 1
            if self._left < 0 and not self.is_merged:
                self.is_merged = True
                other = LocalStore(self.root)
                merge_table_fully(other, read_fingerprint(other))


def merge_before_each_read(root: Path, commit: Callable[[int], object]) -> Iterator[Merging]:
    """Give stores that are merged before their first read of the table, the second ... until all reads came before.

    Something is committed for each of them, so that there is something to merge.
    """
    for reads in range(20):
        commit(reads)
        yield (store := Merging(root, reads))
        if not store.is_merged:
            break
    assert reads > 4


def shards(store: LocalStore, folder: str = "tokens") -> list[Path]:
    return [store.root / name for name in store.names(folder, ".parquet")]


def say_what_was_committed(store: LocalStore) -> None:
    """Write the records that runs leave, with the token shards that their rows name."""
    for run in {parse_run_id(file.name) for file in shards(store)}:
        ids = [parse_shard_id(f"tokens/{file.name}") for file in shards(store) if parse_run_id(file.name) == run]
        record = {"run_id": run, "status": "finished", "started": format_now(), "ended": format_now(), "pid": 1}
        record |= {"host": "here", "videos": len(ids), COMMITTED_KEY: ids}
        store.put(f"runs/{run}.json", json.dumps(record).encode())


def flip(file: Path, at: int) -> None:
    """Replace one bit of the byte ``at`` by the other value."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def cut(file: Path, n_bytes: int) -> None:
    """Break so many bytes off the end of a file."""
    file.write_bytes(file.read_bytes()[:-n_bytes])


def flip_token(root: Path, video_id: str) -> None:
    """Replace one bit of one token of a video."""
    video = TokenCache(root).get(video_id, order="selection")
    file, token = root / video.metadata["token_shard"], video.tokens[-1].view(torch.uint8).numpy().tobytes()
    flip(file, file.read_bytes().find(token))


def rewrite_row(store: LocalStore, video_id: str, change: Callable[[Row], object]) -> None:
    """Update a videos row, the last one of the video; its shard gets the name that fits."""
    for file in reversed(shards(store, "videos")):
        table = pq.read_table(file)
        rows = table.to_pylist()
        for row in rows:
            if row["video_id"] == video_id:
                change(row)
                data = write_parquet(pa.Table.from_pylist(rows, schema=table.schema))
                run, _, number = file.stem.rpartition("-")[0].rpartition("-")
                file.unlink()
                store.put(make_small_name("videos", run, int(number), data), data)
                return


def rewrite_tokens(store: LocalStore, video_id: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Update the token rows of a video that has a shard of its own, and all that is recorded of its bytes."""
    (file,) = (file for file in shards(store) if pq.read_table(file)["video_id"][0].as_py() == video_id)
    metadata = pq.read_metadata(file)
    groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    table = change(pq.read_table(file))
    data = write_parquet(table, groups)
    store.put(f"tokens/{file.name}", data)
    vectors = [f.name for f in table.schema if pa.types.is_fixed_size_binary(f.type)]
    sums = {
        "footer_hash": hash_bytes(slice_footer(memoryview(data))),
        "checksum": hash_bytes(*(join_vectors(table[name]) for name in vectors)),
    }
    rewrite_row(store, video_id, lambda row: row.update(sums))


def with_column(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[pa.Table], pa.Table]:
    """Return a change of one column of numbers."""

    def changed(table: pa.Table) -> pa.Table:
        field = table.schema.field(name)
        return set_column(table, field, pa.array(change(table[name].to_numpy().copy()), field.type))

    return changed


def set_column(table: pa.Table, field: pa.Field, values: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(field.name), field, values)


def other_tokens(table: pa.Table) -> pa.Table:
    """Return the table with every token vector of the other sign in each number."""
    field = table.schema.field("token")
    bits = np.frombuffer(join_vectors(table["token"]), np.uint16) ^ np.uint16(0x8000)
    values = pa.FixedSizeBinaryArray.from_buffers(field.type, len(table), [None, pa.py_buffer(bits)])
    return set_column(table, field, values)
