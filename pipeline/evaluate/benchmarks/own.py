"""Questions of one's own: the file of ``jobs.generate --questions`` with the right answers in it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.errors import QuestionsError
from pipeline.evaluate.benchmarks.annotations import NO_ANSWER, NotAskable, VideoFolder, answer_index, data_folder
from pipeline.evaluate.benchmarks.base import Benchmark, Split
from pipeline.evaluate.benchmarks.items import Item, LoadedQuestions, QuestionCollector
from pipeline.evaluate.protocols import LETTER
from pipeline.generate.questions import AnswerMode, list_letters, read_questions, split_letter, strip_letters
from pipeline.rows import AnswerRecord, QuestionRecord, without_nulls

# A number: its point and its minus sign are no punctuation, unlike the commas of 1,000.
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)")
_IN_NUMBERS = str.maketrans(".-", "\ue000\ue001")  # characters that no text has, and that are no punctuation
_BETWEEN_DIGITS = re.compile(r"(?<=\d)[^\w\s\ue000\ue001](?=\d)")  # 1/2 is not 12
_MODE = AnswerMode(LETTER.decoding, LETTER.choices)
#: How questions with and without choices are answered where no row says otherwise.
_DECODING = {replace(_MODE, method=method).describe() for method in (_MODE.method, "generate")}


def own_benchmark(file: str) -> Benchmark:
    """Return the benchmark of a user's own .jsonl, .csv or .parquet question file; nothing is read yet."""
    return OwnQuestions(
        name=Path(file).name,
        title=Path(file).stem,
        protocols=(LETTER,),
        files=(file,),
        splits=(Split("split", "Split"),),
    )


class OwnQuestions(Benchmark):
    """Questions of a user's own, a row a question: question_id, video_id, prompt or messages, answer.

    A list of video_id puts several videos in one prompt. Optional are choices, split (which part of the file it counts
    to) and cluster; other columns are not looked at.

    ``answer`` is a choice: its text, else its text but for case and spaces around it, else its letter, else its text
    with or without its letter, else its index counted from 0. Without choices it is a text, and :func:`same_text` says
    whether a reply is right.

    ``cluster`` is what must be drawn together when the error of a score is estimated; by default the video, and videos
    that a question asks about together.
    """

    def load(self, data: Path | str | None, roots: Sequence[Path] = ()) -> LoadedQuestions:
        """Return the questions and the faults of their rows.

        Args:
            data: the folder with the videos; the ids are paths below it. If it is None, the ids are of a cache, and no
                file is looked for.
            roots: folders that links in it may lead into.

        Raises QuestionsError (a UsageError) that names the file and the row, for an unreadable file, a malformed row
        and a row without an answer. Raises UsageError if there is no folder, no question is left, or most right answers
        are not among the choices.
        """
        file = self.files[0]
        videos = None if data is None else VideoFolder(data_folder(data, "name the one that the videos are in"), roots)
        rows = [without_nulls(row, QuestionRecord) for row in read_questions(file, _MODE).to_pylist()]
        collector = QuestionCollector()
        for item in clusters_of([_own_item(file, row) for row in rows]):
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


def _own_item(file: str, row: QuestionRecord) -> Item:
    """Convert a user's question to an item; its cluster may still be "".

    Raises QuestionsError if it has no right answer, or options of decoding.
    """
    where = f"{file}, question {row['question_id']}"
    if "target" not in row:
        raise QuestionsError(
            f"{where}: answer is missing: a choice, its letter or its index, or a text where there are no choices; "
            "every row needs question_id, video_id, prompt (or messages) and answer"
        )
    if row["decoding"] not in _DECODING:
        raise QuestionsError(
            f"{where}: system, max_new_tokens, temperature, top_p, top_k and seed are of jobs.generate; here the "
            "protocol says how all questions are answered: leave these columns out"
        )
    return item_of(row, where)


def item_of(row: QuestionRecord | AnswerRecord, where: str) -> Item:
    """Convert a question with a ``target`` to an item; its cluster is "" unless a column names one.

    Raises QuestionsError that begins with ``where`` for a split or cluster that is no text.
    """
    options, split = tuple(row.get("choices", ())), _label(row, "split", where)
    return Item(
        question_id=row["question_id"],
        video_ids=tuple(row["video_ids"]),
        question=row["prompt"],
        conversation=row.get("conversation"),
        options=options,
        answer=_find_choice(row["target"], options) if options else None,
        expected=row["target"],
        splits={"split": split} if split else {},
        cluster=_label(row, "cluster", where),
    )


def is_unpublished(item: Item) -> bool:
    """Return True if the answer to a question with choices is -1, which stands for one that is not published."""
    return bool(item.options) and item.answer is None and item.expected == NO_ANSWER


def clusters_of(items: Sequence[Item]) -> list[Item]:
    """Fill in missing clusters: questions whose videos are connected through shared questions form one cluster."""
    groups = _groups([item.video_ids for item in items])
    return [replace(item, cluster=item.cluster or groups[item.video_id]) for item in items]


def same_text(reply: str, expected: str) -> bool:
    """Return True if a free answer equals the expected one apart from case, punctuation and spaces.

    Numbers are compared by their values: 3.0 is 3 and 1,000 is 1000, but 1.5 is not 15, nor -5 5. A mark between digits
    separates them: 1/2 is not 12.
    """
    bare = _bare(expected)
    return _bare(reply) == bare if bare else reply.strip() == expected.strip()


def _bare(text: str) -> str:
    """Return a text in lower case without punctuation and repeated spaces; the point and sign of a number stay."""
    marked = _BETWEEN_DIGITS.sub(" ", _NUMBER.sub(_mark_number, text))
    letters = "".join(character for character in marked if not unicodedata.category(character).startswith("P"))
    return " ".join(letters.casefold().split())


def _mark_number(number: re.Match[str]) -> str:
    """Return a number without commas and closing zeros of a fraction, its point and sign as in ``_IN_NUMBERS``."""
    digits = number[0].replace(",", "")
    return (digits.rstrip("0").rstrip(".") if "." in digits else digits).translate(_IN_NUMBERS)


def _find_choice(answer: str, options: Sequence[str]) -> int | None:
    """Return the index of the choice that ``answer`` means, or None.

    It may be the choice's text, its text in another case, its letter, its text with or without its letter, or its index
    counted from 0; tried in this order.
    """
    if answer in options:
        return options.index(answer)
    letter, text = split_letter(answer.strip().casefold())
    texts = [text.strip().casefold() for text in strip_letters(options)]
    same_texts = (i for i, name in enumerate(list_letters(len(texts))) if (letter or name, text) == (name, texts[i]))
    means = (
        answer_index("text", answer.casefold(), [text.casefold() for text in options]),
        answer_index("letter", answer.strip(" ().:"), options),
        next(same_texts, None),
        answer_index("index", answer, options),
    )
    return next((index for index in means if index is not None), None)


def _label(row: Mapping[str, object], name: str, where: str) -> str:
    """Return the carried column ``name`` as text, "" if it is empty; ``where`` names the row in an error.

    Raises QuestionsError unless it is text or a whole number.
    """
    value = row.get(name)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise QuestionsError(f"{where}: {name} must be text or a whole number, got {value!r}")
    return str(value)


def _groups(video_lists: Sequence[Sequence[str]]) -> dict[str, str]:
    """Map each video to the first video of its group: videos in one question, directly or through others."""
    groups: dict[str, set[str]] = {}
    for ids in video_lists:
        tied = set(ids).union(*(groups.get(name, ()) for name in ids))
        groups.update(dict.fromkeys(tied, tied))
    return {name: min(tied) for name, tied in groups.items()}
