"""The removal of answers for good: for takedowns, licences, privacy.

``removed/`` has a file for each removal, with the ids of its videos. It bars them: a question about one of them is
neither asked nor counted as failed. Its answers stay as rows of status "removed" without any text; such a row beats all
other rows of its question. Files that held the texts are written again and deleted.

Rerun the command to resume after a kill.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.schema import write_parquet
from pipeline.cache.table import check_content, has_content_hash, make_small_name
from pipeline.errors import printable
from pipeline.generate.answers import (
    ANSWERS,
    REMOVED,
    SUFFIXES,
    list_shards,
    parse_shard,
    read_answers_header,
)
from pipeline.generate.conversation import list_texts, load_messages
from pipeline.inputs.tables import carried_json
from pipeline.runner.removal import Removal, delete_unfinished, forget_in_runs, iter_texts, removal_run
from pipeline.runner.run_record import RUNS, new_run_id, now
from pipeline.storage.stores import Store

_KEYS = ("question_id", "video_ids", "pruning", "method_code", "attempts")  # columns that a removed row keeps
_MAX_ROWS_AS_OBJECTS = 4096


@dataclass
class AnswersRemoval(Removal):
    """The result of a removal from answers.

    Attributes:
        questions: ids of all questions about the videos.
        answers: rows whose texts were removed now, superseded rows too.
    """

    questions: list[str] = field(default_factory=list)
    answers: int = 0

    def lines(self) -> Iterator[str]:
        """Yield lines for the user about the result."""
        yield (
            f"{self.videos:,} videos removed for good from the answers, with {len(self.questions):,} questions about "
            f"them; {self.answers:,} answers lost their texts"
        )
        yield f"{len(self.deleted):,} files deleted; {REMOVED}/ says why"
        yield from super().lines()


def read_barred(store: Store) -> dict[str, str]:
    """Read which videos were removed from answers or results: id -> the reason.

    A file under another name, such as a copy, bars its videos too. Raises CorruptShard, OSError.
    """
    barred: dict[str, str] = {}
    for name in store.names(REMOVED, ".json"):
        data = store.read(name)
        try:
            videos = json.loads(data)["videos"]
            is_bar = all(isinstance(reason, str) for reason in videos.values())
        except (ValueError, LookupError, TypeError, AttributeError):
            is_bar = False
        if not is_bar or has_content_hash(name):
            check_content(store, name, data)
        barred |= videos
    return barred


def bar_videos(store: Store, run_id: str, reasons: Mapping[str, str]) -> None:
    """Bar videos, id -> the reason, from answers or results; those that are barred already keep their reason."""
    barred = read_barred(store)
    if new := {video_id: printable(reason) for video_id, reason in reasons.items() if video_id not in barred}:
        data = json.dumps({"videos": new, "time": now()}, indent=1).encode()
        store.put(make_small_name(REMOVED, run_id, 0, data, ".json"), data)


def remove_answers(store: Store, ids: Sequence[str], reason: str, say: Callable[[str], object]) -> AnswersRemoval:
    """Remove the answers about these videos for ``reason``, and bar the videos; repeat it to resume.

    A question about several videos is removed if one of them is.

    Raises NotAnswers, CacheLocked where a run writes to it, CorruptShard where a file of answers is damaged, and
    OSError.
    """
    read_answers_header(store)
    result = AnswersRemoval(new_run_id(), len(ids))
    with removal_run(store, result, reason, say):
        bar_videos(store, result.run_id, dict.fromkeys(ids, reason))
        _AnswersRemover(store, frozenset(ids), reason, result).run()
    return result


class _AnswersRemover:
    """The steps of one removal of answers, once its videos are barred."""

    def __init__(self, store: Store, ids: frozenset[str], reason: str, result: AnswersRemoval) -> None:
        self._store, self._ids, self._result = store, ids, result
        self._new_values: dict[str, str] = {
            "prompt": "",
            "status": REMOVED,
            "run_id": result.run_id,
            "error_message": printable(reason),
        }

    def run(self) -> None:
        """Forget the texts in the records of runs, then in the files of answers, and delete what held them."""
        (names, copies), result = list_shards(self._store), self._result
        held_names, removed_texts, video_ids = list[str](), set[str](), set[str]()
        for name, table in self._read(names):
            video_ids.update(pc.list_flatten(table["video_ids"]).to_pylist())
            removed_rows = table.filter(self._find_rows(table))
            result.questions += removed_rows["question_id"].to_pylist()
            with_texts = removed_rows.filter(pc.not_equal(removed_rows["status"], REMOVED))
            if len(with_texts):
                held_names.append(name)
                removed_texts.update(_iter_texts(with_texts))
                result.answers += len(with_texts)
        for _, table in self._read(names if removed_texts else []):  # texts that other answers have too stay
            removed_texts.difference_update(_iter_texts(table.filter(pc.invert(self._find_rows(table)))))
        result.questions = sorted(set(result.questions))
        result.find_unknown(self._ids, video_ids, pa.chunked_array([sorted(video_ids - self._ids)], pa.string()))
        # First, since the files of answers alone tell a later run of this command which texts these are.
        forget_in_runs(self._store, self._ids, removed_texts)
        for number, name in enumerate(held_names):
            self._rewrite(number, name)
        # Copies go first: without its shard a copy counts as damaged.
        held_names[:0] = [copy for copy, shard in copies.items() if shard in held_names]
        for name in held_names:
            self._store.delete(name)
        result.deleted += [*held_names, *delete_unfinished(self._store, ("", ANSWERS, RUNS, REMOVED))]

    def _read(self, names: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
        """Yield the name and the rows of each file of answers. Raises CorruptShard, OSError."""
        for name, data in zip(names, self._store.read_all(names), strict=True):
            yield name, parse_shard(self._store, name, data)

    def _find_rows(self, table: pa.Table) -> pa.Array:
        """Return a mask of the rows about removed videos."""
        return pa.array([not self._ids.isdisjoint(ids) for ids in table["video_ids"].to_pylist()], pa.bool_())

    def _rewrite(self, number: int, name: str) -> None:
        """Write a file of answers again, without the texts of its removed rows."""
        data, suffix = self._store.read(name), PurePosixPath(name).suffix
        if suffix == SUFFIXES["parquet"]:
            new_data = write_parquet(self._clear_rows(parse_shard(self._store, name, data)))
        else:
            lines = data.decode().split("\n")  # lines of other answers stay as they are, to the byte
            new_data = "\n".join(line and self._clear_line(line) for line in lines).encode()
        self._store.put(make_small_name(ANSWERS, self._result.run_id, number, new_data, suffix), new_data)

    def _clear_rows(self, table: pa.Table) -> pa.Table:
        """Return a table whose removed rows have _KEYS, the status and the reason, and nulls."""
        is_removed = self._find_rows(table)
        other_rows = pc.if_else(is_removed, pa.scalar(None, pa.int64()), pa.array(range(len(table)), pa.int64()))
        for index, column in enumerate(table.schema):
            if column.name in self._new_values:
                value = pa.scalar(self._new_values[column.name], pa.string())
                table = table.set_column(index, column, pc.if_else(is_removed, value, table[column.name]))
            elif column.name not in _KEYS:
                table = table.set_column(index, column, table[column.name].take(other_rows))
        return table

    def _clear_line(self, line: str) -> str:
        """Return a line of JSON like a removed row, if it is about a removed video; else the line."""
        row: dict[str, Any] = json.loads(line)
        if self._ids.isdisjoint(row["video_ids"]):
            return line
        keys = {name: row.get(name) for name in _KEYS}
        return carried_json({**dict.fromkeys(row), **keys, **self._new_values}, ensure_ascii=False)


def _iter_texts(rows: pa.Table) -> Iterator[str]:
    """Yield the texts of answers, carried columns and system messages included, but not their keys.

    Each comes as it is, and as a message shows it.
    """
    names = {*rows.column_names} - {*_KEYS, "run_id", "status", "error_class", "finish"}
    for batch in rows.select(sorted(names)).to_batches(max_chunksize=_MAX_ROWS_AS_OBJECTS):
        for row in batch.to_pylist():
            row["decoding"] = None if row["decoding"] is None else json.loads(row["decoding"]).get("system")
            row["conversation"] = list_texts(load_messages(row["conversation"] or "[]"))
            for text in iter_texts(row):
                if text.strip():
                    yield from (text, printable(text))
