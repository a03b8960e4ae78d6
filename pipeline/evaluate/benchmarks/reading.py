"""The files of annotations: rows of tables and of JSON lists, and JSON objects by which rows are completed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import UsageError
from pipeline.inputs.tables import UNREADABLE, BadRow, UserRow, read_rows
from pipeline.rows import JsonObject

#: The JSON objects beside the annotations, by file name; a missing file is an empty object.
Tables = Mapping[str, JsonObject]


class Place(NamedTuple):
    """The place of an annotation row, and the JSON objects that complete the row.

    Attributes:
        where: in words.
        part: name of its file without the suffix, or of its section in the file.
        number: of the row in that part, from 0.
        tables: those that the benchmark names.
    """

    where: str
    part: str
    number: int
    tables: Tables


def read_annotations(folder: Path, path: Path, needs: Sequence[str], tables: Tables) -> list[tuple[Place, UserRow]]:
    """Read the rows of an annotation file below a folder, each with its place.

    A .json file is a list of rows, or {"meta": {part: rows}, "root": {part: folder}}, whose rows get a column
    ``prefix`` with that folder. Anything else is as ``read_rows`` takes it. Raises BadRow, and what UNREADABLE lists.
    """
    name = path.relative_to(folder).as_posix()
    if path.suffix == ".json":
        read = [*_json_rows(path)]
    else:
        with path.open("rb") as file:
            rows = enumerate(read_rows(name, file, ", ".join(needs)))
            read = [(path.stem, number, where, row) for number, (where, row) in rows]
    return [(Place(f"{name}, {where}", part, number, tables), row) for part, number, where, row in read]


def read_tables(folder: Path, names: Sequence[str]) -> Tables:
    """Read the JSON objects of these names below a folder. Raise UsageError if one is no JSON object."""
    tables: dict[str, JsonObject] = {}
    for name in names:
        try:
            tables[name] = _loaded(folder / name) if (folder / name).is_file() else {}
            if not isinstance(tables[name], dict):
                raise BadRow("it holds no JSON object")
        except (BadRow, *UNREADABLE) as error:
            raise UsageError(f"{folder / name}: cannot be read: {error}; fetch it again") from error
    return tables


def _json_rows(path: Path) -> Iterator[tuple[str, int, str, UserRow]]:
    """Yield (part, number, place in words, row) for each row of a JSON annotation file."""
    content = _loaded(path)
    if isinstance(content, dict) and isinstance(content.get("meta"), dict):
        root = content.get("root")
        prefixes = root if isinstance(root, dict) else {}
        for part, rows in content["meta"].items():
            for number, row in enumerate(_checked(rows)):
                prefix = {"prefix": prefixes[part]} if part in prefixes else {}
                yield part, number, f"{part}, row {number}", {**row, **prefix}
    else:
        yield from ((path.stem, number, f"row {number}", row) for number, row in enumerate(_checked(content)))


def _checked(rows: object) -> list[UserRow]:
    """Return ``rows`` if it is a list of objects, else raise BadRow."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BadRow("expected a JSON list of objects")
    return rows


def _loaded(path: Path) -> Any:
    """Parse a JSON file. Raises BadRow."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadRow(f"not JSON: {error}") from error
