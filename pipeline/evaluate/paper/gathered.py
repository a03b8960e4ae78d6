"""Results of several benchmarks, read from where ``jobs.evaluate`` left them and checked to belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gstep import PRUNERS, make_pruner
from gstep.language import BUILDERS
from pipeline.cache.header import ModelIdentity, differences
from pipeline.errors import IdentityMismatch, NotResults, UsageError
from pipeline.evaluate.benchmarks import find_benchmark
from pipeline.evaluate.benchmarks.base import Benchmark, Split
from pipeline.evaluate.files import SCORES, scored_benchmark
from pipeline.evaluate.grids import PaperTable
from pipeline.evaluate.request import RESULTS_HEADER, read_results_header
from pipeline.evaluate.scores import SCORE_SCHEMA
from pipeline.evaluate.server_scores import FORM, unknown_names, with_server_scores
from pipeline.evaluate.statistics.results import Column, ResultsTable
from pipeline.evaluate.statistics.score_matrix import ORIGINAL, arms_of, score_matrix
from pipeline.evaluate.statistics.tables import ScoredBenchmark, results_table
from pipeline.generate.late_pruning import asked_grid
from pipeline.rows import JsonObject
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import Store, store_at

_MIXED = "‡"
#: The fields of the identity that the paper holds equal in all columns of a table, besides the model.
_EQUAL = ("protocol", "num_frames", "system", "frames", "pixels", "frame_times", "temperature")
_NEEDED = (
    *("question_id", "cluster", "splits", "method", "retention_ratio", "status", "parsed"),
    *("n_options", "score", "n_kept", "n_total"),
)
_POSITIONS = ",positions="


@dataclass(frozen=True)
class BenchmarkResults:
    """The results of one benchmark, read from a results folder.

    Attributes:
        place: where they are.
        identity: of ``evaluation.json``.
        about: of it what the results do not have to share: the model's name, a hash of the annotations.
        scores: SCORE_SCHEMA.
        unknown: names that its server's form has and its submissions have not.
    """

    place: str
    benchmark: Benchmark
    identity: JsonObject
    about: Mapping[str, str]
    scores: pa.Table
    unknown: Sequence[str] = ()

    @property
    def model_identity(self) -> ModelIdentity:
        """The identity of the model that answered."""
        return cast(ModelIdentity, self.identity["model"])

    @property
    def model(self) -> str:
        """The model's name as its user wrote it; in results without one, its weights."""
        name = self.about.get("model") or self.model_identity["weights"]
        return PurePath(name).name if name.startswith(("/", ".")) else name

    def scored(self, *, split: bool) -> ScoredBenchmark:
        """Return the scores for a table; with ``split``, the parts of the first split have columns."""
        first = self.benchmark.splits[0] if split and self.benchmark.splits else Split("", "")
        scored = scored_benchmark(self.benchmark, self.identity, self.scores, first.name, first.parts.items())
        annotations = self.about.get("annotations", "").rpartition(":")[2][:8]
        return replace(scored, made_of={**scored.made_of, "Annotations": annotations}) if annotations else scored


def gather(table: PaperTable, places: Sequence[str], objects: Objects, *, mixed: bool) -> list[BenchmarkResults]:
    """Read the results in ``places``, in the order of the table's columns; other benchmarks come last.

    Raises UsageError where a place holds no results or damaged ones, two are of one column, two were made with another
    model, or, unless ``mixed``, with other frames or by another protocol.
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
        if wrong := differences(found[0].model_identity, one.model_identity, has=f"{found[0].place} has"):
            raise IdentityMismatch(f"{one.place} is of another model than {found[0].place}: {'; '.join(wrong)}")
    found = sorted(found, key=lambda one: order.get(one.benchmark.name, len(order)))
    if not mixed and (unlike := [line for one in found[1:] for line in _unlike(one, found[0])]):
        raise IdentityMismatch(
            "the paper holds equal in all columns of a table what differs here:\n  "
            + "\n  ".join(unlike)
            + "\nEvaluate them alike, or let --mixed mark the columns that differ."
        )
    return found


def _unlike(one: BenchmarkResults, first: BenchmarkResults) -> list[str]:
    """Describe the settings in which two results differ although one table must not mix them."""
    held, given = ({name: of.identity.get(name) for name in _EQUAL} for of in (first, one))
    return [f"{one.benchmark.title}: {line}" for line in differences(held, given, has=f"{first.benchmark.title} has")]


def compared(
    title: str, table: PaperTable, found: Sequence[BenchmarkResults], draws: int, seed: int
) -> tuple[ResultsTable, list[str]]:
    """Compute the scores of the table's methods and ratios with their errors, and notes on columns that differ."""
    ratios = {round(ratio, 9) for ratio in table.ratios} | {1.0}
    scored = []
    for one in found:
        kept = [round(ratio, 9) in ratios for ratio in one.scores["retention_ratio"].to_pylist()]
        whole = one.scored(split=one.benchmark.name in table.split)
        scored.append(replace(whole, scores=whole.scores.filter(pa.array(kept))))
    results = results_table(title, scored, methods=list(map(label, table.methods)), draws=draws, seed=seed)
    notes = {one.benchmark.title: lines for one in found[1:] if (lines := _unlike(one, found[0]))}
    columns = tuple(_marked(column) if column.benchmark in notes else column for column in results.columns)
    return replace(results, columns=columns), [f"{_MIXED} {line}." for lines in notes.values() for line in lines]


def _marked(column: Column) -> Column:
    """Return a column whose title marks results that the paper would not compare with the others."""
    title = f"{column.title}{_MIXED}" if column.title == column.benchmark else column.title
    return replace(column, title=title, benchmark=f"{column.benchmark}{_MIXED}")


def at_positions(one: BenchmarkResults, positions: str | None) -> BenchmarkResults:
    """Return results reduced to rows of the given positions; None stands for the model family's own.

    The methods' names come without them. Rows that have no positions of their own stay: full retention, and methods
    that prune inside the model.
    """
    usual = BUILDERS[one.model_identity["type"]].default_positions
    wanted = usual if positions is None else positions
    methods = [method.partition(_POSITIONS) for method in one.scores["method"].to_pylist()]
    kept = [(said or usual) == wanted or _has_no_positions(name) for name, _, said in methods]
    names = pa.array([name for name, _, _ in methods], pa.string())
    column = one.scores.schema.get_field_index("method")
    return replace(one, scores=one.scores.set_column(column, "method", names).filter(pa.array(kept)))


def _has_no_positions(method: str) -> bool:
    """Return whether a method has no positions of its own: full retention, or pruning inside the model."""
    name = method.partition(",")[0]
    return name == ORIGINAL.method or (name in PRUNERS and make_pruner(name).layer is not None)


def missing(table: PaperTable, found: Sequence[BenchmarkResults]) -> list[str]:
    """Return a line for each benchmark, method and ratio of the table that the results lack."""
    there = {one.benchmark.name for one in found}
    lines = [f"no results of {' or '.join(names)}" for names in table.benchmarks if not there & set(names)]
    for one in found:
        held = set(arms_of(one.scores))
        lacking = [f"{m}@{r:g}" for r in table.ratios for m in map(label, table.methods) if (m, r) not in held]
        if lacking:
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            lines.append(f"{one.place} ({one.benchmark.title}) has no {', '.join(lacking[:3])}{more}")
        lines += _server_notes(one)
    return lines


def _server_notes(one: BenchmarkResults) -> list[str]:
    """Return lines about submissions without a typed-in score, and scores without a submission."""
    if not one.benchmark.submission:
        return []
    lines = [f"{one.place}/{FORM} has a score of {name}, which is none of its submissions" for name in one.unknown]
    if without := arms_of(one.scores.filter(pc.is_null(one.scores["score"]))):
        where = f"type what its server returns into {one.place}/{FORM}"
        lines.append(f"{one.place} ({one.benchmark.title}) has {len(without)} submissions without a score: {where}")
    return lines


def label(method: str) -> str:
    """Return a method's name as the scores have it: with parameters sorted by name."""
    return asked_grid([method], [1.0])[0].method_label


def _read(place: str, objects: Objects) -> BenchmarkResults:
    """Read the results in one place. Raises NotResults."""
    store = store_at(place, objects)
    held = read_results_header(store)
    identity, about = cast(JsonObject, held["identity"]), cast(Mapping[str, str], held.get("about", {}))
    if "benchmark" not in identity:
        raise NotResults(f"{place} holds scored answers, not the results of a benchmark")
    if lacking := {"model", "num_frames", "protocol"} - identity.keys():
        raise NotResults(f"{place}: {RESULTS_HEADER} does not say {', '.join(sorted(lacking))}: evaluate again")
    benchmark = find_benchmark(str(identity["benchmark"]))
    scores = read_scores(place, store, published=not benchmark.submission)
    if not benchmark.submission:
        return BenchmarkResults(place, benchmark, identity, about, scores)
    unknown = unknown_names(store, arms_of(scores))
    return BenchmarkResults(place, benchmark, identity, about, with_server_scores(store, scores), unknown)


def read_scores(place: str, store: Store, *, published: bool) -> pa.Table:
    """Read a place's scores. Raises NotResults unless every arm has exactly one score of each question.

    Args:
        published: whether the right answers are, so that every answer must have a score.
    """
    again = "run its python -m jobs.evaluate to the end"
    try:
        scores = pq.read_table(pa.BufferReader(store.read(SCORES)))
    except FileNotFoundError:
        raise NotResults(f"{place} has no {SCORES} yet: {again}") from None
    except (pa.ArrowException, OSError) as error:
        raise NotResults(f"{place}: {SCORES} is damaged ({error}): {again}") from error
    kinds = {field.name: field.type for field in scores.schema}
    if wrong := [name for name in _NEEDED if kinds.get(name) != SCORE_SCHEMA.field(name).type]:
        raise NotResults(f"{place}: {SCORES} has no {wrong[0]} as it should be: {again}")
    ok = scores.filter(pc.equal(scores["status"], "ok"))["score"]
    if published and (ok.null_count or not pc.all(pc.and_(pc.greater_equal(ok, 0), pc.less_equal(ok, 1))).as_py()):
        raise NotResults(f"{place}: {SCORES} has answers without a score from 0 to 1: {again}")
    try:
        score_matrix(scores, arms_of(scores))
    except ValueError as error:
        raise NotResults(f"{place}: {SCORES}: {error}; {again}") from error
    return scores
