"""Files of rows that a user wrote (.parquet, .jsonl, .csv), with the words that say where a row stands."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.buckets import suffix_of

TABLE_SUFFIXES = frozenset({".parquet", ".jsonl", ".csv"})
# What reading one may raise; all of it is the file's fault.
UNREADABLE = (OSError, UnicodeDecodeError, pa.ArrowException)


class BadRow(ValueError):  # noqa: N818
    """A row is no row; the message begins with where it stands."""


def read_rows(name: str, file: BinaryIO, needs: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row as a dict, with the words that say where it stands; empty cells of a .csv are left out.

    ``needs`` says in an error what a row should have been. Raises BadRow, and what UNREADABLE lists.
    """
    suffix = suffix_of(name)
    if suffix == ".parquet":
        with pq.ParquetFile(file) as shard:
            batches = (batch.to_pylist() for batch in shard.iter_batches(use_threads=False))
            yield from ((f"row {i}", row) for i, row in enumerate(row for batch in batches for row in batch))
    elif suffix == ".csv":
        yield from _csv_rows(name, file)
    else:
        for number, line in enumerate(io.TextIOWrapper(file, "utf-8-sig"), 1):
            if line.strip():
                yield f"line {number}", _json_object(line, f"{name}, line {number}", needs)


def _csv_rows(name: str, file: BinaryIO) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
    try:
        for row in reader:
            where = f"line {reader.line_num}"
            if None in row:  # dropping what is too much would cut a text at its first comma
                raise BadRow(f"{name}, {where}: more cells than the header names; quote a text that holds commas")
            yield where, {column: text for column, text in row.items() if text != ""}
    except csv.Error as error:
        raise BadRow(f"{name}, line {reader.line_num + 1}: {error}") from error  # where the row begins


def _json_object(line: str, where: str, needs: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number of too many digits, and lists in lists without end
        raise BadRow(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadRow(f"{where}: expected an object with {needs}, got {type(row).__name__}")
    return row


def is_text(name: str) -> bool:
    """Whether a text is valid Unicode: bytes of a file's name that are not UTF-8 come as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def carried_json(columns: dict[str, Any]) -> str:
    """Columns that are only carried along, as strict JSON: NaN and infinity, which it cannot say, become null."""
    strict = json.loads(json.dumps(columns, default=str), parse_constant=lambda name: None)
    return json.dumps(strict, ensure_ascii=True)
