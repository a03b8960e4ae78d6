"""The header of a place on disk: what all its rows were made with, under a schema version."""

from __future__ import annotations

import json
from typing import Any

from pipeline.errors import UsageError
from pipeline.store import Store


def read_header_file(
    store: Store, name: str, version: int, error: type[UsageError], absent: str, of: str = ""
) -> dict[str, Any]:
    """The object in ``name``: schema_version, identity and more. Raises ``error`` where it is none of that version.

    Args:
        absent: what is said of a place without the file, with the remedy.
        of: what the version is of, in words.
    """
    try:
        header = json.loads(store.read(name))
    except FileNotFoundError:
        raise error(f"{store}: {absent}") from None
    except json.JSONDecodeError as damage:
        raise error(f"{store}/{name}: not JSON: {damage}") from damage
    found = header.get("schema_version") if isinstance(header, dict) else None
    if found != version:
        raise error(f"{store}: {of}schema version {found!r}; this program reads version {version}")
    if not isinstance(header.get("identity"), dict):
        raise error(f"{store}/{name}: it holds no identity; restore the file")
    return dict(header)
