"""What a cache says of removed videos outside its tables: kept indexes, records and logs of runs, replaced files.

The tables forget by themselves: a removal moves the other videos and deletes what held the removed ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import PurePosixPath

import pyarrow as pa

from pipeline.cache.bounds import read_bounded
from pipeline.cache.schema import TOKENS, VIDEOS
from pipeline.cache.table import is_table_name
from pipeline.cache.token_shard import has_shard_form
from pipeline.inputs.forms import FORMS
from pipeline.inputs.indexes import forget_members
from pipeline.inputs.listings import VIDEO_SUFFIXES, find_suffix
from pipeline.rows import Json
from pipeline.runner.run_record import RUNS
from pipeline.storage.stores import INDEXES, TEMPORARY, Store
from pipeline.verify.report import KEPT_IN

_FOLDERS = ("", TOKENS, VIDEOS, RUNS, INDEXES, KEPT_IN)
_INSTEAD = "(removed)"
_MAGIC = b"PAR1"
# Fields of a record that name no video: a short id must not change a version or a shard.
_KEPT_KEYS = frozenset(
    {"run_id", "host", "versions", "status", "device", "dtype", "resources", "token_shards", "emptied"}
)
_IN_ARCHIVE = re.compile(rf"({'|'.join(map(re.escape, FORMS))})/")


def forget_videos(store: Store, ids: Collection[str], uris: Collection[str]) -> list[str]:
    """Take ids, addresses and carried texts of videos out of all files but the tables; return the deleted files.

    Records and logs of runs get "(removed)" instead. Kept indexes lose the members, or are deleted. Replaced files with
    a row of the videos are deleted, and so are all unfinished files.

    ``uris`` are the places that rows had; where an earlier removal has deleted the rows, ``ids`` alone tell. No run may
    be writing. Raises OSError.
    """
    deleted_names = forget_members(store, uris, ids)
    texts = _stems([*ids, *uris, *(_IN_ARCHIVE.sub(r"\1#", video_id) for video_id in ids)])
    for file in store.list_files(RUNS):
        if file.name.endswith((".json", ".log")):
            _rewrite(store, file.name, texts)
    for folder in _FOLDERS:
        for file in store.list_files(folder):
            is_unfinished = PurePosixPath(file.name).name.startswith(TEMPORARY)
            if is_unfinished or (folder == KEPT_IN and _may_hold(store.read(file.name), ids)):
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


def _stems(texts: Iterable[str]) -> list[str]:
    """Return texts without a video's suffix, the longest first: what is beside a video has its stem."""
    stems = {text[: -len(find_suffix(text))] if find_suffix(text) in VIDEO_SUFFIXES else text for text in texts}
    return sorted(stems - {""}, key=lambda stem: (-len(stem), stem))


def _rewrite(store: Store, name: str, texts: Iterable[str]) -> None:
    """Replace the texts by "(removed)" in a record or log of a run; a file without them stays as it is.

    A text is replaced where it stands as a whole word, with the file suffixes behind it (.mp4). Raises OSError.
    """
    content = store.read(name).decode("utf-8", "replace")
    try:
        record: Json = json.loads(content)
    except ValueError:
        record = content  # a log, or a record that was cut off
    whole = "\n".join(_texts(record))
    present = [text for text in texts if text in whole]
    patterns = [re.compile(rf"(?<![\w-]){re.escape(text)}(\.\w+)*(?![\w-])") for text in present]
    new_record = _without(record, patterns)
    if new_record != record:
        store.put(name, (new_record if isinstance(new_record, str) else json.dumps(new_record, indent=2)).encode())


def _texts(value: Json) -> Iterator[str]:
    """Yield the texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _without(value: Json, patterns: Collection[re.Pattern[str]]) -> Json:
    """Return a value of JSON with "(removed)" for each match of the patterns in its texts.

    Fields of _KEPT_KEYS stay, and of the options of a run all but ``videos``.
    """
    if isinstance(value, str):
        for pattern in patterns:
            value = pattern.sub(_INSTEAD, value)
        return value
    if isinstance(value, dict):
        return {name: part if name in _KEPT_KEYS else _part(name, part, patterns) for name, part in value.items()}
    return [_without(part, patterns) for part in value] if isinstance(value, list) else value


def _part(name: str, part: Json, patterns: Collection[re.Pattern[str]]) -> Json:
    """Return a part of a record; of the options of a run ``videos`` alone names videos."""
    if name != "config" or not isinstance(part, dict):
        return _without(part, patterns)
    return {option: _without(value, patterns) if option == "videos" else value for option, value in part.items()}


def _may_hold(data: bytes, ids: Collection[str]) -> bool:
    """Return True if a Parquet file has a row of one of the videos, or cannot be read."""
    try:
        table = read_bounded(data, ["video_id"])
    except (pa.ArrowException, OSError, ValueError):
        return True
    return "video_id" in table.column_names and not set(ids).isdisjoint(table["video_id"].to_pylist())
