"""The videos of a folder of ``jobs.testbed make``, each with its questions, their evidence and its things' onsets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import UsageError
from pipeline.evaluate.benchmarks.items import Item
from pipeline.evaluate.benchmarks.shapes import SHAPES
from pipeline.evaluate.shapes.evidence import Evidence, Part, part_of
from pipeline.evaluate.shapes.hardness import HARDNESS
from pipeline.evaluate.shapes.layout import EVIDENCE, RECIPE, read_evidence
from pipeline.evaluate.shapes.making import make_video

#: Questions that only the frame answers in which a thing is first seen.
ABOUT_ONSETS = frozenset({"quarter", "order", "onset"})


class Case(NamedTuple):
    """A question and where its video shows the answer."""

    item: Item
    evidence: Evidence

    @property
    def type(self) -> str:
        return self.item.splits["task_type"]


class Onset(NamedTuple):
    """A thing whose onset a question asks for: its kind, and what must be seen of it."""

    kind: str
    evidence: Evidence


@dataclass(frozen=True)
class FilmedCases:
    """One video.

    Attributes:
        path: of the file.
        cases: all its questions.
        onsets: the things that its questions about onsets name, each once.
    """

    path: Path
    cases: tuple[Case, ...]
    onsets: tuple[Onset, ...]


def read_films(folder: Path, limit: int | None = None) -> list[FilmedCases]:
    """The first ``limit`` videos, or all, in the order of the questions.

    Raises UsageError, with the remedy, where the folder is not there, is no such folder, or is of another version.
    """
    evidence, rows = read_evidence(folder), _manifest(folder)
    loaded = SHAPES.load(folder)
    if left_out := [fault.message for fault in loaded.faults if fault.left_out]:
        raise UsageError(f"{folder}: {left_out[0]}; {_again(folder)}")
    by_video = groupby(loaded.items, lambda item: item.video_id)
    listed = [(video_id, tuple(items)) for video_id, items in by_video][:limit]
    if absent := [item.question_id for _, items in listed for item in items if item.question_id not in evidence]:
        raise UsageError(f"{folder}: {EVIDENCE} does not have the question {absent[0]}; {_again(folder)}")
    films = []
    for video_id, items in listed:
        if video_id not in rows:
            raise UsageError(f"{folder}: manifest.jsonl does not have the video {video_id}; {_again(folder)}")
        cases = tuple(Case(item, evidence[item.question_id]) for item in items)
        films.append(FilmedCases(folder / video_id, cases, _onsets(folder, cases, rows[video_id])))
    return films


def read_recipe(folder: Path) -> dict[str, Any]:
    """What the folder was made from. Raises UsageError where it does not say."""
    try:
        return dict(json.loads((folder / RECIPE).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: {RECIPE} in it cannot be read ({error}); {_again(folder)}") from error


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """By video_id."""
    try:
        lines = (folder / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
        return {row["video_id"]: row for row in map(json.loads, lines)}
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{folder}: manifest.jsonl in it cannot be read ({error}); {_again(folder)}") from error


def _onsets(folder: Path, cases: tuple[Case, ...], row: Mapping[str, Any]) -> tuple[Onset, ...]:
    """Evidence has no kinds, which follow from the video's seed."""
    parts = dict.fromkeys(part for case in cases if case.type in ABOUT_ONSETS for part in case.evidence.parts)
    kinds = _kinds(row)
    if not parts.keys() <= kinds.keys():
        raise UsageError(f"{folder}: {row['video_id']} is not what this version makes of its seed; {_again(folder)}")
    return tuple(Onset(kinds[part], Evidence(row["n_frames"], "first", (part,))) for part in parts)


def _kinds(row: Mapping[str, Any]) -> dict[Part, str]:
    try:
        hardness = HARDNESS[row["hardness"]]
        video = make_video(row["seed"], split=row["seeds"], n_frames=row["n_frames"], hardness=hardness)
    except (KeyError, ValueError):  # of a version that knew others
        return {}
    return {part_of(thing): thing.kind for thing in video.named}


def _again(folder: Path) -> str:
    return f"make it with python -m jobs.testbed make {folder}"
