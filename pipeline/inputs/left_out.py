"""The files and members that a list of videos leaves out, counted by kind."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TypedDict

from pipeline.errors import name_first

APPLE_DOUBLE = "AppleDouble files"
ARCHIVES = "archives beside videos"
CLOSED = "folders without permission"
OTHER_FILES = "other files"
MAX_NAMES = 1000  # of a kind
_MAX_SHOWN = 3  # names of a kind in a line


class LeftOutKind(TypedDict):
    """The files of a kind: their number, and the first names."""

    count: int
    names: list[str]


class LeftOut:
    """The left-out files by kind, in the order in which the kinds were found. Several threads may add.

    Attributes:
        remedies: kind -> the reason why its files are left out, and a way to have them read.
    """

    def __init__(self, kinds: Mapping[str, LeftOutKind] | None = None) -> None:
        self._kinds: dict[str, LeftOutKind] = {}
        self._adding = threading.Lock()
        self.remedies: dict[str, str] = {}
        self.add_all(kinds or {})

    def add(self, kind: str, name: str) -> None:
        """Count one file."""
        self.add_all({kind: {"count": 1, "names": [name]}})

    def add_all(self, kinds: Mapping[str, LeftOutKind], inside: str = "") -> None:
        """Count the files of a record (``as_record``), whose names lie ``inside`` an archive."""
        with self._adding:
            for kind, more in kinds.items():
                record = self._kinds.setdefault(kind, {"count": 0, "names": []})
                record["count"] += more["count"]
                names = more["names"][: MAX_NAMES - len(record["names"])]
                record["names"] += [f"{inside}{name}" for name in names]

    def forget(self, videos: Iterable[str]) -> None:
        """Drop the names of files beside these videos, which have their names up to the suffix; they stay counted."""
        stems = [f"/{PurePosixPath(video).with_suffix('')}." for video in videos]
        with self._adding:
            for record in self._kinds.values():
                record["names"] = [name for name in record["names"] if not any(stem in f"/{name}" for stem in stems)]

    def as_record(self, max_names: int = MAX_NAMES) -> dict[str, LeftOutKind]:
        """Return the counts JSON-able, with at most ``max_names`` names of a kind."""
        with self._adding:
            return {
                kind: {"count": record["count"], "names": record["names"][:max_names]}
                for kind, record in self._kinds.items()
            }

    def counts(self) -> dict[str, int]:
        """Return the number of files of each kind."""
        return {kind: record["count"] for kind, record in self.as_record(0).items()}

    def first_names(self) -> dict[str, list[str]]:
        """Return the names of the first files of each kind, a few that fit in a line."""
        return {kind: record["names"] for kind, record in self.as_record(_MAX_SHOWN).items()}

    def describe(self, kind: str) -> str:
        """Describe the files of a kind by their number and first names."""
        return format_left_out({kind: self.counts()[kind]}, self.first_names())

    def __str__(self) -> str:
        """Return the numbers of files by kind, with the first names, in a line."""
        return format_left_out(self.counts(), self.first_names())


def format_left_out(counts: Mapping[str, int], names: Mapping[str, Sequence[str]]) -> str:
    """Format the files by kind in a line: "1 json without a video (a.json), 8 other files (b, c, d and 5 more)".

    Args:
        counts: kind -> the number of its files.
        names: kind -> the names of the first of them; a kind without names has only its number.
    """
    kinds = []
    for kind, count in counts.items():
        examples = f" ({name_first(names[kind], count)})" if names.get(kind) else ""
        kinds.append(f"{count:,} {_singular(kind) if count == 1 else kind}{examples}")
    return ", ".join(kinds)


def _singular(kind: str) -> str:
    """Return the name of a kind for one file: "archive beside videos"."""
    first, space, words = kind.partition(" ")
    return f"{first.removesuffix('s')}{space}{words.removesuffix('files')}{'file' if words.endswith('files') else ''}"


def is_apple_double(name: str) -> bool:
    """Return True for a file with the resource fork and attributes of another file, which macOS packs."""
    path = PurePosixPath(name)
    return path.name.startswith("._") or "__MACOSX" in path.parts
