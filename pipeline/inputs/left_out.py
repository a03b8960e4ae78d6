"""The files and members that a list of videos leaves out, counted by kind."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import TypedDict

APPLE_DOUBLE = "AppleDouble files"
ARCHIVES = "archives beside videos"
OTHER = "other files"
MAX_NAMES = 1000  # of a kind


class LeftOutKind(TypedDict):
    """The files of a kind: how many, and the names of the first of them."""

    count: int
    names: list[str]


class LeftOut:
    """What was left out, by kind, in the order in which the kinds were met. Several threads may add.

    Attributes:
        remedies: kind -> why its files are left out, and what the user can do to have them taken.
    """

    def __init__(self, kinds: Mapping[str, LeftOutKind] | None = None) -> None:
        self._kinds: dict[str, LeftOutKind] = {}
        self._adding = threading.Lock()
        self.remedies: dict[str, str] = {}
        self.add_all(kinds or {})

    def add(self, kind: str, name: str) -> None:
        """Count one file."""
        self._add(kind, 1, [name])

    def add_all(self, kinds: Mapping[str, LeftOutKind], inside: str = "") -> None:
        """Count the files of a record (``as_record``), whose names lie ``inside`` an archive."""
        for kind, found in kinds.items():
            self._add(kind, found["count"], [f"{inside}{name}" for name in found["names"]])

    def _add(self, kind: str, count: int, names: Iterable[str]) -> None:
        with self._adding:
            found = self._kinds.setdefault(kind, {"count": 0, "names": []})
            found["count"] += count
            if len(found["names"]) < MAX_NAMES:
                found["names"] += [*names][: MAX_NAMES - len(found["names"])]

    def forget(self, videos: Iterable[str]) -> None:
        """Drop the names of files beside these videos, which have their names up to the suffix; they stay counted."""
        stems = [f"/{PurePosixPath(video).with_suffix('')}." for video in videos]
        with self._adding:
            for found in self._kinds.values():
                found["names"] = [name for name in found["names"] if not any(stem in f"/{name}" for stem in stems)]

    def as_record(self, max_names: int = MAX_NAMES) -> dict[str, LeftOutKind]:
        """Return the counts JSON-able, with at most ``max_names`` names of a kind."""
        with self._adding:
            return {
                kind: {"count": found["count"], "names": found["names"][:max_names]}
                for kind, found in self._kinds.items()
            }

    def counts(self) -> dict[str, int]:
        """Return the number of files of each kind."""
        return {kind: found["count"] for kind, found in self.as_record(0).items()}


def say_counts(counts: Mapping[str, int]) -> str:
    """Say the counts by kind in a line for the user: "3 json without a video, 8 other files"."""
    return ", ".join(f"{count:,} {_singular(kind) if count == 1 else kind}" for kind, count in counts.items())


def _singular(kind: str) -> str:
    """Return the name of a kind for one file: "archive beside videos"."""
    first, space, rest = kind.partition(" ")
    return f"{first.removesuffix('s')}{space}{rest.removesuffix('files')}{'file' if rest.endswith('files') else ''}"


def is_apple_double(name: str) -> bool:
    """Return whether a file is what macOS packs beside another one: its resource fork and attributes."""
    path = PurePosixPath(name)
    return path.name.startswith("._") or "__MACOSX" in path.parts
