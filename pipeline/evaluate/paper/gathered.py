"""Results of several benchmarks, read from where ``jobs.evaluate`` left them and checked to belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.cache.header import differences, read_header_file
from pipeline.errors import IdentityMismatch, NotResults, UsageError
from pipeline.evaluate.benchmarks import find_benchmark
from pipeline.evaluate.benchmarks.base import Benchmark
from pipeline.evaluate.files import SCORES
from pipeline.evaluate.grids import PaperTable
from pipeline.evaluate.protocols import QUESTIONS
from pipeline.evaluate.request import RESULTS_HEADER, RESULTS_VERSION
from pipeline.evaluate.server_scores import FORM, with_server_scores
from pipeline.evaluate.statistics.results import Column, ResultsTable
from pipeline.evaluate.statistics.score_matrix import arms_of
from pipeline.evaluate.statistics.tables import ScoredBenchmark, results_table
from pipeline.generate.late_pruning import LateAsked
from pipeline.options import named_values
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import store_at


@dataclass(frozen=True)
class Gathered:
    """The results of one benchmark.

    Attributes:
        place: where they are.
        identity: of ``evaluation.json``.
        scores: SCORE_SCHEMA.
    """

    place: str
    benchmark: Benchmark
    identity: dict[str, Any]
    scores: pa.Table

    def scored(self, *, split: bool) -> ScoredBenchmark:
        """For the tables, with the parts of its first split where they have columns."""
        parts = self.benchmark.splits[0] if split and self.benchmark.splits else None
        columns = [] if parts is None else [Column(f"{parts.name}={part}", name) for part, name in parts.parts.items()]
        metric = str(self.identity.get("metric", QUESTIONS))
        return ScoredBenchmark(self.benchmark.title, self.scores, columns, None if metric == QUESTIONS else metric)


def gather(table: PaperTable, places: Sequence[str], objects: Objects) -> list[Gathered]:
    """The results in ``places``, in the order of the table's columns; benchmarks that it does not have come last.

    Raises UsageError where a place holds no results, two are of one column, or two were made with another model.
    """
    found = [_read(place, objects) for place in places]
    order = {name: number for number, names in enumerate(table.benchmarks) for name in names}
    columns = [order.get(one.benchmark.name, one.benchmark.name) for one in found]
    for number, column in enumerate(columns):
        if column in columns[:number]:
            one, other = found[columns.index(column)], found[number]
            both = f"{one.place} ({one.benchmark.title}) and {other.place} ({other.benchmark.title})"
            raise UsageError(f"{both} are for the same column: name one of them")
    for one in found[1:]:
        if wrong := differences(found[0].identity["model"], one.identity["model"], has=f"{found[0].place} has"):
            raise IdentityMismatch(f"{one.place} is of another model than {found[0].place}: {'; '.join(wrong)}")
    return sorted(found, key=lambda one: order.get(one.benchmark.name, len(order)))


def compared(title: str, table: PaperTable, found: Sequence[Gathered], draws: int, seed: int) -> ResultsTable:
    """The scores of the table's methods at its shares, each with its error."""
    ratios = {round(ratio, 9) for ratio in table.ratios} | {1.0}
    scored = []
    for one in found:
        kept = [round(ratio, 9) in ratios for ratio in one.scores["retention_ratio"].to_pylist()]
        whole = one.scored(split=one.benchmark.name in table.split)
        scored.append(ScoredBenchmark(whole.title, whole.scores.filter(pa.array(kept)), whole.columns, whole.mean_over))
    return results_table(title, scored, methods=list(map(label, table.methods)), draws=draws, seed=seed)


def missing(table: PaperTable, found: Sequence[Gathered]) -> list[str]:
    """What the table has and the results have not, a line each."""
    there = {one.benchmark.name for one in found}
    lines = [f"no results of {' or '.join(names)}" for names in table.benchmarks if not there & set(names)]
    for one in found:
        held = set(zip(one.scores["method"].to_pylist(), one.scores["retention_ratio"].to_pylist(), strict=True))
        lacking = [f"{m}@{r:g}" for r in table.ratios for m in map(label, table.methods) if (m, r) not in held]
        if lacking:
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            lines.append(f"{one.place} ({one.benchmark.title}) has no {', '.join(lacking[:3])}{more}")
        lines += _untyped(one)
    return lines


def _untyped(one: Gathered) -> list[str]:
    """A line where the server of a benchmark was asked about none or some of the arms."""
    if not one.benchmark.submission or not one.scores["score"].null_count:
        return []
    without = arms_of(one.scores.filter(pc.is_null(one.scores["score"])))
    where = f"type what its server returns into {one.place}/{FORM}"
    return [f"{one.place} ({one.benchmark.title}) has {len(without)} submissions without a score: {where}"]


def label(method: str) -> str:
    """A method as the scores name it: its parameters in the order of their names."""
    name, *given = method.split(",")
    return LateAsked(name, 1.0, named_values(given, f"{method}: a parameter")).method_label


def _read(place: str, objects: Objects) -> Gathered:
    store = store_at(place, objects)
    absent = f"no results of python -m jobs.evaluate --benchmark (no {RESULTS_HEADER})"
    held = read_header_file(store, RESULTS_HEADER, (RESULTS_VERSION,), NotResults, absent, of="results of ")
    identity = held["identity"]
    if "benchmark" not in identity:
        raise NotResults(f"{place} holds scored answers, not the results of a benchmark")
    try:
        scores = pq.read_table(pa.BufferReader(store.read(SCORES)))
    except FileNotFoundError:
        raise NotResults(f"{place} has no {SCORES} yet: run its python -m jobs.evaluate to the end") from None
    benchmark = find_benchmark(identity["benchmark"])
    if benchmark.submission:
        scores = with_server_scores(store, scores)
    return Gathered(place, benchmark, identity, scores)
