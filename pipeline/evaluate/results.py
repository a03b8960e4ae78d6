"""Results on disk: the files of an evaluation, and one table laid out from the results of several benchmarks."""

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

from pipeline.cache.header import ModelIdentity, differences
from pipeline.cache.schema import write_parquet
from pipeline.errors import IdentityMismatch, NotResults, UsageError
from pipeline.evaluate.benchmarks import find_benchmark
from pipeline.evaluate.benchmarks.base import Benchmark, Split
from pipeline.evaluate.config import EvaluateConfig
from pipeline.evaluate.forms import latex, markdown
from pipeline.evaluate.page import report_page
from pipeline.evaluate.protocols import QUESTIONS
from pipeline.evaluate.request import RESULTS_HEADER, read_results_header, write_results_header
from pipeline.evaluate.run import ScoredQuestions
from pipeline.evaluate.scores import SCORE_SCHEMA, SCORES
from pipeline.evaluate.statistics import ORIGINAL, MethodAtRatio, arms_of, is_named, score_matrix
from pipeline.evaluate.submissions import FORM, unknown_names, with_server_scores
from pipeline.evaluate.table import ResultsTable
from pipeline.evaluate.tabulate import ScoredBenchmark, results_table
from pipeline.generate.late_pruning import parse_pruning_grid
from pipeline.rows import JsonObject
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import Store, store_at

TABLES_MD, TABLES_TEX, TABLES_JSON, REPORT = "tables.md", "tables.tex", "tables.json", "report.html"
_MOST_PARTS = 30  # parts of a split that a table shows
_SPLIT_IN_PAPER = ("videomme",)  # benchmarks whose first split has columns beside other benchmarks
#: The fields of the identity that all columns of a table share, besides the model.
_EQUAL = ("protocol", "num_frames", "system", "frames", "pixels", "frame_times", "temperature", "thought")
_NEEDED = (
    *("question_id", "cluster", "splits", "method", "retention_ratio", "status", "parsed"),
    *("n_options", "score", "n_kept", "n_total"),
)
_OPTIONAL = {"finish", "weak"}  # columns that older scores do not have


@dataclass(frozen=True, kw_only=True)
class Presentation:
    """How the results of one evaluation are presented.

    Attributes:
        title: of tables and page.
        described: the identity of the results, JSON-able.
        facts: (name, value) about model, cache and run.
        token_bytes: that a cache stores for a token; None where it is not known.
        names: of methods from elsewhere, by import path.
        reference, ours, draws, seed: as of results_table.
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
    store: Store, done: ScoredQuestions, shown: Presentation, identity: JsonObject | None = None
) -> tuple[ResultsTable, list[str]]:
    """Write scores, tables and page into ``store``; return the main table and the file names. Raises OSError.

    ``identity`` becomes the header of a new place. Raises UsageError (nothing was written) for a reference that is no
    row.
    """
    tables = tables_of(done, shown)
    page = report_page(
        tables,
        shown.facts,
        token_bytes=shown.token_bytes,
        faults=done.loaded.faults,
        scores=done.scores,
        described=shown.described,
    )
    if identity is not None:
        write_results_header(store, identity)
    store.put(SCORES, write_parquet(done.scores))
    return tables[0], [SCORES, *_write_tables(store, tables, page)]


def tables_of(done: ScoredQuestions, shown: Presentation) -> list[ResultsTable]:
    """Compute the results tables, one for each split of the benchmark."""
    scored = replace(_scored(shown.benchmark, shown.described, done.scores), names=shown.names)
    return _split_tables(shown.title, scored, shown.benchmark.splits, **_options(shown))


def _options(given: Presentation | EvaluateConfig) -> dict[str, Any]:
    """Return the options of results_table that evaluations have too."""
    return {name: getattr(given, name) for name in ("reference", "ours", "draws", "seed")}


def _split_tables(title: str, scored: ScoredBenchmark, splits: Sequence[Split], **options: Any) -> list[ResultsTable]:
    """Compute a benchmark's tables: one with the parts of its first split and the whole, then its other splits."""
    tables = [results_table(title, [_in_parts(scored, splits[0]) if splits else scored], **options)]
    parted = [(split.title, _in_parts(scored, split)) for split in splits[1:]]
    return [*tables, *(results_table(f"{title}: {name}", [one], **options) for name, one in parted if one.columns)]


def _in_parts(scored: ScoredBenchmark, split: Split) -> ScoredBenchmark:
    """Return the benchmark with a column for each part of a split that has questions.

    It has none where the parts are too many to show, or one of them is the whole.
    """
    values = pc.map_lookup(scored.scores["splits"], split.name, "first")
    present = values.unique().drop_null().to_pylist()
    parts = [(part, title) for part, title in split.parts.items() if part in present]
    parts += [(part, part) for part in sorted(present) if part not in split.parts]
    if len(parts) > _MOST_PARTS or (len(parts) == 1 and not values.null_count):
        parts = []
    return replace(scored, columns=[(f"{split.name}={part}", title) for part, title in parts])


def _write_tables(store: Store, tables: Sequence[ResultsTable], page: str) -> list[str]:
    """Write tables and page, of which LaTeX has the first table alone; return the file names."""
    texts = {
        TABLES_MD: markdown(*tables),
        TABLES_TEX: latex(tables[0]),
        TABLES_JSON: json.dumps([table.as_record() for table in tables], indent=1, ensure_ascii=False) + "\n",
        REPORT: page,
    }
    for name, text in texts.items():
        store.put(name, text.encode())
    return list(texts)


def _scored(benchmark: Benchmark, identity: JsonObject, scores: pa.Table) -> ScoredBenchmark:
    """Return a benchmark's scores for a table without splits, with the settings of ``identity`` that it names."""
    named = {"Frames": _frames(identity), "Protocol": str(identity.get("protocol", ""))}
    metric, notes = str(identity.get("metric", QUESTIONS)), list[str]()
    for one in benchmark.splits:
        present = pc.map_lookup(scores["splits"], one.name, "first").unique().drop_null().to_pylist()
        notes.append(one.describe_parts(present, metric))
    return ScoredBenchmark(
        title=benchmark.title,
        scores=scores,
        mean_over=None if metric == QUESTIONS else metric,
        n_questions=benchmark.n_questions,
        made_of={name: text for name, text in named.items() if text},
        notes=[f"{note}." for note in notes if note],
    )


def _frames(identity: JsonObject) -> str:
    """Return which frames of a video the results are of, as tables say it; "" where they do not say it."""
    if (frames := cast(JsonObject, identity.get("frames") or {})) and "fps" in frames:
        return f"{frames['fps']:g} a second, at most {frames['max_frames']}"
    return str(identity.get("num_frames", ""))


@dataclass(frozen=True)
class LaidOut:
    """A table of several benchmarks, or the tables of one: ``files`` below ``out``, lines about ``missing`` results."""

    tables: Sequence[ResultsTable]
    missing: Sequence[str]
    out: str
    files: Sequence[str]


@dataclass(frozen=True)
class _Results:
    """The results of one benchmark, read from a results folder.

    Attributes:
        place: where they are.
        identity: of ``evaluation.json``.
        about: of it what the results do not have to share: the model's name, a hash of the annotations.
        scores: SCORE_SCHEMA.
        notes: lines about the scores of its server.
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
        """The model's name as its user wrote it; in results without one, its weights."""
        name = str(self.about.get("model") or self.model_identity["weights"])
        return PurePath(name).name if name.startswith(("/", ".")) else name

    def scored(self, ratios: Sequence[float]) -> ScoredBenchmark:
        """Return the scores at these ratios (none: all) and full retention for a table."""
        kept = {round(ratio, 9) for ratio in (*ratios, 1.0)}
        rows = [not ratios or round(ratio, 9) in kept for ratio in self.scores["retention_ratio"].to_pylist()]
        scored = _scored(self.benchmark, self.identity, self.scores.filter(pa.array(rows)))
        annotations = str(self.about.get("annotations", "")).rpartition(":")[2][:8]
        more = {"Annotations": annotations, "Scores": "of its server" if self.benchmark.submission else ""}
        made_of = {**scored.made_of, **{name: text for name, text in more.items() if text}}
        return replace(scored, made_of=made_of, names=cast(Mapping[str, str], self.about.get("names", {})))


def lay_out(config: EvaluateConfig) -> LaidOut:
    """Write one table of the results in several places, in their order: Markdown, LaTeX, JSON and a page.

    The results of a single place get a table for each split, as its evaluation wrote them. ``method`` and
    ``retention_ratio`` choose rows and their order. Raises UsageError (nothing was written) for a place without results
    or with damaged ones, for two of one benchmark, for unlike models, frames or protocols, and for a reference that is
    no row.
    """
    objects = Objects.from_environment(config.s3_endpoint)
    store = store_at(config.out, objects)
    if store.taken() and (store.exists(RESULTS_HEADER) or not store.exists(TABLES_JSON)):
        raise NotResults(f"{store} exists and holds something else than {TABLES_JSON}: name another place with --out")
    found = [_read(place, objects) for place in config.results]
    _check_alike(found)
    methods = [spec.method_label for spec in parse_pruning_grid(config.method, [1.0])]
    there = dict.fromkeys(arm for one in found for arm in arms_of(one.scores))
    ratios = config.retention_ratio or sorted({arm.ratio for arm in there if arm != ORIGINAL}, reverse=True)
    asked = list[MethodAtRatio]()
    for name, ratio in product(methods, ratios):
        seeds = [arm for arm in there if is_named(name, arm.method) and arm.ratio == ratio]
        asked += seeds or [MethodAtRatio(name, ratio)]
    missing = [line for one in found for line in _missing(one, asked or list(there))]
    scored = [one.scored(config.retention_ratio) for one in found]
    options = {**_options(config), "methods": methods or None, "notes": missing}
    if len(found) == 1:
        tables = _split_tables(found[0].model, scored[0], found[0].benchmark.splits, **options)
    else:
        parted = [
            _in_parts(one, of.benchmark.splits[0]) if of.benchmark.name in _SPLIT_IN_PAPER else one
            for one, of in zip(scored, found, strict=True)
        ]
        tables = [results_table(found[0].model, parted, **options)]
    token_bytes = found[0].about.get("token_bytes")
    page = report_page(tables, _facts(found), token_bytes=token_bytes if isinstance(token_bytes, int) else None)
    store.make()
    return LaidOut(tables, missing, config.out, _write_tables(store, tables, page))


def _check_alike(found: Sequence[_Results]) -> None:
    """Raise UsageError unless the results are of different benchmarks, and of one model, protocol and frames."""
    first = found[0]
    for number, one in enumerate(found):
        for other in found[:number]:
            if one.benchmark.name == other.benchmark.name:
                raise UsageError(f"{other.place} and {one.place} are both of {one.benchmark.title}: name one of them")
        if wrong := differences(first.model_identity, one.model_identity, has=f"{first.place} has"):
            raise IdentityMismatch(f"{one.place} is of another model than {first.place}: {'; '.join(wrong)}")
        held, given = ({name: of.identity.get(name) for name in _EQUAL} for of in (first, one))
        if wrong := differences(held, given, has=f"{first.benchmark.title} has"):
            raise IdentityMismatch(
                f"one table must not mix what differs here: {one.benchmark.title}: {'; '.join(wrong)}\n"
                "Evaluate both alike, or lay them out apart."
            )


def _missing(one: _Results, asked: Sequence[MethodAtRatio]) -> list[str]:
    """Return lines about the methods at ratios that these results lack, and about its server's scores."""
    held = set(arms_of(one.scores))
    lacking = [f"{arm.method}@{arm.ratio:g}" for arm in asked if arm not in held]
    more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
    lines = [f"{one.place} ({one.benchmark.title}) has no {', '.join(lacking[:3])}{more}"] if lacking else []
    if _OPTIONAL - set(one.scores.column_names):
        lines.append(f"{one.place} does not say which replies were cut or read by chance: run its jobs.evaluate again")
    return [*lines, *one.notes]


def _facts(found: Sequence[_Results]) -> list[tuple[str, str]]:
    """Return (name, value) facts about the model and settings behind each benchmark's numbers."""
    model = found[0].model_identity
    facts = [("model", f"{found[0].model}, {model['type']}, {model['weights']}")]
    for one in found:
        frames, protocol = _frames(one.identity), one.identity["protocol"]
        asked = pc.count_distinct(one.scores["question_id"]).as_py()
        whose = ", scores from its server, without intervals" if one.benchmark.submission else ""
        facts.append((one.benchmark.title, f"{asked:,} questions, {frames} frames, {protocol}{whose}"))
    return facts


def _read(place: str, objects: Objects) -> _Results:
    """Read the results in one place. Raises NotResults."""
    store = store_at(place, objects)
    held = read_results_header(store)
    identity, about = cast(JsonObject, held["identity"]), cast(JsonObject, held.get("about", {}))
    if "benchmark" not in identity:
        raise NotResults(f"{place} holds scored answers, not the results of a benchmark")
    if lacking := {"model", "num_frames", "protocol"} - identity.keys():
        raise NotResults(f"{place}: {RESULTS_HEADER} does not say {', '.join(sorted(lacking))}: evaluate again")
    benchmark = find_benchmark(str(identity["benchmark"]))
    scores = read_scores(place, store, published=not benchmark.submission)
    if not benchmark.submission:
        return _Results(place, benchmark, identity, about, scores)
    unknown = unknown_names(store, arms_of(scores))
    notes = [f"{place}/{FORM} has a score of {name}, which is none of its submissions" for name in unknown]
    scores = with_server_scores(store, scores)
    if without := arms_of(scores.filter(pc.is_null(scores["score"]))):
        where = f"type what its server returns into {place}/{FORM}"
        notes.append(f"{place} ({benchmark.title}) has {len(without)} submissions without a score: {where}")
    return _Results(place, benchmark, identity, about, scores, notes)


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
    kinds: Mapping[str, pa.DataType] = {field.name: field.type for field in scores.schema}
    looked_at = (*_NEEDED, *sorted(_OPTIONAL & kinds.keys()))
    if wrong := [name for name in looked_at if kinds.get(name) != SCORE_SCHEMA.field(name).type]:
        raise NotResults(f"{place}: {SCORES} has no {wrong[0]} as it should be: {again}")
    ok = scores.filter(pc.equal(scores["status"], "ok"))["score"]
    if published and (ok.null_count or not pc.all(pc.and_(pc.greater_equal(ok, 0), pc.less_equal(ok, 1))).as_py()):
        raise NotResults(f"{place}: {SCORES} has answers without a score from 0 to 1: {again}")
    try:
        score_matrix(scores, arms_of(scores))
    except ValueError as error:
        raise NotResults(f"{place}: {SCORES}: {error}; {again}") from error
    return scores
