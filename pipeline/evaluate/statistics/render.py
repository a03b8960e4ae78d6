"""Tables of results to read: GitHub Markdown with every error and count, and the paper's own LaTeX tabular."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from pipeline.evaluate.statistics.results import SIGNIFICANT, Block, Cell, Column, ResultsTable, Row, Versus

NOISE = "≈"
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
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: "\\" + sign for sign in "&%$#_{}"},
}


def method_title(method: str) -> str:
    """How the paper writes a method: "fastv,K=3" is "FastV, K=3"; names it does not have stay."""
    name, *parameters = method.split(",")
    return ", ".join([_TITLES.get(name, name), *parameters])


def markdown(table: ResultsTable) -> str:
    """The table as GitHub Markdown, with what its signs mean; then differences with their errors, then counts."""
    sections = [
        f"### {escape_markdown(table.title)}",
        "\n".join(_scores(table)),
        "**Best** and <ins>second best</ins> of a block, ties share the mark. Rel.: the mean over benchmarks of the "
        "score relative to full retention, from printed scores.",
        "#### Difference to full retention",
        "\n".join(_differences(table, lambda cell: cell.full)),
    ]
    if any(cell and cell.gstep for row in _rows(table) for cell in _all_cells(row)):
        sections += [
            "#### Difference to GSTEP at the same ratio",
            "\n".join(_differences(table, lambda cell: cell.gstep)),
        ]
    sections += [_legend(table), "#### Answers", "\n".join(_answers(table))]
    return "\n\n".join(sections) + "\n"


def latex(table: ResultsTable) -> str:
    """The table as the paper's tabular, without errors; it needs the packages booktabs and multirow."""
    n_columns = len(table.columns) + 2
    counts = (f"{heading} {n:,}" for heading, n in zip(_headings(table.columns), table.n_questions, strict=True))
    lines = [
        f"% Needs booktabs and multirow. Questions: {'; '.join(counts)}.",
        rf"\begin{{tabular}}{{l {'c' * (n_columns - 1)}}}",
        r"\toprule",
        *_latex_head(table.columns),
        r"\midrule",
        rf"\multicolumn{{{n_columns}}}{{c}}{{\textit{{Original Model (100\%)}}}} \\",
        _latex_row(escape_latex(table.title), table.original),
    ]
    for block in table.blocks:
        heading = rf"\textit{{Pruning Ratio ($\downarrow {escape_latex(_pruned(block))}$)}}"
        lines += [r"\midrule", rf"\multicolumn{{{n_columns}}}{{c}}{{{heading}}} \\"]
        lines += [_latex_row(latex_method(row.method), row) for row in block.rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _headings(columns: Sequence[Column]) -> list[str]:
    return [c.title if c.title == c.benchmark else f"{c.benchmark} {c.title}" for c in columns]


def _rows(table: ResultsTable) -> Iterator[Row]:
    yield table.original
    for block in table.blocks:
        yield from block.rows


def _all_cells(row: Row) -> tuple[Cell | None, ...]:
    return (*row.cells, row.rel)


def _pruned(block: Block) -> str:
    return f"{100 * (1 - block.ratio):g}%"


def _scores(table: ResultsTable) -> Iterator[str]:
    width = len(table.columns) + 1
    yield from _head(["Method", *_headings(table.columns), "Rel."])
    yield _line(["*Questions*", *(f"{n:,}" for n in table.n_questions), ""])
    yield _line(["Original Model (100%)", *map(_marked, _all_cells(table.original))])
    for block in table.blocks:
        yield _line([f"*Pruning ratio (↓ {_pruned(block)})*", *[""] * width])
        for row in block.rows:
            yield _line([escape_markdown(method_title(row.method)), *map(_marked, _all_cells(row))])


def _differences(table: ResultsTable, versus: Callable[[Cell], Versus | None]) -> Iterator[str]:
    yield from _head(["Method", *_headings(table.columns), "Rel."])
    for block in table.blocks:
        compared = [row for row in block.rows if any(cell and versus(cell) for cell in _all_cells(row))]
        if compared:
            yield _line([f"*Pruning ratio (↓ {_pruned(block)})*", *[""] * (len(table.columns) + 1)])
        for row in compared:
            cells = (_difference(versus(cell) if cell else None) for cell in _all_cells(row))
            yield _line([escape_markdown(method_title(row.method)), *cells])


def _answers(table: ResultsTable) -> Iterator[str]:
    yield from _head(["Method", "Retention ratio", "Visual tokens kept", "Replies that name no option", "Failed"])
    for row in _rows(table):
        title = "Original Model" if row is table.original else escape_markdown(method_title(row.method))
        shares = (_percent(row.kept_share), _percent(row.unparsed_share))
        yield _line([title, f"{100 * row.ratio:g}%", *shares, f"{row.n_failed:,}"])


def _legend(table: ResultsTable) -> str:
    text = (
        "Percentage points, from scores before rounding, on the same questions. In brackets the 95 % interval of "
        f"{table.bootstrap.draws:,} paired draws of whole videos (seed {table.bootstrap.seed}). p is two-sided, by the "
        f"same draws, and adjusted for the methods of the block (Holm), the interval is not. "
        f"{NOISE} within noise: p is 0.05 or more."
    )
    alone = [name for name, n in zip(_headings(table.columns), table.n_clusters, strict=True) if n == 1]
    if alone:
        text += f" No interval: all questions of a column are about one video ({escape_markdown(', '.join(alone))})."
    return text


def _head(titles: Sequence[str]) -> Iterator[str]:
    yield _line([escape_markdown(title) for title in titles])
    yield "|---|" + "---:|" * (len(titles) - 1)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _marked(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    return {"best": f"**{cell.printed}**", "second": f"<ins>{cell.printed}</ins>", "": cell.printed}[cell.mark]


def _difference(versus: Versus | None) -> str:
    if versus is None:
        return "–"
    if versus.low is None or versus.high is None or versus.p_holm is None:
        return f"{_signed(versus.difference)} (no interval)"
    ends = f"[{_signed(versus.low)}, {_signed(versus.high)}]"
    return f"{_signed(versus.difference)} {ends} {_p(versus.p_holm)}{' ' + NOISE if versus.noise else ''}"


def _p(p: float) -> str:
    if p < 0.001:
        return "p < 0.001"
    rounded = f"{p:.3f}"  # 0.0496 must not read like 0.05, which is noise
    return f"p < {SIGNIFICANT}" if p < SIGNIFICANT <= float(rounded) else f"p {rounded}"


def _signed(points: float) -> str:
    return f"{points:+.1f}" if abs(points) >= 0.05 else "0.0"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}%"


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text)


def _latex_head(columns: Sequence[Column]) -> list[str]:
    """Two lines of titles where a benchmark has several columns, the first spanning them; else one."""
    groups = [(title, len(list(of_title))) for title, of_title in groupby(columns, lambda column: column.benchmark)]
    titles = [_bold("Method"), *(_bold(escape_latex(title)) for title, _ in groups), _bold("Rel.")]
    if all(width == 1 for _, width in groups):
        return [" & ".join(titles) + r" \\"]
    widths = [1, *(width for _, width in groups), 1]
    upper, lower, rules, start = [], [], [], 1
    for title, width in zip(titles, widths, strict=True):
        upper.append(rf"\multirow{{2}}{{*}}{{{title}}}" if width == 1 else rf"\multicolumn{{{width}}}{{c}}{{{title}}}")
        of_group = columns[start - 2 : start - 2 + width]
        lower += [""] if width == 1 else [_bold(escape_latex(column.title)) for column in of_group]
        rules += [] if width == 1 else [rf"\cmidrule(lr){{{start}-{start + width - 1}}}"]
        start += width
    return [" & ".join(upper) + r" \\", " ".join(rules), " & ".join(lower) + r" \\"]


def latex_method(method: str) -> str:
    """The same in LaTeX; the paper's own method is bold."""
    return _bold("GSTEP (Ours)") if method == "gstep" else escape_latex(method_title(method))


def _latex_row(label: str, row: Row) -> str:
    return " & ".join([label, *map(_latex_cell, _all_cells(row))]) + r" \\"


def _latex_cell(cell: Cell | None) -> str:
    if cell is None:
        return "--"
    text = escape_latex(cell.printed)
    return {"best": _bold(text), "second": rf"\underline{{{text}}}", "": text}[cell.mark]


def _bold(text: str) -> str:
    return rf"\textbf{{{text}}}"


def escape_latex(text: str) -> str:
    """Text that LaTeX sets as it is."""
    return "".join(_LATEX.get(sign, sign) for sign in text)
