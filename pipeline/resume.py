"""What is left to do: the manifest minus the live rows of the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.config import PruneConfig
from pipeline.errors import SourceChanged, UsageError
from pipeline.manifest import MANIFEST_SCHEMA
from pipeline.objects import Objects, is_object

Row = dict[str, Any]
_ASKED = 32  # requests at a time

# A todo row is a manifest row and the number of this attempt.
TODO_SCHEMA = MANIFEST_SCHEMA.append(pa.field("attempts", pa.int32(), nullable=False))


def remaining(manifest: pa.Table, live: pa.Table, config: PruneConfig, objects: Objects | None = None) -> pa.Table:
    """The manifest rows that this run must process, as TODO_SCHEMA.

    A failed row counts as done unless ``--retry-failed``. Raises SourceChanged where a cached video's uri, size or
    clip differs and ``--on-changed`` is ``refuse``.

    Sizes are what a listing on S3 said; else one look at the file, or one HEAD for each ok row of an object that a
    manifest names. With ``--on-changed skip`` none is asked for. Raises UsageError where the store does not answer.
    """
    done = {row["video_id"]: row for row in live.to_pylist()}
    rows = manifest.to_pylist()
    sizes = {} if config.on_changed == "skip" else _sizes(rows, done, objects)
    changed: list[str] = []
    places, attempts = [], []
    for place, row in enumerate(rows):
        old = done.get(row["video_id"])
        if old is None:
            redo = True
        else:
            failed = old["status"] != "ok"
            difference = _difference(row, old, sizes.get(row["video_id"], row["size"]))
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


def _difference(row: Row, old: Row, size: int | None) -> str | None:
    """What differs between a manifest row, whose video has ``size`` bytes now, and the cached row of the same id."""
    for name in ("uri", "start_s", "end_s"):
        if row[name] != old[name]:
            return f"{name} was {old[name]!r}, is {row[name]!r}"
    # None: gone since, and its tokens are in the cache, which is what the cache is for.
    if row["policy"] or old["source_size"] is None or size is None or size == old["source_size"]:
        return None
    return f"the file had {old['source_size']} bytes, has {size}"


def _sizes(rows: Sequence[Row], done: Mapping[str, Row], objects: Objects | None) -> dict[str, int | None]:
    """By video_id, the size now of what no listing gave one of; None where it is gone."""
    unknown = [row for row in rows if row["size"] is None and _comparable(row, done.get(row["video_id"]))]
    sizes = {row["video_id"]: _size_on_disk(row["path"]) for row in unknown if not is_object(row["path"])}
    asked = [row for row in unknown if is_object(row["path"]) and done[row["video_id"]]["status"] == "ok"]
    if asked:
        found = _sizes_on_s3([row["path"] for row in asked], objects or Objects.from_environment())
        sizes |= {row["video_id"]: size for row, size in zip(asked, found, strict=True)}
    return sizes


def _comparable(row: Row, old: Row | None) -> bool:
    return (
        old is not None and old["source_size"] is not None and not row["policy"] and _difference(row, old, None) is None
    )


def _size_on_disk(path: str) -> int | None:
    try:
        return Path(path).stat().st_size
    except OSError:
        return None


def _sizes_on_s3(uris: Sequence[str], objects: Objects) -> Iterator[int | None]:
    """One HEAD each; None where the object is gone or this one cannot be asked about.

    Raises UsageError once the store has refused as many in a row as are asked at a time, or all of them: it says
    nothing then, and "unchanged" would be a guess.
    """

    def size(uri: str) -> int | OSError | None:
        try:
            return objects.size(uri)
        except FileNotFoundError:
            return None
        except OSError as error:
            return error

    refused = 0
    pool = ThreadPoolExecutor(_ASKED)
    try:
        for start in range(0, len(uris), 8 * _ASKED):  # not all at once: a million of them would wait in memory
            for answer in pool.map(size, uris[start : start + 8 * _ASKED]):
                refused = refused + 1 if isinstance(answer, OSError) else 0
                if isinstance(answer, OSError) and refused == min(_ASKED, len(uris)):
                    raise UsageError(
                        f"{answer.filename}: whether cached videos have changed cannot be asked: {answer.strerror}; "
                        "--on-changed skip keeps them unasked"
                    )
                yield None if isinstance(answer, OSError) else answer
    finally:
        pool.shutdown(cancel_futures=True)
