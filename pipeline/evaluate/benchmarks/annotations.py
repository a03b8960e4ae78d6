"""Cells of annotations, checked, and the videos that they name; none outside the data folder is ever opened."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

from pipeline.errors import UsageError
from pipeline.generate.choices import MAX_LETTERS, letters
from pipeline.inputs.named_videos import Judge
from pipeline.inputs.tables import UserRow, is_text
from pipeline.storage.s3 import is_object
from pipeline.video.frame_folders import FIRST_FRAME, is_frame_folder

FaultKind = Literal[
    "bad-row",
    "missing-video",
    "policy",
    "repeated-question",
    "repeated-candidate",
    "blank-candidate",
    "answer-no-candidate",
    "no-answer",
]
AnswerRule = Literal["letter", "index", "text"]
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# In front of an option: "A. ", "A) ", "(A) ", "A: ".
_LETTER = re.compile(r"\(?[A-Z][.):]\s*")


class NotAskable(Exception):  # noqa: N818
    """An annotation row that cannot be asked, with the kind of fault and a message."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.kind: FaultKind = kind


def data_folder(data: Path | str, remedy: str) -> Path:
    """Return the folder that ``--data`` names. Raise UsageError, with the remedy, if it does not exist."""
    if is_object(str(data)) or re.match(r"[a-z0-9]+:/", str(data)):  # a Path drops one of the two slashes
        raise UsageError(f"--data {data}: only local folders are read; copy the data onto this machine, or mount it")
    folder = Path(data)
    if not folder.is_dir():
        what = "is a file; name the folder that it is in" if folder.exists() else f"no such folder; {remedy}"
        raise UsageError(f"--data {data}: {what}")
    return folder


class Videos:
    """The videos below a folder, whose links may lead into the ``roots``."""

    def __init__(self, folder: Path, roots: Sequence[Path] = ()) -> None:
        self._folder = os.path.abspath(folder)  # noqa: PTH100 - links are judged below
        self._judge = Judge([folder, *roots])

    def find(self, paths: Sequence[str], named: Iterable[str]) -> str:
        """Find the first of the ``paths`` below the folder that is a file or a folder of frames.

        A folder of frames says how many a second it has. Returns a POSIX path relative to the folder.

        ``named`` is what the annotations put into the paths: texts that may have been written to lead elsewhere.
        Raises NotAskable.
        """
        for name in named:
            if name.startswith("/") or ".." in name.split("/") or _CONTROL.search(name):
                raise NotAskable("policy", f"{name!r} leads outside the data folder or is no name of a file")
        outside = empty = None
        for path in (PurePosixPath(path).as_posix() for path in paths):
            absolute = os.path.join(self._folder, path)  # noqa: PTH118
            if self._judge(absolute):
                outside = outside or path
            elif os.path.isfile(absolute) or is_frame_folder(absolute):  # noqa: PTH113 - False, not an error, for a name that is too long
                return path
            elif os.path.isdir(absolute):  # noqa: PTH112
                empty = empty or path
        if outside:
            raise NotAskable(
                "policy",
                f"a link leads {outside!r} outside the data folder; put the file itself there, or name with "
                "--video-root the folder that it leads to",
            )
        if empty:
            raise NotAskable("missing-video", f"the folder {empty!r} holds no frames ({FIRST_FRAME} and so on)")
        more = f" (nor at {len(paths) - 1} other places)" if len(paths) > 1 else ""
        raise NotAskable("missing-video", f"there is no {paths[0]!r} in the data folder{more}")


def text_of(row: UserRow, column: str) -> str:
    """Return a cell that holds text or a whole number as text. Raise NotAskable for any other cell."""
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise NotAskable("bad-row", f"{column} must be text or a whole number, got {value!r}")
    if not is_text(str(value)):
        raise NotAskable("bad-row", f"{column} is not valid text: {value!r}")
    return str(value)


def options_of(row: UserRow, column: str) -> tuple[str, ...]:
    """Return a cell that holds a list of texts, of which some may be blank. Raise NotAskable for any other cell."""
    value = row.get(column)
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise NotAskable("bad-row", f"{column} must be a list of texts, got {value!r}")
    if not all(map(is_text, value)):
        raise NotAskable("bad-row", f"{column} are not valid text: {value!r}")
    if len(value) > MAX_LETTERS:
        raise NotAskable("bad-row", f"{column} are {len(value)}, and there are {MAX_LETTERS} letters")
    return tuple(value)


def seconds_of(row: UserRow, column: str) -> float | None:
    """Return a cell that holds seconds, or None for an empty one. Raise NotAskable for any other cell."""
    value = row.get(column)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise NotAskable("bad-row", f"{column} must be seconds, 0 or more, got {value!r}")
    return float(value)


def clip_of(row: UserRow, columns: tuple[str, str]) -> tuple[float | None, float | None]:
    """Return a clip's start and end in seconds, None where the cell is empty. Raise NotAskable if the clip is empty."""
    start_s, end_s = (seconds_of(row, column) for column in columns)
    if end_s is not None and end_s <= (start_s or 0.0):
        raise NotAskable("bad-row", f"the clip from {columns[0]} {start_s} to {columns[1]} {end_s} is empty")
    return start_s, end_s


def answer_index(rule: AnswerRule, answer: str, options: Sequence[str]) -> int | None:
    """Return the index of the option that is the right ``answer``; None where it is none of them.

    "letter": of either case; "index": counted from 0; "text": equal to an option, the first of equal ones.
    """
    answer = answer.strip()
    known = {
        "letter": letters(len(options)),
        "index": [str(i) for i in range(len(options))],
        "text": [text.strip() for text in options],
    }[rule]
    wanted = answer.upper() if rule == "letter" else answer
    return known.index(wanted) if wanted in known else None


#: The value that stands for an unpublished answer where answers are indices.
NOT_PUBLISHED = "-1"


def without_letter(option: str) -> str:
    """Return the text of an option without the letter before it."""
    return _LETTER.sub("", option.strip(), count=1)
