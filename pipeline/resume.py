"""What is left to do: the manifest minus the live rows of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.config import PruneConfig
from pipeline.errors import SourceChanged
from pipeline.manifest import MANIFEST_SCHEMA

# A todo row is a manifest row and the number of this attempt.
TODO_SCHEMA = MANIFEST_SCHEMA.append(pa.field("attempts", pa.int32(), nullable=False))


def remaining(manifest: pa.Table, live: pa.Table, config: PruneConfig) -> pa.Table:
    """The manifest rows that this run must process, as TODO_SCHEMA.

    A failed row counts as done unless ``--retry-failed``. Raises SourceChanged where a cached video's uri, size or
    clip differs and ``--on-changed`` is ``refuse``.
    """
    done = {row["video_id"]: row for row in live.to_pylist()}
    changed: list[str] = []
    places, attempts = [], []
    for place, row in enumerate(manifest.to_pylist()):
        old = done.get(row["video_id"])
        if old is None:
            redo = True
        else:
            failed = old["status"] != "ok"
            difference = _difference(row, old)
            # A failed row holds no tokens to protect, and a mended file deserves its attempts anew.
            redo = failed and config.retry_failed and (difference is not None or old["attempts"] < config.max_attempts)
            if difference and not failed and config.on_changed != "skip":
                changed.append(f"{row['video_id']}: {difference}")
                redo = True
        if redo:
            places.append(place)
            attempts.append(1 if old is None else old["attempts"] + 1)
    if changed and config.on_changed == "refuse":
        raise SourceChanged(
            f"{len(changed)} videos of the cache {config.out} have changed:\n  "
            + "\n  ".join(changed[:5])
            + "\nKeep the cached ones with --on-changed skip, or process them again with --on-changed redo."
        )
    return manifest.take(pa.array(places, pa.int64())).append_column(
        TODO_SCHEMA.field("attempts"), pa.array(attempts, pa.int32())
    )


def _difference(row: dict[str, Any], old: dict[str, Any]) -> str | None:
    """What differs between a manifest row and the cached row of the same id."""
    for name in ("uri", "start_s", "end_s"):
        if row[name] != old[name]:
            return f"{name} was {old[name]!r}, is {row[name]!r}"
    if old["source_size"] is not None and not row["policy"]:
        try:
            size = Path(row["path"]).stat().st_size
        except OSError:
            return None  # gone since: its tokens are in the cache, which is what the cache is for
        if size != old["source_size"]:
            return f"the file had {old['source_size']} bytes, has {size}"
    return None
