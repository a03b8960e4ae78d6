"""Answers on disk: the columns, the settings that all rows share, and the live rows.

``answers.json`` holds the settings, ``answers/<shard>.parquet`` or ``.jsonl`` one row per question,
``runs/<run_id>.json`` the provenance, and ``removed/`` the barred videos. A question has one live row under each
pruning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple, NotRequired, TypedDict, cast, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.changed_code import find_changed_methods, keep_unknown_code, refuse_changed_code
from pipeline.cache.header import (
    CacheIdentity,
    ModelIdentity,
    PrunerIdentity,
    read_header_file,
    serialize_header,
)
from pipeline.cache.live import read_states, sort_by_rule
from pipeline.cache.merging import KEEP
from pipeline.cache.schema import (
    READ_THREADS,
    complete_columns,
    hash_bytes_to_hex,
    make_field,
    open_parquet,
    write_parquet,
)
from pipeline.cache.table import check_content, has_content_hash, make_small_name
from pipeline.errors import CorruptShard, NotAnswers, QuestionFaultClass
from pipeline.generate.question_columns import append_carried_columns, concat_answers, make_carried_columns
from pipeline.inputs.tables import serialize_carried
from pipeline.rows import AnswerRecord, Json, JsonObject, QuestionRecord, drop_nulls
from pipeline.storage.stores import Store, store_at

ANSWERS_VERSION = 2
KEYS = ("question_id", "pruning")
_LIVE_KEYS = (*KEYS, "method_code")  # rows of one question made with different code are separate
_MERGED_KEY = b"merged"  # metadata key of a merged file: a JSON list of the files it was made of
HEADER = "answers.json"
ANSWERS = "answers"
REMOVED = "removed"  # the folder of the bars, and the status of removed rows
QUESTION_EXTRA = "question_extra"  # in old answers: JSON of the carried columns
PRUNINGS: Final = "prunings"  # key of the identity if there are several prunings
SUFFIXES = {"parquet": ".parquet", "jsonl": ".jsonl"}
_MAX_ROWS_AS_OBJECTS = 4096
_NUMBER_PATTERN = re.compile(r"([^0-9]*)([0-9]{0,18})")

ANSWER_SCHEMA = pa.schema(
    [
        make_field("question_id", pa.string(), "the id in the questions file", nullable=False),
        make_field("run_id", pa.string(), "the run that wrote this row: runs/<run_id>.json", nullable=False),
        make_field("video_ids", pa.list_(pa.string()), "the videos of the prompt, in its order", nullable=False),
        make_field(
            "prompt", pa.string(), "the question as it was asked, without what a chat template adds", nullable=False
        ),
        make_field(
            "conversation", pa.string(), "JSON of its messages, the prompt being the last; null without messages"
        ),
        make_field("choices", pa.list_(pa.string()), "its choices; null for an open question"),
        make_field("target", pa.string(), "the right answer, as the questions file says it (its column answer)"),
        make_field(
            "pruning", pa.string(), "method@ratio that pruned for this answer; null where the cache holds it so"
        ),
        make_field(
            "method_code",
            pa.string(),
            "hash of the code of your own methods that pruned; null where none did",
        ),
        make_field("status", pa.string(), "'ok', 'failed' or 'removed'", nullable=False),
        make_field("error_class", pa.string(), " ".join(get_args(QuestionFaultClass))),
        make_field("error_message", pa.string(), "at most 1 KB, printable; why a removed answer was removed"),
        make_field("retryable", pa.bool_(), "whether another attempt may succeed"),
        make_field("attempts", pa.int32(), "how often this question was asked, over all runs", nullable=False),
        make_field(
            "answer", pa.string(), "what was generated; the letter or text of the choice where choices were scored"
        ),
        make_field("choice", pa.int32(), "index of the choice; null where the answer names none"),
        make_field("choice_scores", pa.list_(pa.float64()), "natural log-probability of each letter or choice"),
        make_field("choice_tokens", pa.list_(pa.int32()), "tokens of each letter or choice"),
        make_field(
            "choice_normalised", pa.int32(), "index of the choice that is likeliest per token (loglikelihood only)"
        ),
        make_field("finish", pa.string(), "'stop': the model ended the answer; 'length': max_new_tokens did"),
        make_field("n_prompt_tokens", pa.int32(), "tokens of the prompt, text and visual"),
        make_field("n_visual_tokens", pa.int32(), "placeholders of visual tokens (and newlines) among them"),
        make_field("n_total", pa.int32(), "visual tokens of its videos before pruning"),
        make_field("n_kept", pa.int32(), "of those, how many were kept; by the model itself where it prunes inside"),
        make_field(
            "kept_per_frame",
            pa.list_(pa.int32()),
            "of each frame; null where the model prunes inside, which does not say",
        ),
        make_field("n_new_tokens", pa.int32(), "tokens that were generated; null where choices were scored"),
        make_field("retention_ratio", pa.float64(), "nominal share of the visual tokens that was read"),
        make_field(
            "decode_warnings", pa.int32(), "warnings while its videos were decoded: their frames may be damaged"
        ),
        make_field("load_s", pa.float64(), "seconds reading tokens for this question; 0 where they were in memory"),
        make_field("prefill_s", pa.float64(), "seconds to the first token, or of scoring; of the whole batch"),
        make_field("decode_s", pa.float64(), "seconds from there to the last token; of the whole batch"),
        make_field("batch_size", pa.int32(), "questions in that batch"),
        make_field("decoding", pa.string(), "JSON: method, system message and the options that were in effect"),
    ]
)
#: Nullable columns that were added without a new schema version, with the date of the first files that have them.
LATER_COLUMNS: Mapping[str, str] = {
    "decode_warnings": "2026-11-26",
    "method_code": "2026-11-27",
    "conversation": "2026-11-29",
}


class LateIdentity(PrunerIdentity):
    """The identity of a method that prunes after the cache."""

    text_tower: NotRequired[str]
    positions: NotRequired[str]
    pooling_head: NotRequired[str | None]


class AnswersIdentity(TypedDict, total=False):
    """The settings that all answers in one folder share.

    Attributes:
        pruner: the single pruning after the cache; absent if the stored tokens are used.
        prunings: several prunings by label, None for the stored tokens; later runs may add some.
        engine: absent for the transformers engine.
        benchmark, protocol: absent from answers of jobs.generate.
    """

    cache: CacheIdentity
    model: ModelIdentity
    retention_ratio: float
    prompt: dict[str, str]
    decoding: dict[str, str | int | float | None]
    pruner: LateIdentity
    prunings: dict[str, LateIdentity | None]
    engine: JsonObject
    benchmark: str
    protocol: JsonObject


class AnswersHeader(TypedDict):
    """The content of answers.json."""

    schema_version: int
    identity: AnswersIdentity


def make_answer_key(row: QuestionRecord | AnswerRecord) -> tuple[str, str | None]:
    """Return (question id, pruning), the key of a row within a run; the single pruning is None."""
    return row["question_id"], row.get("pruning")


def read_answers(path: str | Path, *, store: Store | None = None) -> pa.Table:
    """Read the live rows, with ANSWER_SCHEMA and carried columns, in natural order of question_id: 1, 2, 10.

    Args:
        path: a folder or ``s3://bucket/prefix``; not used if ``store`` is given.

    Raises:
        NotAnswers: the location does not hold answers.
        CorruptShard: a file of answers is damaged.
    """
    store = store or store_at(path)
    identity = read_answers_header(store)["identity"]
    return sort_naturally(AnswersTable(store, identity).live())


def sort_naturally(rows: pa.Table) -> pa.Table:
    """Sort rows by question_id, comparing the numbers in it as numbers: 1, 2, 10."""
    keys = [
        [(words, int(digits or -1)) for words, digits in _NUMBER_PATTERN.findall(question_id)]
        for question_id in rows["question_id"].to_pylist()
    ]
    return rows.take(pa.array(sorted(range(len(keys)), key=keys.__getitem__), pa.int64()))


def read_answers_header(store: Store) -> AnswersHeader:
    """Read answers.json. Raises NotAnswers if it is missing, damaged or has another version."""
    absent = f"no answers (no {HEADER}); python -m jobs.generate makes some"
    header = read_header_file(store, HEADER, (ANSWERS_VERSION,), NotAnswers, absent, of="answers of ")
    return cast(AnswersHeader, header)


def write_answers_header(store: Store, identity: AnswersIdentity) -> None:
    """Write answers.json, and create the folder if needed."""
    store.make()
    store.put(HEADER, serialize_header({"schema_version": ANSWERS_VERSION, "identity": cast(JsonObject, identity)}))


def check_answers_folder(store: Store) -> None:
    """Raise NotAnswers if the output folder has files but neither answers.json nor bars of removed videos."""
    if not store.exists(HEADER) and store.has_other_files() and not store.names(REMOVED, ".json"):
        raise NotAnswers(f"{store} exists and holds no answers (it has no {HEADER}): name an empty place with --out")


class MatchedIdentity(NamedTuple):
    """The settings of a run, matched with those of the stored answers.

    Attributes:
        identity: the requested settings; the code of a method is left out if the stored settings lack it.
        changed: True if stored answers were made with other code, so they are not live under ``identity``.
    """

    identity: AnswersIdentity
    changed: bool


def match_answers(
    store: Store, requested: AnswersIdentity, *, redo: bool = False, compared_keys: Collection[str] | None = None
) -> MatchedIdentity:
    """Match the ``requested`` settings with those of the stored answers; without stored answers, any settings match.

    Prunings that only one side has are not compared. Other code of a user method is accepted if the old code made no
    good answer under a requested pruning.

    Args:
        redo: accept other code in any case.
        compared_keys: the keys to compare besides PRUNINGS; None compares all.

    Raises:
        IdentityMismatch: the settings differ, or good answers were made with other code.
        NotAnswers: answers.json is damaged or has another version.
    """
    if not store.exists(HEADER) or not AnswersTable(store).names():
        return MatchedIdentity(requested, changed=False)
    stored_identity = read_answers_header(store)["identity"]
    if not redo:
        requested = cast(AnswersIdentity, keep_unknown_code(stored_identity, requested))
    old, new = (
        _select_compared(identity, stored_identity, requested, compared_keys)
        for identity in (stored_identity, requested)
    )
    refusal = f"{store} has answers made with other settings; name another --out"
    changed_methods = find_changed_methods(old, new, refusal, has="the answers have", redo=redo)
    if changed_methods and not redo:
        live = AnswersTable(store).live()
        answered_prunings = pc.unique(live.filter(pc.equal(live["status"], "ok"))["pruning"]).to_pylist()
        prunings = requested.get(PRUNINGS)
        if any(
            find_code(stored_identity, name) != find_code(requested, name)
            for name in answered_prunings
            if not prunings or name in prunings
        ):
            refuse_changed_code(store, changed_methods, "answers")
    return MatchedIdentity(requested, changed=bool(changed_methods))


def _select_compared(
    identity: AnswersIdentity,
    stored_identity: AnswersIdentity,
    requested: AnswersIdentity,
    compared_keys: Collection[str] | None,
) -> JsonObject:
    """Return the entries of ``identity`` to compare: those in ``compared_keys``, or all if that is None.

    Of PRUNINGS, only entries that both settings have are compared. If only one has PRUNINGS, that is a difference,
    unless ``compared_keys`` are given.
    """
    selection: dict[str, Json] = {
        key: cast(Json, value) for key, value in identity.items() if compared_keys is None or key in compared_keys
    }
    if compared_keys is not None or (PRUNINGS in stored_identity and PRUNINGS in requested):
        shared_names = stored_identity.get(PRUNINGS, {}).keys() & requested.get(PRUNINGS, {}).keys()
        selection[PRUNINGS] = {name: cast(Json, identity[PRUNINGS][name]) for name in shared_names}
    return selection


def find_code(identity: AnswersIdentity, pruning: str | None) -> str | None:
    """Return the hashes of the user code behind answers under a pruning, joined by a space; None if there is none.

    They cover the methods that pruned the cache and that prune now. ``pruning`` is None or "" for the single pruning.
    """
    late = identity[PRUNINGS].get(pruning or "") if PRUNINGS in identity else identity.get("pruner")
    cached_method = identity["cache"].get("pruner") if "cache" in identity else None
    codes = [pruner.get("code") for pruner in (cached_method, late) if pruner is not None]
    return " ".join(code for code in codes if code) or None


class AnswersTable:
    """A view of the committed rows of answers; each shard is read once and kept in memory.

    Args:
        identity: the settings whose rows are live: rows made with other code are not. None uses answers.json.
    """

    def __init__(self, store: Store, identity: AnswersIdentity | None = None) -> None:
        self._store = store
        self._identity = identity
        self._tables: dict[str, pa.Table] = {}

    def names(self) -> list[str]:
        """List the committed shards, without copies under other names."""
        return list_shards(self._store)[0]

    def rows(self) -> pa.Table:
        """Return all committed rows, with the columns of ANSWER_SCHEMA and then the carried columns.

        If a shard was merged and deleted after the listing, this lists and reads once more.
        """
        try:
            names = self._read()
        except FileNotFoundError:  # a file was merged and deleted after the listing
            names = self._read()
        return concat_answers([ANSWER_SCHEMA.empty_table(), *(self._tables[name] for name in names)])

    def _read(self) -> list[str]:
        """Read the shards committed since the last call; return the names of all shards."""
        names = self.names()
        new = [name for name in names if name not in self._tables]
        for name, data in zip(new, self._store.read_all(new), strict=True):
            self._tables[name] = parse_shard(self._store, name, data)
        return names

    def live(self) -> pa.Table:
        """Return the live row of every question under every pruning, by question_id, without rows of other code."""
        rows = select_live(self.rows())
        identity = self._identity
        if identity is None:
            identity = read_answers_header(self._store)["identity"] if self._store.exists(HEADER) else {}
        codes = {name: find_code(identity, name) for name in pc.unique(rows["pruning"]).to_pylist()}
        current_codes = pa.array([codes[name] for name in rows["pruning"].to_pylist()], pa.string())
        return rows.filter(pc.equal(pc.fill_null(rows["method_code"], ""), pc.fill_null(current_codes, "")))

    def select_live_answers(self, questions: pa.Table, prunings: Iterable[str]) -> pa.Table:
        """Return the live rows of these questions under these prunings; the name "" is the single pruning."""
        live = self.live()
        is_question = pc.is_in(live["question_id"], value_set=questions["question_id"].combine_chunks())
        labels = pa.array([name or None for name in prunings], pa.string())
        return live.filter(pc.and_(is_question, pc.is_in(live["pruning"], value_set=labels)))


def list_shards(store: Store) -> tuple[list[str], dict[str, str]]:
    """List the shards of answers, sorted by name, and the copies of shards under other names (copy -> shard).

    A file without a hash in its name is read: it is a copy if its content is that of a shard, otherwise a shard itself.
    """
    names = sorted(name for suffix in SUFFIXES.values() for name in store.names(ANSWERS, suffix))
    shards = {PurePosixPath(name).stem[-32:]: name for name in names if has_content_hash(name)}
    unhashed_names = [name for name in names if not has_content_hash(name)]
    copies = {name: shards.get(hash_bytes_to_hex(store.read(name))) for name in unhashed_names}
    shard_by_copy = {name: shard for name, shard in copies.items() if shard is not None}
    return [name for name in names if name not in shard_by_copy], shard_by_copy


def select_live(rows: pa.Table) -> pa.Table:
    """Select the live row of each question, pruning and code, sorted by question_id.

    Removed beats ok, ok beats failed, and then more attempts win. Ties go to the earliest run id, then to the first
    ``answer`` in sort order.
    """
    if len(rows) == 0:
        return rows
    *ids, run, answer = (  # the rank of each text among the sorted distinct texts
        np.asarray(pc.rank(rows[name], tiebreaker="dense").to_numpy(), np.int64)
        for name in (*_LIVE_KEYS, "run_id", "answer")
    )
    order = sort_by_rule(ids, read_states(rows["status"]), rows["attempts"].to_numpy(), [run, answer])
    changes = [column[order][1:] != column[order][:-1] for column in ids]
    return rows.take(pa.array(order[np.append(True, np.logical_or.reduce(changes))]))


def merge_answers(store: Store, at_least: int, keep: timedelta = KEEP) -> None:
    """Merge the Parquet files of answers that no earlier merge has read, if they are more than ``at_least``.

    The merged file has only their live rows, and its sources stay for readers. In any case, sources of earlier merges
    are deleted if their merged file is at least ``keep`` old; a source that has a copy stays as long as the copy. Files
    of JSON lines are left alone.
    """
    shards, copies = list_shards(store)
    names = [name for name in shards if PurePosixPath(name).suffix == SUFFIXES["parquet"]]
    tables = {name: parse_shard(store, name, data) for name, data in zip(names, store.read_all(names), strict=True)}
    sources_by_name = {
        name: tables.keys() & set(json.loads((table.schema.metadata or {}).get(_MERGED_KEY, b"[]")))
        for name, table in tables.items()
    }
    merged_names = set().union(*sources_by_name.values())
    # Ask for all ages first: a merged file may be the source of a later one, and be deleted below.
    expired = [sources for name, sources in sources_by_name.items() if sources and store.compute_age(name) >= keep]
    for old in sorted(set().union(*expired).difference(copies.values())):
        store.delete(old)
    waiting = [name for name in names if name not in merged_names]
    if len(waiting) > at_least:
        live = select_live(concat_answers([tables[name] for name in waiting]))
        data = write_parquet(live.replace_schema_metadata({_MERGED_KEY: json.dumps(waiting)}))
        store.put(make_small_name(ANSWERS, "merged", 0, data), data)


def try_merge_answers(store: Store, at_least: int, say: Callable[[str], object]) -> None:
    """Call ``merge_answers``; ``say`` gets a warning if a file is damaged or the store fails."""
    try:
        merge_answers(store, at_least)
    except (CorruptShard, OSError) as error:
        say(f"warning: the files of answers were not merged: {error}")


def commit_answers(
    store: Store,
    run_id: str,
    number: int,
    rows: Sequence[AnswerRecord],
    form: str = "parquet",
    questions: pa.Table | None = None,
) -> None:
    """Write rows as one file, which makes them visible.

    Args:
        number: the number of the shard in this run, for the file's name.
        form: "parquet" or "jsonl". In JSON lines, infinite log-probabilities become null.
        questions: the questions whose carried columns the rows get; removed rows get nulls. None adds no columns.
    """
    table = pa.Table.from_pylist([{**row, "run_id": run_id} for row in rows], schema=ANSWER_SCHEMA)
    if questions is not None:
        table = append_carried_columns(table, questions, ANSWER_SCHEMA.names)
    if form == "parquet":
        data = write_parquet(table)
    else:  # strict JSON: a log-probability of minus infinity becomes null
        data = "".join(serialize_carried(row, ensure_ascii=False) + "\n" for row in table.to_pylist()).encode()
    store.put(make_small_name(ANSWERS, run_id, number, data, SUFFIXES[form]), data)


def parse_shard(store: Store, name: str, data: bytes) -> pa.Table:
    """Convert the bytes of a shard to a table with the columns of ANSWER_SCHEMA and then its carried columns.

    Columns of LATER_COLUMNS that an older shard lacks are null, and carried columns that it has as JSON in one column
    are unpacked. Of the metadata, only the list of a merged file's sources stays.

    Raises:
        CorruptShard: the bytes do not match the hash, or a column is missing or has a wrong type.
    """
    check_content(store, name, data)
    metadata: dict[bytes, bytes] = {}
    if PurePosixPath(name).suffix == SUFFIXES["parquet"]:
        table = open_parquet(pa.BufferReader(data)).read(use_threads=READ_THREADS)
        metadata = {key: text for key, text in (table.schema.metadata or {}).items() if key == _MERGED_KEY}
        carried_table = table.drop_columns([name for name in ANSWER_SCHEMA.names if name in table.column_names])
        carried_columns = dict(zip(carried_table.column_names, carried_table.columns, strict=True))
        extra = carried_columns.pop(QUESTION_EXTRA, None)
        extras = [] if extra is None else extra.to_pylist()
    else:
        lines = data.decode().split("\n")  # splitlines would split at characters that JSON does not escape
        rows = [json.loads(line) for line in lines if line]
        own_names = frozenset(ANSWER_SCHEMA.names)
        present_fields = [ANSWER_SCHEMA.field(key) for key in own_names.intersection(*rows)]
        table = pa.Table.from_pylist(rows, schema=pa.schema(present_fields))
        extras = [row.pop(QUESTION_EXTRA, None) for row in rows]
        carried_columns = make_carried_columns(
            [{key: row[key] for key in row if key not in own_names} for row in rows], own_names, {}
        )
    try:
        table = complete_columns(table, ANSWER_SCHEMA.names, ANSWER_SCHEMA, LATER_COLUMNS, f"{store}/{name}")
        table = table.cast(ANSWER_SCHEMA)
    except (pa.ArrowException, ValueError) as error:
        raise CorruptShard(f"{store}/{name}: {error}; restore the file", "schema") from error
    if any(extras):
        carried_columns |= make_carried_columns([json.loads(text or "{}") for text in extras], ANSWER_SCHEMA.names, {})
    for key, values in carried_columns.items():
        table = table.append_column(key, values)
    return table.replace_schema_metadata(metadata)


def iter_answers(table: pa.Table) -> Iterator[AnswerRecord]:
    """Yield the rows of a table as records without nulls."""
    for batch in table.to_batches(max_chunksize=_MAX_ROWS_AS_OBJECTS):
        for row in batch.to_pylist():
            yield drop_nulls(row, AnswerRecord)
