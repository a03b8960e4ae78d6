"""The shared code of the commands that remove videos from caches and from answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import pyarrow as pa

from pipeline.cache.near_ids import find_similar_ids
from pipeline.errors import describe_similar_name, list_first_names
from pipeline.inputs.forms import FORMS
from pipeline.inputs.listings import VIDEO_SUFFIXES, find_suffix
from pipeline.rows import Json
from pipeline.runner.claim import Claim
from pipeline.runner.cluster.connection import collect_provenance
from pipeline.runner.run_record import RUNS, RunFile
from pipeline.storage.stores import TEMPORARY, Store

_INSTEAD = "(removed)"
# Fields of a record that never name a video, so that a short id does not change a version or the name of a shard.
_KEPT_KEYS = frozenset(
    {"run_id", "host", "versions", "status", "device", "dtype", "resources", "token_shards", "emptied"}
)
_OPTIONS = frozenset({"videos", "ask", "system"})  # options of a run that may contain the texts
_IN_ARCHIVE = re.compile(rf"({'|'.join(map(re.escape, FORMS))})/")
_MAX_EXAMPLES = 5  # at most this many unknown ids are named


@dataclass
class Removal:
    """The result of a removal of videos from one cache or set of answers.

    Attributes:
        run_id: the run whose record has the reason; "" if there is no run.
        videos: the number of ids that are removed now.
        unknown: ids that were not found, sorted.
        likely: unknown id -> similar known ids; for the first _MAX_EXAMPLES unknown ids only.
        deleted: names of files that contained something of the videos.
    """

    run_id: str
    videos: int = 0
    unknown: list[str] = field(default_factory=list)
    likely: dict[str, list[str]] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)

    def find_unknown(self, ids: Collection[str], known_ids: Iterable[str], nameable: pa.ChunkedArray) -> None:
        """Set ``unknown`` to the ``ids`` not in ``known_ids``, and ``likely`` to ids similar to the first few of them.

        Suggested are ids of ``nameable`` that are not among ``ids``.
        """
        self.unknown = sorted(set(ids).difference(known_ids))
        for video_id in self.unknown[:_MAX_EXAMPLES]:
            if likely := [name for name in find_similar_ids(video_id, nameable) if name not in ids]:
                self.likely[video_id] = likely

    def lines(self) -> Iterator[str]:
        """Yield a note with the number and the first few of the unknown ids, then a note for each id of ``likely``."""
        if n_unknown := len(self.unknown):
            names = list_first_names(self.unknown, n_unknown, _MAX_EXAMPLES)
            yield f"note: {n_unknown:,} of the ids are unknown here, and barred all the same: {names}"
        for video_id, likely in self.likely.items():
            names = ", ".join(describe_similar_name(video_id, name) for name in likely)
            yield f"note: {video_id} was not found; did you mean {names}? It stays until you name it"


@contextmanager
def claim_for_removal(store: Store, result: Removal, reason: str, say: Callable[[str], object]) -> Iterator[None]:
    """Claim ``store`` for a removal inside the context, and write the record of its run, with the reason.

    Raises:
        CacheLocked: another run writes to ``store``.
        UsageError: nothing can be written, or a folder of ``store`` is a symbolic link.
    """
    record = {**collect_provenance(result.run_id), "removed": result.videos, "reason": reason}
    with Claim(store, result.run_id, say), RunFile(store, record):
        yield


def forget_in_runs(store: Store, ids: Collection[str], texts: Collection[str]) -> None:
    """Replace ids of videos and other texts by "(removed)" in the records and logs of all runs.

    An id is also replaced in the form ARCHIVE#MEMBER. Each text is replaced without its video suffix, where letters,
    digits, "_" or "-" do not touch it, together with any suffixes behind it (.mp4). In records, fields that cannot name
    a video stay, such as the versions.
    """
    texts = [*ids, *texts, *(_IN_ARCHIVE.sub(r"\1#", video_id) for video_id in ids)]
    # Without a video's suffix, since files that belong to a video share its stem; the longest first.
    unique = {text[: -len(find_suffix(text))] if find_suffix(text) in VIDEO_SUFFIXES else text for text in texts}
    stems = sorted(unique - {""}, key=lambda stem: (-len(stem), stem))
    names = [file.name for file in store.list_files(RUNS) if file.name.endswith((".json", ".log"))]
    for name in names:
        content = store.read(name).decode("utf-8", "replace")
        try:
            record: Json = json.loads(content)
        except (ValueError, RecursionError):
            record = content  # a log or a truncated record
        whole = "\n".join(iter_texts(record))
        present = [stem for stem in stems if stem in whole]
        patterns = [re.compile(rf"(?<![\w-]){re.escape(stem)}(\.\w+)*(?![\w-])") for stem in present]
        new_record = _remove_texts(record, patterns)
        if new_record != record:
            store.put(name, (new_record if isinstance(new_record, str) else json.dumps(new_record, indent=2)).encode())


def delete_unfinished(store: Store, folders: Iterable[str]) -> list[str]:
    """Delete the temporary files of stopped writers in these folders while no run writes, and return their names."""
    names = [file.name for folder in folders for file in store.list_files(folder)]
    unfinished_names = [name for name in names if PurePosixPath(name).name.startswith(TEMPORARY)]
    for name in unfinished_names:
        store.delete(name)
    return unfinished_names


def iter_texts(value: Json) -> Iterator[str]:
    """Yield the strings in a JSON value, at any depth, but not the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from iter_texts(part)


def _remove_texts(value: Json, patterns: Collection[re.Pattern[str]], *, are_options: bool = False) -> Json:
    """Return a copy of a JSON value in which each match of the patterns in its strings is "(removed)".

    Keys and the fields _KEPT_KEYS stay as they are. If ``are_options``, as for a field "config", only the fields
    _OPTIONS of an object are changed.
    """
    if isinstance(value, str):
        for pattern in patterns:
            value = pattern.sub(_INSTEAD, value)
        return value
    if isinstance(value, dict):
        stay = value.keys() - _OPTIONS if are_options else _KEPT_KEYS
        return {
            name: part if name in stay else _remove_texts(part, patterns, are_options=name == "config")
            for name, part in value.items()
        }
    return [_remove_texts(part, patterns) for part in value] if isinstance(value, list) else value
