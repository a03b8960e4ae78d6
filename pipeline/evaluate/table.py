"""The table of results, rows methods by ratios and positions, columns benchmarks and Rel.

A number stands beside its difference to that of a reference method, with the 95 % interval of that difference. Several
seeds of a method are one row. Tables 1, 2 and 4 of the GSTEP paper are such tables of several benchmarks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from itertools import groupby
from typing import Any, Literal

from pipeline.evaluate.statistics import FEWEST_VIDEOS, AnswerCounts
from pipeline.rows import JsonObject

Mark = Literal["best", "second", ""]
OVERALL = "overall"  # key of a benchmark's last column
UNCLEAR = "unclear"
FEW = "†"
NONE = "–"
FULL_ROW = 0  # index of the row of full retention, and of its arm
PRINTED_0 = 0.05  # smaller differences are printed as 0.0


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
        """True if its videos are too few for an interval."""
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
        mark: "best" of its block and column if the interval of its difference to the next best excludes 0; "second" for
            the next best then, and for its ties.
        spread: standard deviation over the seeds whose mean the number is; None for a single seed.
        difference: None where the row is compared with no other.
        low: lower end of the difference's 95 % interval; None, like its upper end, where there is none.
        high: its upper end.
        unclear: whether that interval, as it is printed, holds 0; None without an interval.
        videos_needed: about how many videos would resolve an unclear difference, all benchmarks together; None where it
            is clear or printed as 0.0, and without an interval.
    """

    score: float
    printed: str
    mark: Mark = ""
    spread: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    unclear: bool | None = None
    videos_needed: int | None = None

    @property
    def spread_text(self) -> str:
        """The spread over seeds as it stands behind the number; "" for a single seed."""
        return "" if self.spread is None else f" ± {printed(self.spread)}"

    @property
    def interval_text(self) -> str:
        """The difference to the reference with the interval; "" without a difference."""
        return "" if self.difference is None else f"{signed(self.difference)} {ends(self.low, self.high)}".rstrip()

    @property
    def unclear_text(self) -> str:
        """The word for an unclear difference, with the number of videos that would resolve it; "" where it is clear."""
        needed = "" if self.videos_needed is None else f" (about {self.videos_needed:,} videos)"
        return f"{UNCLEAR}{needed}" if self.unclear else ""

    @property
    def difference_text(self) -> str:
        """The text beside the number: its difference to the reference, and what is unclear of it."""
        return f"{self.interval_text} {self.unclear_text}".rstrip()


@dataclass(frozen=True)
class ArmGroup:
    """A row before its numbers.

    Attributes:
        method: with its parameters, without positions, and without the seed where it has several.
        positions: "" where they are the model family's own.
        seeds: whose mean the numbers are.
        arms: the place of its arms, one for each seed.
    """

    method: str
    positions: str
    ratio: float
    seeds: Sequence[int]
    arms: slice


@dataclass(frozen=True, kw_only=True)
class Row(ArmGroup):
    """The results of one method at one ratio; counts are over all benchmarks and seeds.

    Attributes:
        title: the method's name as printed, with its positions where they are not the model family's.
        cells: of each column; None where the method was not run.
        mean: of the printed overall scores; None where a benchmark is missing.
        rel: Rel.; None where a benchmark is missing, or its full retention is (or scores 0).
    """

    title: str
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
        return self.rows[FULL_ROW]

    @property
    def blocks(self) -> list[tuple[str, list[Row]]]:
        """The other rows with a heading each, the pruning ratio 1 - retention ratio: by its rise, then by positions."""
        groups = groupby(self.rows[FULL_ROW + 1 :], key=lambda row: (row.ratio, row.positions))
        return [
            (f"Pruning Ratio (↓ {100 * (1 - ratio):g}%){f', {positions} positions' if positions else ''}", list(rows))
            for (ratio, positions), rows in groups
        ]

    @property
    def several(self) -> bool:
        """True if the table is about several benchmarks, and has a column of means."""
        return len({column.benchmark for column in self.columns}) > 1

    def numbers(self, row: Row) -> list[Cell | None]:
        """Return all numbers of a row: each column's, the mean of several benchmarks, Rel."""
        return [*row.cells, *([row.mean] if self.several else []), row.rel]

    @property
    def titles(self) -> list[str]:
        """The titles of all numbers of a row; FEW marks the columns that have too few videos for an interval."""
        titles = [
            f"{column.text if self.several else column.title}{FEW if column.few else ''}" for column in self.columns
        ]
        return [*titles, *(["Avg."] if self.several else []), "Rel."]

    @property
    def made_of(self) -> list[tuple[str, list[str]]]:
        """The data behind each column's numbers: (name, a text a column); questions as n of N."""
        rows = {
            "Questions": list(map(_format_count, self.columns)),
            "Videos": [f"{column.n_videos:,}" for column in self.columns],
        }
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
            if any(cell.videos_needed is not None for cell in cells):
                of_rel = " Of Rel. it is of all benchmarks together." if self.several else ""
                unclear += (
                    "About N videos: so many videos like these would resolve the difference if it stays as it is, an "
                    f"estimate: the number of videos x (half width of the interval / difference)², rounded up.{of_rel} "
                )
            yield (
                f"{unclear}The table has {count:,} intervals, uncorrected: where no method differs, 1 in 20 leaves 0 "
                "out by chance."
            )

    def as_record(self) -> JsonObject:
        """Return the table, JSON-able: "notes" are all ``remarks``, and a column has its ``made_of`` entries too."""
        return {
            "title": self.title,
            "columns": [
                {name: value for name, value in vars(column).items() if name != "made_of"} | {**column.made_of}
                for column in self.columns
            ],
            "rows": [self.record_of(row) for row in self.rows],
            "reference": self.reference,
            "draws": self.draws,
            "seed": self.seed,
            "notes": list(self.remarks),
        }

    def record_of(self, row: Row) -> dict[str, Any]:
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


def printed(percent: float) -> str:
    """Format a percentage to one decimal, halves upwards: 58.65 is 58.7 despite floating point."""
    return str(Decimal(repr(round(percent, 9))).quantize(Decimal("0.1"), ROUND_HALF_UP))


def ends(low: float | None, high: float | None) -> str:
    """Format the ends of an interval in points; "" without an interval."""
    return "" if low is None or high is None else f"[{signed(low)}, {signed(high)}]"


def _format_count(column: Column) -> str:
    """Return the number of a column's questions, "n of N" if the benchmark has more."""
    partly = column.n_whole is not None and column.n_whole != column.n_questions
    return f"{column.n_questions:,}" + (f" of {column.n_whole:,}" if partly else "")


def signed(points: float) -> str:
    """Format points to one decimal with their sign; points that round to 0 have no sign."""
    return f"{points:+.1f}" if abs(points) >= PRINTED_0 else "0.0"
