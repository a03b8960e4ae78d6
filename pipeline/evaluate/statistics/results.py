"""A table of results: its rows and columns, each number with its error. ``tables`` makes it, ``render`` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipeline.evaluate.statistics.score_matrix import Tally

Mark = Literal["best", "second", ""]
SIGNIFICANT = 0.05  # a difference with a smaller adjusted p is significant
OVERALL = "overall"  # key of a benchmark's last column


@dataclass(frozen=True)
class Column:
    """A column of scores.

    Attributes:
        key: "SPLIT=VALUE" (``duration=short``), or "overall".
        title: as printed.
        benchmark: title of its benchmark; results_table fills in this and all that follows.
        n_questions: how many it is about.
        n_clusters: how many videos they are about that are drawn together.
        made_of: what else its numbers were made of, by name: frames, protocol.
    """

    key: str
    title: str
    benchmark: str = ""
    n_questions: int = 0
    n_clusters: int = 0
    made_of: Mapping[str, str] = field(default_factory=dict)

    @property
    def over(self) -> str:
        """The title of its benchmark, "" where its own title is that."""
        return "" if self.title == self.benchmark else self.benchmark


@dataclass(frozen=True, kw_only=True)
class Versus:
    """The difference between a score and another arm's on the same questions, in percentage points before rounding.

    Attributes:
        difference: in points.
        low: lower end of its 95 % interval; None, like its upper end and what follows ``error``, with too few clusters
            (errors.FEWEST), and where all clusters have the same difference.
        high: its upper end.
        error: standard error, of whole clusters; 0 where all of them have the same difference; None with one cluster,
            in all or in each part.
        p_holm: two-sided p, adjusted for the other methods of the block.
        noise: p_holm is 0.05 or more.
        enough: where it is noise: clusters with which a difference of this size would be found in 4 of 5 studies.
    """

    difference: float
    low: float | None = None
    high: float | None = None
    error: float | None = None
    p_holm: float | None = None
    noise: bool | None = None
    enough: int | None = None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A number of the table, in percent.

    Attributes:
        score: before rounding; of Rel. the mean of ratios of printed scores, as in the paper.
        printed: to one decimal; Rel. with its %.
        mark: "best" of its block and column, "second" the next distinct printed value; ties share it.
        low: lower end of the score's 95 % interval (of Rel. from unrounded scores); None where there is none.
        high: its upper end.
        full: compared with full retention.
        gstep: compared with GSTEP at the same ratio.
    """

    score: float
    printed: str
    mark: Mark = ""
    low: float | None = None
    high: float | None = None
    full: Versus | None = None
    gstep: Versus | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """The results of one method at one ratio; counts are over all benchmarks.

    Attributes:
        cells: of each column; None where the method was not run.
        rel: Rel.; None where a benchmark is missing, or its full retention is (or scores 0).
    """

    method: str
    ratio: float
    cells: tuple[Cell | None, ...]
    rel: Cell | None
    tally: Tally

    @property
    def all_cells(self) -> tuple[Cell | None, ...]:
        """The cells of all columns, then of Rel."""
        return (*self.cells, self.rel)


@dataclass(frozen=True)
class Block:
    """The methods at one retention ratio."""

    ratio: float
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class ResultsTable:
    """The table of results.

    Attributes:
        columns: of all benchmarks; Rel. is not among them.
        original: full retention.
        blocks: by falling ratio.
        draws, seed: of the intervals.
    """

    title: str
    columns: tuple[Column, ...]
    original: Row
    blocks: tuple[Block, ...]
    draws: int
    seed: int

    @property
    def rows(self) -> list[Row]:
        """Full retention, then the rows of each block."""
        return [self.original, *(row for block in self.blocks for row in block.rows)]

    @property
    def compares_gstep(self) -> bool:
        """Whether a number is compared with GSTEP's."""
        return any(cell and cell.gstep for row in self.rows for cell in row.cells)
