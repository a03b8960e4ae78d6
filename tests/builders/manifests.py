"""The videos of a list in tests, and their bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.inputs.archive import ArchiveOptions
from pipeline.inputs.forms import OpenArchives
from pipeline.inputs.indexes import Indexes
from pipeline.inputs.tar_and_zip import Tar
from pipeline.inputs.video_list import VideoList
from pipeline.storage.location import Location
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import LocalStore

NOWHERE = Objects()


def read_manifest(*arguments: Any, **options: Any) -> pa.Table:
    """Return all videos of ``VideoList.read``."""
    return VideoList.read(*arguments, **options).known


def rows(
    place: Any,
    column: str | None = None,
    objects: Objects = NOWHERE,
    first: str = "all",
    options: ArchiveOptions | None = None,
    **more: Any,
) -> list[dict[str, Any]]:
    """Return a row for each video of a place, or of a column of it; ``more`` goes to its Indexes."""
    place = place if isinstance(place, (str, list)) else str(place)
    indexes = Indexes(options or ArchiveOptions(column), **more)
    found: list[dict[str, Any]] = read_manifest(place, (), objects, indexes, first=first).to_pylist()
    return found


def ids(table: pa.Table | Iterable[dict[str, Any]]) -> list[str]:
    """Return the ids of rows."""
    return [row["video_id"] for row in (table.to_pylist() if isinstance(table, pa.Table) else table)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def list_for_run(
    place: Any, folder: Path, column: str | None = None, *, is_limited: bool = False, say: Any = lambda line: None
) -> VideoList:
    """Return the list of ``place`` as a run reads it, which keeps indexes in ``folder``."""
    indexes = Indexes(ArchiveOptions(column), LocalStore(folder / "cache"), keeps=True, say=say)
    names = place if isinstance(place, list) else [str(place)]
    return VideoList.read(names, (), NOWHERE, indexes, first="needed", is_limited=is_limited)


class CountingTar(Tar):
    """A tar that counts the members that were read, of all tars."""

    n_read = 0

    def members(self, options: ArchiveOptions) -> Iterator[Any]:
        for member in super().members(options):
            CountingTar.n_read += 1
            yield member


def member_of(row: dict[str, Any]) -> Location:
    return Location.parse(row["uri"], row["source_offset"], row["size"])


def read_member(opened: OpenArchives, row: dict[str, Any], most: int = 2**30) -> bytes:
    """Return the bytes of a row's video."""
    parts: list[bytes] = []
    append: Callable[[bytes], None] = parts.append
    size = opened.fetch(member_of(row), append, most)
    assert size == len(b"".join(parts))
    return b"".join(parts)


def contents(found: list[dict[str, Any]], objects: Objects = NOWHERE) -> list[bytes]:
    """Return the bytes of each row's video, read one after the other as a worker does."""
    with OpenArchives(objects, map(member_of, found)) as opened:
        return [read_member(opened, row) for row in found]


def touch(path: Path) -> Path:
    """Write a file of one byte, with the folders that lead to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    return path
