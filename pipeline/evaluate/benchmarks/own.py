"""Users' own questions: a file for ``jobs.generate --questions`` that also has the right answers."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.errors import QuestionsError
from pipeline.evaluate.benchmarks.annotations import (
    NO_ANSWER,
    NotAskable,
    VideoFolder,
    find_answer_index,
    resolve_data_folder,
)
from pipeline.evaluate.benchmarks.base import Benchmark, Split
from pipeline.evaluate.benchmarks.items import Item, LoadedQuestions, QuestionCollector
from pipeline.evaluate.protocols import LETTER
from pipeline.generate.questions import AnswerMode, list_letters, read_questions, split_letter, strip_letters
from pipeline.rows import AnswerRecord, QuestionRecord, drop_nulls

# A number. Its point and its minus sign are not punctuation, unlike the commas in 1,000.
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)")
_IN_NUMBERS = str.maketrans(".-", "\ue000\ue001")  # private-use characters, which texts lack; not punctuation
_BETWEEN_DIGITS = re.compile(r"(?<=\d)[^\w\s\ue000\ue001](?=\d)")  # 1/2 must not become 12
_MODE = AnswerMode(LETTER.decoding, LETTER.choices)
#: The answer modes of questions with and without choices whose rows set no options of decoding.
_DECODING = {replace(_MODE, method=method).describe() for method in (_MODE.method, "generate")}


def make_user_benchmark(file: str) -> Benchmark:
    """Return the benchmark of a user's file of questions, which is not read yet."""
    return UserQuestions(
        name=Path(file).name,
        title=Path(file).stem,
        protocols=(LETTER,),
        files=(file,),
        splits=(Split("split", "Split"),),
    )


class UserQuestions(Benchmark):
    """A user's own questions, a row per question with question_id, video_id, prompt or messages, and answer.

    A list in ``video_id`` puts several videos into the prompt. ``choices``, ``split`` and ``cluster`` are optional.
    With choices, ``answer`` is the text of a choice, its letter or its index from 0. Without choices, it is a text, and
    ``is_same_text`` compares replies with it.
    """

    def load(self, data: Path | str | None, roots: Sequence[Path] = ()) -> LoadedQuestions:
        """Read the file, and return the questions and the faults of their rows.

        Args:
            data: the folder in which the video ids are paths. None: the ids are those of a cache, and no files are
                looked for.

        Raises:
            QuestionsError: the file cannot be read, or a row is malformed, has no answer, or has options of decoding.
            UsageError: ``data`` is not a folder, no question is left, or more than half of the right answers are not
                among the choices, or they seem to be counted from 1.
        """
        file = self.files[0]
        videos = (
            None
            if data is None
            else VideoFolder(resolve_data_folder(data, "name the one that the videos are in"), roots)
        )
        rows = [drop_nulls(row, QuestionRecord) for row in read_questions(file, _MODE).to_pylist()]
        collector = QuestionCollector()
        for item in assign_clusters([_make_user_item(file, row) for row in rows]):
            where = f"question {item.question_id}"
            try:
                if is_unpublished(item):
                    raise NotAskable("no-answer", "answer is -1: the right answer is not published")
                paths = tuple(videos.find([name], [name]) for name in item.video_ids) if videos else item.video_ids
            except NotAskable as fault:
                collector.leave_out(where, item.question_id, fault)
            else:
                collector.keep(where, replace(item, video_ids=paths))
        return collector.finish(file, "every question needs its videos below --data")


def _make_user_item(file: str, row: QuestionRecord) -> Item:
    """Convert a row of the file to a question, whose cluster is "" if the row names none.

    Raises:
        QuestionsError: the row has no right answer or sets options of decoding, or its split or cluster is malformed.
    """
    where = f"{file}, question {row['question_id']}"
    if "target" not in row:
        raise QuestionsError(
            f"{where}: answer is missing: a choice, its letter or its index, or a text where there are no choices; "
            "every row needs question_id, video_id, prompt (or messages) and answer"
        )
    if row["decoding"] not in _DECODING:
        raise QuestionsError(
            f"{where}: system, max_new_tokens, temperature, top_p, top_k and seed are for jobs.generate; here, the "
            "protocol determines how all questions are answered: leave these columns out"
        )
    return make_answered_item(row, where)


def make_answered_item(row: QuestionRecord | AnswerRecord, where: str) -> Item:
    """Convert a row with a ``target`` to a question, whose cluster is "" if the row names none.

    Raises:
        QuestionsError: split or cluster is neither text nor a whole number; the message begins with ``where``.
    """
    options = tuple(row.get("choices", ()))
    split = _get_label(row, "split", where)
    return Item(
        question_id=row["question_id"],
        video_ids=tuple(row["video_ids"]),
        question=row["prompt"],
        conversation=row.get("conversation"),
        options=options,
        answer=_find_choice(row["target"], options) if options else None,
        expected=row["target"],
        splits={"split": split} if split else {},
        cluster=_get_label(row, "cluster", where),
    )


def is_unpublished(item: Item) -> bool:
    """Return True if a question with choices has the answer -1, which means that the answer is not published."""
    return bool(item.options) and item.answer is None and item.expected == NO_ANSWER


def assign_clusters(items: Sequence[Item]) -> list[Item]:
    """Return the questions with missing clusters filled in: the smallest id of the videos that questions connect."""
    groups = _group_videos([item.video_ids for item in items])
    return [replace(item, cluster=item.cluster or groups[item.video_id]) for item in items]


def is_same_text(reply: str, expected: str) -> bool:
    """Return True if a free answer equals the expected one apart from case, punctuation and spaces.

    Numbers are compared by value: 3.0 equals 3 and 1,000 equals 1000, but 1.5 differs from 15, and 1/2 from 12. An
    expected text of punctuation only must be equal as it is.
    """
    bare = _normalize_text(expected)
    return _normalize_text(reply) == bare if bare else reply.strip() == expected.strip()


def _normalize_text(text: str) -> str:
    """Return a text in lower case without punctuation and repeated spaces; numbers keep point and sign, encoded."""
    marked = _BETWEEN_DIGITS.sub(" ", _NUMBER.sub(_mark_number, text))
    letters = "".join(character for character in marked if not unicodedata.category(character).startswith("P"))
    return " ".join(letters.casefold().split())


def _mark_number(number: re.Match[str]) -> str:
    """Return a number without commas and trailing zeros of its fraction; its point and sign are encoded."""
    digits = number[0].replace(",", "")
    return (digits.rstrip("0").rstrip(".") if "." in digits else digits).translate(_IN_NUMBERS)


def _find_choice(answer: str, options: Sequence[str]) -> int | None:
    """Return the index of the choice that ``answer`` denotes, or None.

    The first that applies counts: the exact text of a choice, its text in another case, its letter, its text with or
    without its letter, its index from 0.
    """
    if answer in options:
        return options.index(answer)
    letter, text = split_letter(answer.strip().casefold())
    texts = [text.strip().casefold() for text in strip_letters(options)]
    same_texts = (i for i, name in enumerate(list_letters(len(texts))) if (letter or name, text) == (name, texts[i]))
    means = (
        find_answer_index("text", answer.casefold(), [text.casefold() for text in options]),
        find_answer_index("letter", answer.strip(" ().:"), options),
        next(same_texts, None),
        find_answer_index("index", answer, options),
    )
    return next((index for index in means if index is not None), None)


def _get_label(row: Mapping[str, object], name: str, where: str) -> str:
    """Return the value of the column ``name`` as text, "" if it is missing or null.

    Raises:
        QuestionsError: it is neither text nor a whole number.
    """
    value = row.get(name)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise QuestionsError(f"{where}: {name} must be text or a whole number, got {value!r}")
    return str(value)


def _group_videos(video_lists: Sequence[Sequence[str]]) -> dict[str, str]:
    """Map each video id to the smallest id of its group: videos that questions connect, directly or through others."""
    groups: dict[str, set[str]] = {}
    for ids in video_lists:
        tied = set(ids).union(*(groups.get(name, ()) for name in ids))
        groups.update(dict.fromkeys(tied, tied))
    return {name: min(tied) for name, tied in groups.items()}
