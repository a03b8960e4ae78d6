"""What ``jobs.evaluate`` writes for readers: one self-contained page about the scores of a benchmark on a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc
from jinja2 import Environment

from pipeline.evaluate.benchmarks.base import Benchmark
from pipeline.evaluate.benchmarks.items import Item, LoadedQuestions
from pipeline.evaluate.report import text
from pipeline.evaluate.report.cards import Links, cards
from pipeline.evaluate.report.charts import line_charts, styles
from pipeline.evaluate.report.disagreements import answers_of, disagreements
from pipeline.evaluate.report.faults import failure_counts, fault_counts, warned_line
from pipeline.evaluate.statistics.bootstrap import FEW, FEWEST
from pipeline.evaluate.statistics.render import NOISE, few_mark, few_videos, p_text
from pipeline.evaluate.statistics.results import SIGNIFICANT, ResultsTable
from pipeline.evaluate.statistics.score_matrix import Arm
from pipeline.html_pages import asset, environment, policy_hash
from pipeline.rows import JsonObject

PACKAGE = "pipeline.evaluate.report"


@dataclass(frozen=True, kw_only=True)
class Presentation:
    """The information with which results are presented: title, facts and settings.

    Attributes:
        title: of tables and page.
        facts: (name, value) about model, cache and run.
        described: the identity of the results, JSON-able.
        pages: of videos, by id: (label, relative address).
    """

    title: str
    benchmark: Benchmark
    described: JsonObject
    facts: Sequence[tuple[str, str]] = ()
    pages: Mapping[str, Links] = field(default_factory=dict)
    draws: int = 10_000
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of the report page.

    Attributes:
        table: the main table; its methods and ratios are those of the whole page.
        splits: the same scores with the columns of further splits, each with that split's title.
        scores: rows of ``scores.parquet``.
        loaded: the questions, and the faults of their annotations.
    """

    shown: Presentation
    table: ResultsTable
    splits: Sequence[ResultsTable] = ()
    scores: pa.Table
    loaded: LoadedQuestions


def report_page(report: Report) -> str:
    """Render the HTML page, which holds its own style and script and loads nothing.

    Raises ValueError where the scores have a question that is not among the items, or a link of ``pages`` is not
    relative.
    """
    items = {item.question_id: item for item in report.loaded.items}
    _check(report, items)
    table = report.table
    answers = answers_of(report.scores, [Arm(row.method, row.ratio) for row in table.rows])
    found = disagreements(answers)
    style, prefix = styles(found.methods), f"{report.shown.title}: "
    return (
        templates()
        .get_template("report.html")
        .render(
            report=report,
            table=table,
            styles=style,
            ratios=[block.ratio for block in table.blocks],
            has_intervals=any(column.n_clusters >= FEWEST for column in table.columns),
            too_few_draws=_too_few_draws(table),
            has_options=any(item.options for item in items.values()),
            charts=line_charts(table, style),
            heats=[(split.title.removeprefix(prefix), split, _deepest(split)) for split in report.splits],
            found=found,
            cards=cards(found, answers, report.scores, items, report.shown.pages),
            n_scored=len(answers.questions),
            faults=fault_counts(report.loaded.faults),
            n_askable=report.loaded.n_annotated - sum(fault.left_out for fault in report.loaded.faults),
            warned=warned_line(report.scores),
            failures=list(failure_counts(report.scores, answers)),
            protocol=list(_flat(report.shown.described)),
            data={"counts": {f"{ratio:g}": counts.tolist() for ratio, counts in found.counts.items()}},
        )
    )


@cache
def templates() -> Environment:
    """Return the Jinja environment of this room's templates, with what is the same on every page."""
    made = environment(PACKAGE)
    words = (text.title_of, text.ratio_text, text.share_text, text.signed, text.cut, text.lettered, p_text)
    made.filters |= {word.__name__: word for word in words}
    made.globals |= {
        function.__name__: function for function in (text.bracket, text.column_title, few_mark, few_videos)
    }
    made.globals |= {"few": FEW, "fewest": FEWEST, "noise": NOISE, "significant": SIGNIFICANT}
    script = asset(PACKAGE, "report.js")
    made.globals |= {"style": asset(PACKAGE, "report.css"), "script": script, "script_hash": policy_hash(script)}
    return made


def _check(report: Report, items: Mapping[str, Item]) -> None:
    """Raise ValueError if a scored question is not among the items, or a page link is not relative."""
    asked = pc.unique(report.scores["question_id"]).to_pylist()
    if odd := [question for question in asked if question not in items]:
        raise ValueError(f"the scores have {len(odd)} questions that are not among the items, e.g. {odd[0]!r}")
    for links in report.shown.pages.values():
        for _, link in links:
            if urlsplit(link).scheme or urlsplit(link).netloc:
                raise ValueError(f"the link {link!r} leads outside: begin one to a file beside the page with ./")


def _too_few_draws(table: ResultsTable) -> bool:
    """Return whether the number of draws is too small for p-values that survive the adjustment."""
    largest = max((len(block.rows) for block in table.blocks), default=0)
    drawn = any(column.n_clusters >= FEW for column in table.columns)
    return drawn and largest * 2 / (table.draws + 1) >= SIGNIFICANT


def _deepest(split: ResultsTable) -> float:
    """Return the difference in points that gets the full colour: the table's largest, within 5 to 30."""
    cells = [cell for row in split.rows for cell in row.cells]
    largest = max((abs(cell.full.difference) for cell in cells if cell and cell.full), default=0.0)
    return min(30.0, max(5.0, largest))


def _flat(described: JsonObject, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, value) of every leaf of a nested mapping."""
    for name, value in described.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _leaf(value)


def _leaf(value: object) -> str:
    """Format a leaf of the described settings as text."""
    if value is None:
        return "not set: the checkpoint's own"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
