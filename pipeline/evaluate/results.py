"""Results on disk: the files of one evaluation, and one table laid out from the results of several benchmarks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import PurePath
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Group, RenderableType
from rich.text import Text

from pipeline.cache.header import ModelIdentity, list_differences
from pipeline.cache.schema import complete_columns, write_parquet
from pipeline.errors import CorruptShard, IdentityMismatch, NotResults, UsageError
from pipeline.evaluate.abilities import BUILT_IN, read_ability_rules
from pipeline.evaluate.benchmarks import find_benchmark
from pipeline.evaluate.benchmarks.base import Benchmark, Split
from pipeline.evaluate.breaks import Breaks
from pipeline.evaluate.config import DEFAULT_WITHIN, RESULTS_HEADER, EvaluateConfig
from pipeline.evaluate.forms import format_latex_table, format_markdown_tables, render_breaks, render_table
from pipeline.evaluate.losses import find_breaks
from pipeline.evaluate.page import render_report_page
from pipeline.evaluate.protocols import QUESTIONS
from pipeline.evaluate.request import read_results_header, write_results_header
from pipeline.evaluate.run import ScoredQuestions
from pipeline.evaluate.scores import FORM, LATER_COLUMNS, SCORE_SCHEMA, SCORES, apply_server_scores, list_unknown_names
from pipeline.evaluate.statistics import ORIGINAL, MethodAtRatio, is_named, list_arms, make_score_matrix, set_arm_scores
from pipeline.evaluate.table import ResultsTable
from pipeline.evaluate.tabulate import ScoredBenchmark, make_results_table
from pipeline.generate.late_pruning import parse_pruning_grid
from pipeline.rows import JsonObject
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import Store, store_at

TABLES_MD, TABLES_TEX, TABLES_JSON, REPORT = "tables.md", "tables.tex", "tables.json", "report.html"
WHERE_IT_BREAKS = "where_it_breaks"  # key of the first record of a table that --results lays out
_MAX_PARTS = 30  # maximum number of split values that a table shows
_SPLIT_IN_PAPER = ("videomme",)  # benchmarks whose first split has columns in a table of several benchmarks too
#: Fields of the identity, besides the model, that must be equal for all columns of a table.
_EQUAL = ("protocol", "num_frames", "system", "frames", "pixels", "frame_times", "temperature", "thought")
_NEEDED_COLUMNS = (
    *("question_id", "cluster", "splits", "method", "retention_ratio", "status", "parsed"),
    *("n_options", "score", "n_kept", "n_total"),
)
_OPTIONAL = {"finish", "weak"}  # columns that older scores do not have


@dataclass(frozen=True, kw_only=True)
class Presentation:
    """How the results of one evaluation are presented in tables and on the report page.

    Attributes:
        described: the JSON-able identity of the results.
        token_bytes: the bytes that a cache stores per token; None if unknown.
        names: the names of user methods, by import path.
        reference, ours, draws, seed: arguments of ``make_results_table``.
    """

    title: str
    benchmark: Benchmark
    described: JsonObject
    facts: Sequence[tuple[str, str]] = ()
    token_bytes: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    reference: str | None = None
    ours: str | None = None
    draws: int = 10_000
    seed: int = 0


def write_results(
    store: Store, scored: ScoredQuestions, presentation: Presentation, identity: JsonObject | None = None
) -> tuple[ResultsTable, list[str]]:
    """Write scores, tables and report page into ``store``; return the main table and the names of the files.

    Args:
        identity: written as the header of the folder; None leaves the header as it is.

    Raises:
        UsageError: the reference or ``ours`` is no row of the table, or a question lacks the split that the benchmark
            averages over; nothing was written.
    """
    tables = make_tables(scored, presentation)
    page = render_report_page(
        tables,
        presentation.facts,
        token_bytes=presentation.token_bytes,
        scored=scored,
        identity=presentation.described,
    )
    if identity is not None:
        write_results_header(store, identity)
    store.put(SCORES, write_parquet(scored.scores))
    return tables[0], [SCORES, *_write_tables(store, tables, page)]


def make_tables(answered: ScoredQuestions, presentation: Presentation) -> list[ResultsTable]:
    """Compute the tables of one evaluation: the main table, then one for each further split that can have columns.

    Raises:
        UsageError: the reference or ``ours`` is no row of the table, or a question lacks the split that the benchmark
            averages over.
    """
    benchmark = replace(
        _make_scored(presentation.benchmark, presentation.described, answered.scores), names=presentation.names
    )
    return _split_tables(
        presentation.title, benchmark, presentation.benchmark.splits, **select_table_options(presentation)
    )


def select_table_options(source: Presentation | EvaluateConfig) -> dict[str, Any]:
    """Return the arguments of ``make_results_table`` that ``source`` has: reference, ours, draws and seed."""
    return {name: getattr(source, name) for name in ("reference", "ours", "draws", "seed")}


def _split_tables(title: str, scored: ScoredBenchmark, splits: Sequence[Split], **options: Any) -> list[ResultsTable]:
    """Compute a benchmark's tables: the main one with the values of its first split, then one for each other split.

    A further split for which ``_split_scores`` makes no columns gets no table.
    """
    tables = [make_results_table(title, [_split_scores(scored, splits[0]) if splits else scored], **options)]
    by_part = [(split.title, _split_scores(scored, split)) for split in splits[1:]]
    return [
        *tables,
        *(make_results_table(f"{title}: {name}", [part], **options) for name, part in by_part if part.columns),
    ]


def _split_scores(scored: ScoredBenchmark, split: Split) -> ScoredBenchmark:
    """Return the benchmark with a column for each value of ``split`` that has questions.

    Known values come first, then others in sorted order. It gets no such columns if there are more than ``_MAX_PARTS``
    values, if all questions have the same value, or if the benchmark has only one number per method.
    """
    values = pc.map_lookup(scored.scores["splits"], split.name, "first")
    present = values.unique().drop_null().to_pylist()
    parts = [(part, title) for part, title in split.parts.items() if part in present]
    parts += [(part, part) for part in sorted(present) if part not in split.parts]
    is_single = len(parts) == 1 and not values.null_count
    if not scored.per_question or len(parts) > _MAX_PARTS or is_single:
        parts = []
    return replace(scored, columns=[(f"{split.name}={part}", title) for part, title in parts])


def _write_tables(store: Store, tables: Sequence[ResultsTable], page: str, breaks: Breaks | None = None) -> list[str]:
    """Write all tables as Markdown and JSON, the first one as LaTeX, and the report page; return the file names.

    ``breaks`` goes into the Markdown and into the first table's JSON record.
    """
    records = [_make_first_record(tables[0], breaks), *(table.as_record() for table in tables[1:])]
    texts = {
        TABLES_MD: format_markdown_tables(*tables, breaks=breaks),
        TABLES_TEX: format_latex_table(tables[0]),
        TABLES_JSON: json.dumps(records, indent=1, ensure_ascii=False) + "\n",
        REPORT: page,
    }
    for name, text in texts.items():
        store.put(name, text.encode())
    return list(texts)


def _make_first_record(table: ResultsTable, breaks: Breaks | None) -> JsonObject:
    """Return the first table as a JSON-able record, with *Where it breaks* unless ``breaks`` is None."""
    return {**table.as_record(), **({} if breaks is None else {WHERE_IT_BREAKS: breaks.as_record()})}


def _make_scored(benchmark: Benchmark, identity: JsonObject, scores: pa.Table) -> ScoredBenchmark:
    """Return a benchmark's scores for a table, with its metric, its notes, and the notes of ``Split.describe_values``.

    If a task of lmms-eval has only one number per arm, every score of the arm is replaced by it.
    """
    facts = {"Frames": _describe_frames(identity), "Protocol": str(identity.get("protocol", ""))}
    metric = benchmark.metric(str(identity.get("metric", QUESTIONS)))
    notes = list[str]()
    for split in benchmark.splits:
        present = pc.map_lookup(scores["splits"], split.name, "first").unique().drop_null().to_pylist()
        notes.append(split.describe_values(present, metric))
    if not (benchmark.scores_questions or benchmark.submission):
        scores = set_arm_scores(scores, {arm: benchmark.get_arm_share(arm.label) for arm in list_arms(scores)})
    return ScoredBenchmark(
        title=benchmark.title,
        scores=scores,
        mean_over=None if metric == QUESTIONS else metric,
        n_questions=benchmark.n_questions,
        made_of={**{name: text for name, text in facts.items() if text}, **benchmark.made_of},
        notes=[*(f"{note}." for note in notes if note), *benchmark.notes],
        weights=benchmark.weights,
        per_question=benchmark.scores_questions,
    )


def _describe_frames(identity: JsonObject) -> str:
    """Return the number of frames per video as text, or the frame rate and the maximum; "" if neither is known."""
    if (frames := cast(JsonObject, identity.get("frames") or {})) and "fps" in frames:
        return f"{frames['fps']:g} a second, at most {frames['max_frames']}"
    return str(identity.get("num_frames", ""))


@dataclass(frozen=True)
class WrittenComparison:
    """A table of several benchmarks, or the tables of one, as ``write_comparison`` wrote them.

    Attributes:
        tables: the main table first.
        missing: lines about methods, ratios, columns and server scores that the results lack.
    """

    tables: Sequence[ResultsTable]
    breaks: Breaks
    missing: Sequence[str]
    out: str
    files: Sequence[str]

    def render(self) -> RenderableType:
        """Render the first table and *Where it breaks* for the terminal, and name the other tables and the files."""
        others = ", ".join(table.title for table in self.tables[1:])
        more = [Text(f"also in {TABLES_MD}: {others}")] if others else []
        parts = [*render_table(self.tables[0]), *more, "", *render_breaks(self.breaks)]
        return Group(*parts, "", Text(f"{self.out}: {', '.join(self.files)}"))

    def as_record(self) -> JsonObject:
        """Return the files, the missing results, the first table and *Where it breaks* as one JSON-able record."""
        written = {"out": self.out, "files": list(self.files), "missing": list(self.missing)}
        return {**written, **_make_first_record(self.tables[0], self.breaks)}


@dataclass(frozen=True)
class _BenchmarkResults:
    """The results of one benchmark, read from a results folder.

    Attributes:
        about: facts that results may differ in: the model's name, a hash of the annotations.
        notes: lines about scores of the benchmark's server that are missing or unknown.
    """

    place: str
    benchmark: Benchmark
    identity: JsonObject
    about: JsonObject
    scores: pa.Table
    notes: Sequence[str] = ()

    @property
    def model_identity(self) -> ModelIdentity:
        """The identity of the model that answered."""
        return cast(ModelIdentity, self.identity["model"])

    @property
    def model(self) -> str:
        """The model's name as the user gave it, or its weights without a name; of a local path, the last component."""
        name = str(self.about.get("model") or self.model_identity["weights"])
        return PurePath(name).name if name.startswith(("/", ".")) else name

    def select_scores(self, ratios: Sequence[float]) -> ScoredBenchmark:
        """Return the scores at these ratios and at full retention as a benchmark of a table; [] selects all ratios.

        ``made_of`` gets the first 8 digits of the annotations' hash, and a note on scores from a server.
        """
        rounded_ratios = {round(ratio, 9) for ratio in (*ratios, 1.0)}
        rows = [not ratios or round(ratio, 9) in rounded_ratios for ratio in self.scores["retention_ratio"].to_pylist()]
        benchmark = _make_scored(self.benchmark, self.identity, self.scores.filter(pa.array(rows)))
        annotations = str(self.about.get("annotations", "")).rpartition(":")[2][:8]
        more = {"Annotations": annotations, "Scores": "of its server" if self.benchmark.submission else ""}
        made_of = {**benchmark.made_of, **{name: text for name, text in more.items() if text}}
        return replace(benchmark, made_of=made_of, names=cast(Mapping[str, str], self.about.get("names", {})))


def write_comparison(config: EvaluateConfig) -> WrittenComparison:
    """Write one table of the results in several folders, in their order, as Markdown, LaTeX, JSON and a report page.

    ``config.method`` and ``config.retention_ratio`` choose the rows, ordered by descending ratio and then as the
    methods are given. A method or ratio that some results lack becomes a line of ``missing``. *Where it breaks* is
    added to all files but LaTeX. In a table of several benchmarks, only those of ``_SPLIT_IN_PAPER`` have columns for
    their first split; a single folder's table has them, and each further split gets its own table. An earlier table in
    ``out`` is replaced.

    Raises:
        UsageError: results are missing or damaged, two folders hold the same benchmark, models, frames or protocols
            differ, ``out`` holds something other than such a table, a reference or ``ours`` is no row, a question lacks
            the split that its benchmark averages over, or the table of abilities is malformed. Nothing was written.
    """
    rules = [*([] if config.abilities is None else read_ability_rules(config.abilities)), *BUILT_IN]
    objects = Objects.from_environment(config.s3_endpoint, config.s3_requester_pays)
    store = store_at(config.out, objects)
    if store.has_other_files() and (store.exists(RESULTS_HEADER) or not store.exists(TABLES_JSON)):
        raise NotResults(f"{store} exists and holds files other than {TABLES_JSON}: name another folder with --out")
    results = [_read_results(place, objects) for place in config.results]
    _check_alike(results)
    methods = [spec.method_label for spec in parse_pruning_grid(config.method, [1.0])]
    arms = dict.fromkeys(arm for result in results for arm in list_arms(result.scores))
    ratios = config.retention_ratio or sorted({arm.ratio for arm in arms if arm != ORIGINAL}, reverse=True)
    requested = list[MethodAtRatio]()
    for name, ratio in product(methods, ratios):
        seeds = [arm for arm in arms if is_named(name, arm.method) and arm.ratio == ratio]
        requested += seeds or [MethodAtRatio(name, ratio)]
    missing_lines = [line for result in results for line in _list_missing(result, requested or list(arms))]
    benchmarks = [result.select_scores(config.retention_ratio) for result in results]
    options = {**select_table_options(config), "methods": methods or None, "notes": missing_lines}
    if len(results) == 1:
        tables = _split_tables(results[0].model, benchmarks[0], results[0].benchmark.splits, **options)
    else:
        by_part = [
            _split_scores(result, of.benchmark.splits[0]) if of.benchmark.name in _SPLIT_IN_PAPER else result
            for result, of in zip(benchmarks, results, strict=True)
        ]
        tables = [make_results_table(results[0].model, by_part, **options)]
    by_name = {result.benchmark.name: benchmark for result, benchmark in zip(results, benchmarks, strict=True)}
    within = DEFAULT_WITHIN if config.within is None else config.within
    breaks = find_breaks(by_name, rules, within=within, methods=methods or None, draws=config.draws, seed=config.seed)
    token_bytes = results[0].about.get("token_bytes")
    page = render_report_page(
        tables,
        _list_facts(results),
        token_bytes=token_bytes if isinstance(token_bytes, int) else None,
        breaks=breaks,
    )
    store.make()
    return WrittenComparison(tables, breaks, missing_lines, config.out, _write_tables(store, tables, page, breaks))


def _check_alike(results: Sequence[_BenchmarkResults]) -> None:
    """Check that the results can stand in one table.

    Raises:
        UsageError: two of them are of the same benchmark.
        IdentityMismatch: they differ in the model, or in a setting of ``_EQUAL``, such as protocol or frames.
    """
    first = results[0]
    for number, result in enumerate(results):
        for earlier in results[:number]:
            if result.benchmark.name == earlier.benchmark.name:
                raise UsageError(
                    f"{earlier.place} and {result.place} are both of {result.benchmark.title}: name one of them"
                )
        if differences := list_differences(
            first.model_identity, result.model_identity, old_subject=f"{first.place} has"
        ):
            raise IdentityMismatch(
                f"{result.place} and {first.place} were made with different models: {'; '.join(differences)}"
            )
        first_values, values = ({name: source.identity.get(name) for name in _EQUAL} for source in (first, result))
        if differences := list_differences(first_values, values, old_subject=f"{first.benchmark.title} has"):
            raise IdentityMismatch(
                f"one table cannot mix different settings: {result.benchmark.title}: {'; '.join(differences)}\n"
                "Evaluate both with the same settings, or lay them out in separate tables."
            )


def _list_missing(result: _BenchmarkResults, requested: Sequence[MethodAtRatio]) -> list[str]:
    """Return lines about requested arms and later columns that these results lack, then the results' own notes.

    At most three arms are named; the others are counted.
    """
    present = set(list_arms(result.scores))
    lacking = [f"{arm.method}@{arm.ratio:g}" for arm in requested if arm not in present]
    more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
    lines = [f"{result.place} ({result.benchmark.title}) has no {', '.join(lacking[:3])}{more}"] if lacking else []
    if _OPTIONAL - set(result.scores.column_names):
        lines.append(
            f"{result.place} does not say which replies were cut or read by chance: run its jobs.evaluate again"
        )
    return [*lines, *result.notes]


def _list_facts(results: Sequence[_BenchmarkResults]) -> list[tuple[str, str]]:
    """Return (name, value) facts for the page: the model, then each benchmark's questions, frames and protocol."""
    model = results[0].model_identity
    facts = [("model", f"{results[0].model}, {model['type']}, {model['weights']}")]
    for result in results:
        frames = _describe_frames(result.identity)
        protocol = result.identity["protocol"]
        n_questions = pc.count_distinct(result.scores["question_id"]).as_py()
        note = ", scores from its server, without intervals" if result.benchmark.submission else ""
        facts.append((result.benchmark.title, f"{n_questions:,} questions, {frames} frames, {protocol}{note}"))
    return facts


def _read_results(place: str, objects: Objects) -> _BenchmarkResults:
    """Read the results in one folder.

    For a benchmark without published answers, the scores are the percentages that the user typed into the form; notes
    say how many submissions have none, and which names in the form are unknown.

    Raises:
        NotResults: the results are missing, incomplete or damaged, or are scored answers of jobs.generate.
        UsageError: the form is malformed, or the benchmark is unknown.
    """
    store = store_at(place, objects)
    header = read_results_header(store)
    identity, about = cast(JsonObject, header["identity"]), cast(JsonObject, header.get("about", {}))
    if "benchmark" not in identity:
        raise NotResults(f"{place} holds scored answers, not the results of a benchmark")
    if missing_keys := {"model", "num_frames", "protocol"} - identity.keys():
        raise NotResults(f"{place}: {RESULTS_HEADER} does not say {', '.join(sorted(missing_keys))}: evaluate again")
    benchmark = find_benchmark(str(identity["benchmark"])).load_stored_settings(store)
    scores = read_scores(place, store, published=benchmark.scores_questions)
    notes = list[str]()
    if benchmark.submission:
        unknown = list_unknown_names(store, list_arms(scores))
        notes += [f"{place}/{FORM} has a score for {name}, which is not one of its submissions" for name in unknown]
        scores = apply_server_scores(store, scores)
        if unscored_arms := list_arms(scores.filter(pc.is_null(scores["score"]))):
            where = f"type what its server returns into {place}/{FORM}"
            notes.append(f"{place} ({benchmark.title}) has {len(unscored_arms)} submissions without a score: {where}")
    return _BenchmarkResults(place, benchmark, identity, about, scores, notes)


def read_scores(
    place: str,
    store: Store,
    *,
    published: bool,
    columns: Sequence[str] = (*_NEEDED_COLUMNS, *LATER_COLUMNS),
) -> pa.Table:
    """Read ``columns`` of the scores in a results folder and check them.

    A column of LATER_COLUMNS that an older file lacks is null, except ``finish`` and ``weak``, which are left out.

    Args:
        place: the folder's name for error messages.
        published: True if every good answer must have a score from 0 to 1.

    Raises:
        NotResults: the file is missing or damaged, a column is missing or has the wrong type, a score is missing or out
            of range, or an arm does not have exactly one score for each question.
    """
    remedy = "run its python -m jobs.evaluate to the end"
    try:
        data = store.read(SCORES)
    except FileNotFoundError:
        raise NotResults(f"{place} has no {SCORES} yet: {remedy}") from None
    try:
        stored_table = pq.read_table(pa.BufferReader(data))
        scores = complete_columns(stored_table, columns, SCORE_SCHEMA, LATER_COLUMNS, SCORES)
    except (pa.ArrowException, OSError, CorruptShard) as error:
        raise NotResults(f"{place}: {SCORES} is damaged ({error}): {remedy}") from error
    # Without these columns the counts of cut and weak replies are unknown, not 0.
    scores = scores.drop_columns(sorted(_OPTIONAL.difference(stored_table.column_names)))
    if wrong_columns := [field.name for field in scores.schema if field.type != SCORE_SCHEMA.field(field.name).type]:
        raise NotResults(f"{place}: the column {wrong_columns[0]} of {SCORES} has the wrong type: {remedy}")
    good_scores = scores.filter(pc.equal(scores["status"], "ok"))["score"]
    if published and (
        good_scores.null_count
        or not pc.all(pc.and_(pc.greater_equal(good_scores, 0), pc.less_equal(good_scores, 1))).as_py()
    ):
        raise NotResults(f"{place}: {SCORES} has answers without a score from 0 to 1: {remedy}")
    try:
        make_score_matrix(scores, list_arms(scores))
    except ValueError as error:
        raise NotResults(f"{place}: {SCORES}: {error}; {remedy}") from error
    return scores
