"""Questions of one's own: the file of ``jobs.generate --questions`` with the right answers in it."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipeline.errors import QuestionsError
from pipeline.evaluate.benchmarks.annotations import NOT_PUBLISHED, LeftOut, Videos, answer_index, data_folder
from pipeline.evaluate.benchmarks.base import Benchmark, Split
from pipeline.evaluate.benchmarks.items import Collected, Item, Loaded
from pipeline.evaluate.protocols import LETTER
from pipeline.generate.choices import MAX_LETTERS
from pipeline.generate.questions import json_list, target_of, video_ids_of
from pipeline.inputs.listings import suffix_of
from pipeline.inputs.tables import TABLE_SUFFIXES, UNREADABLE, BadRow, UserRow, is_text, read_rows
from pipeline.storage.s3 import is_object

_COLUMNS = ("question_id", "video_id", "prompt", "answer")
_NEEDS = "question_id, video_id, prompt and answer"
# Columns that jobs.generate takes: to pass over them would give other answers without a word.
_DECODING = ("system", "max_new_tokens", "temperature", "top_p", "top_k", "seed")


def own_benchmark(file: str) -> Benchmark:
    """The questions in a .jsonl, .csv or .parquet file as a benchmark; nothing is read yet."""
    return OwnQuestions(
        name=Path(file).name,
        title=Path(file).stem,
        protocols=(LETTER,),
        files=(file,),
        splits=(Split("split", "Split"),),
    )


class OwnQuestions(Benchmark):
    """Questions of a user's own, a row a question: question_id, video_id, prompt, answer.

    A list of video_id puts several videos in one prompt. Optional are choices, split (which part of the file it counts
    to) and cluster; other columns are not looked at.

    ``answer`` is a choice: its text, else its text but for case and spaces around it, else its letter, else its index
    counted from 0. Without choices it is a text, and :func:`same_text` says whether a reply is right.

    ``cluster`` is what must be drawn together when the error of a score is estimated; by default the video, and videos
    that a question asks about together.
    """

    def load(self, data: Path | str | None, roots: Sequence[Path] = ()) -> Loaded:
        """Return the questions, and what is wrong with them.

        Args:
            data: the folder that the videos are in, their ids being paths below it; None where they are those of a
                cache, and then nothing is looked for.
            roots: folders that links in it may lead into.

        Raises QuestionsError (a UsageError) that names the file and the row, as jobs.generate does: the file cannot be
        read, a row without a needed column, choices that make no sense, ids that repeat; and UsageError: no such
        folder, no question left.
        """
        file = self.files[0]
        videos = None if data is None else Videos(data_folder(data, "name the one that the videos are in"), roots)
        read = _rows(file)
        if lacking := [name for name in _COLUMNS if read and not any(name in row for _, row in read)]:
            raise QuestionsError(f"{file}: the column {lacking[0]} is missing; every row needs {_NEEDS}")
        rows = [(where, read_question(row, f"{file}, {where}")) for where, row in read]
        _check_ids(file, [item.question_id for _, item in rows])
        groups = _groups([item.video_ids for _, item in rows])
        collected = Collected()
        for where, item in rows:
            try:
                if item.options and item.answer is None and item.expected == NOT_PUBLISHED:
                    raise LeftOut("no-answer", "answer is -1: the right answer is not published")
                found = tuple(videos.find([name], [name]) for name in item.video_ids) if videos else item.video_ids
            except LeftOut as fault:
                collected.leave_out(where, item.question_id, fault)
            else:
                cluster = item.cluster or groups[item.video_id]
                collected.keep(where, replace(item, video_ids=found, cluster=cluster))
        return collected.loaded(file, "every question needs its videos below --data")


def clusters_of(items: Sequence[Item]) -> list[Item]:
    """The same questions, each with a cluster: the one it names, else the videos that questions tie together."""
    groups = _groups([item.video_ids for item in items])
    return [replace(item, cluster=item.cluster or groups[item.video_id]) for item in items]


def same_text(reply: str, expected: str) -> bool:
    """Whether a free answer is the expected one: but for case, punctuation and the width of spaces."""
    bare = _bare(expected)
    return _bare(reply) == bare if bare else reply.strip() == expected.strip()


def _bare(text: str) -> str:
    letters = "".join(character for character in text if not unicodedata.category(character).startswith("P"))
    return " ".join(letters.casefold().split())


def _rows(file: str) -> list[tuple[str, UserRow]]:
    if is_object(file):
        raise QuestionsError(f"{file}: only local files are read; copy it onto this machine")
    if suffix_of(file) not in TABLE_SUFFIXES:
        raise QuestionsError(f"{file}: questions are a file named {', '.join(sorted(TABLE_SUFFIXES))}")
    try:
        opened = Path(file).open("rb")  # noqa: SIM115 - closed below; an error of reading is another one
    except OSError as error:
        raise QuestionsError(f"{file}: cannot be read: {error.strerror}") from error
    with opened:
        try:
            return list(read_rows(file, opened, _NEEDS, "question_id"))
        except BadRow as error:
            raise QuestionsError(str(error)) from error
        except UNREADABLE as error:
            raise QuestionsError(f"{file}: cannot be read as questions: {error}") from error


def _check_ids(file: str, question_ids: Sequence[str]) -> None:
    if repeated := [name for name, count in Counter(question_ids).items() if count > 1]:
        shown = ", ".join(map(repr, repeated[:3]))
        raise QuestionsError(f"{file}: {len(repeated)} question_ids repeat, e.g. {shown}; ids must be unique")


def read_question(row: UserRow, where: str, most_choices: int | None = MAX_LETTERS) -> Item:
    """Read the question of a row: ids of videos unchecked, no cluster unless it names one.

    Raises QuestionsError that says ``where``.
    """
    for name in _DECODING:
        if row.get(name) is not None:
            raise QuestionsError(
                f"{where}: {name} is of jobs.generate; here the protocol says how all questions are answered: leave "
                "the column out"
            )
    question_id = row.get("question_id")
    if isinstance(question_id, bool) or not isinstance(question_id, str | int) or not str(question_id).strip():
        raise QuestionsError(f"{where}: question_id must be text or a whole number, got {question_id!r}")
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise QuestionsError(f"{where}: prompt must be text, got {prompt!r}; every row needs {_NEEDS}")
    options, expected, split = _choices(row, where, most_choices), _answer(row, where), _label(row, "split", where)
    item = Item(
        question_id=str(question_id),
        video_ids=tuple(video_ids_of(row, where)),
        question=prompt,
        options=options,
        answer=_right(expected, options) if options else None,
        expected=expected,
        splits={"split": split} if split else {},
        cluster=_label(row, "cluster", where),
    )
    for text in (item.question_id, prompt, expected, split, item.cluster, *item.video_ids, *options):
        if not is_text(text):
            raise QuestionsError(f"{where}: not valid text: {text!r}")
    return item


def _choices(row: UserRow, where: str, most: int | None) -> tuple[str, ...]:
    value = row.get("choices")
    if value is None:
        return ()
    choices = json_list(value) if isinstance(value, str) else value
    if not isinstance(choices, list) or not all(isinstance(text, str) and text.strip() for text in choices):
        raise QuestionsError(f"{where}: choices must be a list of texts (in .csv as JSON), got {value!r}")
    if len(choices) < 2 or (most is not None and len(choices) > most):
        raise QuestionsError(f"{where}: choices must be 2 to {most}, as there are letters, got {len(choices)}")
    return tuple(choices)


def _answer(row: UserRow, where: str) -> str:
    with suppress(QuestionsError):
        if (expected := target_of(row, where)) is not None:
            return expected
    raise QuestionsError(
        f"{where}: answer must be a choice, its letter or its index, or a text where there are no choices, got "
        f"{row.get('answer')!r}; every row needs {_NEEDS}"
    )


def _right(answer: str, options: Sequence[str]) -> int | None:
    """Index of the choice that ``answer`` means; None where it means none."""
    if answer in options:
        return options.index(answer)
    folded = [text.casefold() for text in options]
    for index in (
        answer_index("text", answer.casefold(), folded),
        answer_index("letter", answer, options),
        answer_index("index", answer, options),
    ):
        if index is not None:
            return index
    return None


def _label(row: UserRow, name: str, where: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise QuestionsError(f"{where}: {name} must be text or a whole number, got {value!r}")
    return str(value)


def _groups(asked: Sequence[Sequence[str]]) -> dict[str, str]:
    """Video -> the first video of those that questions tie together, through other questions too."""
    groups: dict[str, set[str]] = {}
    for ids in asked:
        tied = set(ids).union(*(groups.get(name, ()) for name in ids))
        groups.update(dict.fromkeys(tied, tied))
    return {name: min(tied) for name, tied in groups.items()}
