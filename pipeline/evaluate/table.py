"""The table of results, rows methods by ratios and positions, columns benchmarks and Rel.

A number stands beside its difference to that of a reference method, with the 95 % interval of that difference. Several
seeds of a method are one row. Tables 1, 2 and 4 of the GSTEP paper are such tables of several benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_HALF_UP, Decimal
from itertools import groupby
from typing import Any, Literal, NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa

from pipeline.errors import UsageError
from pipeline.evaluate.statistics import (
    FEWEST_VIDEOS,
    ORIGINAL,
    OUTSIDE,
    AnswerCounts,
    Estimate,
    Floats,
    Ints,
    MethodAtRatio,
    ScoreMatrix,
    arms_of,
    estimates,
    is_named,
    relative,
    score_matrix,
    split_seed,
)
from pipeline.rows import JsonObject

Mark = Literal["best", "second", ""]
OVERALL = "overall"  # key of a benchmark's last column
UNCLEAR = "unclear"
FEW = "†"
NONE = "–"
_FULL = 0  # index of the row of full retention, and of its arm
_PRINTED_0 = 0.05  # smaller differences are printed as 0.0
_POSITIONS = ",positions="
_TITLES = {
    "fastv": "FastV",
    "fastvid": "FastVID",
    "cdpruner": "CDPruner",
    "visionzip": "VisionZip",
    "vidcom2": "VidCom2",
    "gstep": "GSTEP",
    "novelty": "Novelty",
    "random": "Random",
    "uniform": "Uniform",
    "topk": "Top-k",
    "fps": "FPS",
}


@dataclass(frozen=True)
class ScoredBenchmark:
    """The scores of a benchmark and how they are shown.

    Attributes:
        title: as printed.
        scores: rows of ``scores.parquet``.
        columns: (SPLIT=VALUE, title) of the parts to show before the overall score: ("duration=short", "Short").
        mean_over: a split whose values weigh the same in the overall score, however many questions each has (MLVU's and
            MVBench's tasks); None: all questions weigh the same.
        n_questions: of the whole benchmark; None where it has no fixed number.
        made_of: what else the scores were made of, by name, such as frames and protocol.
        notes: sentences about it that belong below the table.
        names: of methods from elsewhere, by import path.
    """

    title: str
    scores: pa.Table
    columns: Sequence[tuple[str, str]] = ()
    mean_over: str | None = None
    n_questions: int | None = None
    made_of: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of scores.

    Attributes:
        key: "SPLIT=VALUE" (``duration=short``), or "overall"; in a table of several benchmarks after "BENCHMARK: ".
        title: as printed.
        benchmark: title of its benchmark.
        n_questions: how many it is about.
        n_whole: how many it would be about with the whole benchmark; None where that is not known.
        n_videos: how many videos these questions are about.
        made_of: of its benchmark.
    """

    key: str
    title: str
    benchmark: str
    n_questions: int
    n_whole: int | None = None
    n_videos: int
    made_of: Mapping[str, str] = field(default_factory=dict)

    @property
    def few(self) -> bool:
        """Whether its videos are too few for an interval."""
        return self.n_videos < FEWEST_VIDEOS

    @property
    def text(self) -> str:
        """The whole title in one line."""
        return self.title if self.title == self.benchmark else f"{self.benchmark} {self.title}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A number of the table, in percent, and its difference to the reference in points before rounding.

    Attributes:
        score: before rounding; of Rel. the mean of ratios of printed scores, as in the paper.
        printed: to one decimal; Rel. with its %.
        mark: "best" of its block and column, "second" the next distinct printed value; ties share it.
        spread: standard deviation over the seeds whose mean the number is; None for a single seed.
        difference: None where the row is compared with no other.
        low: lower end of the difference's 95 % interval; None, like its upper end, where there is none.
        high: its upper end.
        unclear: whether that interval, as it is printed, holds 0; None without an interval.
    """

    score: float
    printed: str
    mark: Mark = ""
    spread: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    unclear: bool | None = None

    @property
    def spread_text(self) -> str:
        """The spread over seeds as it stands behind the number; "" for a single seed."""
        return "" if self.spread is None else f" ± {printed(self.spread)}"

    @property
    def difference_text(self) -> str:
        """What stands beside the number: its difference to the reference with the interval; "" without one."""
        if self.difference is None:
            return ""
        if self.low is None or self.high is None:
            return signed(self.difference)
        unclear = f" {UNCLEAR}" if self.unclear else ""
        return f"{signed(self.difference)} [{signed(self.low)}, {signed(self.high)}]{unclear}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The results of one method at one ratio; counts are over all benchmarks and seeds.

    Attributes:
        title: the method's name as printed, with its positions where they are not the model family's.
        method: with its parameters, without positions, and without the seed where it has several.
        positions: "" where they are the model family's own.
        seeds: whose mean the numbers are.
        cells: of each column; None where the method was not run.
        mean: of the printed overall scores; None where a benchmark is missing.
        rel: Rel.; None where a benchmark is missing, or its full retention is (or scores 0).
    """

    title: str
    method: str
    positions: str
    ratio: float
    seeds: Sequence[int]
    cells: Sequence[Cell | None]
    mean: Cell | None
    rel: Cell | None
    tally: AnswerCounts


@dataclass(frozen=True, kw_only=True)
class ResultsTable:
    """The table of results.

    Attributes:
        rows: full retention first.
        reference: the method of the rows that other rows are compared with.
        ours: the method that LaTeX shows as its author's own; None for none.
        draws, seed: of the intervals.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    reference: str
    ours: str | None
    draws: int
    seed: int
    notes: Sequence[str] = ()

    @property
    def original(self) -> Row:
        """The row of full retention."""
        return self.rows[_FULL]

    @property
    def blocks(self) -> list[tuple[str, list[Row]]]:
        """The other rows with a heading each: by falling ratio, then by positions."""
        found = groupby(self.rows[_FULL + 1 :], key=lambda row: (row.ratio, row.positions))
        return [(_heading(ratio, positions), list(rows)) for (ratio, positions), rows in found]

    @property
    def several(self) -> bool:
        """Whether the table is about several benchmarks, and has a column of means."""
        return len({column.benchmark for column in self.columns}) > 1

    def numbers(self, row: Row) -> list[Cell | None]:
        """Return all numbers of a row: each column's, the mean of several benchmarks, Rel."""
        return [*row.cells, *([row.mean] if self.several else []), row.rel]

    @property
    def titles(self) -> list[str]:
        """The titles of all numbers of a row; FEW marks the columns that have too few videos for an interval."""
        titles = [f"{one.text if self.several else one.title}{FEW if one.few else ''}" for one in self.columns]
        return [*titles, *(["Avg."] if self.several else []), "Rel."]

    @property
    def made_of(self) -> list[tuple[str, list[str]]]:
        """What each column's numbers were made of: (name, a text a column); questions as n of N."""
        rows = {"Questions": list(map(_asked, self.columns)), "Videos": [f"{one.n_videos:,}" for one in self.columns]}
        for name in dict.fromkeys(name for column in self.columns for name in column.made_of):
            rows[name] = [column.made_of.get(name, "") for column in self.columns]
        return list(rows.items())

    @property
    def remarks(self) -> list[str]:
        """Sentences that belong below the table: differences, few videos, cut and weakly read replies, its notes."""
        lines = list(self._about_differences())
        if any(column.few for column in self.columns):
            lines.append(f"{FEW} Fewer than {FEWEST_VIDEOS} videos: no interval.")
        tally = sum((row.tally for row in self.rows), AnswerCounts())
        of = f"of {tally.n_replies:,} replies were"
        if tally.n_cut:
            lines.append(f"Cut: {tally.n_cut:,} {of} cut by max_new_tokens; the rule read an unfinished reply.")
        if tally.n_weak:
            lines.append(f"Weak: {tally.n_weak:,} {of} read by chance: drawn, or by a letter inside a word.")
        return [*lines, *self.notes]

    def _about_differences(self) -> Iterator[str]:
        """Yield sentences about seeds and differences, as far as the table has any."""
        cells = [cell for row in self.rows for cell in self.numbers(row) if cell]
        if any(cell.spread is not None for cell in cells):
            yield "±: standard deviation over the seeds whose mean stands there; an interval is of videos alone."
        count = sum(cell.low is not None for cell in cells)
        if any(cell.difference is not None for cell in cells):
            title = next(row.title for row in self.rows if row.method == self.reference)
            drawn = f", with the 95 % interval of {self.draws:,} draws of whole videos (seed {self.seed})"
            yield f"Beside a number: its paired difference to {title} in points{drawn if count else ''}."
        if count:
            unclear = f"{UNCLEAR.capitalize()}: the interval holds 0. " if any(cell.unclear for cell in cells) else ""
            yield (
                f"{unclear}The table has {count:,} intervals, uncorrected: where no method differs, 1 in 20 leaves 0 "
                "out by chance."
            )

    def as_record(self) -> JsonObject:
        """Return the whole table, JSON-able."""
        return {
            "title": self.title,
            "columns": [
                {name: value for name, value in vars(column).items() if name != "made_of"} | {**column.made_of}
                for column in self.columns
            ],
            "rows": [self._record(row) for row in self.rows],
            "reference": self.reference,
            "draws": self.draws,
            "seed": self.seed,
            "notes": list(self.remarks),
        }

    def _record(self, row: Row) -> JsonObject:
        """Return a row, JSON-able: each number with its difference and interval."""
        cells = zip(self.columns, row.cells, strict=True)
        return {
            "method": row.method,
            "positions": row.positions or None,
            "retention_ratio": row.ratio,
            "seeds": list(row.seeds),
            "scores": {column.key: vars(cell) for column, cell in cells if cell is not None},
            "mean": None if row.mean is None else vars(row.mean),
            "rel": None if row.rel is None else vars(row.rel),
            "tokens": row.tally.tokens,
            "kept_share": row.tally.kept_share,
            "unparsed_share": row.tally.unparsed_share,
            "n_failed": row.tally.n_failed,
            "n_cut": row.tally.n_cut,
            "n_weak": row.tally.n_weak,
        }


class _Group(NamedTuple):
    """A row before its numbers: method, positions and ratio, and the numbers of its arms, one for each seed."""

    method: str
    positions: str
    ratio: float
    seeds: list[int]
    arms: list[int]


def results_table(
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
    """Compute the table of results for one or several benchmarks.

    Args:
        title: what was pruned: the model.
        benchmarks: in the order of their columns.
        methods: in the order of rows, others are left out; None: all, in order of first appearance.
        reference: the method that others are compared with; None: gstep, else the first, and full retention where there
            is one method alone.
        ours: the method that LaTeX marks as ours.
        draws: of whole videos. A benchmark's draws depend on the seed and its title alone.
        seed: of the draws.
        notes: sentences that belong below the table.

    Raises ValueError where two benchmarks share a title, or the scores of one are not paired (score_matrix); UsageError
    for a reference or ``ours`` that is no row.
    """
    titles = [benchmark.title for benchmark in benchmarks]
    if not titles or len(set(titles)) < len(titles):
        raise ValueError(f"benchmarks need different titles, for each is drawn on its own: {titles}")
    arms = [ORIGINAL, *_ordered(benchmarks, methods)]
    groups = _groups(arms)
    reference = _reference(groups, reference)
    ours = None if ours is None else _row_named(groups, ours, "ours")
    against = [_row_against(groups, row, reference) for row in range(len(groups))]
    matrices = [score_matrix(benchmark.scores, arms) for benchmark in benchmarks]
    columns, cells, overall, seeds = list[Column](), list[list[Cell | None]](), list[Estimate](), list[Estimate]()
    for benchmark, matrix in zip(benchmarks, matrices, strict=True):
        parts = _parts(benchmark, matrix)
        part_Qs = [part_Q for *_, part_Q in parts]
        generator = np.random.default_rng([seed, crc32(benchmark.title.encode())])
        mean_AQ = np.stack([matrix.scores[group.arms].mean(0) for group in groups])
        measured = estimates(mean_AQ, matrix.clusters, part_Qs, draws, generator)
        of_seeds = estimates(matrix.scores, matrix.clusters, part_Qs, 0, generator)
        for (key, name, part_Q), numbers, of_arms in zip(parts, measured, of_seeds, strict=True):
            columns.append(
                Column(
                    key=key if len(benchmarks) == 1 else f"{benchmark.title}: {key}",
                    title=name,
                    benchmark=benchmark.title,
                    n_questions=int(np.sum(part_Q != OUTSIDE)),
                    n_whole=benchmark.n_questions if key == OVERALL else None,
                    n_videos=numbers.n_videos,
                    made_of=benchmark.made_of,
                )
            )
            shown = _spread(groups, [_cell(100 * value) for value in numbers.value.tolist()], of_arms.value)
            cells.append(_compared(against, numbers, _marked(groups, shown)))
        overall.append(measured[-1])
        seeds.append(of_seeds[-1])
    last = [c for c, column in enumerate(columns) if column.key.endswith(OVERALL)]
    by_row = list(zip(*cells, strict=True))
    of_overall = [[row[c] for c in last] for row in by_row]
    rels = _spread(groups, [rel_of(row, of_overall[_FULL]) for row in of_overall], relative(seeds, _FULL).value)
    rel = _compared(against, relative(overall, _FULL), _marked(groups, rels))
    means = _spread(groups, [_mean_of(row) for row in of_overall], np.mean([one.value for one in seeds], axis=0))
    mean = _marked(groups, means)
    names = {path: name for benchmark in benchmarks for path, name in benchmark.names.items()}
    rows = [
        Row(
            title=_row_title(group, names),
            method=group.method,
            positions=group.positions,
            ratio=group.ratio,
            seeds=group.seeds,
            cells=by_row[i],
            mean=mean[i],
            rel=rel[i],
            tally=sum((matrix.tallies[a] for matrix in matrices for a in group.arms), AnswerCounts()),
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


def printed(percent: float) -> str:
    """Format a percentage to one decimal, halves upwards: 58.65 is 58.7 despite floating point."""
    return str(Decimal(repr(round(percent, 9))).quantize(Decimal("0.1"), ROUND_HALF_UP))


def rel_of(scores: Sequence[Cell | None], originals: Sequence[Cell | None]) -> Cell | None:
    """Compute Rel. by the paper's rule: the mean over benchmarks of printed score / printed full retention, in %.

    None where a number is missing or an original is 0.0.
    """
    ratios = []
    for score, original in zip(scores, originals, strict=True):
        if score is None or original is None or float(original.printed) == 0:
            return None
        ratios.append(float(score.printed) / float(original.printed))
    rel = 100 * math.fsum(ratios) / len(ratios)
    return Cell(score=rel, printed=f"{printed(rel)}%")


def marks(shown: Sequence[Cell | None]) -> list[Mark]:
    """Mark the best printed value of a column in a block, and the next distinct one."""
    value = [float(one.printed.rstrip("%")) if one else None for one in shown]
    ranked = sorted({number for number in value if number is not None}, reverse=True)
    mark: dict[float | None, Mark] = dict(zip(ranked, ("best", "second"), strict=False))
    return [mark.get(number, "") for number in value]


def _ordered(benchmarks: Sequence[ScoredBenchmark], methods: Sequence[str] | None) -> list[MethodAtRatio]:
    """Return the arms but full retention: by falling ratio, then positions, then in the order of ``methods``, by seed.

    A method without a seed stands for all of its seeds.
    """
    arms = dict.fromkeys(arm for benchmark in benchmarks for arm in arms_of(benchmark.scores) if arm != ORIGINAL)
    labels = {arm: arm.method.partition(_POSITIONS) for arm in arms}
    order = list(dict.fromkeys(split_seed(label)[0] for label, *_ in labels.values())) if methods is None else methods

    def place(arm: MethodAtRatio) -> int | None:
        return next((i for i, name in enumerate(order) if is_named(name, labels[arm][0])), None)

    kept = [
        (-arm.ratio, labels[arm][2], i, split_seed(arm.method)[1] or 0, arm)
        for arm in arms
        if (i := place(arm)) is not None
    ]
    return [arm for *_, arm in sorted(kept)]


def _groups(arms: Sequence[MethodAtRatio]) -> list[_Group]:
    """Return the rows of arms in the order of ``_ordered``: the seeds of a method are one row."""

    def row_of(a: int) -> tuple[float, str, str]:
        label, _, positions = arms[a].method.partition(_POSITIONS)
        return arms[a].ratio, positions, split_seed(label)[0]

    groups = []
    for (ratio, positions, name), numbers in groupby(range(len(arms)), key=row_of):
        members = list(numbers)
        label = name if len(members) > 1 else arms[members[0]].method.partition(_POSITIONS)[0]
        seeds = [split_seed(arms[a].method)[1] or 0 for a in members]
        groups.append(_Group(label, positions, ratio, seeds, members))
    return groups


def _reference(groups: Sequence[_Group], name: str | None) -> str:
    """Return the method of the rows that others are compared with. Raises UsageError where it has none."""
    if name is not None:
        return _row_named(groups, name, "reference")
    methods = list(dict.fromkeys(group.method for group in groups[_FULL + 1 :]))
    return ORIGINAL.method if len(methods) < 2 else "gstep" if "gstep" in methods else methods[0]


def _row_named(groups: Sequence[_Group], name: str, option: str) -> str:
    """Return the method of the rows that a user's ``name`` means. Raises UsageError where there is none."""
    methods = list(dict.fromkeys(group.method for group in groups))
    for method in methods:
        if is_named(name, method):
            return method
    raise UsageError(f"--{option} {name}: no row of the table; there are {', '.join(methods)}")


def _row_against(groups: Sequence[_Group], row: int, reference: str) -> int | None:
    """Return the row of the reference that a row is compared with, at its ratio and positions; None for no row.

    A method that prunes inside the model has one row, whatever the positions of others.
    """
    if reference == ORIGINAL.method or row == _FULL:
        return None if row == _FULL else _FULL
    same = [i for i, one in enumerate(groups) if one.method == reference and one.ratio == groups[row].ratio]
    if row in same:
        return None
    exact = [i for i in same if groups[i].positions == groups[row].positions]
    return next(iter(exact), same[0] if len(same) == 1 else None)


def _row_title(group: _Group, names: Mapping[str, str]) -> str:
    """Return a row's method as printed, with the number of its seeds, and its positions where they are not usual."""
    if group.method == ORIGINAL.method:
        return "Full retention"
    path, *parameters = group.method.split(",")
    title = method_title(",".join([names.get(path, path), *parameters]))
    title += f", {len(group.seeds)} seeds" if len(group.seeds) > 1 else ""
    return f"{title}, {group.positions} positions" if group.positions else title


def _parts(benchmark: ScoredBenchmark, matrix: ScoreMatrix) -> list[tuple[str, str, Ints]]:
    """Return (key, title, part of each question) of each column of a benchmark, the overall score last."""
    parts = []
    for key, title in benchmark.columns:
        name, is_split, value = key.partition("=")
        if not is_split:
            raise ValueError(f"column {key!r} of {benchmark.title} is no SPLIT=VALUE, such as duration=short")
        parts.append((key, title, matrix.split(name, value)))
    whole = matrix.whole() if benchmark.mean_over is None else matrix.by(benchmark.mean_over)
    return [*parts, (OVERALL, "Overall" if benchmark.columns else benchmark.title, whole)]


def _cell(score: float) -> Cell | None:
    """Return the cell of a percentage, None where it is nan: the row was not scored."""
    return None if math.isnan(score) else Cell(score=score, printed=printed(score))


def _spread(groups: Sequence[_Group], shown: Sequence[Cell | None], value_A: Floats) -> list[Cell | None]:
    """Return a column's cells with the spread of the seeds' numbers, given as shares for each arm."""
    return [
        replace(cell, spread=100 * float(np.std(value_A[group.arms], ddof=1))) if cell and len(group.arms) > 1 else cell
        for group, cell in zip(groups, shown, strict=True)
    ]


def _mean_of(cells: Sequence[Cell | None]) -> Cell | None:
    """Return the plain mean of printed numbers, as the paper's Table 4 has it; None where one is missing."""
    values = [float(one.printed) for one in cells if one is not None]
    if len(values) < len(cells):
        return None
    mean = math.fsum(values) / len(values)
    return Cell(score=mean, printed=printed(mean))


def _marked(groups: Sequence[_Group], shown: Sequence[Cell | None]) -> list[Cell | None]:
    """Return a column's cells with their marks in each block, rows of the same ratio and positions."""
    cells = list(shown)
    others = range(_FULL + 1, len(groups))
    for _, block in groupby(others, key=lambda i: (groups[i].ratio, groups[i].positions)):
        rows = list(block)
        for i, mark in zip(rows, marks([shown[i] for i in rows]), strict=True):
            cells[i] = (cell := cells[i]) and replace(cell, mark=mark)
    return cells


def _compared(against: Sequence[int | None], numbers: Estimate, shown: Sequence[Cell | None]) -> list[Cell | None]:
    """Return a column's cells with the difference of each row to the row that it is compared with."""
    cells = list(shown)
    for i, (cell, other) in enumerate(zip(shown, against, strict=True)):
        if cell is None or other is None or math.isnan((by := numbers.difference(i, other)).value):
            continue
        ends: dict[str, Any] = {}
        if not math.isnan(by.low):
            low, high = 100 * by.low, 100 * by.high
            ends = {"low": low, "high": high, "unclear": low < _PRINTED_0 and high > -_PRINTED_0}
        cells[i] = replace(cell, difference=100 * by.value, **ends)
    return cells


def method_title(method: str) -> str:
    """Return a method as the paper writes it: "fastv,K=3" is "FastV, K=3"; unknown names stay."""
    name, *parameters = method.split(",")
    return ", ".join([_TITLES.get(name, name), *parameters])


def _heading(ratio: float, positions: str) -> str:
    """Return the heading of a block: the pruning ratio, 1 - retention ratio."""
    return f"Pruning Ratio (↓ {100 * (1 - ratio):g}%)" + (f", {positions} positions" if positions else "")


def _asked(column: Column) -> str:
    """Return how many questions a column is about, "n of N" where the benchmark has more."""
    partly = column.n_whole is not None and column.n_whole != column.n_questions
    return f"{column.n_questions:,}" + (f" of {column.n_whole:,}" if partly else "")


def signed(points: float) -> str:
    """Format points to one decimal with their sign, except what rounds to 0."""
    return f"{points:+.1f}" if abs(points) >= _PRINTED_0 else "0.0"
