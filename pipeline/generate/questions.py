"""Questions: a file becomes an Arrow table with one row per question, every row checked.

Also: the prompts of questions with choices, and the choice that a generated answer names.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from string import ascii_uppercase
from typing import Any, BinaryIO

import pyarrow as pa

from gstep.language import Decoding, PromptBuilder
from gstep.language.types import ChatMessage
from gstep.lazy import format_suggestion
from pipeline.errors import QuestionsError, convert_usage_errors, make_printable, suggest_file
from pipeline.generate.answers import ANSWER_SCHEMA, QUESTION_EXTRA
from pipeline.generate.config import GenerateConfig
from pipeline.generate.conversation import (
    get_question,
    has_system,
    list_texts,
    load_messages,
    parse_messages,
)
from pipeline.generate.question_columns import (
    DECODING_OPTIONS,
    KNOWN_COLUMNS,
    make_carried_columns,
    refuse_near_names,
)
from pipeline.inputs.listings import find_suffix
from pipeline.inputs.tables import (
    TABLE_SUFFIXES,
    UserRow,
    convert_given_table,
    convert_row_errors,
    convert_to_text,
    is_nan,
    is_text,
    iter_given_rows,
    read_parquet_types,
    read_rows,
)
from pipeline.storage.s3 import Objects, check_uri, is_s3

# ``decoding`` is the JSON of ``AnswerMode.describe()``: all settings for the answer to this question. ``conversation``
# is the file's column ``messages`` as JSON; ``prompt`` is then the text of the last message.
QUESTION_SCHEMA = pa.schema(
    [
        pa.field("question_id", pa.string(), nullable=False),
        pa.field("video_ids", pa.list_(pa.string()), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("conversation", pa.string()),
        pa.field("choices", pa.list_(pa.string())),
        pa.field("target", pa.string()),  # the right answer in the file; the model never gets it
        pa.field("decoding", pa.string(), nullable=False),
    ]
)
_NEEDED_TEXT = "question_id, video_id and prompt (or messages)"
_MAX_DIGITS = 10  # longer numbers are not taken for the index of a choice
_MAX_NAMES_BYTES = 200  # length of the list of a row's columns in a message
_ANSWER_COLUMNS = frozenset((*ANSWER_SCHEMA.names, QUESTION_EXTRA))
MAX_LETTERS = len(ascii_uppercase)
# The sentence with which lmms-eval's multiple-choice tasks (MMMU, VideoMME, MLVU) end their prompts.
INSTRUCTION = "Answer with the option's letter from the given choices directly."
#: Tags around the reasoning of a model: the default of ``--reasoning_tags`` in lmms-eval 0.7.3.
REASONING = (("<think>", "</think>"), ("<analysis>", "</analysis>"))
# No second letter may follow a letter, as in "A, B" and "(A) or (B)"; "A, B is wrong" does name A.
_ALONE = r"(?!\)?\s*(?:[,/&]|\b(?:and|or)\b)\s*\(?[A-Z]\b(?!\)?\s+\w))"
_FIRST = re.compile(rf"\(?([A-Z]){_ALONE}(?:\)|[.:,]|\*|\s*$|\n)")
# A lower-case letter counts only at the end: "the answer is a cat" names no letter.
_SENTENCE = re.compile(
    r"\b(?i:answer|option|choice)\b(?:\s+(?i:is))?[\s:*([\"'`\u201c]*"
    rf"([A-Z]\b{_ALONE}|[a-z](?=[)*.\]\"'`\u201d]*\s*$))"
)
# Letters of words, except in scripts without spaces between words: in Chinese, "B" may directly follow a word.
_IN_WORDS = r"[^\W\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]"
# "A" and "I" count as words if another word follows: "A dog", "I think", but not "A and B".
_LETTER = re.compile(rf"(?<!{_IN_WORDS})(?:[AI](?!{_IN_WORDS})(?!\s+(?!(?:and|or|nor)\b)\w)|[B-HJ-Z](?!{_IN_WORDS}))")

# A letter before a choice: "A. a dog", "A: a dog", "A) a dog", "(A) a dog". "A.D." and "A minor" have none.
_LABEL = re.compile(r"\s*[(\uff08]?([A-Za-z])(?:[.:](?=\s)|[)\uff09\u3001\uff0e\uff1a])\s*(?=\S)")


@dataclass(frozen=True)
class AnswerMode:
    """How a question is answered: the run's default, or the mode of a single question.

    Attributes:
        method: "letter" and "loglikelihood" score the choices, "generate" generates an answer. Questions without
            choices are always generated.
        system: the system message; None leaves it to the chat template.
    """

    decoding: Decoding
    method: str = "letter"
    system: str | None = None

    @classmethod
    def of(cls, config: GenerateConfig) -> AnswerMode:
        """Create a run's default mode. Raises UsageError if a decoding option is invalid."""
        with convert_usage_errors():
            decoding = Decoding(config.max_new_tokens, config.temperature, config.top_p, config.top_k, config.seed)
        return cls(decoding, config.choices, config.system)

    @classmethod
    def parse(cls, text: str) -> AnswerMode:
        """Parse the JSON of ``describe``; missing decoding options get their defaults."""
        options = json.loads(text)
        decoding = Decoding(**{item.name: options[item.name] for item in fields(Decoding) if item.name in options})
        return cls(decoding, options["method"], options["system"])

    @property
    def scores_choices(self) -> bool:
        """True if the choices are scored, False if an answer is generated."""
        return self.method != "generate"

    def describe(self) -> str:
        """Return the mode as JSON, without decoding options that have no effect."""
        options = {} if self.scores_choices else describe_decoding(self.decoding)
        fields = {"method": self.method, "system": self.system, **options}
        return json.dumps(fields, sort_keys=True, ensure_ascii=False)


def describe_decoding(decoding: Decoding) -> dict[str, int | float]:
    """Return the decoding options as a dict; at temperature 0 only ``max_new_tokens`` and ``temperature``."""
    options: dict[str, int | float] = asdict(decoding)
    greedy = ("max_new_tokens", "temperature")
    return options if decoding.temperature > 0 else {name: options[name] for name in greedy}


def read_questions(place: str, mode: AnswerMode, objects: Objects | None = None, limit: int | None = None) -> pa.Table:
    """Read and check a file of questions (.jsonl, .parquet or .csv, local or s3://), in the file's order.

    The table has the columns of QUESTION_SCHEMA, followed by the file's other columns.

    Args:
        mode: the run's default; a row's options replace its decoding options and system message.
        objects: the client for S3; None creates one from the environment.
        limit: the number of rows to read; later rows are not checked.

    Raises:
        QuestionsError: the file cannot be read or has no row; a row lacks question_id, video_id, or prompt and
            messages; a question_id repeats; a column seems to be a misspelled one; or messages, choices or options are
            invalid.
        UsageError: the S3 address is malformed, or boto3 is not installed.
    """
    with _open_file(place, objects) as file, convert_row_errors(place, "questions", QuestionsError):
        types = read_parquet_types(place, file)
        return _check_rows(read_rows(place, file, _NEEDED_TEXT, "question_id"), types, place, mode, limit)


def read_given_questions(source: object, mode: AnswerMode, limit: int | None = None) -> pa.Table:
    """Check questions given as dicts or as a table that Arrow can convert, like the rows of a file.

    The result has the columns of QUESTION_SCHEMA, and the carried columns, which keep a table's types.

    Args:
        source: an iterable of dicts, or an object with ``__arrow_c_stream__``.
        mode: the run's default; a row's options replace its decoding options and system message.
        limit: the number of rows to take; later rows are neither checked nor returned. None takes all.

    Raises:
        QuestionsError: ``source`` holds no rows or cannot be converted, a row is invalid, a question_id repeats, or
            text is not UTF-8.
    """
    types: dict[str, pa.DataType] = {}
    with convert_row_errors("questions", "questions", QuestionsError):
        if hasattr(source, "__arrow_c_stream__"):
            source = table = convert_given_table("questions", source, _NEEDED_TEXT)
            types = dict(zip(table.schema.names, table.schema.types, strict=True))
        return _check_rows(iter_given_rows("questions", source, _NEEDED_TEXT), types, "questions", mode, limit)


def _check_rows(
    numbered_rows: Iterator[tuple[str, UserRow]],
    types: Mapping[str, pa.DataType],
    place: str,
    mode: AnswerMode,
    limit: int | None,
) -> pa.Table:
    """Check the first ``limit`` rows; return a table with QUESTION_SCHEMA and the carried columns.

    Args:
        numbered_rows: pairs of the row's location in words and the row.
        types: the Arrow types of the source's columns; carried columns without a type get one from their values.
        place: the source's name, for errors.
        mode: the run's default; a row's options replace its decoding options and system message.
        limit: None checks all rows.

    Raises:
        QuestionsError: there is no row, a row is invalid, or a question_id repeats.
        BadRow: the iterator cannot read a row.
    """
    rows: list[dict[str, str | list[str] | None]] = []
    carried_rows: list[UserRow] = []
    for where, row in islice(numbered_rows, limit):
        rows.append(_parse_question(row, f"{place}, {where}", mode))
        carried_rows.append({name: value for name, value in row.items() if name not in KNOWN_COLUMNS})
    if not rows:
        raise QuestionsError(f"{place}: there is no question in it")
    counts = Counter(row["question_id"] for row in rows)
    if repeated_ids := [name for name, count in counts.items() if count > 1]:
        examples = ", ".join(map(repr, repeated_ids[:3]))
        raise QuestionsError(f"{place}: {len(repeated_ids)} question_ids repeat, e.g. {examples}; ids must be unique")
    table = pa.Table.from_pylist(rows, schema=QUESTION_SCHEMA)
    try:
        types = {name: kind for name, kind in types.items() if name not in KNOWN_COLUMNS}
        columns = make_carried_columns(carried_rows, _ANSWER_COLUMNS, types)
    except QuestionsError as error:
        raise QuestionsError(f"{place}: {error}") from error
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table


def refuse_placeholders(questions: pa.Table, builder: PromptBuilder, place: str) -> None:
    """Raise QuestionsError if a text has a placeholder of the model, such as ``<video>``.

    Prompts, messages, choices and system messages are checked.
    """
    for row in questions.select(QUESTION_SCHEMA.names).to_pylist():
        texts = [row["prompt"], *(row["choices"] or ()), *list_texts(load_messages(row["conversation"] or "[]"))]
        try:
            builder.refuse_placeholders([*texts, json.loads(row["decoding"])["system"] or ""])
        except ValueError as error:
            raise QuestionsError(f"{place}, question {row['question_id']}: {error}") from error


def make_questions(prompts: Sequence[str], video_ids: Sequence[str], mode: AnswerMode) -> pa.Table:
    """Create the table of questions (QUESTION_SCHEMA) that asks every prompt about every video, for ``--ask``.

    It is ordered by video, then prompt. An id is the video's id, "#" and a hash of the prompt. ``mode`` is that of all
    questions, but each gets its own seed.

    Raises:
        QuestionsError: a prompt is blank, not valid text or repeated, or there are no videos.
    """
    hashes = [blake2b(prompt.encode(errors="replace"), digest_size=4).hexdigest() for prompt in prompts]
    rows = [
        {"question_id": f"{video_id}#{key}", "video_id": [video_id], "prompt": prompt}
        for video_id in video_ids
        for key, prompt in zip(hashes, prompts, strict=True)
    ]
    return _check_rows(((str(row["question_id"]), row) for row in rows), {}, "--ask", mode, None)


def _open_file(place: str, objects: Objects | None) -> BinaryIO:
    """Open a local file of questions, or read one on S3 whole, as a binary file.

    Args:
        objects: the client for S3; None creates one from the environment.

    Raises:
        QuestionsError: the suffix is unknown, or the file cannot be opened.
        UsageError: the S3 address is malformed, or boto3 is not installed.
    """
    if find_suffix(place) not in TABLE_SUFFIXES:
        raise QuestionsError(f"{place}: questions are a file named {', '.join(sorted(TABLE_SUFFIXES))}")
    try:
        if is_s3(place):
            check_uri(place)
            return io.BytesIO((objects or Objects.from_environment()).read(place))
        return Path(place).open("rb")
    except OSError as error:
        near = "" if is_s3(place) else suggest_file(Path(place))
        raise QuestionsError(f"{place}: cannot be read: {error.strerror}{near}") from error


def _parse_question(row: UserRow, where: str, mode: AnswerMode) -> dict[str, str | list[str] | None]:
    """Check one row of a question file, and return it as a row of QUESTION_SCHEMA.

    NaN counts as an empty cell. An invalid row raises QuestionsError, which begins with ``where``.
    """
    row = {name: value for name, value in row.items() if not is_nan(value)}
    _check_columns(row, where)
    question_id = _format_id(row.get("question_id"))
    if question_id is None:
        raise QuestionsError(f"{where}: question_id must be text or a whole number, got {row.get('question_id')!r}")
    choices = _parse_choices(row, where, mode)
    video_ids = _parse_video_ids(row, where)
    mode = _parse_mode(row, question_id, where, mode, choices is not None)
    messages: list[ChatMessage] = []
    prompt = row.get("prompt")
    if row.get("messages") is not None:
        messages = _parse_conversation(row, where, len(video_ids))
        prompt = get_question(messages)
        mode = replace(mode, system=None) if has_system(messages) else mode
    if not isinstance(prompt, str) or not prompt.strip():
        raise QuestionsError(f"{where}: prompt must be text, got {prompt!r}; every row needs {_NEEDED_TEXT}")
    question = {
        "question_id": question_id,
        "video_ids": video_ids,
        "prompt": prompt,
        "conversation": json.dumps(messages, ensure_ascii=False) if messages else None,
        "choices": choices,
        "target": _parse_target(row, where),
        "decoding": mode.describe(),
    }
    texts = (question_id, prompt, str(question["decoding"]), str(question["target"]), *video_ids)
    for text in (*texts, *(choices or ()), *list_texts(messages)):
        if not is_text(text):
            raise QuestionsError(f"{where}: not valid text: {text!r}")
    return question


def _parse_conversation(row: UserRow, where: str, n_videos: int) -> list[ChatMessage]:
    """Return the checked messages of a row.

    Raises:
        QuestionsError: a message is invalid, the row has a prompt too, or both messages and row have a system message.
    """
    if row.get("prompt") is not None:
        raise QuestionsError(f"{where}: a row has prompt or messages, and not both: the last message is the prompt")
    messages = parse_messages(row["messages"], where, n_videos)
    if has_system(messages) and row.get("system") is not None:
        raise QuestionsError(f"{where}: both messages and the column system have a system message: leave out one")
    return messages


def _check_columns(row: UserRow, where: str) -> None:
    """Raise QuestionsError if a row lacks question_id, video_id, or both prompt and messages, or has a wrong column.

    Columns that seem to be misspelled, or settings of another tool, are wrong (``refuse_near_names``).
    """
    refuse_near_names(row, where)
    other_names = [str(name) for name in row if name not in KNOWN_COLUMNS]
    needed_names = ("question_id", "video_id", *(("prompt",) if "messages" not in row else ()))
    missing_names = [f"{name}{format_suggestion(name, other_names)}" for name in needed_names if name not in row]
    if missing_names:
        names = make_printable(", ".join(map(str, row)), _MAX_NAMES_BYTES) or "none"
        raise QuestionsError(
            f"{where}: every row needs {_NEEDED_TEXT}; {', '.join(missing_names)} is missing; the row has: {names}"
        )


def _parse_video_ids(row: UserRow, where: str) -> list[str]:
    """Return the ids of a row's videos from an id, a list of ids, or a text with a JSON list of ids.

    A text that starts with "[" but is not a JSON list of at least one text is an id itself.

    Raises:
        QuestionsError: a list is empty, or an id is neither a nonempty text nor an integer.
    """
    value = row["video_id"]
    if isinstance(value, str) and value.startswith("["):  # a .csv has no type for lists
        ids_in_text = _parse_json_list(value)
        value = ids_in_text if ids_in_text and all(isinstance(name, str) for name in ids_in_text) else value
    texts = [_format_id(name) for name in (value if isinstance(value, list) else [value])]
    ids = [text for text in texts if text is not None]
    if not ids or len(ids) < len(texts):
        raise QuestionsError(f"{where}: video_id must be a video's id or a list of them, got {value!r}")
    return ids


def _format_id(value: object) -> str | None:
    """Return an id as text (1.0 is "1"); None if the value is blank or not an id."""
    try:
        text = convert_to_text(value, "the id")
    except ValueError:
        return None
    return text if text.strip() else None


def _parse_choices(row: UserRow, where: str, mode: AnswerMode) -> list[str] | None:
    """Return a row's choices from a list or a text with a JSON list; None if the row has none.

    Raises:
        QuestionsError: it is not a list of at least two texts, none of them blank, or has more than 26 for a method
            other than "loglikelihood".
    """
    value = row.get("choices")
    if value is None:
        return None
    choices = _parse_json_list(value) if isinstance(value, str) else value
    if not isinstance(choices, list) or not all(isinstance(text, str) and text.strip() for text in choices):
        raise QuestionsError(f"{where}: choices must be a list of texts (in .csv as JSON), got {value!r}")
    if len(choices) < 2:
        raise QuestionsError(f"{where}: choices must be at least two, got {value!r}")
    if mode.method != "loglikelihood" and len(choices) > MAX_LETTERS:
        raise QuestionsError(
            f"{where}: {len(choices)} choices, and there are {MAX_LETTERS} letters: use --choices loglikelihood"
        )
    return choices


def _parse_target(row: UserRow, where: str) -> str | None:
    """Return the right answer (the column ``answer``) as text; None if it is missing or a blank text.

    A whole float such as 2.0 becomes "2".

    Raises:
        QuestionsError: the value is neither text nor a number.
    """
    value = row.get("answer")
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise QuestionsError(f"{where}: answer must be text or a number, got {value!r}")
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _parse_json_list(text: str) -> list[Any] | None:
    """Parse a .csv cell as a JSON list; return None if it is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: nested too deeply
        return None
    return value if isinstance(value, list) else None


def _parse_mode(row: UserRow, question_id: str, where: str, mode: AnswerMode, has_choices: bool) -> AnswerMode:
    """Return the mode of a row's question: the row's options, otherwise those of ``mode``, the run's.

    The seed is the row's, or is derived from the run's seed and the id. A question without choices is always generated.

    Raises:
        QuestionsError: an option or the system message of the row is invalid.
    """
    own_options = {
        name: _parse_number(row[name], kind, name, where)
        for name, kind in DECODING_OPTIONS.items()
        if row.get(name) is not None
    }
    # A common seed would draw the same numbers for every question.
    own_options.setdefault("seed", derive_seed(mode.decoding.seed, question_id))
    try:
        decoding = Decoding(**{**asdict(mode.decoding), **own_options})
    except ValueError as error:
        raise QuestionsError(f"{where}: {error}") from error
    system = mode.system if row.get("system") is None else row["system"]
    if system is not None and not isinstance(system, str):
        raise QuestionsError(f"{where}: system must be text, got {system!r}")
    return AnswerMode(decoding, mode.method if has_choices else "generate", system)


def _parse_number(value: Any, kind: type, name: str, where: str) -> Any:
    """Convert an option to int or float (``kind``); texts are parsed, and whole floats such as 4.0 become integers.

    Texts such as "inf" and "1e999" give infinity for a float.

    Raises:
        QuestionsError: the value is not such a number (True and False are not), or is an integer too large for a float.
    """
    number = value
    if isinstance(value, str):
        with suppress(ValueError):
            number = float(value)  # such columns have 4.0 for 4 in a .csv as well
            number = kind(value)
    if isinstance(number, float) and kind is int and number.is_integer():
        number = int(number)
    number_types = (int,) if kind is int else (int, float)
    if isinstance(number, bool) or not isinstance(number, number_types):
        raise QuestionsError(f"{where}: {name} must be a {'whole ' if kind is int else ''}number, got {value!r}")
    try:
        return kind(number)
    except OverflowError as error:  # an integer too large for a float
        raise QuestionsError(f"{where}: {name} must be a number, got one of {len(str(number))} digits") from error


def derive_seed(seed: int, question_id: str) -> int:
    """Compute a question's seed, below 2**63, from the run's seed and its id."""
    return int.from_bytes(blake2b(f"{seed}\0{question_id}".encode(errors="replace"), digest_size=8).digest()) >> 1


def add_choices(prompt: str, choices: Sequence[str]) -> str:
    """Append the choices, as lines "A. ...", and the instruction to answer with a letter to the prompt.

    Letters that the choices begin with already are not repeated. Choices beyond Z are left out.
    """
    texts = strip_letters(choices)
    options = "".join(f"{letter}. {text}\n" for letter, text in zip(ascii_uppercase, texts, strict=False))
    return f"{prompt}\n{options}{INSTRUCTION}"


def split_letter(choice: str) -> tuple[str, str]:
    """Split a choice into (the letter before it as a capital, its text); the letter may be ""."""
    match = _LABEL.match(choice)
    return ("", choice) if match is None else (match[1].upper(), choice[match.end() :])


def strip_letters(choices: Sequence[str]) -> list[str]:
    """Return the choices without the letters before them, if these are A, B, C and so on for all choices.

    Otherwise, or if the texts would become equal, as in "(a) only" and "(b) only", return the choices unchanged.
    """
    letters, texts = zip(*map(split_letter, choices), strict=True) if choices else ((), ())
    is_labeled = list(letters) == list_letters(len(choices)) and len(set(texts)) == len(texts)
    return list(texts if is_labeled else choices)


def explain_count_from_1(answers: Iterable[tuple[str | None, Sequence[str] | None]]) -> str | None:
    """Explain why the right answers seem to be counted from 1 instead of 0, or return None if they do not.

    They do if at least half of them are numbers, none of the numbers is 0, and at least one equals the number of
    choices. An answer that is the text of a choice is not a number.

    Args:
        answers: pairs of a right answer and the choices; pairs with None are left out.
    """
    pairs = [(answer, choices) for answer, choices in answers if answer is not None and choices]
    numbers = [
        (int(answer), len(choices))
        for answer, choices in pairs
        if answer.strip().isdecimal() and len(answer) < _MAX_DIGITS
        if answer.strip() not in {text.strip() for text in (*choices, *strip_letters(choices))}
    ]
    n_beyond = sum(number == n_choices for number, n_choices in numbers)
    if not n_beyond or 2 * len(numbers) < len(pairs) or any(number == 0 for number, _ in numbers):
        return None
    return (
        f"of {len(numbers)} right answers that are numbers, {n_beyond} are the number of choices and none is 0: they "
        "seem to be counted from 1, and here 0 is the first choice. Subtract 1, or give letters or the texts of choices"
    )


def list_letters(count: int) -> list[str]:
    """Return the first ``count`` capital letters, at most 26."""
    return list(ascii_uppercase[:count])


def parse_letter(answer: str, choices: Sequence[str]) -> int | None:
    """Return the index of the choice that a generated answer names; None if it names no choice, or several.

    Text between the tags of ``REASONING`` is ignored. The first of these rules that finds exactly one choice decides:
    the answer is the text of a choice, and not a letter; it begins with "B", "(B)" or "B. a dog"; it calls a letter the
    answer, as in "the answer is B"; it has one capital letter that stands alone, except "A" and "I" used as words.
    """
    text = strip_reasoning(answer, REASONING).strip("*").strip()
    names = list_letters(len(choices))
    bare_texts = strip_letters(choices)
    same_texts = [
        i
        for i, forms in enumerate(zip(choices, bare_texts, strict=True))
        if _normalize_answer(text) in map(_normalize_answer, forms)
    ]
    if len(same_texts) == 1 and text.strip("().") not in names:
        return same_texts[0]
    first = _FIRST.match(text)
    if first and first[1] in names:
        return names.index(first[1])
    named_letters = {letter.upper() for letter in _SENTENCE.findall(text)} & set(names)
    if len(named_letters) == 1:
        return names.index(named_letters.pop())
    single_letters = set(_LETTER.findall(text)) & set(names)
    return names.index(single_letters.pop()) if len(single_letters) == 1 else None


def strip_reasoning(reply: str, tags: Sequence[tuple[str, str]]) -> str:
    """Return a reply without the text between pairs of tags, stripped of surrounding white space.

    Equals ``strip_reasoning_tags`` of lmms-eval 0.7.3. A closing tag without an opening tag removes all text before it.
    An opening tag that is never closed stays.
    """
    for opening, closing in tags:
        while (start := reply.find(opening)) >= 0 and (end := reply.find(closing, start)) >= 0:
            reply = reply[:start] + reply[end + len(closing) :]
        if opening not in reply:
            reply = reply.rpartition(closing)[2]
    return reply.strip()


def _normalize_answer(text: str) -> str:
    """Return a text in lower case, without final periods and surrounding white space."""
    return text.strip().rstrip(".").casefold()
