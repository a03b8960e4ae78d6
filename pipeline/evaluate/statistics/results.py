"""A table of results: its rows and columns, each number with its error. ``tables`` makes it, ``render`` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Mark = Literal["best", "second", ""]
SIGNIFICANT = 0.05  # a difference with a smaller adjusted p is significant
OVERALL = "overall"  # key of a benchmark's last column


@dataclass(frozen=True)
class Column:
    """A column of scores.

    Attributes:
        key: "SPLIT=VALUE" (``duration=short``), or "overall".
        title: as printed.
        benchmark: title of its benchmark; results_table fills it in.
    """

    key: str
    title: str
    benchmark: str = ""


@dataclass(frozen=True, kw_only=True)
class Versus:
    """The difference between a score and another arm's on the same questions, in percentage points before rounding.

    Attributes:
        difference: in points.
        low: lower end of its 95 % interval; None, like its upper end and what follows ``error``, with too few clusters
            (errors.FEWEST), and where all clusters have the same difference.
        high: its upper end.
        error: standard error, of whole clusters; 0 where all of them have the same difference; None with one cluster.
        p: two-sided.
        p_holm: p adjusted for the other methods of the block.
        noise: p_holm is 0.05 or more.
        enough: where it is noise: clusters with which a difference of this size would be found in 4 of 5 studies.
    """

    difference: float
    low: float | None = None
    high: float | None = None
    error: float | None = None
    p: float | None = None
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
        kept_share: visual tokens really kept, mean over answers of their share; None where unknown.
        unparsed_share: replies that named no option.
        n_failed: questions that ended as an error, and score 0.
    """

    method: str
    ratio: float
    cells: tuple[Cell | None, ...]
    rel: Cell | None
    kept_share: float | None
    unparsed_share: float | None
    n_failed: int


@dataclass(frozen=True)
class Block:
    """The methods at one retention ratio."""

    ratio: float
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Bootstrap:
    """The draws and seed of the intervals."""

    draws: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class ResultsTable:
    """The table of results.

    Attributes:
        columns: of all benchmarks; Rel. is not among them.
        n_questions: of each column.
        n_clusters: of each column: videos that are drawn together.
        made_of: of each column what else its numbers were made of, by name: frames, protocol.
        original: full retention.
        blocks: by falling ratio.
    """

    title: str
    columns: tuple[Column, ...]
    n_questions: tuple[int, ...]
    n_clusters: tuple[int, ...]
    made_of: tuple[Mapping[str, str], ...]
    original: Row
    blocks: tuple[Block, ...]
    bootstrap: Bootstrap
