"""The files and members that a list of videos leaves out, counted by kind."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TypedDict

from pipeline.errors import list_first_names

APPLE_DOUBLE = "AppleDouble files"
ARCHIVES = "archives beside videos"
CLOSED = "folders without permission"
OTHER_FILES = "other files"
MAX_NAMES = 1000  # names kept per kind
_MAX_SHOWN = 3  # names per kind in a line


class LeftOutKind(TypedDict):
    """The number of left-out files of a kind, and the first names."""

    count: int
    names: list[str]


class LeftOut:
    """The left-out files by kind, in the order in which the kinds first occurred. Thread-safe.

    Attributes:
        remedies: kind -> why its files are left out, and how to have them read.
    """

    def __init__(self, kinds: Mapping[str, LeftOutKind] | None = None) -> None:
        self._kinds: dict[str, LeftOutKind] = {}
        self._adding = threading.Lock()
        self.remedies: dict[str, str] = {}
        self.add_all(kinds or {})

    def add(self, kind: str, name: str) -> None:
        """Count one file of a kind, and keep its name if there are fewer than 1,000."""
        self.add_all({kind: {"count": 1, "names": [name]}})

    def add_all(self, kinds: Mapping[str, LeftOutKind], inside: str = "") -> None:
        """Add counts and names from ``as_record``, with ``inside`` before each name.

        At most 1,000 names of a kind are kept.
        """
        with self._adding:
            for kind, more in kinds.items():
                record = self._kinds.setdefault(kind, {"count": 0, "names": []})
                record["count"] += more["count"]
                names = more["names"][: MAX_NAMES - len(record["names"])]
                record["names"] += [f"{inside}{name}" for name in names]

    def forget(self, videos: Iterable[str]) -> None:
        """Drop the names of files that belong to these removed videos; the counts stay.

        A file belongs to a video if its path contains the video's path up to the suffix: "a/b.json" belongs to "b.mp4".
        """
        stems = [f"/{PurePosixPath(video).with_suffix('')}." for video in videos]
        with self._adding:
            for record in self._kinds.values():
                record["names"] = [name for name in record["names"] if not any(stem in f"/{name}" for stem in stems)]

    def as_record(self, max_names: int = MAX_NAMES) -> dict[str, LeftOutKind]:
        """Return a JSON-serializable copy: kind -> count and at most ``max_names`` names."""
        with self._adding:
            return {
                kind: {"count": record["count"], "names": record["names"][:max_names]}
                for kind, record in self._kinds.items()
            }

    def counts(self) -> dict[str, int]:
        """Return the number of files of each kind."""
        return {kind: record["count"] for kind, record in self.as_record(0).items()}

    def list_first_names_by_kind(self) -> dict[str, list[str]]:
        """Return the first three names of each kind."""
        return {kind: record["names"] for kind, record in self.as_record(_MAX_SHOWN).items()}

    def describe(self, kind: str) -> str:
        """Format the number and first names of the files of a kind, which must have occurred."""
        return format_left_out({kind: self.counts()[kind]}, self.list_first_names_by_kind())

    def __str__(self) -> str:
        """Format all kinds in one line; "" if nothing is left out."""
        return format_left_out(self.counts(), self.list_first_names_by_kind())


def format_left_out(counts: Mapping[str, int], names: Mapping[str, Sequence[str]]) -> str:
    """Format the files by kind: "1 json without a video (a.json), 8 other files (b, c, d and 5 more)".

    Args:
        counts: kind -> the number of its files.
        names: kind -> names to show; a kind may have none.
    """
    kinds = []
    for kind, count in counts.items():
        examples = f" ({list_first_names(names[kind], count)})" if names.get(kind) else ""
        kinds.append(f"{count:,} {_make_singular(kind) if count == 1 else kind}{examples}")
    return ", ".join(kinds)


def _make_singular(kind: str) -> str:
    """Return the name of a kind for a single file: "archive beside videos"."""
    first, space, words = kind.partition(" ")
    return f"{first.removesuffix('s')}{space}{words.removesuffix('files')}{'file' if words.endswith('files') else ''}"


def is_apple_double(name: str) -> bool:
    """Return True for an AppleDouble file, in which macOS packs another file's attributes."""
    path = PurePosixPath(name)
    return path.name.startswith("._") or "__MACOSX" in path.parts
