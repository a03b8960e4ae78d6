"""The results of pruning methods in the layout of the GSTEP paper's Tables 1 and 2, each number with its error.

Rows are full retention, then a block of methods for each retention ratio; columns the splits and the overall score of
each benchmark, and Rel. at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_HALF_UP, Decimal
from zlib import crc32

import numpy as np
import pyarrow as pa

from pipeline.evaluate.statistics.bootstrap import Difference, Estimate, draw_counts, estimate, relative
from pipeline.evaluate.statistics.errors import OUTSIDE, Ints, holm
from pipeline.evaluate.statistics.results import (
    OVERALL,
    SIGNIFICANT,
    Block,
    Cell,
    Column,
    Mark,
    ResultsTable,
    Row,
    Versus,
)
from pipeline.evaluate.statistics.score_matrix import GSTEP, ORIGINAL, Arm, ScoreMatrix, Tally, arms_of, score_matrix

_FULL = 0  # index of the arm of full retention


@dataclass(frozen=True)
class ScoredBenchmark:
    """The scores of a benchmark and how they are shown.

    Attributes:
        title: as printed.
        scores: rows of ``scores.parquet``.
        columns: splits to show, before the overall score.
        mean_over: a split whose values weigh the same in the overall score, however many questions each has (MLVU's and
            MVBench's tasks); None: all questions weigh the same.
        made_of: what else the scores were made of, by name, such as frames and protocol.
    """

    title: str
    scores: pa.Table
    columns: Sequence[Column] = ()
    mean_over: str | None = None
    made_of: Mapping[str, str] = field(default_factory=dict)


def results_table(
    title: str,
    benchmarks: Sequence[ScoredBenchmark],
    *,
    methods: Sequence[str] | None = None,
    draws: int = 10_000,
    seed: int = 0,
) -> ResultsTable:
    """Compute the table of results, with errors and comparisons, for one or several benchmarks.

    Args:
        title: what was pruned: the model.
        benchmarks: in the order of their columns.
        methods: in the order of rows, others are left out; None: all, in order of first appearance.
        draws: of whole clusters. A benchmark's draws depend on the seed and its title alone.
        seed: of the draws.

    Raises ValueError where two benchmarks share a title, or the scores of one are not paired (score_matrix).
    """
    titles = [benchmark.title for benchmark in benchmarks]
    if not titles or len(set(titles)) < len(titles):
        raise ValueError(f"benchmarks need different titles, for each is drawn on its own: {titles}")
    arms = [ORIGINAL, *_arms_by_block(benchmarks, methods)]
    matrices = [score_matrix(benchmark.scores, arms) for benchmark in benchmarks]
    measured = [
        one
        for benchmark, matrix in zip(benchmarks, matrices, strict=True)
        for one in _measure(benchmark, matrix, draws, seed)
    ]
    cells = [_compared(arms, numbers, _shown(numbers)) for _, numbers in measured]
    overall = [numbers for column, numbers in measured if column.key == OVERALL]
    rel = _compared(arms, relative(overall, _FULL), _shown_rel(overall))
    tallies = [sum(of_arm, Tally()) for of_arm in zip(*(matrix.tallies for matrix in matrices), strict=True)]
    rows = [
        Row(method=arm.method, ratio=arm.ratio, cells=of_arm, rel=of_rel, tally=tally)
        for arm, of_arm, of_rel, tally in zip(arms, zip(*cells, strict=True), rel, tallies, strict=True)
    ]
    return ResultsTable(
        title=title,
        columns=tuple(column for column, _ in measured),
        original=rows[_FULL],
        blocks=tuple(Block(ratio, tuple(rows[a] for a in block)) for ratio, block in _blocks(arms).items()),
        draws=draws,
        seed=seed,
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


def _arms_by_block(benchmarks: Sequence[ScoredBenchmark], methods: Sequence[str] | None) -> list[Arm]:
    """Return the arms of all benchmarks, by falling ratio, then in the order of ``methods``."""
    found = dict.fromkeys(arm for benchmark in benchmarks for arm in arms_of(benchmark.scores) if arm != ORIGINAL)
    order = list(dict.fromkeys(arm.method for arm in found) if methods is None else methods)
    return sorted((arm for arm in found if arm.method in order), key=lambda arm: (-arm.ratio, order.index(arm.method)))


def _blocks(arms: Sequence[Arm]) -> dict[float, list[int]]:
    """Return the numbers of the arms at each ratio, without full retention."""
    by_ratio: dict[float, list[int]] = {}
    for a, arm in enumerate(arms):
        if a != _FULL:
            by_ratio.setdefault(arm.ratio, []).append(a)
    return by_ratio


def _measure(
    benchmark: ScoredBenchmark, matrix: ScoreMatrix, draws: int, seed: int
) -> Iterator[tuple[Column, Estimate]]:
    """Estimate each column of a benchmark with the benchmark's own draws."""
    generator = np.random.default_rng([seed, crc32(benchmark.title.encode())])
    counts_RG = draw_counts(matrix.n_clusters, draws, generator)
    for column, part_Q in _columns(benchmark, matrix):
        inside_Q = part_Q != OUTSIDE
        filled_in = replace(
            column,
            benchmark=benchmark.title,
            n_questions=int(inside_Q.sum()),
            n_clusters=len(np.unique(matrix.clusters[inside_Q])),
            made_of=benchmark.made_of,
        )
        yield filled_in, estimate(matrix.scores, matrix.clusters, part_Q, counts_RG)


def _columns(benchmark: ScoredBenchmark, matrix: ScoreMatrix) -> Iterator[tuple[Column, Ints]]:
    """Yield each column of a benchmark with the part of each question, the overall score last."""
    for column in benchmark.columns:
        name, is_split, value = column.key.partition("=")
        if not is_split:
            raise ValueError(f"column {column.key!r} of {benchmark.title} is no SPLIT=VALUE, such as duration=short")
        yield column, matrix.split(name, value)
    overall = Column(OVERALL, "Overall" if benchmark.columns else benchmark.title)
    yield overall, matrix.whole() if benchmark.mean_over is None else matrix.by(benchmark.mean_over)


def _shown(numbers: Estimate) -> list[Cell | None]:
    """Return the printed percentage of each arm, None where it was not scored."""
    return [None if math.isnan(v) else Cell(score=100 * v, printed=printed(100 * v)) for v in numbers.value.tolist()]


def _shown_rel(overall: Sequence[Estimate]) -> list[Cell | None]:
    """Return the printed Rel. of each arm."""
    shown_A = list(zip(*(_shown(numbers) for numbers in overall), strict=True))
    return [rel_of(shown, shown_A[_FULL]) for shown in shown_A]


def _compared(arms: Sequence[Arm], numbers: Estimate, shown: Sequence[Cell | None]) -> list[Cell | None]:
    """Return a column's shown cells with their marks, intervals and comparisons."""
    full, gstep, mark = dict[int, Versus](), dict[int, Versus](), dict[int, Mark]()
    for block in _blocks(arms).values():
        full |= _versus(numbers, block, _FULL)
        for ours in (a for a in block if arms[a].method == GSTEP):
            gstep |= _versus(numbers, [a for a in block if a != ours], ours)
        mark |= zip(block, marks([shown[a] for a in block]), strict=True)
    cells: list[Cell | None] = []
    for a, one in enumerate(shown):
        low, high = map(_points, numbers.interval(a))
        cells.append(
            one and replace(one, mark=mark.get(a, ""), low=low, high=high, full=full.get(a), gstep=gstep.get(a))
        )
    return cells


def _versus(numbers: Estimate, arms: Sequence[int], other: int) -> dict[int, Versus]:
    """Compare each arm with another; those arms are one family of tests."""
    differences = {a: numbers.difference(a, other) for a in arms}
    adjusted = holm([difference.p for difference in differences.values()])
    return {
        a: _in_points(difference, p_holm)
        for (a, difference), p_holm in zip(differences.items(), adjusted, strict=True)
        if not math.isnan(difference.value)
    }


def _in_points(difference: Difference, p_holm: float) -> Versus:
    """Convert a difference of shares to percentage points, with its adjusted p."""
    known = not math.isnan(p_holm)
    noise = p_holm >= SIGNIFICANT if known else None
    return Versus(
        difference=100 * difference.value,
        low=_points(difference.low),
        high=_points(difference.high),
        error=_points(difference.error),
        p_holm=p_holm if known else None,
        noise=noise,
        enough=math.ceil(difference.enough) if noise and math.isfinite(difference.enough) else None,
    )


def _points(share: float) -> float | None:
    """Convert a share to percent, nan to None."""
    return None if math.isnan(share) else 100 * share
