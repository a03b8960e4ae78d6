"""The table of results, rows methods by ratios and positions, columns benchmarks and Rel.: Markdown, LaTeX and JSON.

A number stands beside its difference to full retention with the 95 % interval of that difference. Tables 1, 2 and 4 of
the GSTEP paper are such tables of several benchmarks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_HALF_UP, Decimal
from itertools import groupby
from typing import Literal
from zlib import crc32

import numpy as np
import pyarrow as pa

from pipeline.evaluate.statistics import (
    FEWEST_VIDEOS,
    ORIGINAL,
    OUTSIDE,
    SIGNIFICANT,
    AnswerCounts,
    Estimate,
    Floats,
    Ints,
    MethodAtRatio,
    ScoreMatrix,
    arms_of,
    estimates,
    holm,
    relative,
    score_matrix,
)
from pipeline.rows import JsonObject

Mark = Literal["best", "second", ""]
OVERALL = "overall"  # key of a benchmark's last column
NOISE = "≈"
FEW = "†"
NONE = "–"
_COUNTS = ("Tokens", "Kept", "No option", "Cut", "Weak", "Failed")  # the last columns in Markdown
_FULL = 0  # index of the arm of full retention
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
    """

    title: str
    scores: pa.Table
    columns: Sequence[tuple[str, str]] = ()
    mean_over: str | None = None
    n_questions: int | None = None
    made_of: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


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
    """A number of the table, in percent, and its difference to full retention in points before rounding.

    Attributes:
        score: before rounding; of Rel. the mean of ratios of printed scores, as in the paper.
        printed: to one decimal; Rel. with its %.
        mark: "best" of its block and column, "second" the next distinct printed value; ties share it.
        right: questions that were answered right; None for a mean over parts and for Rel.
        difference: None in the row of full retention, and without that row.
        low: lower end of the difference's 95 % interval; None, like its upper end and p, where there is none.
        high: its upper end.
        p: two-sided, adjusted for the other methods of the block (Holm).
    """

    score: float
    printed: str
    mark: Mark = ""
    right: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None

    @property
    def noise(self) -> bool:
        """Whether the difference is within noise."""
        return self.p is not None and self.p >= SIGNIFICANT


@dataclass(frozen=True, kw_only=True)
class Row:
    """The results of one method at one ratio; counts are over all benchmarks.

    Attributes:
        method: with its parameters, without positions.
        positions: "" where they are the model family's own.
        cells: of each column; None where the method was not run.
        mean: of the printed overall scores; None where a benchmark is missing.
        rel: Rel.; None where a benchmark is missing, or its full retention is (or scores 0).
    """

    method: str
    positions: str
    ratio: float
    cells: Sequence[Cell | None]
    mean: Cell | None
    rel: Cell | None
    tally: AnswerCounts

    @property
    def title(self) -> str:
        """The method's name as printed, with its positions where they are not the model family's."""
        name = "Full retention" if self.method == ORIGINAL.method else method_title(self.method)
        return f"{name}, {self.positions} positions" if self.positions else name


@dataclass(frozen=True, kw_only=True)
class ResultsTable:
    """The table of results: ``rows`` begin with full retention; ``draws`` and ``seed`` are of the intervals."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
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
        """Sentences that belong below the table: few videos, cut and weakly read replies, then its notes."""
        lines, few = list[str](), [column.text for column in self.columns if column.few]
        if few:
            lines.append(f"{FEW} Fewer than {FEWEST_VIDEOS} videos ({', '.join(few)}): neither interval nor p.")
        tally = sum((row.tally for row in self.rows), AnswerCounts())
        of = f"of {tally.n_replies:,} replies were"
        if tally.n_cut:
            lines.append(f"Cut: {tally.n_cut:,} {of} cut by max_new_tokens; the rule read an unfinished reply.")
        if tally.n_weak:
            lines.append(f"Weak: {tally.n_weak:,} {of} read by chance: drawn, or by a letter inside a word.")
        return [*lines, *self.notes]

    def as_record(self) -> JsonObject:
        """Return the whole table, JSON-able."""
        return {
            "title": self.title,
            "columns": [
                {name: value for name, value in vars(column).items() if name != "made_of"} | {**column.made_of}
                for column in self.columns
            ],
            "rows": [self._record(row) for row in self.rows],
            "draws": self.draws,
            "seed": self.seed,
            "notes": list(self.remarks),
        }

    def _record(self, row: Row) -> JsonObject:
        """Return a row, JSON-able: each number with its difference, interval and p."""
        cells = zip(self.columns, row.cells, strict=True)
        return {
            "method": row.method,
            "positions": row.positions or None,
            "retention_ratio": row.ratio,
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


def results_table(
    title: str,
    benchmarks: Sequence[ScoredBenchmark],
    *,
    methods: Sequence[str] | None = None,
    draws: int = 10_000,
    seed: int = 0,
    notes: Sequence[str] = (),
) -> ResultsTable:
    """Compute the table of results for one or several benchmarks.

    Args:
        title: what was pruned: the model.
        benchmarks: in the order of their columns.
        methods: in the order of rows, others are left out; None: all, in order of first appearance.
        draws: of whole videos. A benchmark's draws depend on the seed and its title alone.
        seed: of the draws.
        notes: sentences that belong below the table.

    Raises ValueError where two benchmarks share a title, or the scores of one are not paired (score_matrix).
    """
    titles = [benchmark.title for benchmark in benchmarks]
    if not titles or len(set(titles)) < len(titles):
        raise ValueError(f"benchmarks need different titles, for each is drawn on its own: {titles}")
    arms = [ORIGINAL, *_ordered(benchmarks, methods)]
    matrices = [score_matrix(benchmark.scores, arms) for benchmark in benchmarks]
    columns, cells, overall = list[Column](), list[list[Cell | None]](), list[Estimate]()
    for benchmark, matrix in zip(benchmarks, matrices, strict=True):
        parts = _parts(benchmark, matrix)
        generator = np.random.default_rng([seed, crc32(benchmark.title.encode())])
        measured = estimates(matrix.scores, matrix.clusters, [part_Q for *_, part_Q in parts], draws, generator)
        for (key, name, part_Q), numbers in zip(parts, measured, strict=True):
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
            cells.append(_compared(arms, numbers, _scores(matrix.scores, part_Q, numbers)))
        overall.append(measured[-1])
    last = [c for c, column in enumerate(columns) if column.key.endswith(OVERALL)]
    by_arm = list(zip(*cells, strict=True))
    of_overall = [[row[c] for c in last] for row in by_arm]
    rel = _compared(arms, relative(overall, _FULL), [rel_of(row, of_overall[_FULL]) for row in of_overall])
    mean = _marked(arms, [_mean_of(row) for row in of_overall])
    tallies = [sum(of_arm, AnswerCounts()) for of_arm in zip(*(matrix.tallies for matrix in matrices), strict=True)]
    rows = []
    for a, arm in enumerate(arms):
        method, _, positions = arm.method.partition(_POSITIONS)
        row = Row(
            method=method,
            positions=positions,
            ratio=arm.ratio,
            cells=by_arm[a],
            mean=mean[a],
            rel=rel[a],
            tally=tallies[a],
        )
        rows.append(row)
    notes = [*notes, *(f"{benchmark.title}: {note}" for benchmark in benchmarks for note in benchmark.notes)]
    return ResultsTable(title=title, columns=columns, rows=rows, draws=draws, seed=seed, notes=notes)


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
    """Return the arms but full retention: by falling ratio, then by positions, then in the order of ``methods``."""
    found = dict.fromkeys(arm for benchmark in benchmarks for arm in arms_of(benchmark.scores) if arm != ORIGINAL)
    names = {arm: arm.method.partition(_POSITIONS) for arm in found}
    order = list(dict.fromkeys(name for name, *_ in names.values()) if methods is None else methods)
    kept = [arm for arm in found if names[arm][0] in order]
    return sorted(kept, key=lambda arm: (-arm.ratio, names[arm][2], order.index(names[arm][0])))


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


def _scores(scores_AQ: Floats, part_Q: Ints, numbers: Estimate) -> list[Cell | None]:
    """Return the printed percentage of each arm, None where it was not scored."""
    plain = not np.any(part_Q > 0)  # of a mean over parts a count of right answers says nothing
    right_A = scores_AQ[:, part_Q != OUTSIDE].sum(1).tolist()
    return [
        None
        if math.isnan(value)
        else Cell(score=100 * value, printed=printed(100 * value), right=right if plain else None)
        for value, right in zip(numbers.value.tolist(), right_A, strict=True)
    ]


def _mean_of(cells: Sequence[Cell | None]) -> Cell | None:
    """Return the plain mean of printed numbers, as the paper's Table 4 has it; None where one is missing."""
    values = [float(one.printed) for one in cells if one is not None]
    if len(values) < len(cells):
        return None
    mean = math.fsum(values) / len(values)
    return Cell(score=mean, printed=printed(mean))


def _same_block(arms: Sequence[MethodAtRatio]) -> list[list[int]]:
    """Return the numbers of the arms at the same ratio and positions, without full retention."""
    others = range(_FULL + 1, len(arms))  # in the order of _ordered
    found = groupby(others, key=lambda a: (arms[a].ratio, arms[a].method.partition(_POSITIONS)[2]))
    return [list(block) for _, block in found]


def _marked(arms: Sequence[MethodAtRatio], shown: Sequence[Cell | None]) -> list[Cell | None]:
    """Return a column's cells with their marks."""
    cells = list(shown)
    for block in _same_block(arms):
        for a, mark in zip(block, marks([shown[a] for a in block]), strict=True):
            cells[a] = (one := cells[a]) and replace(one, mark=mark)
    return cells


def _compared(arms: Sequence[MethodAtRatio], numbers: Estimate, shown: Sequence[Cell | None]) -> list[Cell | None]:
    """Return a column's cells with their marks and comparisons; the methods of a block are one family of tests."""
    cells = _marked(arms, shown)
    for block in _same_block(arms):
        found = [numbers.difference(a, _FULL) for a in block]
        for a, by, p in zip(block, found, holm([by.p for by in found]), strict=True):
            if (one := cells[a]) and not math.isnan(by.value):
                low, high = (None if math.isnan(end) else 100 * end for end in (by.low, by.high))
                known = None if math.isnan(p) else p
                cells[a] = replace(one, difference=100 * by.value, low=low, high=high, p=known)
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


def titled(row: Row) -> str:
    """Return a row's title, followed by the numbers of its failed, cut and weakly read answers if there are any."""
    counts = {"failed": row.tally.n_failed, "cut": row.tally.n_cut, "weak": row.tally.n_weak}
    told = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    return f"{row.title} ({told})" if told else row.title


def difference_text(cell: Cell, n_questions: int | None) -> str:
    """Return what stands beside a number: its difference to full retention with the interval, or n of N right.

    Args:
        n_questions: of the column, where its videos are too few for an interval.
    """
    if n_questions is not None and cell.right is not None:
        return f"{round(cell.right, 2):g} of {n_questions:,}"
    if cell.difference is None:
        return ""
    if cell.low is None or cell.high is None:
        return signed(cell.difference)
    return f"{signed(cell.difference)} [{signed(cell.low)}, {signed(cell.high)}]{f' {NOISE}' if cell.noise else ''}"


def signed(points: float) -> str:
    """Format points to one decimal with their sign, except what rounds to 0."""
    return f"{points:+.1f}" if abs(points) >= 0.05 else "0.0"


def percent(share: float | None) -> str:
    """Format a share in percent, a dash for None."""
    return NONE if share is None else f"{100 * share:.1f}%"


def legend(table: ResultsTable) -> str:
    """Return the sentences that explain the table."""
    return (
        "Bold: best of a block, underlined: second; ties share the mark. Beside a number: its difference to full "
        f"retention in points, with the 95 % interval of {table.draws:,} paired draws of whole videos (seed "
        f"{table.seed}); {NOISE} within noise (p is {SIGNIFICANT} or more after Holm's rule over the methods of the "
        f"block, which the intervals do not have). With fewer than {FEWEST_VIDEOS} videos: right answers of all. "
        "Rel.: mean over benchmarks of the score relative to full retention, from printed scores. Kept: share of the "
        "visual tokens, mean over answers. No option: replies that name none. Cut: replies that max_new_tokens ended. "
        "Weak: replies whose option is drawn at random, or is a letter inside a word. Failed answers count as wrong."
    )


def markdown(table: ResultsTable) -> str:
    """Return the table as GitHub Markdown."""
    width = len(table.titles)
    lines = [
        *table_head(["Method", *table.titles, *_COUNTS]),
        *(
            table_row([f"*{name}*", *map(escape_markdown, texts), *[""] * (width - len(texts) + len(_COUNTS))])
            for name, texts in table.made_of
        ),
        _markdown_row(table, table.original),
    ]
    for heading, rows in table.blocks:
        lines.append(table_row([f"*{escape_markdown(heading)}*", *[""] * (width + len(_COUNTS))]))
        lines += [_markdown_row(table, row) for row in rows]
    below = [legend(table), *table.remarks]
    return "\n\n".join([f"### {escape_markdown(table.title)}", "\n".join(lines), *map(escape_markdown, below)]) + "\n"


def _markdown_row(table: ResultsTable, row: Row) -> str:
    """Return a row of the Markdown table."""
    few: list[int | None] = [column.n_questions if column.few else None for column in table.columns]
    cells = []
    for cell, n_questions in zip(table.numbers(row), [*few, *[None] * 2][: len(table.titles)], strict=True):
        if cell is None:
            cells.append(NONE)
            continue
        number = {"best": f"**{cell.printed}**", "second": f"<ins>{cell.printed}</ins>", "": cell.printed}[cell.mark]
        cells.append(f"{number} {escape_markdown(difference_text(cell, n_questions))}".rstrip())
    tally = row.tally
    tokens = NONE if tally.tokens is None else f"{tally.tokens:,.0f}"
    counts = [NONE if n is None else f"{n:,}" for n in (tally.n_cut, tally.n_weak, tally.n_failed)]
    shares = (percent(tally.kept_share), percent(tally.unparsed_share))
    return table_row([escape_markdown(row.title), *cells, tokens, *shares, *counts])


def table_head(titles: Sequence[str]) -> Iterator[str]:
    """Yield the two lines that begin a Markdown table."""
    yield table_row([escape_markdown(title) for title in titles])
    yield "|---|" + "---:|" * (len(titles) - 1)


def table_row(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def escape_markdown(text: str) -> str:
    """Convert text to one line of Markdown that shows it literally."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", _one_line(text))


def _one_line(text: str) -> str:
    """Replace line breaks and repeated spaces by one space."""
    return re.sub(r"\s+", " ", text)


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    FEW: r"\dag{}",
    NONE: "--",
    "↓": r"$\downarrow$",
    "↑": r"$\uparrow$",
    "<": "$<$",
    ">": "$>$",
    **{sign: "\\" + sign for sign in "&%$#_{}"},
}


def escape_latex(text: str) -> str:
    """Convert text to one line of LaTeX that sets it literally."""
    return "".join(_LATEX.get(sign, sign) for sign in _one_line(text))


def latex(table: ResultsTable) -> str:
    """Return the scores as the paper's tabular; it needs the packages booktabs and multirow."""
    width = len(table.titles) + 1
    lines = [
        f"% {_one_line(table.title)}",
        r"% Needs booktabs and multirow.",
        rf"\begin{{tabular}}{{l {'c' * (width - 1)}}}",
        r"\toprule",
        *_latex_head(table),
    ]
    for heading, rows in [("Original Model (100%)", [table.original]), *table.blocks]:
        text = escape_latex(heading)
        lines += [r"\midrule", rf"\multicolumn{{{width}}}{{c}}{{\textit{{{text}}}}} \\"]
        for row in rows:
            title = escape_latex(titled(row))
            title = title.replace("GSTEP", _bold("GSTEP (Ours)"), 1) if row.method == "gstep" else title
            lines.append(" & ".join([title, *map(_latex_number, table.numbers(row))]) + r" \\")
    lines.append(r"\bottomrule")
    made_of = [f"{name}: {'; '.join(_by_column(table.columns, texts))}." for name, texts in table.made_of]
    below = rf"\multicolumn{{{width}}}{{p{{0.95\linewidth}}}}{{\footnotesize "
    lines += [rf"{below}{escape_latex(text)}}} \\" for text in (*made_of, *table.remarks)]
    return "\n".join([*lines, r"\end{tabular}"]) + "\n"


def _latex_head(table: ResultsTable) -> list[str]:
    """Return the LaTeX lines of column titles: two where columns of a benchmark are spanned by its title, else one."""
    rest = table.titles[len(table.columns) :]
    by_benchmark = groupby(table.columns, key=lambda column: column.benchmark)
    spans = [(name, [f"{one.title}{FEW if one.few else ''}" for one in columns]) for name, columns in by_benchmark]
    if all(len(titles) == 1 for _, titles in spans):
        flat = ["Method", *(title for _, titles in spans for title in titles), *rest]
        return [" & ".join(_bold(escape_latex(title)) for title in flat) + r" \\"]
    upper, lower, rules, start = [_two_rows("Method")], [""], [], 2
    for name, titles in spans:
        if len(titles) == 1:
            upper.append(_two_rows(titles[0]))
            lower.append("")
        else:
            upper.append(rf"\multicolumn{{{len(titles)}}}{{c}}{{{_bold(escape_latex(name))}}}")
            lower += [_bold(escape_latex(title)) for title in titles]
            rules.append(rf"\cmidrule(lr){{{start}-{start + len(titles) - 1}}}")
        start += len(titles)
    upper, lower = [*upper, *map(_two_rows, rest)], [*lower, *[""] * len(rest)]
    return [" & ".join(upper) + r" \\", " ".join(rules), " & ".join(lower) + r" \\"]


def _two_rows(title: str) -> str:
    """Return LaTeX of a column title that takes both lines."""
    return rf"\multirow{{2}}{{*}}{{{_bold(escape_latex(title))}}}"


def _latex_number(cell: Cell | None) -> str:
    """Return a number in LaTeX: best bold, second underlined."""
    if cell is None:
        return "--"
    text = escape_latex(cell.printed)
    return {"best": _bold(text), "second": rf"\underline{{{text}}}", "": text}[cell.mark]


def _bold(text: str) -> str:
    """Return LaTeX of bold text."""
    return rf"\textbf{{{text}}}"


def _by_column(columns: Sequence[Column], texts: Sequence[str]) -> list[str]:
    """Return each column's title with its text; the text alone, once, where all columns share it."""
    said = [(column.text, text) for column, text in zip(columns, texts, strict=True) if text]
    if len({text for _, text in said}) == 1 and len(said) > 1:
        return [said[0][1]]
    return [f"{title} {text}" for title, text in said]
