"""Tables of results to read: GitHub Markdown with every error and count, and the paper's own LaTeX tabular."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pipeline.evaluate.statistics.bootstrap import FEW, FEWEST
from pipeline.evaluate.statistics.results import OVERALL, SIGNIFICANT, Block, Cell, Column, ResultsTable, Row, Versus
from pipeline.evaluate.statistics.sheets import (
    Group,
    Head,
    Number,
    Sheet,
    escape_markdown,
    sheet_latex,
    sheet_markdown,
    table_head,
    table_row,
)

NOISE = "≈"
FEW_MARK = "†"
WHOLE = "Questions of the whole benchmark"  # key of made_of, for columns that show a part of a benchmark
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


def method_title(method: str) -> str:
    """Return a method as the paper writes it: "fastv,K=3" is "FastV, K=3"; unknown names stay."""
    name, *parameters = method.split(",")
    return ", ".join([_TITLES.get(name, name), *parameters])


def markdown(table: ResultsTable) -> str:
    """Return the table as GitHub Markdown: scores, then differences with their errors, then counts of answers."""
    sections = [
        sheet_markdown(results_sheet(table)),
        "**Best** and <ins>second best</ins> of a block, ties share the mark. Rel.: the mean over benchmarks of the "
        "score relative to full retention, from printed scores.",
        "#### Difference to full retention",
        "\n".join(_differences(table, lambda cell: cell.full)),
    ]
    if table.compares_gstep:
        sections += [
            "#### Difference to GSTEP at the same ratio",
            "\n".join(_differences(table, lambda cell: cell.gstep)),
        ]
    sections += [_legend(table), "#### Answers", "\n".join(_answers(table))]
    return "\n\n".join(sections) + "\n"


def latex(table: ResultsTable) -> str:
    """Return the table as the paper's tabular, without errors."""
    return sheet_latex(results_sheet(table))


def results_sheet(table: ResultsTable, title: str = "", notes: Sequence[str] = ()) -> Sheet:
    """Return the scores in the paper's layout, with what they were made of; ``notes`` come last."""
    groups = [Group("Original Model (100%)", [(titled(table.title, table.original), _numbers(table.original))])]
    for block in table.blocks:
        rows = [(titled(method_title(row.method), row), _numbers(row)) for row in block.rows]
        groups.append(Group(f"Pruning Ratio (↓ {_pruned(block)})", rows))
    said = [*few_videos(table), *notes]
    if any(row.tally.n_failed for row in table.rows):
        said.append("Failed: answers that ended as an error, and count as wrong.")
    return Sheet(title or table.title, "Method", _heads(table), groups, _made_of(table), said)


def _heads(table: ResultsTable) -> list[Head]:
    """Return the titles of the columns, those with few videos marked."""
    return [*(Head(column.title + few_mark(column), column.over) for column in table.columns), Head("Rel.")]


def _made_of(table: ResultsTable) -> list[tuple[str, list[str]]]:
    """Return the rows of a table's footer, (title, a text a column): questions, videos, protocol, frames and so on."""
    asked = [
        f"{column.n_questions:,} of {column.made_of[WHOLE]}"
        if WHOLE in column.made_of and column.key == OVERALL
        else f"{column.n_questions:,}"
        for column in table.columns
    ]
    rows = {"Questions": asked, "Videos": [f"{column.n_clusters:,}" for column in table.columns]}
    for name in dict.fromkeys(name for column in table.columns for name in column.made_of if name != WHOLE):
        rows[name] = [column.made_of.get(name, "") for column in table.columns]
    return [(name, [*texts, ""]) for name, texts in rows.items()]


def titled(title: str, row: Row) -> str:
    """Return a row's title, followed by the number of its failed answers if there are any."""
    return f"{title} ({row.tally.n_failed:,} failed)" if row.tally.n_failed else title


def number_of(cell: Cell | None) -> Number | None:
    """Return a cell's printed number with its mark, or None."""
    return None if cell is None else Number(cell.printed, cell.mark)


def _numbers(row: Row) -> list[Number | None]:
    """Return the printed numbers of a row."""
    return [number_of(cell) for cell in row.all_cells]


def few_mark(column: Column) -> str:
    """Return the mark for the title of a column with few videos, "" where there are enough."""
    return FEW_MARK if 0 < column.n_clusters < FEW else ""


def _pruned(block: Block) -> str:
    """Format a block's pruning ratio, 1 - retention ratio."""
    return f"{100 * (1 - block.ratio):g}%"


def _differences(table: ResultsTable, versus: Callable[[Cell], Versus | None]) -> Iterator[str]:
    """Yield the Markdown lines of a table of differences, a row a method; ``versus`` picks the comparison."""
    yield from table_head(["Method", *(head.text for head in _heads(table))])
    for block in table.blocks:
        compared = [row for row in block.rows if any(cell and versus(cell) for cell in row.all_cells)]
        if compared:
            yield table_row([f"*Pruning ratio (↓ {_pruned(block)})*", *[""] * (len(table.columns) + 1)])
        for row in compared:
            cells = (_difference(versus(cell) if cell else None) for cell in row.all_cells)
            yield table_row([escape_markdown(method_title(row.method)), *cells])


def _answers(table: ResultsTable) -> Iterator[str]:
    """Yield the Markdown lines of the table of kept tokens, unread replies and failures."""
    yield from table_head(["Method", "Retention ratio", "Visual tokens kept", "Replies that name no option", "Failed"])
    for row in table.rows:
        title = "Original Model" if row is table.original else escape_markdown(method_title(row.method))
        shares = (_percent(row.tally.kept_share), _percent(row.tally.unparsed_share))
        yield table_row([title, f"{100 * row.ratio:g}%", *shares, f"{row.tally.n_failed:,}"])


def _legend(table: ResultsTable) -> str:
    """Return the sentence that explains the tables of differences."""
    drawn = f"{table.draws:,} paired draws of whole videos (seed {table.seed})"
    return (
        "Percentage points, from scores before rounding, on the same questions. In brackets the 95 % interval of "
        f"{drawn}. p is two-sided, and adjusted for the methods of the block (Holm), the interval is not. "
        f"{NOISE} within noise: p is 0.05 or more; with so many videos in all a difference of this size would be found "
        "in 4 of 5 studies. No spread: the difference is the same in every video, which shows nothing of its error."
    )


def few_videos(table: ResultsTable) -> list[str]:
    """Return a sentence about the columns with too few videos for draws of them, if there are some."""
    few = [
        f"{Head(column.title, column.over).text} {column.n_clusters:,}" for column in table.columns if few_mark(column)
    ]
    how = f"interval and p are Student's, with a cluster-robust error (CR2); fewer than {FEWEST}: none."
    return [f"{FEW_MARK} Fewer than {FEW} videos ({', '.join(few)}): {how}"] if few else []


def _difference(versus: Versus | None) -> str:
    """Format a difference with its interval, p and whether it is noise."""
    if versus is None:
        return "–"
    if versus.low is None or versus.high is None or versus.p_holm is None:
        return f"{signed(versus.difference)} ({'no spread' if versus.error == 0 else 'no interval'})"
    ends = f"[{signed(versus.low)}, {signed(versus.high)}]"
    enough = "" if versus.enough is None else f" ({versus.enough:,} videos)"
    return f"{signed(versus.difference)} {ends} {p_text(versus.p_holm)}{f' {NOISE}{enough}' if versus.noise else ''}"


def p_text(p: float) -> str:
    """Format an adjusted p so that a significant one never reads as 0.050."""
    if p < 0.001:
        return "p < 0.001"
    rounded = f"{p:.3f}"
    return f"p < {SIGNIFICANT}" if p < SIGNIFICANT <= float(rounded) else f"p {rounded}"


def signed(points: float) -> str:
    """Format points to one decimal with their sign, except what rounds to 0."""
    return f"{points:+.1f}" if abs(points) >= 0.05 else "0.0"


def _percent(share: float | None) -> str:
    """Format a share in percent, a dash for None."""
    return "–" if share is None else f"{100 * share:.1f}%"
