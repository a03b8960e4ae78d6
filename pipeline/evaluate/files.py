"""What an evaluation leaves behind: the scores, the tables as Markdown and LaTeX, and the report page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.schema import write_parquet
from pipeline.evaluate.benchmarks.base import Benchmark, Split
from pipeline.evaluate.protocols import QUESTIONS
from pipeline.evaluate.report.page import Presentation, Report, report_page
from pipeline.evaluate.run import ScoredQuestions
from pipeline.evaluate.statistics.render import WHOLE, latex, markdown
from pipeline.evaluate.statistics.results import Column, ResultsTable
from pipeline.evaluate.statistics.tables import ScoredBenchmark, results_table
from pipeline.rows import JsonObject
from pipeline.storage.stores import Store

SCORES, TABLES_MD, TABLES_TEX, REPORT = "scores.parquet", "tables.md", "tables.tex", "report.html"
_MOST_PARTS = 30  # parts of a split that a table shows


def main_table(done: ScoredQuestions, shown: Presentation) -> ResultsTable:
    """Compute the results table in the paper's layout: a column for each part of the first split, then the whole."""
    splits = shown.benchmark.splits
    return replace(_table(done, shown, splits[0] if splits else None), title=shown.title)


def write_results(store: Store, done: ScoredQuestions, shown: Presentation) -> tuple[ResultsTable, list[str]]:
    """Write scores, tables and page into ``store``; return the main table and the file names. Raises OSError."""
    table = main_table(done, shown)
    splits = [_table(done, shown, split) for split in shown.benchmark.splits[1:] if _parts(done, split)]
    report = Report(shown=shown, table=table, splits=splits, scores=done.scores, loaded=done.loaded)
    texts = {
        TABLES_MD: "\n".join(markdown(one) for one in (table, *splits)),
        TABLES_TEX: latex(table),
        REPORT: report_page(report),
    }
    store.put(SCORES, write_parquet(done.scores))
    for name, text in texts.items():
        store.put(name, text.encode())
    return table, [SCORES, *texts]


def scored_benchmark(
    benchmark: Benchmark, identity: JsonObject, scores: pa.Table, split: str, parts: Iterable[tuple[str, str]]
) -> ScoredBenchmark:
    """Return a benchmark's scores for a table, with the settings that the table names under them.

    Args:
        identity: of the results.
        parts: (part, title) of those parts of the ``split`` that have columns.
    """
    n_questions, whole = pc.count_distinct(scores["question_id"]).as_py(), benchmark.n_questions
    made_of = {} if whole in (None, n_questions) else {WHOLE: f"{whole:,}"}
    named = {"Frames": "num_frames", "Protocol": "protocol"}
    made_of |= {name: str(identity[key]) for name, key in named.items() if key in identity}
    columns = [Column(f"{split}={part}", title) for part, title in parts]
    metric = str(identity.get("metric", QUESTIONS))
    return ScoredBenchmark(benchmark.title, scores, columns, None if metric == QUESTIONS else metric, made_of)


def _table(done: ScoredQuestions, shown: Presentation, split: Split | None) -> ResultsTable:
    """Compute the results table with a column for each part of ``split``, then the whole."""
    name, parts = ("", []) if split is None else (split.name, _parts(done, split))
    scored = scored_benchmark(shown.benchmark, shown.described, done.scores, name, parts)
    title = f"{shown.title}: {split.title}" if split and parts else shown.title
    return results_table(title, [scored], draws=shown.draws, seed=shown.seed)


def _parts(done: ScoredQuestions, split: Split) -> list[tuple[str, str]]:
    """Return (part, title) of a split's parts that have questions, or nothing if they are too many to show."""
    present = dict.fromkeys(item.splits[split.name] for item in done.loaded.items if split.name in item.splits)
    named = [(part, title) for part, title in split.parts.items() if part in present]
    others = [(part, part) for part in sorted(present) if part not in split.parts]
    found = [*named, *others]
    return found if len(found) <= _MOST_PARTS else []
