"""The removal of answers for good: for takedowns, licenses, privacy. Rerun the command to resume after a kill.

Each removal puts a file into ``removed/`` that bars its videos: questions about them are neither asked nor counted as
failed. Their answers stay as rows of status "removed" without any text, which beat all other rows of the question.
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
from pipeline.errors import make_printable
from pipeline.generate.answers import (
    ANSWERS,
    REMOVED,
    SUFFIXES,
    list_shards,
    parse_shard,
    read_answers_header,
)
from pipeline.generate.conversation import list_texts, load_messages
from pipeline.inputs.tables import serialize_carried
from pipeline.runner.removal import Removal, claim_for_removal, delete_unfinished, forget_in_runs, iter_texts
from pipeline.runner.run_record import RUNS, format_now, make_run_id
from pipeline.storage.stores import Store

_KEYS = ("question_id", "video_ids", "pruning", "method_code", "attempts")  # columns that a removed row keeps
_MAX_ROWS_AS_OBJECTS = 4096


@dataclass
class AnswersRemoval(Removal):
    """The result of a removal from answers.

    Attributes:
        questions: the ids of all questions about the videos, sorted.
        answers: the number of rows whose texts were removed now, superseded rows included.
    """

    questions: list[str] = field(default_factory=list)
    answers: int = 0

    def lines(self) -> Iterator[str]:
        """Yield lines with the counts, and notes about unknown ids."""
        yield (
            f"{self.videos:,} videos removed for good from the answers, with {len(self.questions):,} questions about "
            f"them; {self.answers:,} answers lost their texts"
        )
        yield f"{len(self.deleted):,} files deleted; {REMOVED}/ says why"
        yield from super().lines()


def read_removal_reasons(store: Store) -> dict[str, str]:
    """Read which videos were removed from answers or results, and why: video id -> reason.

    A file without a hash in its name, such as a copy, counts too if it can be read.

    Raises:
        CorruptShard: a file does not match the hash in its name, or is not such a file.
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
    """Bar videos from answers or results, by one new file, unless all are barred already; those keep their reason.

    Args:
        reasons: video id -> reason, cut to 1 KB.
    """
    barred = read_removal_reasons(store)
    if new := {video_id: make_printable(reason) for video_id, reason in reasons.items() if video_id not in barred}:
        data = json.dumps({"videos": new, "time": format_now()}, indent=1).encode()
        store.put(make_small_name(REMOVED, run_id, 0, data, ".json"), data)


def remove_answers(store: Store, ids: Sequence[str], reason: str, say: Callable[[str], object]) -> AnswersRemoval:
    """Bar videos, and remove the texts of all answers about them; repeat the call to resume.

    A question about several videos is removed if one of them is. Files that held the texts are replaced, and the
    records of runs lose the ids and texts.

    Args:
        reason: stored with the rows, the bars and the record of the removal.

    Raises:
        NotAnswers: ``store`` does not hold answers.
        CacheLocked: a run writes to ``store``.
        UsageError: ``store`` cannot be written to.
        CorruptShard: a file of answers is damaged.
    """
    read_answers_header(store)
    result = AnswersRemoval(make_run_id(), len(ids))
    with claim_for_removal(store, result, reason, say):
        bar_videos(store, result.run_id, dict.fromkeys(ids, reason))
        _AnswersRemover(store, frozenset(ids), reason, result).run()
    return result


class _AnswersRemover:
    """The steps of one removal of answers, once its videos are barred."""

    def __init__(self, store: Store, ids: frozenset[str], reason: str, result: AnswersRemoval) -> None:
        """Prepare the removal of the answers about the videos ``ids``; ``run`` fills in ``result``."""
        self._store = store
        self._ids = ids
        self._result = result
        self._new_values: dict[str, str] = {
            "prompt": "",
            "status": REMOVED,
            "run_id": result.run_id,
            "error_message": make_printable(reason),
        }

    def run(self) -> None:
        """Clean the records of runs, rewrite the files of answers without the texts, and delete the old ones.

        Texts that other answers have too stay in the records. Copies of the old files and unfinished files are deleted
        too. Fills in the result.
        """
        names, copies = list_shards(self._store)
        result = self._result
        old_names = list[str]()
        removed_texts = set[str]()
        video_ids = set[str]()
        for name, table in self._read(names):
            video_ids.update(pc.list_flatten(table["video_ids"]).to_pylist())
            removed_rows = table.filter(self._find_rows(table))
            result.questions += removed_rows["question_id"].to_pylist()
            with_texts = removed_rows.filter(pc.not_equal(removed_rows["status"], REMOVED))
            if len(with_texts):
                old_names.append(name)
                removed_texts.update(_iter_texts(with_texts))
                result.answers += len(with_texts)
        for _, table in self._read(names if removed_texts else []):  # texts that other answers have, too, stay
            removed_texts.difference_update(_iter_texts(table.filter(pc.invert(self._find_rows(table)))))
        result.questions = sorted(set(result.questions))
        result.find_unknown(self._ids, video_ids, pa.chunked_array([sorted(video_ids - self._ids)], pa.string()))
        # Before the files change: after a kill, only the files of answers tell a rerun which texts to remove.
        forget_in_runs(self._store, self._ids, removed_texts)
        for number, name in enumerate(old_names):
            self._rewrite(number, name)
        # Delete copies first: without its shard, a copy counts as damaged.
        old_names[:0] = [copy for copy, shard in copies.items() if shard in old_names]
        for name in old_names:
            self._store.delete(name)
        result.deleted += [*old_names, *delete_unfinished(self._store, ("", ANSWERS, RUNS, REMOVED))]

    def _read(self, names: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
        """Yield (name, rows) of each file. Raises CorruptShard if one is damaged."""
        for name, data in zip(names, self._store.read_all(names), strict=True):
            yield name, parse_shard(self._store, name, data)

    def _find_rows(self, table: pa.Table) -> pa.Array:
        """Return a bool mask of the rows about removed videos."""
        return pa.array([not self._ids.isdisjoint(ids) for ids in table["video_ids"].to_pylist()], pa.bool_())

    def _rewrite(self, number: int, name: str) -> None:
        """Write a file of answers anew without the texts of removed rows; the old file stays."""
        data = self._store.read(name)
        suffix = PurePosixPath(name).suffix
        if suffix == SUFFIXES["parquet"]:
            new_data = write_parquet(self._clear_rows(parse_shard(self._store, name, data)))
        else:
            lines = data.decode().split("\n")  # lines of other answers stay unchanged, byte for byte
            new_data = "\n".join(line and self._clear_line(line) for line in lines).encode()
        self._store.put(make_small_name(ANSWERS, self._result.run_id, number, new_data, suffix), new_data)

    def _clear_rows(self, table: pa.Table) -> pa.Table:
        """Return the table with the removed rows cleared: only _KEYS, the status, the run and the reason are left."""
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
        """Return a JSON line, cleared if it is about a removed video."""
        row: dict[str, Any] = json.loads(line)
        if self._ids.isdisjoint(row["video_ids"]):
            return line
        keys = {name: row.get(name) for name in _KEYS}
        return serialize_carried({**dict.fromkeys(row), **keys, **self._new_values}, ensure_ascii=False)


def _iter_texts(rows: pa.Table) -> Iterator[str]:
    """Yield the texts of answers that must be forgotten: all columns, carried ones too, but not keys, status or finish.

    ``decoding`` counts only with its system message, and a conversation only with its texts. Each text is yielded
    twice: unchanged, and as messages print it. Blank texts are skipped.
    """
    names = {*rows.column_names} - {*_KEYS, "run_id", "status", "error_class", "finish"}
    for batch in rows.select(sorted(names)).to_batches(max_chunksize=_MAX_ROWS_AS_OBJECTS):
        for row in batch.to_pylist():
            row["decoding"] = None if row["decoding"] is None else json.loads(row["decoding"]).get("system")
            row["conversation"] = list_texts(load_messages(row["conversation"] or "[]"))
            for text in iter_texts(row):
                if text.strip():
                    yield from (text, make_printable(text))
