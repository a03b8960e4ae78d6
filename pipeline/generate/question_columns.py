"""The columns of a questions file: those that are read, similar names, which are refused, and the carried columns.

Columns that are not read are carried to the answers, so a misspelled setting would go unnoticed.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import QuestionsError
from pipeline.inputs.tables import UserRow, UserValue, format_value, is_nan, is_text, parse_number, simplify_type

#: Decoding options that a question may set, with their types.
DECODING_OPTIONS: Mapping[str, type] = {
    "max_new_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "seed": int,
}
KNOWN_COLUMNS = ("question_id", "video_id", "prompt", "messages", "choices", "answer", "system", *DECODING_OPTIONS)
_MIN_LETTERS = 5  # shorter names are not compared by edits: "speed" does not mean "seed"
# Names in other tools, as ``_fold_name`` returns them.
_SYNONYMS = {
    "question": "prompt",
    "query": "prompt",
    "conversation": "messages",
    "option": "choices",
    "candidate": "choices",
    "answerchoice": "choices",
    "systemprompt": "system",
    "systemmessage": "system",
    **dict.fromkeys(
        ("maxtoken", "maxcompletiontoken", "maxoutputtoken", "maxgentoken", "maxgentok", "maxlength"), "max_new_tokens"
    ),
}
# Settings of OpenAI, vLLM, transformers and lmms-eval that questions do not have here, as ``_fold_name`` returns them.
_UNKNOWN_SETTINGS = frozenset(
    (
        *("stop", "stoptokenid", "stopsequence", "stopstring", "until", "dosample", "numbeam", "minp", "mintoken"),
        *("minnewtoken", "repetitionpenalty", "frequencypenalty", "presencepenalty", "lengthpenalty", "logitbias"),
        *("responseformat",),
    )
)
_TIMES = ("stop", "until")  # with a number as value these are times, not settings
_PREFIX = "question_"  # of a carried column whose name is a column of the answers


def refuse_near_names(row: UserRow, where: str) -> None:
    """Raise QuestionsError if a column seems to be meant for a known column that the row lacks.

    A name is near a known one if it is its name in other tools, or differs only by case, separators, a plural s or one
    edit (the last only between names of at least five letters, no digits, and equally many words). If the row has the
    known column too (for ``prompt`` also: has messages), the near name is accepted as the user's. Settings of other
    tools that questions do not have (_UNKNOWN_SETTINGS) are refused as well, but ``stop`` and ``until`` with a number
    are times. Empty cells count as missing.
    """
    filled_cells = {  # pandas writes NaN for an empty cell
        str(name): value
        for name, value in row.items()
        if not (value is None or (isinstance(value, str | list) and not value) or is_nan(value))
    }
    missing_names = {name for name in KNOWN_COLUMNS if name not in filled_cells}
    if "messages" in filled_cells:
        missing_names.discard("prompt")
    for name, value in filled_cells.items():
        if name in KNOWN_COLUMNS:
            continue
        if (near := find_meant_column(name)) in missing_names:
            raise QuestionsError(
                f"{where}: no column {name} is read (did you mean {near}?): rename it to {near}, or to another name if "
                "it is a column of your own"
            )
        if (setting := _fold_name(name)) in _UNKNOWN_SETTINGS and (
            setting not in _TIMES or math.isnan(parse_number(value))
        ):
            raise QuestionsError(
                f"{where}: {name} is a setting that questions do not have here (they have "
                f"{', '.join(DECODING_OPTIONS)}): leave it out, or rename it if it is a column of your own"
            )


@lru_cache(maxsize=1024)
def find_meant_column(name: str) -> str | None:
    """Return the known column that a column named ``name`` seems to be meant for, or None; results are cached.

    Names in other tools (_SYNONYMS) are tried first, then equal names but for case, separators and a plural s, then
    names that differ by one edit, have the same number of words, only letters and at least five of them.
    """
    folded = _fold_name(name)
    if folded in _SYNONYMS:
        return _SYNONYMS[folded]
    for known in KNOWN_COLUMNS:
        if folded == _fold_name(known):
            return known
    for known in KNOWN_COLUMNS:
        # A further word or a number is not a typing error: answer_a and prompt2 are different names.
        is_comparable = len(_split_words(name)) == len(_split_words(known)) and folded.isalpha()
        letters = _fold_name(known)
        if is_comparable and min(len(folded), len(letters)) >= _MIN_LETTERS and _is_within_one_edit(folded, letters):
            return known
    return None


def _split_words(name: str) -> list[str]:
    """Split a name into lower-case words, at characters that are not letters or digits and before capitals."""
    return re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def _fold_name(name: str) -> str:
    """Return a name in lower case with letters and digits only, and without the s of a plural."""
    *words, last = _split_words(name) or [""]
    return "".join([*words, last.removesuffix("s") or last])


def _is_within_one_edit(a: str, b: str) -> bool:
    """Return True if two texts are equal but for at most one edit.

    An edit inserts, removes or changes a letter, or swaps two neighbors.
    """
    short, long = sorted((a, b), key=len)
    same = next((i for i, (x, y) in enumerate(zip(short, long, strict=False)) if x != y), len(short))
    if len(short) < len(long):
        return short[same:] == long[same + 1 :]
    swapped = short[same + 1 : same + 2] + short[same : same + 1]
    return short[same + 1 :] == long[same + 1 :] or swapped + short[same + 2 :] == long[same:]


def make_carried_columns(
    rows: Sequence[UserRow], own_names: Collection[str], types: Mapping[str, pa.DataType]
) -> dict[str, pa.Array]:
    """Convert the columns that are carried to the answers to Arrow arrays, by their names in the answers.

    A column gets its declared type or the common type of its values; without one that Parquet can hold, it becomes
    text. A name that the answers use themselves is written as ``question_NAME``.

    Args:
        rows: the carried columns of each question.
        own_names: the names of the answers' own columns.
        types: the declared types of carried columns, if any; these come first in the result.

    Raises:
        QuestionsError: two columns would get the same name, or a name is not valid text.
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
    """Convert values to an array of the declared type if they fit, else of their common type, else of text.

    Objects with different keys have no common type. As text, None and NaN become null, and values that are not text
    become JSON.
    """
    for kind in () if declared_type is None else (simplify_type(declared_type),), ():
        try:
            array = pa.array(values, *kind)
            pq.write_table(pa.table({"": array.slice(0, 0)}), io.BytesIO())
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            continue
        # Reject structs to which Arrow has added the keys of other rows.
        if kind or not pa.types.is_nested(array.type) or array.to_pylist() == list(values):
            return array
    return pa.array([None if value is None or is_nan(value) else _as_text(value) for value in values], pa.string())


def _as_text(value: Any) -> str:
    """Return valid text unchanged, and any other value as JSON."""
    return value if isinstance(value, str) and is_text(value) else json.dumps(value, default=format_value)


def append_carried_columns(answers: pa.Table, questions: pa.Table, own_names: Collection[str]) -> pa.Table:
    """Append the columns of the questions that are not among ``own_names``, matched by question_id.

    Removed answers, and answers without a question, get nulls.
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
    """Concatenate tables of answers whose carried columns may differ.

    A column that a table lacks is null there. Columns of several types get their wider types; if Arrow has no wider
    type for one of them, all columns of several types become text.
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
    """Return a table with the columns ``names`` as text or JSON; nulls stay."""
    for index, name in enumerate(table.column_names):
        if name in names:
            texts = [None if value is None else _as_text(value) for value in table[name].to_pylist()]
            table = table.set_column(index, name, pa.array(texts, pa.string()))
    return table
