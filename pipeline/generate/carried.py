"""The carried columns of a user's questions: nothing here reads them, and answers keep them."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import QuestionsError
from pipeline.inputs.tables import UserRow, UserValue, is_nan, is_text, plain_type, shown_as

_PREFIX = "question_"  # of a carried column whose name the answers need for a column of their own


def make_carried_columns(
    rows: Sequence[UserRow], own_names: Collection[str], types: Mapping[str, pa.DataType]
) -> dict[str, pa.Array]:
    """Return the columns of user's rows that are carried along, by the names that they have in the answers.

    A column keeps its type. Values of several types, and values that Parquet cannot hold, become text. A name that the
    answers need is written as ``question_NAME``.

    Args:
        rows: each question's other columns, which nothing here reads.
        own_names: names that the answers have for columns of their own.
        types: of the carried columns, where their file or table says them.

    Raises QuestionsError if two columns would get one name, or if a name is no text.
    """
    names = list(dict.fromkeys([*types, *(name for row in rows for name in row)]))
    new_names = {name: f"{_PREFIX}{name}" if name in own_names else str(name) for name in names}
    for name, new_name in new_names.items():
        if not is_text(new_name):
            raise QuestionsError(f"the column {name!r} has a name that is not valid text: rename it")
        if new_name in own_names or list(new_names.values()).count(new_name) > 1:
            raise QuestionsError(
                f"the column {name!r} would be {new_name!r} in the answers, which is the name of another column: "
                "rename it"
            )
    return {new: _as_column([row.get(name) for row in rows], types.get(name)) for name, new in new_names.items()}


def _as_column(values: Sequence[UserValue], declared_type: pa.DataType | None) -> pa.Array:
    """Return values as a column: of the declared type if they fit, else of the type that all have, else as text.

    Among texts NaN is a gap, as pandas has gaps in the dicts of a table's rows.
    A declared type counts as its ``plain_type``.
    """
    for kind in () if declared_type is None else (plain_type(declared_type),), ():
        try:
            array = pa.array(values, *kind)
            pq.write_table(pa.table({"": array.slice(0, 0)}), io.BytesIO())
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            continue
        # Arrow adds to each nested value the keys that other rows have.
        if kind or not pa.types.is_nested(array.type) or array.to_pylist() == list(values):
            return array
    return pa.array([None if value is None or is_nan(value) else _as_text(value) for value in values], pa.string())


def _as_text(value: Any) -> str:
    """Return a value as text: text as it is, and any other value as JSON."""
    return value if isinstance(value, str) and is_text(value) else json.dumps(value, default=shown_as)


def add_carried(answers: pa.Table, questions: pa.Table, own_names: Collection[str]) -> pa.Table:
    """Return answers with the columns that their questions carry: all columns of ``questions`` besides ``own_names``.

    An answer without its question gets nulls, and so does a removed answer.
    """
    names = [name for name in questions.column_names if name not in own_names]
    if not names:
        return answers
    ids = pc.if_else(pc.equal(answers["status"], "removed"), pa.scalar(None, pa.string()), answers["question_id"])
    rows = pc.index_in(ids, value_set=questions["question_id"].combine_chunks())
    for name in names:
        answers = answers.append_column(questions.schema.field(name), questions[name].take(rows))
    return answers


def concat_answers(tables: Sequence[pa.Table]) -> pa.Table:
    """Join tables of answers whose questions came from several files.

    A column that one of the files lacks is null there. A column of several types becomes the wider type, else text.
    """
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException:
        pass
    types: dict[str, set[pa.DataType]] = {}
    for table in tables:
        for field in table.schema:
            types.setdefault(field.name, set()).add(field.type)
    differing = {name for name, kinds in types.items() if len(kinds - {pa.null()}) > 1}
    return pa.concat_tables([_with_texts(table, differing) for table in tables], promote_options="permissive")


def _with_texts(table: pa.Table, names: Collection[str]) -> pa.Table:
    """Return a table with the columns ``names`` as text; values that are not text become JSON."""
    for index, name in enumerate(table.column_names):
        if name in names:
            texts = [None if value is None else _as_text(value) for value in table[name].to_pylist()]
            table = table.set_column(index, name, pa.array(texts, pa.string()))
    return table
