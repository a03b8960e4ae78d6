"""The page of results, one HTML file that loads nothing: tables, accuracy against tokens and megabytes, faults."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import name_first
from pipeline.evaluate.benchmarks.items import AnnotationFault
from pipeline.evaluate.breaks import Breaks
from pipeline.evaluate.charts import (
    PANEL_HEIGHT,
    PANEL_LEFT,
    PANEL_RIGHT,
    PANEL_WIDTH,
    Style,
    assign_styles,
    make_panels,
    ticks,
)
from pipeline.evaluate.forms import COUNTS, MARKS, add_counts, percent
from pipeline.evaluate.statistics import ORIGINAL
from pipeline.evaluate.table import NONE, ResultsTable, Row
from pipeline.html_pages import environment
from pipeline.rows import JsonObject

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 820, 330, 46, 12, 44  # pixels of the chart and its margins
_APART = 64  # pixels between two labels of the horizontal axis


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Accuracy against the tokens that a question was answered from; places are in pixels.

    Attributes:
        title: of the vertical axis.
        up: (place, label) of the vertical axis.
        across: (place, tokens, megabytes or "") of the horizontal axis, which is logarithmic.
        full: the place of full retention; None where it is unknown.
        lines: of the methods.
    """

    title: str
    up: Sequence[tuple[float, str]]
    across: Sequence[tuple[float, str, str]]
    full: float | None
    lines: Sequence[Line]


class Line(NamedTuple):
    """The line of a method: its title, its style, and (x, y, words) of its points."""

    title: str
    style: Style
    points: Sequence[tuple[float, float, str]]


def report_page(
    tables: Sequence[ResultsTable],
    facts: Sequence[tuple[str, str]],
    *,
    token_bytes: int | None = None,
    faults: Sequence[AnnotationFault] = (),
    scores: pa.Table | None = None,
    identity: JsonObject | None = None,
    breaks: Breaks | None = None,
) -> str:
    """Return the page of results as HTML, with a chart of the first table.

    Args:
        tables: the main one, then those of further splits.
        facts: (name, value) about model, data and run.
        token_bytes: that a cache stores for a token; None where it is not known.
        faults: of the annotations.
        scores: rows of ``scores.parquet``, whose failed answers are counted.
        identity: the settings that all results share, JSON-able.
        breaks: the section *Where it breaks*; None for none.
    """
    pruned_titles = [row.title for row in tables[0].rows if row.method != ORIGINAL.method]
    styles = assign_styles([*pruned_titles, *(verdict.title for verdict in (breaks.verdicts if breaks else ()))])
    templates = environment("pipeline.evaluate")
    templates.globals |= {"titled": add_counts, "percent": percent, "missing": NONE}
    return templates.get_template("results.html").render(
        tables=tables,
        facts=facts,
        chart=_chart(tables[0], token_bytes, styles),
        breaks=breaks,
        panels=[] if breaks is None else make_panels(breaks, styles),
        panel={"width": PANEL_WIDTH, "height": PANEL_HEIGHT, "left": PANEL_LEFT, "right": PANEL_RIGHT},
        legend=f"{MARKS} {COUNTS}",
        faults=list(_fault_lines(faults)),
        failures=[] if scores is None else list(_failure_lines(scores)),
        warned=None if scores is None else format_warned_line(scores),
        protocol=list(_flatten(identity or {})),
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        bottom=_BOTTOM,
    )


def format_warned_line(scores: pa.Table) -> str:
    """Return a line about the answers whose videos were decoded with warnings; "" if there are none."""
    rows_with_warnings = scores.filter(pc.greater(pc.fill_null(scores["decode_warnings"], 0), 0))
    if not len(rows_with_warnings):
        return ""
    videos = pc.unique(rows_with_warnings["video_id"]).to_pylist()
    names = name_first(videos, len(videos))
    return (
        f"{len(rows_with_warnings):,} of {len(scores):,} answers, about {len(videos):,} videos ({names}), "
        "come from frames that were decoded with warnings and may be damaged"
    )


def _chart(table: ResultsTable, token_bytes: int | None, styles: Mapping[str, Style]) -> Chart | None:
    """Return the chart of the table's last number against tokens; None if no pruned row has both.

    The last number is the overall score, or Rel. of several benchmarks. Full retention is a level, not a point.
    ``styles`` has the title of each pruned row.
    """

    def value(row: Row) -> float | None:
        cell = row.rel if table.several else row.cells[-1]
        return cell.score if cell else None

    tallies = [(row, row.tally.tokens, value(row)) for row in table.rows if row.method != ORIGINAL.method]
    points = [(row, tokens, score) for row, tokens, score in tallies if tokens and score is not None]
    if not points:
        return None
    full = value(table.original)
    marks = ticks([score for *_, score in points] + ([] if full is None else [full]))
    fewest, most = (math.log(pick(tokens for _, tokens, _ in points)) for pick in (min, max))

    def right(tokens: float) -> float:
        share = (math.log(tokens) - fewest) / (most - fewest) if most > fewest else 0.5
        return _LEFT + 24 + (_WIDTH - _LEFT - 60) * share

    def down(score: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (marks[-1] - score) / (marks[-1] - marks[0])

    def megabytes(tokens: float) -> str:
        return "" if token_bytes is None else f"{tokens * token_bytes / 1e6:.2g} MB"

    across = list[tuple[float, str, str]]()
    for tokens in sorted({tokens for _, tokens, _ in points}):
        if not across or right(tokens) - across[-1][0] >= _APART:
            across.append((right(tokens), f"{tokens:,.0f}", megabytes(tokens)))
    by_method: dict[str, list[tuple[float, float, str]]] = {}
    for row, tokens, score in sorted(points, key=lambda point: point[1]):
        words = f"{row.title}: {score:.1f} at {tokens:,.0f} tokens"
        more = f", {megabytes(tokens)}" if token_bytes else ""
        by_method.setdefault(row.title, []).append((right(tokens), down(score), words + more))
    return Chart(
        title="Rel." if table.several else table.columns[-1].text,
        up=[(down(tick), f"{tick:g}") for tick in marks],
        across=across,
        full=None if full is None else down(full),
        lines=[Line(title, styles[title], by_method[title]) for title in styles if title in by_method],
    )


def _fault_lines(faults: Sequence[AnnotationFault]) -> Iterator[tuple[str, str, int, str]]:
    """Yield (kind, "left out" or "kept", count, an example) for the annotations' faults, the most frequent first."""
    for (kind, left_out), count in Counter((fault.kind, fault.left_out) for fault in faults).most_common():
        example = next(fault.message for fault in faults if (fault.kind, fault.left_out) == (kind, left_out))
        yield kind, "left out" if left_out else "kept", count, example


def _failure_lines(scores: pa.Table) -> Iterator[tuple[str, str, int, str]]:
    """Yield (class, "answers, wrong", count, an example) for the answers that failed, the most frequent class first."""
    failed_rows = scores.filter(pc.not_equal(scores["status"], "ok"))
    rows = failed_rows.select(["error_class", "question_id", "method"]).to_pylist()
    for name, count in Counter(row["error_class"] or "unknown" for row in rows).most_common():
        row = next(row for row in rows if (row["error_class"] or "unknown") == name)
        yield name, "answers, wrong", count, f"{row['question_id']} under {row['method']}"


def _flatten(identity: JsonObject, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) of every leaf of a nested mapping: a text as it is, words for None, else JSON."""
    for name, value in identity.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        elif value is None:
            yield f"{prefix}{name}", "not set: the checkpoint's own"
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
