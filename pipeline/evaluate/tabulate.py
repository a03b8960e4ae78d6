"""Compute the table of results from scores: its rows, their numbers, and their differences to a reference method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa

from pipeline.errors import UsageError
from pipeline.evaluate.statistics import (
    NO_PART,
    ORIGINAL,
    POSITIONS,
    AnswerCounts,
    Estimate,
    Floats,
    MethodAtRatio,
    QuestionPartition,
    ScoreMatrix,
    average_estimates,
    compute_estimates,
    compute_relative_scores,
    count_videos_needed,
    is_named,
    list_arms,
    make_score_matrix,
    split_seed,
)
from pipeline.evaluate.table import (
    FULL_ROW,
    OVERALL,
    PRINTED_0,
    ArmGroup,
    Cell,
    Column,
    Mark,
    ResultsTable,
    Row,
    format_score,
)

_TITLES = {
    "fastv": "FastV",
    "fastvid": "FastVID",
    "cdpruner": "CDPruner",
    "visionzip": "VisionZip",
    "holitom": "HoliTom",
    "flashvid": "FlashVID",
    "ottvid": "OTT-Vid",
    "tango": "Tango",
    "vidcom2": "VidCom2",
    "evs": "EVS",
    "vcast": "V-CAST",
    "divprune": "DivPrune",
    "gstep": "GSTEP",
    "novelty": "Novelty",
    "random": "Random",
    "uniform": "Uniform",
    "topk": "Top-k",
    "fps": "FPS",
}


@dataclass(frozen=True)
class ScoredBenchmark:
    """The scores of one benchmark, and how they are shown.

    Attributes:
        title: unique in a table.
        scores: rows of ``scores.parquet``.
        columns: ("SPLIT=VALUE", title) of the columns before the overall score, such as ("duration=short", "Short").
        mean_over: the split over whose values the overall score is a mean (the tasks of MLVU and MVBench); None for the
            mean over questions.
        n_questions: the number of questions in the whole benchmark; None if it has no fixed number.
        made_of: what else the scores were made with, such as frames and protocol, by name.
        names: the names of user methods, by import path.
        weights: the weights of the values of ``mean_over``; questions whose value has no weight do not count. {} gives
            all values the same weight.
        per_question: False if a server or task computed one number for each arm, which then stands in every row.
    """

    title: str
    scores: pa.Table
    columns: Sequence[tuple[str, str]] = ()
    mean_over: str | None = None
    n_questions: int | None = None
    made_of: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    per_question: bool = True

    def average(self, matrix: ScoreMatrix) -> QuestionPartition:
        """Return the parts over which the overall score is a mean.

        Raises:
            UsageError: a question lacks the split ``mean_over``, as in scores of an older version.
        """
        try:
            return matrix.whole() if self.mean_over is None else matrix.by(self.mean_over, self.weights)
        except ValueError as error:
            raise UsageError(f"{self.title}: {error}") from error


def make_results_table(
    title: str,
    benchmarks: Sequence[ScoredBenchmark],
    *,
    methods: Sequence[str] | None = None,
    reference: str | None = None,
    ours: str | None = None,
    draws: int = 10_000,
    seed: int = 0,
    notes: Sequence[str] = (),
) -> ResultsTable:
    """Compare methods on one or several benchmarks: scores, differences with intervals, and averages.

    A row is a method at one retention ratio and kind of positions, averaged over its seeds. The first row is full
    retention; the others are ordered by descending ratio, positions and method. Rel. is the mean over the benchmarks of
    a row's score in percent of that of full retention. The mean and Rel. are computed from printed scores, as in the
    paper, but intervals from unrounded ones. The mean has marks, but no difference to another row.

    Args:
        methods: the methods to show, in order; a name without a seed or positions selects all of them, and a name that
            matches nothing is ignored. None shows all methods in order of first appearance.
        reference: the method that each row is compared with, at the row's own ratio. None is gstep if it has rows, or
            else the first method; with a single method, it is full retention.
        ours: the method that LaTeX marks as ours.
        draws: the number of bootstrap draws of whole videos, which depend only on ``seed`` and a benchmark's title.
        notes: sentences to print below the table, before those of the benchmarks.

    Raises:
        ValueError: there is no benchmark, two have the same title, the arms of one were not scored on the same
            questions, once each, or a column is not SPLIT=VALUE.
        UsageError: no row has the method ``reference`` or ``ours``, or a question lacks the split that its benchmark
            averages over.
    """
    titles = [benchmark.title for benchmark in benchmarks]
    if not titles or len(set(titles)) < len(titles):
        raise ValueError(f"benchmarks need different titles, since each has bootstrap draws of its own: {titles}")
    arms, groups = group_arms(benchmarks, methods)
    reference = _choose_reference(groups, reference)
    ours = None if ours is None else _find_method(groups, ours, "ours")
    pairs = {row: _find_reference_row(groups, row, reference) for row in range(len(groups))}
    against = {row: other for row, other in pairs.items() if other is not None}
    matrices = [make_score_matrix(benchmark.scores, arms) for benchmark in benchmarks]
    columns = list[Column]()
    cells = list[list[Cell | None]]()
    overall = list[Estimate]()
    arm_estimates = list[Estimate]()
    last = list[int]()  # the index of each benchmark's overall score among the columns
    for benchmark, matrix in zip(benchmarks, matrices, strict=True):
        parts = _list_columns(benchmark, matrix)
        parts_by_column = [subset for *_, subset in parts]
        measured = estimate_rows(benchmark, matrix, groups, parts_by_column, draws, seed)
        measured_arms = compute_estimates(
            matrix.scores, matrix.clusters, parts_by_column, 0, np.random.default_rng(seed)
        )
        for (key, name, subset), numbers, arm_numbers in zip(parts, measured, measured_arms, strict=True):
            columns.append(
                Column(
                    key=key if len(benchmarks) == 1 else f"{benchmark.title}: {key}",
                    title=name,
                    benchmark=benchmark.title,
                    n_questions=int(np.sum(subset.numbers != NO_PART)),
                    n_whole=benchmark.n_questions if key == OVERALL else None,
                    n_videos=numbers.n_videos,
                    made_of=benchmark.made_of,
                )
            )
            percentages = (100 * numbers.value).tolist()
            cells.append(_make_cells(groups, against, percentages, numbers, arm_numbers.value, numbers.n_videos))
        last.append(len(columns) - 1)
        overall.append(measured[-1])
        arm_estimates.append(measured_arms[-1])
    by_row = list(zip(*cells, strict=True))
    # The paper's tables are means of printed scores.
    scores = [[math.nan if (cell := row[c]) is None else float(cell.printed) for c in last] for row in by_row]
    means = [math.fsum(row) / len(row) for row in scores]
    mean = _make_cells(groups, {}, means, average_estimates(overall), average_estimates(arm_estimates).value, 0)
    rels = [
        100
        * math.fsum(score / (full or math.nan) for score, full in zip(row, scores[FULL_ROW], strict=True))
        / len(row)
        for row in scores
    ]
    rel_estimate = compute_relative_scores(overall, FULL_ROW)
    n_videos = sum(estimate.n_videos for estimate in overall)
    rel = _make_cells(
        groups, against, rels, rel_estimate, compute_relative_scores(arm_estimates, FULL_ROW).value, n_videos, "%"
    )
    names = {path: name for benchmark in benchmarks for path, name in benchmark.names.items()}
    rows = [
        Row(
            **vars(group),
            title=format_row_title(group, names),
            cells=by_row[i],
            mean=mean[i],
            rel=rel[i],
            tally=sum((tally for matrix in matrices for tally in matrix.tallies[group.arms]), AnswerCounts()),
        )
        for i, group in enumerate(groups)
    ]
    return ResultsTable(
        title=title,
        columns=columns,
        rows=rows,
        reference=reference,
        ours=ours,
        draws=draws,
        seed=seed,
        notes=[*notes, *(f"{benchmark.title}: {note}" for benchmark in benchmarks for note in benchmark.notes)],
    )


def estimate_rows(
    benchmark: ScoredBenchmark,
    matrix: ScoreMatrix,
    groups: Sequence[ArmGroup],
    parts: Sequence[QuestionPartition],
    draws: int,
    seed: int,
) -> list[Estimate]:
    """Return an estimate for each column of one benchmark; its values are those of the rows, each a mean over seeds.

    The bootstrap draws depend only on ``seed`` and the benchmark's title.
    """
    generator = np.random.default_rng([seed, crc32(benchmark.title.encode())])
    mean_AQ = np.stack([matrix.scores[group.arms].mean(0) for group in groups])
    return compute_estimates(mean_AQ, matrix.clusters, parts, draws, generator)


def mark_rows(numbers: Estimate, shown: Mapping[int, Cell | None]) -> dict[int, Mark]:
    """Return the marks of the best row of a block and of the next best, or {} if there is no clear best row.

    The best row must be the only one with the largest printed number, and the interval of its difference to the next
    best row, or to each of several that tie, must exist and be above 0 as printed.

    Args:
        numbers: the unrounded numbers of all rows, with their draws.
        shown: the cells of the block, by row.
    """
    value = {row: float(cell.printed.rstrip("%")) for row, cell in shown.items() if cell}
    ranked = sorted(set(value.values()), reverse=True)
    if len(ranked) < 2:
        return {}
    best, second = ([row for row in value if value[row] == number] for number in ranked[:2])
    if len(best) > 1 or not all(100 * numbers.difference(best[0], row).low >= PRINTED_0 for row in second):
        return {}
    return {best[0]: "best", **dict.fromkeys(second, "second")}


def group_arms(
    benchmarks: Sequence[ScoredBenchmark], methods: Sequence[str] | None
) -> tuple[list[MethodAtRatio], list[ArmGroup]]:
    """Return the selected arms, with full retention as the first, and the rows that they form.

    Full retention is there whether it was run or not. The other rows follow by descending ratio, then by positions (the
    default first, others by name), then in the order of ``methods`` or, if that is None, of first appearance. The arms
    of a row, one for each seed, are neighbors; a row with one seed keeps it in its name.

    Args:
        methods: names as a user writes them, each for all seeds or positions that it does not name; a name without an
            arm is ignored. None selects all arms.
    """
    seeds: dict[tuple[float, str, str], dict[int, MethodAtRatio]] = {}
    for arm in (arm for benchmark in benchmarks for arm in list_arms(benchmark.scores) if arm != ORIGINAL):
        label, _, positions = arm.method.partition(POSITIONS)
        method, seed = split_seed(label)
        if methods is None or any(is_named(name, arm.method) for name in methods):
            seeds.setdefault((-arm.ratio, positions, method), {})[seed or 0] = arm
    order = (
        [method for *_, method in seeds]
        if methods is None
        else [split_seed(name.partition(POSITIONS)[0])[0] for name in methods]
    )
    arms = [ORIGINAL]
    groups = [ArmGroup(ORIGINAL.method, "", ORIGINAL.ratio, [0], slice(1))]
    for minus, positions, method in sorted(seeds, key=lambda row: (*row[:2], order.index(row[2]))):
        members = dict(sorted(seeds[minus, positions, method].items()))
        label = method if len(members) > 1 else next(iter(members.values())).method.partition(POSITIONS)[0]
        groups.append(ArmGroup(label, positions, -minus, [*members], slice(len(arms), len(arms) + len(members))))
        arms += members.values()
    return arms, groups


def _choose_reference(groups: Sequence[ArmGroup], name: str | None) -> str:
    """Return the method to compare rows with: ``name`` if given, otherwise gstep if it has rows, or the first method.

    With fewer than two methods, the default is full retention.
    """
    if name is not None:
        return _find_method(groups, name, "reference")
    methods = list(dict.fromkeys(group.method for group in groups[FULL_ROW + 1 :]))
    return ORIGINAL.method if len(methods) < 2 else "gstep" if "gstep" in methods else methods[0]


def _find_method(groups: Sequence[ArmGroup], name: str, option: str) -> str:
    """Return the first method of the rows that a user's ``name`` selects, or raise UsageError about ``--option``."""
    methods = list(dict.fromkeys(group.method for group in groups))
    for method in methods:
        if is_named(name, method):
            return method
    raise UsageError(f"--{option} {name}: no row of the table; there are {', '.join(methods)}")


def _find_reference_row(groups: Sequence[ArmGroup], row: int, reference: str) -> int | None:
    """Return the row that ``row`` is compared with, or None.

    This is the reference's row with the same ratio and positions. If the reference has only one row at this ratio, that
    row serves for all positions. Full retention and the rows of the reference itself are compared with none. If full
    retention is the reference, every other row is compared with it.
    """
    if reference == ORIGINAL.method or row == FULL_ROW:
        return None if row == FULL_ROW else FULL_ROW
    candidates = [i for i, group in enumerate(groups) if group.method == reference and group.ratio == groups[row].ratio]
    if row in candidates:
        return None
    exact = [i for i in candidates if groups[i].positions == groups[row].positions]
    return next(iter(exact), candidates[0] if len(candidates) == 1 else None)


def format_row_title(group: ArmGroup, names: Mapping[str, str]) -> str:
    """Return the printed title of a row: the method, the number of seeds if several, and positions unless default.

    Args:
        names: the names of user methods, by import path.
    """
    if group.method == ORIGINAL.method:
        return "Full retention"
    path, *parameters = group.method.split(",")
    title = format_method_title(",".join([names.get(path, path), *parameters]))
    title += f", {len(group.seeds)} seeds" if len(group.seeds) > 1 else ""
    return f"{title}, {group.positions} positions" if group.positions else title


def _list_columns(benchmark: ScoredBenchmark, matrix: ScoreMatrix) -> list[tuple[str, str, QuestionPartition]]:
    """Return (key, title, parts) of each column of a benchmark, the overall score last.

    The last title is "Overall", or that of the benchmark if there is no other column.

    Raises:
        ValueError: a column is not SPLIT=VALUE.
        UsageError: a question lacks the split that the benchmark averages over.
    """
    parts = []
    for key, title in benchmark.columns:
        name, is_split, value = key.partition("=")
        if not is_split:
            raise ValueError(f"column {key!r} of {benchmark.title} is no SPLIT=VALUE, such as duration=short")
        parts.append((key, title, matrix.split(name, value)))
    return [*parts, (OVERALL, "Overall" if benchmark.columns else benchmark.title, benchmark.average(matrix))]


def _make_cells(
    groups: Sequence[ArmGroup],
    against: Mapping[int, int],
    percentages: Sequence[float],
    numbers: Estimate,
    value_A: Floats,
    n_videos: int,
    unit: str = "",
) -> list[Cell | None]:
    """Return the cells of a column, one per row; None where ``percentages`` is nan.

    Marks are set within each block of equal ratio and positions; full retention gets none.

    Args:
        against: the row that each row is compared with, if any.
        percentages: the numbers to print, one per row.
        numbers: the unrounded scores of the rows as shares, with their draws, for marks and differences.
        value_A: the score of each arm as a share, for the sample standard deviation over the seeds of a row.
        unit: appended to each printed number.
    """
    cells = [
        None if math.isnan(percentage) else Cell(score=percentage, printed=f"{format_score(percentage)}{unit}")
        for percentage in percentages
    ]
    marks: dict[int, Mark] = {}
    for _, block in groupby(range(FULL_ROW + 1, len(groups)), key=lambda i: (groups[i].ratio, groups[i].positions)):
        marks |= mark_rows(numbers, {i: cells[i] for i in block})
    for i, (group, cell) in enumerate(zip(groups, cells, strict=True)):
        if cell is not None:
            spread = 100 * float(np.std(value_A[group.arms], ddof=1)) if len(group.seeds) > 1 else None
            difference = _describe_difference(numbers, i, against[i], n_videos) if i in against else {}
            cells[i] = replace(cell, mark=marks.get(i, ""), spread=spread, **difference)
    return cells


def _describe_difference(numbers: Estimate, row: int, reference: int, n_videos: int) -> dict[str, Any]:
    """Return the fields of a Cell for a row's difference to a reference row, in points; {} if either has no score.

    Without an interval, the only field is ``difference``. ``videos_needed`` is a number only if the difference is
    unclear and not printed as 0.0.
    """
    difference = numbers.difference(row, reference)
    if math.isnan(difference.value):
        return {}
    points, low, high = (100 * share for share in difference)
    if math.isnan(difference.low):
        return {"difference": points}
    unclear = low < PRINTED_0 and high > -PRINTED_0
    needed = count_videos_needed(difference, n_videos) if unclear and abs(points) >= PRINTED_0 else None
    return {"difference": points, "low": low, "high": high, "unclear": unclear, "videos_needed": needed}


def format_method_title(method: str) -> str:
    """Return a method as the paper writes it, such as "FastV, K=3" for "fastv,K=3"; unknown names stay unchanged."""
    name, *parameters = method.split(",")
    return ", ".join([_TITLES.get(name, name), *parameters])
