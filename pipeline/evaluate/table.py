"""The table of results: rows are methods at a ratio and positions, columns are benchmarks (or split values) and Rel."""

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
        key: "SPLIT=VALUE" (``duration=short``) or "overall", prefixed with "BENCHMARK: " in a table of several
            benchmarks.
        benchmark: the title of its benchmark.
        n_whole: the number of questions in the whole benchmark; None if unknown, and for a split value.
        made_of: what the benchmark's scores were made with, such as frames and protocol, by name.
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
        """True if the column has too few videos for intervals."""
        return self.n_videos < FEWEST_VIDEOS

    @property
    def text(self) -> str:
        """The full title: the benchmark and the column's own title, or one of them if they are equal."""
        return self.title if self.title == self.benchmark else f"{self.benchmark} {self.title}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A score in percent, and its difference to the reference in points, both before rounding.

    Attributes:
        score: for Rel., a mean of ratios of printed scores, as in the paper.
        printed: the score to one decimal; Rel. ends with "%".
        mark: "best" of its block and column if the interval of its difference to the next best excludes 0; the next
            best and its ties are then "second"; otherwise "".
        spread: the sample standard deviation over the seeds, in points; None for a single seed.
        difference: None if the row is not compared with another row.
        low, high: the ends of the difference's 95 % interval; None without an interval.
        unclear: whether the interval, as printed, contains 0; None without an interval.
        videos_needed: about how many videos would resolve an unclear difference, over all benchmarks together; None if
            the difference is clear, is printed as 0.0, or has no interval.
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
        """The spread over seeds as printed behind the score; "" for a single seed."""
        return "" if self.spread is None else f" ± {format_score(self.spread)}"

    @property
    def interval_text(self) -> str:
        """The difference to the reference with its interval, if any; "" without a difference."""
        return (
            ""
            if self.difference is None
            else f"{format_points(self.difference)} {format_interval(self.low, self.high)}".rstrip()
        )

    @property
    def unclear_text(self) -> str:
        """The word "unclear", with the number of videos needed if known; "" for other differences."""
        needed = "" if self.videos_needed is None else f" (about {self.videos_needed:,} videos)"
        return f"{UNCLEAR}{needed}" if self.unclear else ""

    @property
    def difference_text(self) -> str:
        """The text beside the score: the difference, its interval, and whether it is unclear."""
        return f"{self.interval_text} {self.unclear_text}".rstrip()


@dataclass(frozen=True)
class ArmGroup:
    """The arms of one row of the table: one method at one ratio and positions, with all its seeds.

    Attributes:
        method: the method with its parameters, without positions, and with its seed if there is only one.
        positions: the positions of the kept tokens; "" for the model family's default.
        arms: the indices of the row's arms, one per seed in order.
    """

    method: str
    positions: str
    ratio: float
    seeds: Sequence[int]
    arms: slice


@dataclass(frozen=True, kw_only=True)
class Row(ArmGroup):
    """The results of one method at one ratio; counts are summed over all benchmarks and seeds.

    Attributes:
        title: the printed name, with the number of seeds if several, and positions other than the default.
        cells: one per column; None if the method was not run there.
        mean: the mean of the printed overall scores; None if a benchmark is missing.
        rel: Rel., the mean over the benchmarks of the score in percent of that of full retention; None if a benchmark
            is missing, or full retention is missing or its printed score is 0 on one.
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
        reference: the method that other rows are compared with.
        ours: the method that LaTeX marks as ours; None for none.
        draws, seed: of the bootstrap behind the intervals.
        notes: sentences to print below the table, after its own remarks.
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
        """The other rows in blocks of equal ratio and positions; a block's heading has the pruning ratio in percent."""
        groups = groupby(self.rows[FULL_ROW + 1 :], key=lambda row: (row.ratio, row.positions))
        return [
            (f"Pruning Ratio (↓ {100 * (1 - ratio):g}%){f', {positions} positions' if positions else ''}", list(rows))
            for (ratio, positions), rows in groups
        ]

    @property
    def several(self) -> bool:
        """True if the table has several benchmarks, and therefore a column of means."""
        return len({column.benchmark for column in self.columns}) > 1

    def numbers(self, row: Row) -> list[Cell | None]:
        """Return all cells of a row: its columns, the mean if there are several benchmarks, and Rel."""
        return [*row.cells, *([row.mean] if self.several else []), row.rel]

    @property
    def titles(self) -> list[str]:
        """The titles of the cells that ``numbers`` returns; FEW is appended to columns with too few videos."""
        titles = [
            f"{column.text if self.several else column.title}{FEW if column.few else ''}" for column in self.columns
        ]
        return [*titles, *(["Avg."] if self.several else []), "Rel."]

    @property
    def made_of(self) -> list[tuple[str, list[str]]]:
        """What the scores were made with, as (name, one text per column); counts of questions and videos come first."""
        rows = {
            "Questions": list(map(_format_count, self.columns)),
            "Videos": [f"{column.n_videos:,}" for column in self.columns],
        }
        for name in dict.fromkeys(name for column in self.columns for name in column.made_of):
            rows[name] = [column.made_of.get(name, "") for column in self.columns]
        return list(rows.items())

    @property
    def remarks(self) -> list[str]:
        """Sentences to print below the table.

        They explain the differences, columns with too few videos, and cut and weakly read replies, as far as the table
        has any; then come the notes.
        """
        lines = list(self._explain_differences())
        if any(column.few for column in self.columns):
            lines.append(f"{FEW} Fewer than {FEWEST_VIDEOS} videos: no interval.")
        tally = sum((row.tally for row in self.rows), AnswerCounts())
        replies = f"of {tally.n_replies:,} replies were"
        if tally.n_cut:
            lines.append(f"Cut: {tally.n_cut:,} {replies} cut by max_new_tokens; the rule read an unfinished reply.")
        if tally.n_weak:
            lines.append(f"Weak: {tally.n_weak:,} {replies} read by chance: drawn, or by a letter inside a word.")
        return [*lines, *self.notes]

    def _explain_differences(self) -> Iterator[str]:
        """Yield sentences that explain the spread over seeds, the differences and the intervals that the table has."""
        cells = [cell for row in self.rows for cell in self.numbers(row) if cell]
        if any(cell.spread is not None for cell in cells):
            yield "±: standard deviation over the seeds whose mean is shown; intervals are over videos only."
        count = sum(cell.low is not None for cell in cells)
        if any(cell.difference is not None for cell in cells):
            title = next(row.title for row in self.rows if row.method == self.reference)
            drawn = f", with the 95 % interval of {self.draws:,} draws of whole videos (seed {self.seed})"
            yield f"Beside a number: its paired difference to {title} in points{drawn if count else ''}."
        if count:
            unclear = (
                f"{UNCLEAR.capitalize()}: the interval contains 0. " if any(cell.unclear for cell in cells) else ""
            )
            if any(cell.videos_needed is not None for cell in cells):
                of_rel = " For Rel., N counts the videos of all benchmarks." if self.several else ""
                unclear += (
                    "About N videos: N videos like these would resolve the difference if it stays as it is, an "
                    f"estimate: the number of videos x (half width of the interval / difference)², rounded up.{of_rel} "
                )
            yield (
                f"{unclear}The table has {count:,} intervals, uncorrected: where no method differs, 1 in 20 leaves 0 "
                "out by chance."
            )

    def as_record(self) -> JsonObject:
        """Return the table as a JSON-able record.

        "notes" are all ``remarks``, and the entries of a column's ``made_of`` are entries of the column. Neither
        ``ours`` nor the titles of rows are included.
        """
        return {
            "title": self.title,
            "columns": [
                {name: value for name, value in vars(column).items() if name != "made_of"} | {**column.made_of}
                for column in self.columns
            ],
            "rows": [self.make_row_record(row) for row in self.rows],
            "reference": self.reference,
            "draws": self.draws,
            "seed": self.seed,
            "notes": list(self.remarks),
        }

    def make_row_record(self, row: Row) -> dict[str, Any]:
        """Return a row as a JSON-able record: its scores with differences and intervals, and counts of its answers.

        Columns without a score are left out of "scores".
        """
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


def format_score(percent: float) -> str:
    """Format a percentage to one decimal; halves are rounded away from 0, so 58.65 becomes 58.7."""
    return str(Decimal(repr(round(percent, 9))).quantize(Decimal("0.1"), ROUND_HALF_UP))


def format_interval(low: float | None, high: float | None) -> str:
    """Format an interval in points as "[-1.2, +0.3]"; "" if an end is None."""
    return "" if low is None or high is None else f"[{format_points(low)}, {format_points(high)}]"


def _format_count(column: Column) -> str:
    """Return a column's number of questions, as "n of N" if the whole benchmark has another number."""
    partly = column.n_whole is not None and column.n_whole != column.n_questions
    return f"{column.n_questions:,}" + (f" of {column.n_whole:,}" if partly else "")


def format_points(points: float) -> str:
    """Format points to one decimal with their sign; points that round to 0 become "0.0"."""
    return f"{points:+.1f}" if abs(points) >= PRINTED_0 else "0.0"
