"""A token shard, opened so that whatever is read of it is what was committed, or raises."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.cache.cached_video import vector_bytes
from pipeline.cache.schema import FOOTER_TAIL, READ_THREADS, digest, footer_length, open_parquet, parse_footer
from pipeline.errors import CorruptShard
from pipeline.rows import VideoRow
from pipeline.storage.stores import RangedObject, Store


class TokenShard:
    """A token shard whose footer is the one that the videos rows name.

    ``sparse`` is for shards of which some columns are left alone (``schema.open_parquet``).

    Attributes:
        name: file below the cache.
        parquet: the file as Arrow reads it; every page is checked against its checksum.
        n_bytes: of the whole file.
        n_footer: of its footer.

    Raises CorruptShard, and OSError where the store fails.
    """

    def __init__(self, store: Store, name: str, footer_hash: str, *, sparse: bool = False) -> None:
        self.name = name
        self._shown = f"{store}/{name}"
        try:
            self._source = store.open(name)
            self.n_bytes: int = self._source.size()
            self._source.seek(max(0, self.n_bytes - FOOTER_TAIL))
            self.n_footer = footer_length(self._source.read(FOOTER_TAIL))
            self._source.seek(max(0, self.n_bytes - self.n_footer))
            footer = self._source.read(self.n_footer)
        except FileNotFoundError:
            raise CorruptShard(f"{self._shown}: the shard is missing", "missing") from None
        except ValueError as error:
            raise CorruptShard(f"{self._shown}: {error}", "footer") from error
        if digest(footer) != footer_hash:
            raise CorruptShard(f"{self._shown}: its footer is not the one that was committed", "footer")
        self.parquet: pq.ParquetFile = open_parquet(self._source, parse_footer(footer), sparse=sparse)

    def read(self, row: VideoRow, keep: int, columns: Sequence[str], near: Collection[str] = ()) -> pa.Table:
        """The first ``keep`` token rows of a video, from no more row groups than hold them.

        Args:
            row: the video's row of the videos table.
            columns: what is read.
            near: columns that lie between those, and are fetched with them where that saves a request.
        """
        counts = np.cumsum(row["row_counts"])
        n_groups = int(np.searchsorted(counts, keep)) + 1
        wanted = range(row["first_row_group"], row["first_row_group"] + n_groups)
        self._check(wanted, columns, enough=n_groups <= len(counts))
        stretches = _stretches(self.parquet, wanted, {*columns, *near})
        held = self._source.holding(stretches) if isinstance(self._source, RangedObject) else nullcontext()
        try:
            with held:
                table = self.parquet.read_row_groups(list(wanted), columns=list(columns), use_threads=READ_THREADS)
        except (OSError, pa.ArrowException) as error:
            if isinstance(error, OSError) and error.filename and not isinstance(error, FileNotFoundError):
                raise  # the store failed, not the shard
            raise CorruptShard(f"{self._shown}: {error}") from error
        if len(table) != counts[n_groups - 1]:
            raise CorruptShard(f"{self._shown}: {len(table)} rows where {counts[n_groups - 1]} belong", "rows")
        return table.slice(0, keep)

    def read_checked(self, row: VideoRow) -> pa.Table:
        """All of a video's token rows with all columns, once they have the checksum of its row."""
        table = self.read(row, row["n_tokens"], self.parquet.schema_arrow.names)
        if (ids := table["video_id"].unique().to_pylist()) != [row["video_id"]]:
            raise CorruptShard(f"{self._shown}: the rows are those of {', '.join(map(str, ids[:3]))}", "rows")
        if checksum_of(table) != row["checksum"]:
            what = f"the token bytes of {row['video_id']} do not have the checksum of the videos row"
            raise CorruptShard(f"{self._shown}: {what}", "checksum")
        return table

    def require(self, columns: Sequence[str]) -> None:
        """Raises CorruptShard where it lacks one of the columns."""
        if lacking := sorted(set(columns) - set(self.parquet.schema_arrow.names)):
            raise CorruptShard(f"{self._shown}: it has no column {', '.join(lacking)}", "schema")

    def _check(self, groups: range, columns: Sequence[str], enough: bool) -> None:
        self.require(columns)
        if not enough or groups.start < 0 or groups.stop > self.parquet.metadata.num_row_groups:
            raise CorruptShard(
                f"{self._shown}: {self.parquet.metadata.num_row_groups} row groups, not {groups.start} to "
                f"{groups.stop - 1}, which the videos row asks for",
                "rows",
            )


def checksum_of(table: pa.Table) -> str:
    """The checksum of a video's token rows, all columns of them, as its row of the videos table has it."""
    vectors = [field.name for field in table.schema if pa.types.is_fixed_size_binary(field.type)]
    # Evidence of frames is null beside most tokens, and those bytes are nobody's.
    return digest(*(vector_bytes(table[name].drop_null()) for name in vectors))


def _stretches(shard: pq.ParquetFile, groups: Sequence[int], names: Collection[str]) -> list[tuple[int, int]]:
    """[start, end) in bytes of neighbouring row groups as far as ``names`` go; one, unless others lie between."""
    stretches: list[tuple[int, int]] = []
    for number in groups:
        group = shard.metadata.row_group(number)
        columns = [c for c in map(group.column, range(group.num_columns)) if c.path_in_schema in names]
        start, end = columns[0].data_page_offset, max(c.data_page_offset + c.total_compressed_size for c in columns)
        if stretches and stretches[-1][1] == start:
            start = stretches.pop()[0]
        stretches.append((start, end))
    return stretches
