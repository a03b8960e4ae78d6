"""Reads annotation files, checks their cells, and finds the videos that they name.

No path outside the data folder, and outside the folders into which its links may lead, is ever accepted.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from pipeline.errors import UsageError, suggest_unicode_form
from pipeline.generate.questions import MAX_LETTERS, list_letters
from pipeline.inputs.named_videos import FolderCheck
from pipeline.inputs.tables import UNREADABLE, BadRow, UserRow, convert_to_text, is_text, read_rows
from pipeline.rows import JsonObject
from pipeline.storage.s3 import is_s3
from pipeline.video.frame_folders import FIRST_FRAME, is_frame_folder

#: The JSON objects beside the annotations, by file name; a missing file is an empty object.
Tables = Mapping[str, JsonObject]


class AnnotationRow(NamedTuple):
    """The position of an annotation row, and the JSON objects that complete it.

    Attributes:
        where: file and position in words, for messages.
        part: the section of the file that has the row, or the name of the file without its suffix.
        number: index of the row in that part.
    """

    where: str
    part: str
    number: int
    tables: Tables


def read_annotations(
    folder: Path, path: Path, needs: Sequence[str], tables: Tables
) -> list[tuple[AnnotationRow, UserRow]]:
    """Read all rows of an annotation file in a folder, with their positions.

    A .json file is a list of rows, or {"meta": {part: rows}, "root": {part: folder}}; then ``prefix`` of each row is
    the folder of its part, if there is one. Other files are Parquet, CSV or JSON Lines.

    Args:
        needs: columns to name in errors; they are not checked.
        tables: passed on to every position.

    Raises:
        BadRow: the content is not JSON, or not rows.
        OSError, UnicodeDecodeError, OverflowError, ArrowException: the file cannot be read (UNREADABLE).
    """
    name = path.relative_to(folder).as_posix()
    if path.suffix == ".json":
        read = [*_iter_json_rows(path)]
    else:
        with path.open("rb") as file:
            rows = enumerate(read_rows(name, file, ", ".join(needs)))
            read = [(path.stem, number, where, row) for number, (where, row) in rows]
    return [(AnnotationRow(f"{name}, {where}", part, number, tables), row) for part, number, where, row in read]


def read_tables(folder: Path, names: Sequence[str]) -> Tables:
    """Read JSON files in a folder, and return their objects by file name; {} for a missing file.

    Raises:
        UsageError: a file cannot be read or holds no JSON object.
    """
    tables: dict[str, JsonObject] = {}
    for name in names:
        try:
            tables[name] = _load_json(folder / name) if (folder / name).is_file() else {}
            if not isinstance(tables[name], dict):
                raise BadRow("it holds no JSON object")
        except (BadRow, *UNREADABLE) as error:
            raise UsageError(f"{folder / name}: cannot be read: {error}; fetch it again") from error
    return tables


def _iter_json_rows(path: Path) -> Iterator[tuple[str, int, str, UserRow]]:
    """Yield (part, number, position in words, row) for each row of a JSON file, numbered from 0 in each part.

    The parts of a file with an object ``meta`` are its keys; a part's entry in ``root`` becomes the column ``prefix``
    of its rows. Any other file is one part, named like the file without its suffix.

    Raises:
        BadRow: the file is not JSON, or rows are not a list of objects.
    """
    content = _load_json(path)
    if isinstance(content, dict) and isinstance(content.get("meta"), dict):
        root = content.get("root")
        prefixes = root if isinstance(root, dict) else {}
        for part, rows in content["meta"].items():
            for number, row in enumerate(_check_rows(rows)):
                prefix = {"prefix": prefixes[part]} if part in prefixes else {}
                yield part, number, f"{part}, row {number}", {**row, **prefix}
    else:
        yield from ((path.stem, number, f"row {number}", row) for number, row in enumerate(_check_rows(content)))


def _check_rows(rows: object) -> list[UserRow]:
    """Return ``rows`` if it is a list of dicts, which may be empty; raise BadRow otherwise."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BadRow("expected a JSON list of objects")
    return rows


def _load_json(path: Path) -> Any:
    """Parse a JSON file; raise BadRow if it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadRow(f"not JSON: {error}") from error


FaultKind = Literal[
    "bad-row",
    "missing-video",
    "policy",
    "repeated-question",
    "repeated-candidate",
    "blank-candidate",
    "answer-no-candidate",
    "no-answer",
    "other-media",
    "not-counted",
]
AnswerRule = Literal["letter", "index", "text"]
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# The letter before an option: "A. ", "A) ", "(A) ", "A: ".
_LETTER = re.compile(r"^\(?[A-Z][.):]\s*")


class NotAskable(Exception):  # noqa: N818
    """An annotation row cannot be asked; ``kind`` is the kind of fault, see ``AnnotationFault``."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.kind: FaultKind = kind


def resolve_data_folder(data: Path | str, remedy: str) -> Path:
    """Return the folder that ``--data`` names as a Path.

    Raises:
        UsageError: it is an address, a file, or missing; the last message ends with ``remedy``.
    """
    if is_s3(str(data)) or re.match(r"[a-z0-9]+:/", str(data)):  # a Path drops one of the two slashes
        raise UsageError(f"--data {data}: only local folders are read; copy the data onto this machine, or mount it")
    folder = Path(data)
    if not folder.is_dir():
        problem = "is a file; name the folder that it is in" if folder.exists() else f"no such folder; {remedy}"
        raise UsageError(f"--data {data}: {problem}")
    return folder


class VideoFolder:
    """The videos in a data folder; links in it may also lead into the ``roots``."""

    def __init__(self, folder: Path, roots: Sequence[Path] = ()) -> None:
        self._folder = os.path.abspath(folder)  # noqa: PTH100 - links are judged below
        self._judge = FolderCheck([folder, *roots])

    def find(self, paths: Sequence[str], names: Iterable[str]) -> str:
        """Return the first of the ``paths`` that is a file or a folder of frames, as a POSIX path below the folder.

        A path that a link leads outside is skipped.

        Args:
            paths: candidates relative to the folder, at least one.
            names: the texts from annotations that the paths were built from.

        Raises:
            NotAskable: "policy" if a name is absolute, or contains a component ".." or control characters; or, if there
                is no video, "policy" if a link led outside, and "missing-video" otherwise.
        """
        for name in names:
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
        near = next(filter(None, (suggest_unicode_form(os.path.join(self._folder, path)) for path in paths)), "")  # noqa: PTH118
        raise NotAskable("missing-video", f"there is no {paths[0]!r} in the data folder{more}{near}")


def get_text(row: UserRow, column: str) -> str:
    """Return a cell with text or a whole number as text.

    Raises:
        NotAskable: "bad-row" if the cell is missing, blank, not valid text or of another type.
    """
    value = row.get(column)
    try:
        text = convert_to_text(value, column)
    except ValueError:
        text = ""
    if not text.strip():
        raise NotAskable("bad-row", f"{column} must be text or a whole number, got {value!r}")
    if not is_text(text):
        raise NotAskable("bad-row", f"{column} is not valid text: {value!r}")
    return text


def get_options(row: UserRow, column: str) -> tuple[str, ...]:
    """Return a cell with a list of 1 to 26 texts, some of which may be blank.

    Raises:
        NotAskable: "bad-row" for any other cell.
    """
    value = row.get(column)
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise NotAskable("bad-row", f"{column} must be a list of texts, got {value!r}")
    if not all(map(is_text, value)):
        raise NotAskable("bad-row", f"{column} are not valid text: {value!r}")
    if len(value) > MAX_LETTERS:
        raise NotAskable("bad-row", f"{column} are {len(value)}, and there are {MAX_LETTERS} letters")
    return tuple(value)


def get_seconds(row: UserRow, column: str) -> float | None:
    """Return a cell with seconds as a float; None if it is missing or null.

    Raises:
        NotAskable: "bad-row" if it is not a finite number, or negative.
    """
    value = row.get(column)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise NotAskable("bad-row", f"{column} must be seconds, 0 or more, got {value!r}")
    return float(value)


def get_clip(row: UserRow, columns: tuple[str, str]) -> tuple[float | None, float | None]:
    """Return the start and end of a clip in seconds, None for an empty cell; raise NotAskable if the clip is empty."""
    start_s, end_s = (get_seconds(row, column) for column in columns)
    if end_s is not None and end_s <= (start_s or 0.0):
        raise NotAskable("bad-row", f"the clip from {columns[0]} {start_s} to {columns[1]} {end_s} is empty")
    return start_s, end_s


def find_answer_index(rule: AnswerRule, answer: str, options: Sequence[str]) -> int | None:
    """Return the index of the option that ``answer`` denotes, or None if it denotes none; outer blanks are ignored.

    Args:
        rule: "letter": a letter in either case; "index": an index from 0; "text": the text of an option, the first one
            of equal options.
    """
    answer = answer.strip()
    answers = {
        "letter": list_letters(len(options)),
        "index": [str(i) for i in range(len(options))],
        "text": [text.strip() for text in options],
    }[rule]
    answer_text = answer.upper() if rule == "letter" else answer
    return answers.index(answer_text) if answer_text in answers else None


#: The value that stands for an unpublished answer where answers are indices.
NO_ANSWER = "-1"


def strip_option_letter(option: str) -> str:
    """Return an option without outer blanks and without a capital letter before it, such as "A. " or "(A) "."""
    return _LETTER.sub("", option.strip())
