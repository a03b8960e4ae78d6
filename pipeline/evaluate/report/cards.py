"""What the page shows of each disagreement: the question, its options, and every method's reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from pipeline.evaluate.benchmarks.items import Item
from pipeline.evaluate.report.disagreements import Answers, Disagreement, Disagreements
from pipeline.evaluate.report.text import cut, share_text
from pipeline.evaluate.statistics.score_matrix import ORIGINAL, Arm
from pipeline.generate.choices import letters

_REPLY = 300  # characters shown
_COLUMNS = ("status", "error_class", "reply", "parsed", "right", "n_kept", "n_total")

Links = Sequence[tuple[str, str]]


class Answer(NamedTuple):
    """The answer of one method, as the page shows it.

    Attributes:
        outcome: "right", "wrong" or "failed".
        reply: None where there is none; of a failed one its class.
        read_as: what the reply was taken for, where that is not the reply itself.
        kept: visual tokens kept, in words.
    """

    method: str
    outcome: str
    reply: str | None
    read_as: str
    kept: str


class Card(NamedTuple):
    """The page's card about one question at one retention ratio, with every method's answer."""

    found: Disagreement
    item: Item
    clip: str
    answers: Sequence[Answer]
    links: Links


def cards(
    found: Disagreements, answers: Answers, scores: pa.Table, items: Mapping[str, Item], pages: Mapping[str, Links]
) -> list[Card]:
    """Make a card for each disagreement that the page shows."""
    made = []
    for one in found.shown:
        item = items[answers.questions[one.question]]
        arms = [ORIGINAL if method == ORIGINAL.method else Arm(method, one.ratio) for method in found.methods]
        rows = [(arm.method, answers.of_arm(arm, one.question)) for arm in arms]
        shown = [_answer(method, scores, row, item) for method, row in rows if row is not None]
        links = [link for video in item.video_ids for link in pages.get(video, ())]
        made.append(Card(one, item, _clip(item), shown, links))
    return made


def _answer(method: str, scores: pa.Table, row: int, item: Item) -> Answer:
    """Describe a method's answer from its row of the scores."""
    cells = {name: scores[name][row].as_py() for name in _COLUMNS}
    failed = cells["status"] != "ok"
    reply = None if cells["reply"] is None else cut(cells["reply"].strip(), _REPLY)
    return Answer(
        method,
        "failed" if failed else "right" if cells["right"] else "wrong",
        cells["error_class"] if failed else reply,
        "" if failed else _read_as(reply, cells["parsed"], item),
        _kept(cells["n_kept"], cells["n_total"]),
    )


def _read_as(reply: str | None, parsed: int | None, item: Item) -> str:
    """Say which option a reply was read as, "" where the reply is just that letter."""
    if not item.options:
        return ""
    if parsed is None:
        return "names no option"
    letter = letters(len(item.options))[parsed]
    return "" if reply == letter else f"read as {letter}"


def _kept(kept: int | None, total: int | None) -> str:
    """Format the kept visual tokens and their share."""
    if kept is None:
        return "–"
    return f"{kept:,} ({share_text(kept / total)})" if total else f"{kept:,}"


def _clip(item: Item) -> str:
    """Format a clip's start and end in seconds, "" for a whole video."""
    if item.start_s is None and item.end_s is None:
        return ""
    start, end = (("" if s is None else f"{s:g}") for s in (item.start_s, item.end_s))
    return f"{start or '0'}–{end or 'end'} s"
