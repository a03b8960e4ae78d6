"""The report page of results: one self-contained HTML file with tables, charts, and lists of faults and failures."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import list_first_names
from pipeline.evaluate.benchmarks.items import LoadedQuestions
from pipeline.evaluate.breaks import UNKNOWN, Breaks, Loss
from pipeline.evaluate.forms import COUNTS, MARKS, add_counts, format_percent
from pipeline.evaluate.run import ScoredQuestions
from pipeline.evaluate.statistics import ORIGINAL
from pipeline.evaluate.table import NONE, ResultsTable, Row
from pipeline.html_pages import make_environment
from pipeline.rows import JsonObject

_STEPS = 6  # approximate number of steps on a vertical axis
_COLORS, _DASHES = 6, 3  # GSTEP has the first color to itself; dashes distinguish methods of one color
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 820, 330, 46, 12, 44  # pixels of the chart and its margins
_APART = 64  # minimum pixels between two labels of the horizontal axis
_PANEL_WIDTH, _PANEL_HEIGHT = 380, 270  # pixels of a panel
_PANEL_LEFT, _PANEL_RIGHT, _PANEL_TOP, _PANEL_BOTTOM = 40, 8, 22, 42  # pixels of a panel's margins
_PANEL_APART = 40  # minimum pixels between two labels of a panel's horizontal axis
_DODGE, _SPREAD = 8.0, 0.7  # pixels between methods at one ratio, and the maximum share of a ratio's width for all


class Style(NamedTuple):
    """The color and dash of a method in every chart of a page, as numbers of CSS classes."""

    color: int
    dash: int


class Point(NamedTuple):
    """A value in a chart; coordinates are in pixels.

    Attributes:
        words: the text shown on hovering.
        ends: the y coordinates of the interval, upper end first; None without an interval.
        safe: in a panel, whether the ratio is safe; True elsewhere.
    """

    x: float
    y: float
    words: str
    ends: tuple[float, float] | None = None
    safe: bool = True


class Line(NamedTuple):
    """The line of a method in a chart; ``answer`` is the text of its lowest safe ratio in a panel."""

    title: str
    style: Style
    points: Sequence[Point]
    answer: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The chart of accuracy against tokens, or a panel with the losses on one kind of ability; x and y are in pixels.

    Attributes:
        title: the title of the vertical axis; in a panel, the ability.
        text: in a panel, the ability's tasks and the score of full retention.
        empty_text: the text in the middle of a panel without points.
        up: (y, label) of each tick of the vertical axis.
        across: (x, label) of the ticks of the horizontal axis: tokens on a logarithmic scale, or retention ratios.
        below: (x, label) of a second row of labels: megabytes.
        level: the y coordinate of full retention, or of no loss in a panel; None if full retention has no score.
        limit: in a panel, the y coordinate of the largest safe loss.
    """

    title: str
    text: str = ""
    empty_text: str = ""
    up: Sequence[tuple[float, str]]
    across: Sequence[tuple[float, str]]
    below: Sequence[tuple[float, str]] = ()
    level: float | None
    limit: float = 0.0
    lines: Sequence[Line]


def render_report_page(
    tables: Sequence[ResultsTable],
    facts: Sequence[tuple[str, str]],
    *,
    token_bytes: int | None = None,
    scored: ScoredQuestions | None = None,
    identity: JsonObject | None = None,
    breaks: Breaks | None = None,
) -> str:
    """Return the report page as HTML, with a chart of the first table.

    Args:
        tables: the main table first; at least one.
        facts: (name, value) pairs to show.
        token_bytes: the bytes that a cache stores per token; None leaves out labels in megabytes.
        scored: for the lists of annotation faults and failed answers and the note on decode warnings, left out if None.
        identity: the settings that all results share.
    """
    pruned_titles = [row.title for row in tables[0].rows if row.method != ORIGINAL.method]
    styles = _assign_styles([*pruned_titles, *(verdict.title for verdict in (breaks.verdicts if breaks else ()))])
    templates = make_environment("pipeline.evaluate")
    templates.globals |= {"titled": add_counts, "percent": format_percent, "missing": NONE}
    return templates.get_template("results.html").render(
        tables=tables,
        facts=facts,
        chart=_make_chart(tables[0], token_bytes, styles),
        breaks=breaks,
        panels=[] if breaks is None else _make_panels(breaks, styles),
        panel={"width": _PANEL_WIDTH, "height": _PANEL_HEIGHT, "left": _PANEL_LEFT, "right": _PANEL_RIGHT},
        legend=f"{MARKS} {COUNTS}",
        faults=[] if scored is None else [*_list_fault_lines(scored.loaded), *_list_failure_lines(scored.scores)],
        warned=None if scored is None else format_warned_line(scored.scores),
        protocol=list(_flatten(identity or {})),
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        bottom=_BOTTOM,
    )


def format_warned_line(scores: pa.Table) -> str:
    """Return a line that counts the answers from videos decoded with warnings, and these videos; "" if there are none.

    It names up to three videos, and knows only the first video of each question.
    """
    rows_with_warnings = scores.filter(pc.greater(pc.fill_null(scores["decode_warnings"], 0), 0))
    if not len(rows_with_warnings):
        return ""
    videos = pc.unique(rows_with_warnings["video_id"]).to_pylist()
    names = list_first_names(videos, len(videos))
    return (
        f"{len(rows_with_warnings):,} of {len(scores):,} answers, about {len(videos):,} videos ({names}), "
        "come from frames that were decoded with warnings and may be damaged"
    )


def _assign_styles(titles: Iterable[str]) -> dict[str, Style]:
    """Return a style for each distinct title, in the order of first appearance; "GSTEP" has color 0 to itself.

    Beyond ``(_COLORS - 1) * _DASHES`` titles, styles repeat.
    """
    titles = dict.fromkeys(titles)
    others = [title for title in titles if title != "GSTEP"]
    numbers = {title: Style(i % (_COLORS - 1) + 1, i // (_COLORS - 1) % _DASHES) for i, title in enumerate(others)}
    return {title: numbers.get(title, Style(0, 0)) for title in titles}


def _compute_ticks(values: Sequence[float]) -> list[float]:
    """Return ascending round numbers that enclose the values: at least two, spaced by 1, 2 or 5 times a power of ten.

    There are about ``_STEPS`` steps; values less than 0.5 apart count as 0.5 apart.
    """
    low, high = min(values), max(values)
    rough = max(high - low, 0.5) / _STEPS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1.0, 2.0, 5.0, 10.0) if s * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 10) for k in range(first, max(last, first + 1) + 1)]


def _compute_axis_y(number: float, axis: Sequence[float], top: int, height: int) -> float:
    """Return the y coordinate of a number on a vertical axis with these ascending ticks, the last one at ``top``."""
    return top + height * (axis[-1] - number) / (axis[-1] - axis[0])


def _drop_close_labels(labels: Iterable[tuple[float, str]], apart: int) -> list[tuple[float, str]]:
    """Return the (x, label) pairs, ascending in x, without those closer than ``apart`` pixels to the last kept one."""
    spaced = list[tuple[float, str]]()
    for x, label in labels:
        if not spaced or x - spaced[-1][0] >= apart:
            spaced.append((x, label))
    return spaced


def _make_chart(table: ResultsTable, token_bytes: int | None, styles: Mapping[str, Style]) -> Chart | None:
    """Return the chart of a table's overall score, or Rel. of several benchmarks, against tokens.

    Full retention is drawn as a level, not as a point. Returns None if no pruned row has both a score and a nonzero
    number of tokens.

    Args:
        token_bytes: the bytes per token; None leaves the labels in megabytes empty.
        styles: by title of a pruned row; lines are in this order.
    """

    def get_score(row: Row) -> float | None:
        cell = row.rel if table.several else row.cells[-1]
        return cell.score if cell else None

    tallies = [(row, row.tally.tokens, get_score(row)) for row in table.rows if row.method != ORIGINAL.method]
    points = [(row, tokens, score) for row, tokens, score in tallies if tokens and score is not None]
    if not points:
        return None
    full = get_score(table.original)
    axis = _compute_ticks([score for *_, score in points] + ([] if full is None else [full]))
    fewest, most = (math.log(pick(tokens for _, tokens, _ in points)) for pick in (min, max))

    def compute_token_x(tokens: float) -> float:
        share = (math.log(tokens) - fewest) / (most - fewest) if most > fewest else 0.5
        return _LEFT + 24 + (_WIDTH - _LEFT - 60) * share

    def compute_score_y(score: float) -> float:
        return _compute_axis_y(score, axis, _TOP, _HEIGHT - _TOP - _BOTTOM)

    def format_megabytes(tokens: float) -> str:
        return "" if token_bytes is None else f"{tokens * token_bytes / 1e6:.2g} MB"

    ordered = sorted({tokens for _, tokens, _ in points})
    by_method: dict[str, list[Point]] = {}
    for row, tokens, score in sorted(points, key=lambda point: point[1]):
        words = f"{row.title}: {score:.1f} at {tokens:,.0f} tokens"
        more = f", {format_megabytes(tokens)}" if token_bytes else ""
        by_method.setdefault(row.title, []).append(Point(compute_token_x(tokens), compute_score_y(score), words + more))
    return Chart(
        title="Rel." if table.several else table.columns[-1].text,
        up=[(compute_score_y(tick), f"{tick:g}") for tick in axis],
        across=_drop_close_labels([(compute_token_x(tokens), f"{tokens:,.0f}") for tokens in ordered], _APART),
        below=_drop_close_labels([(compute_token_x(tokens), format_megabytes(tokens)) for tokens in ordered], _APART),
        level=None if full is None else compute_score_y(full),
        lines=[Line(title, styles[title], by_method[title]) for title in styles if title in by_method],
    )


def _make_panels(breaks: Breaks, styles: Mapping[str, Style]) -> list[Chart]:
    """Return a panel for each kind, with one line per method; ``styles`` has the title of each verdict.

    All panels share their axes. A loss has no point if it has no number, too few videos, nothing to lose, or no
    interval. A panel without any points shows the answer and reason of its verdicts if all share them, and UNKNOWN
    otherwise.
    """
    losses = [loss for verdict in breaks.verdicts for loss in verdict.tested if _is_drawn(loss)]
    numbers = [number for loss in losses for number in (loss.difference, loss.low, loss.high) if number is not None]
    axis = _compute_ticks([0.0, -breaks.within, *numbers])

    def compute_loss_y(points: float) -> float:
        return _compute_axis_y(points, axis, _PANEL_TOP, _PANEL_HEIGHT - _PANEL_TOP - _PANEL_BOTTOM)

    place = (_PANEL_WIDTH - _PANEL_LEFT - _PANEL_RIGHT) / max(len(breaks.ratios), 1)
    center = {ratio: _PANEL_LEFT + place * (i + 0.5) for i, ratio in enumerate(breaks.ratios)}
    across = _drop_close_labels([(x, f"{100 * ratio:g}%") for ratio, x in center.items()], _PANEL_APART)
    panels = []
    for kind in breaks.kinds:
        verdicts = breaks.select_verdicts(kind)
        lines = list[Line]()
        step = min(_DODGE, _SPREAD * place / len(verdicts)) if verdicts else 0.0
        for i, verdict in enumerate(verdicts):
            aside = step * (i - (len(verdicts) - 1) / 2)
            safe = verdict.passed
            points = [
                Point(
                    x=center[loss.ratio] + aside,
                    y=compute_loss_y(loss.difference or 0.0),
                    words=f"{verdict.title} at {loss.share}: {loss.text}",
                    ends=None
                    if loss.low is None or loss.high is None
                    else (compute_loss_y(loss.high), compute_loss_y(loss.low)),
                    safe=loss in safe,
                )
                for loss in verdict.tested
                if _is_drawn(loss)
            ]
            lines.append(Line(verdict.title, styles[verdict.title], points, verdict.answer))
        reasons = {f"{verdict.answer}: {verdict.reason}" for verdict in verdicts}
        empty_text = reasons.pop() if len(reasons) == 1 else UNKNOWN
        panels.append(
            Chart(
                title=kind.name,
                text=kind.text,
                empty_text="" if any(line.points for line in lines) else empty_text,
                up=[(compute_loss_y(tick), f"{tick:+g}" if tick else "0") for tick in axis],
                across=across,
                level=compute_loss_y(0.0),
                limit=compute_loss_y(-breaks.within),
                lines=lines,
            )
        )
    return panels


def _is_drawn(loss: Loss) -> bool:
    """Return False if the loss has too few videos, nothing to lose, or no interval."""
    return loss.outcome not in ("few videos", "nothing to lose", "no interval")


def _list_fault_lines(loaded: LoadedQuestions) -> Iterator[tuple[str, str, int, str]]:
    """Yield (kind, "left out" or "kept", count, example) for the faults of the annotations, the most frequent first."""
    for kind, left_out, count, example in sorted(loaded.summarize_faults(), key=lambda fault: -fault[2]):
        yield kind, "left out" if left_out else "kept", count, example


def _list_failure_lines(scores: pa.Table) -> Iterator[tuple[str, str, int, str]]:
    """Yield (error class, "answers, wrong", count, example) for the failed answers, the most frequent class first."""
    failed_rows = scores.filter(pc.not_equal(scores["status"], "ok"))
    rows = failed_rows.select(["error_class", "question_id", "method"]).to_pylist()
    for name, count in Counter(row["error_class"] or "unknown" for row in rows).most_common():
        row = next(row for row in rows if (row["error_class"] or "unknown") == name)
        yield name, "answers, wrong", count, f"{row['question_id']} under {row['method']}"


def _flatten(identity: JsonObject, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) for every leaf of a nested mapping.

    Text stays as it is, None becomes "not set: the checkpoint's own", and other values, empty mappings and lists
    included, become JSON.
    """
    for name, value in identity.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        elif value is None:
            yield f"{prefix}{name}", "not set: the checkpoint's own"
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
