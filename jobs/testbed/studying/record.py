"""The counts of a study, as study.json has them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from jobs.testbed.studying.measure import Findings, Outcome
from pipeline.evaluate.shapes.questions import TYPES
from pipeline.evaluate.statistics.errors import sandwich_error

#: Key of what has no part.
ALL = "all"
KINDS = ("brief", "static", "moving")


class Share(TypedDict):
    """``yes`` of ``count``; ``error`` is the share's standard error, clustered by video, null where it has none."""

    yes: int
    count: int
    error: float | None


class MethodRecord(TypedDict):
    """A method at a ratio.

    Attributes:
        by_type: right answers, by type of question.
        seen, gone: of them those whose evidence was kept, and those whose was not; null for a method that prunes inside
            the language model, whose first layers see everything.
        onsets: things whose onset kept a token, by kind; null likewise.
    """

    method: str
    retention_ratio: float
    by_type: dict[str, Share]
    seen: Share | None
    gone: Share | None
    onsets: dict[str, Share] | None


class StudyRecord(TypedDict):
    """All of it.

    Attributes:
        about: the model, the videos and the settings.
        knock_out: right answers by what was left of a video, by type of question.
        short_of_others: questions whose evidence touches more than half of all tokens.
    """

    about: dict[str, Any]
    knock_out: dict[str, dict[str, Share]]
    short_of_others: list[str]
    methods: list[MethodRecord]


def record_of(findings: Findings, about: Mapping[str, Any]) -> StudyRecord:
    """The counts, by methods from the largest ratio."""
    arms = sorted(findings.answers, key=lambda arm: -arm.ratio)  # stable: methods stay in the order they were named in
    methods = [_method(arm.method, arm.ratio, findings.answers[arm], findings.onsets.get(arm)) for arm in arms]
    return {
        "about": dict(about),
        "knock_out": {variant: by_kind(outcomes, TYPES) for variant, outcomes in findings.knock_out.items()},
        "short_of_others": findings.short,
        "methods": methods,
    }


def share(outcomes: Sequence[Outcome]) -> Share:
    """How many of them were so."""
    if not outcomes:
        return {"yes": 0, "count": 0, "error": None}
    so = np.array([float(one.so) for one in outcomes])
    video = np.unique([one.video_id for one in outcomes], return_inverse=True)[1]
    error = sandwich_error(so, video)
    return {"yes": int(so.sum()), "count": len(so), "error": None if math.isnan(error) else round(error, 9)}


def by_kind(outcomes: Sequence[Outcome], kinds: Iterable[str]) -> dict[str, Share]:
    """Of each kind that there is, and of all."""
    parts = {kind: [one for one in outcomes if one.kind == kind] for kind in kinds}
    return {kind: share(part) for kind, part in parts.items() if part} | {ALL: share(outcomes)}


def _method(method: str, ratio: float, answers: Sequence[Outcome], onsets: Sequence[Outcome] | None) -> MethodRecord:
    inside = onsets is None
    return {
        "method": method,
        "retention_ratio": ratio,
        "by_type": by_kind(answers, TYPES),
        "seen": None if inside else share([one for one in answers if one.shown]),
        "gone": None if inside else share([one for one in answers if not one.shown]),
        "onsets": None if onsets is None else by_kind(onsets, KINDS),
    }
