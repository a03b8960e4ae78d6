"""Text forms of the table of results and of *Where it breaks*: Markdown, LaTeX, and the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.evaluate.breaks import BREAKS_TITLE, Breaks
from pipeline.evaluate.table import FEW, NONE, OVERALL, Cell, Column, ResultsTable, Row

_TERMINAL_COLUMNS = 6  # columns of scores that fit a terminal
_STYLES = {"best": "bold", "second": "underline", "": ""}
_COUNTS = ("Tokens", "Kept", "No option", "Cut", "Weak", "Failed")  # the last columns in Markdown
MARKS = (
    "Bold: the best number of a block, where the 95 % interval of its paired difference to the next best (underlined) "
    "excludes 0. Ties and numbers without an interval are not bold. Rel.: mean over benchmarks of the score relative "
    "to full retention, from printed scores."
)
COUNTS = (
    "Kept: share of the visual tokens, mean over answers. No option: replies that name none. Cut: replies that "
    "max_new_tokens ended. Weak: replies whose option is drawn at random, or is a letter inside a word. Failed "
    "answers count as wrong."
)


def add_counts(row: Row) -> str:
    """Return a row's title, followed in parentheses by its nonzero counts of failed, cut and weakly read answers."""
    counts = {"failed": row.tally.n_failed, "cut": row.tally.n_cut, "weak": row.tally.n_weak}
    counts_text = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    return f"{row.title} ({counts_text})" if counts_text else row.title


def format_percent(share: float | None) -> str:
    """Format a share as a percentage with one decimal; None becomes a dash."""
    return NONE if share is None else f"{100 * share:.1f}%"


def format_markdown_tables(*tables: ResultsTable, breaks: Breaks | None = None) -> str:
    """Return the tables as one GitHub Markdown text, each with a heading, followed by the legend and *Where it breaks*.

    The remarks of a table stand below it, except those that an earlier table has already shown.
    """
    sections = list[str]()
    written_titles = set[str]()
    for table in tables:
        width = len(table.titles) + len(_COUNTS)
        heads = [(f"*{name}*", texts) for name, texts in table.made_of]
        lines = [format_table_row(map(escape_markdown, ["Method", *table.titles, *_COUNTS])), "|---|" + "---:|" * width]
        lines += [
            format_table_row([name, *map(escape_markdown, texts), *[""] * (width - len(texts))])
            for name, texts in heads
        ]
        lines.append(_format_markdown_row(table, table.original))
        for heading, rows in table.blocks:
            lines.append(format_table_row([f"*{escape_markdown(heading)}*", *[""] * width]))
            lines += [_format_markdown_row(table, row) for row in rows]
        new_remarks = [text for text in table.remarks if text not in written_titles]
        written_titles.update(new_remarks)
        sections += [f"### {escape_markdown(table.title)}", "\n".join(lines), *map(escape_markdown, new_remarks)]
    sections.append(escape_markdown(f"{MARKS} {COUNTS}"))
    return "\n\n".join([*sections, *(_format_breaks_sections(breaks) if breaks else [])]) + "\n"


def _format_breaks_sections(breaks: Breaks) -> list[str]:
    """Return the Markdown sections of *Where it breaks*: heading, verdicts if any, explanation, kinds and remarks."""
    lines = [
        format_table_row(["Kind", "Method", "Lowest safe ratio", "Losses by retention ratio"]),
        format_table_row(["---"] * 4),
    ]
    for verdict in breaks.verdicts:
        losses = "; ".join(f"{loss.share}: {loss.text}" for loss in verdict.losses)
        answer = f"**{verdict.answer}** ({escape_markdown(verdict.reason)})"
        names = (escape_markdown(name) for name in (verdict.kind.name, verdict.title))
        lines.append(format_table_row([*names, answer, escape_markdown(losses)]))
    tasks = [f"{kind.name}: {kind.text}." for kind in breaks.kinds]
    texts = [*breaks.explanation, *([f"Kinds: {' '.join(tasks)}"] if tasks else []), *breaks.remarks]
    return [f"### {BREAKS_TITLE}", *(["\n".join(lines)] if breaks.verdicts else []), *map(escape_markdown, texts)]


def _format_markdown_row(table: ResultsTable, row: Row) -> str:
    """Return a row of the Markdown table: its title, scores with differences, and the counts of its answers.

    The best score is bold and the second underlined; missing numbers are dashes.
    """
    cells = []
    for cell in table.numbers(row):
        if cell is None:
            cells.append(NONE)
            continue
        number = {"best": f"**{cell.printed}**", "second": f"<ins>{cell.printed}</ins>", "": cell.printed}[cell.mark]
        cells.append(f"{number}{cell.spread_text} {escape_markdown(cell.difference_text)}".rstrip())
    tally = row.tally
    tokens = NONE if tally.tokens is None else f"{tally.tokens:,.0f}"
    counts = [NONE if n is None else f"{n:,}" for n in (tally.n_cut, tally.n_weak, tally.n_failed)]
    shares = (format_percent(tally.kept_share), format_percent(tally.unparsed_share))
    return format_table_row([escape_markdown(row.title), *cells, tokens, *shares, *counts])


def format_table_row(cells: Iterable[str]) -> str:
    """Return the cells as one row of a Markdown table; they are not escaped."""
    return f"| {' | '.join(cells)} |"


def escape_markdown(text: str) -> str:
    """Return the text as one line with Markdown's special characters escaped."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", _collapse_spaces(text))


def _collapse_spaces(text: str) -> str:
    """Replace each run of white space, line breaks included, with one space."""
    return re.sub(r"\s+", " ", text)


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    FEW: r"\dag{}",
    NONE: "--",
    "±": r"$\pm$",
    "↓": r"$\downarrow$",
    "↑": r"$\uparrow$",
    "<": "$<$",
    ">": "$>$",
    **{sign: "\\" + sign for sign in "&%$#_{}"},
}


def escape_latex(text: str) -> str:
    """Return the text as one line with LaTeX's special characters escaped."""
    return "".join(_LATEX.get(sign, sign) for sign in _collapse_spaces(text))


def format_latex_table(table: ResultsTable) -> str:
    """Return the table as a LaTeX ``tabular`` in the paper's layout, which needs the packages booktabs and multirow.

    Rows below it say what the scores were made with, then come the remarks and the legend of the marks. The method
    ``table.ours`` is bold and marked "(Ours)".
    """
    width = len(table.titles) + 1
    lines = [
        f"% {_collapse_spaces(table.title)}",
        r"% Needs booktabs and multirow.",
        rf"\begin{{tabular}}{{l {'c' * (width - 1)}}}",
        r"\toprule",
        *_format_latex_head(table),
    ]
    for heading, rows in [("Original Model (100%)", [table.original]), *table.blocks]:
        text = escape_latex(heading)
        lines += [r"\midrule", rf"\multicolumn{{{width}}}{{c}}{{\textit{{{text}}}}} \\"]
        for row in rows:
            title = escape_latex(add_counts(row))
            if row.method == table.ours:
                title = _format_bold(f"{escape_latex(row.title)} (Ours)") + escape_latex(
                    add_counts(row).removeprefix(row.title)
                )
            lines.append(" & ".join([title, *map(_format_latex_number, table.numbers(row))]) + r" \\")
    lines.append(r"\bottomrule")
    made_of = [f"{name}: {'; '.join(_join_columns(table.columns, texts))}." for name, texts in table.made_of]
    below = rf"\multicolumn{{{width}}}{{p{{0.95\linewidth}}}}{{\footnotesize "
    lines += [rf"{below}{escape_latex(text)}}} \\" for text in (*made_of, *table.remarks, MARKS)]
    return "\n".join([*lines, r"\end{tabular}"]) + "\n"


def _format_latex_head(table: ResultsTable) -> list[str]:
    """Return the LaTeX lines of the column titles.

    If a benchmark has several columns, there are three lines: benchmark titles that span their columns, rules, and
    column titles. Otherwise there is one line.
    """
    other_titles = table.titles[len(table.columns) :]
    by_benchmark = groupby(table.columns, key=lambda column: column.benchmark)
    spans = [
        (name, [f"{column.title}{FEW if column.few else ''}" for column in columns]) for name, columns in by_benchmark
    ]
    if all(len(titles) == 1 for _, titles in spans):
        flat = ["Method", *(title for _, titles in spans for title in titles), *other_titles]
        return [" & ".join(_format_bold(escape_latex(title)) for title in flat) + r" \\"]
    upper = [_format_tall_title("Method")]
    lower = [""]
    rules = []
    start = 2
    for name, titles in spans:
        if len(titles) == 1:
            upper.append(_format_tall_title(titles[0]))
            lower.append("")
        else:
            upper.append(rf"\multicolumn{{{len(titles)}}}{{c}}{{{_format_bold(escape_latex(name))}}}")
            lower += [_format_bold(escape_latex(title)) for title in titles]
            rules.append(rf"\cmidrule(lr){{{start}-{start + len(titles) - 1}}}")
        start += len(titles)
    upper, lower = [*upper, *map(_format_tall_title, other_titles)], [*lower, *[""] * len(other_titles)]
    return [" & ".join(upper) + r" \\", " ".join(rules), " & ".join(lower) + r" \\"]


def _format_tall_title(title: str) -> str:
    """Return LaTeX for a bold column title that spans both lines of the head."""
    return rf"\multirow{{2}}{{*}}{{{_format_bold(escape_latex(title))}}}"


def _format_latex_number(cell: Cell | None) -> str:
    """Return LaTeX for a score, bold if best and underlined if second, above its difference, if any; "--" for None."""
    if cell is None:
        return "--"
    text = escape_latex(cell.printed)
    text = {"best": _format_bold(text), "second": rf"\underline{{{text}}}", "": text}[cell.mark]
    text += escape_latex(cell.spread_text)
    beside = escape_latex(cell.difference_text).replace("-", "$-$")
    return rf"\shortstack{{{text}\\{{\tiny {beside}}}}}" if beside else text


def _format_bold(text: str) -> str:
    """Return LaTeX that sets ``text``, which is not escaped, in bold."""
    return rf"\textbf{{{text}}}"


def _join_columns(columns: Sequence[Column], texts: Sequence[str]) -> list[str]:
    """Return "TITLE TEXT" for each column with a text, or the text alone if several columns have the same one."""
    values = [(column.text, text) for column, text in zip(columns, texts, strict=True) if text]
    if len({text for _, text in values}) == 1 and len(values) > 1:
        return [values[0][1]]
    return [f"{title} {text}" for title, text in values]


def render_table(results: ResultsTable) -> Iterator[RenderableType]:
    """Yield the table of results for the terminal, then its remarks and the legend of its marks.

    With more than ``_TERMINAL_COLUMNS`` score columns, only the overall scores, the mean and Rel. are shown, and a last
    line says that the others are in tables.md. The remark on too few videos is left out if no shown column has too few.
    """
    keys = [column.key.rpartition(": ")[2] for column in results.columns]
    all_fit = len(results.columns) <= _TERMINAL_COLUMNS
    indices = [
        number for number in range(len(results.titles)) if all_fit or number >= len(keys) or keys[number] == OVERALL
    ]
    table = Table(title=Text(results.title), title_justify="left", show_edge=False)
    table.add_column("method")
    titles = ["kept", *(results.titles[number] for number in indices)]
    for title in titles:
        table.add_column(Text(title), justify="right")
    for rows in ([results.original], *(rows for _, rows in results.blocks)):
        for row in rows:
            numbers = results.numbers(row)
            cells = [_render_cell(numbers[number]) for number in indices]
            table.add_row(Text(add_counts(row)), f"{100 * row.ratio:g} %", *cells, end_section=row is rows[-1])
    yield table
    for remark in (*results.remarks, MARKS):
        if not remark.startswith(FEW) or any(FEW in title for title in titles):
            yield Text(remark)
    if n_left_out := len(results.titles) - len(indices):
        yield Text(f"the {n_left_out} splits are in tables.md")


def render_breaks(breaks: Breaks) -> Iterator[RenderableType]:
    """Yield *Where it breaks* for the terminal: a table by kind and method, then kinds, explanation and remarks.

    Without verdicts, only the title replaces the table.
    """
    table = Table(title=Text(BREAKS_TITLE), title_justify="left", show_edge=False)
    for name in ("kind", "method", "lowest safe ratio", "why", "losses by retention ratio"):
        table.add_column(name, overflow="fold")
    for kind in breaks.kinds:
        verdicts = breaks.select_verdicts(kind)
        for verdict in verdicts:
            losses = Group(*(Text(f"{loss.share}: {loss.text}") for loss in verdict.losses))
            texts = map(Text, (kind.name, verdict.title, verdict.answer, verdict.reason))
            table.add_row(*texts, losses, end_section=verdict is verdicts[-1])
    if breaks.verdicts:
        yield table
    else:
        yield Text(BREAKS_TITLE)
    kinds = [f"{kind.name}: {kind.text}" for kind in breaks.kinds]
    for line in (*kinds, *breaks.explanation, *breaks.remarks):
        yield Text(line)


def _render_cell(cell: Cell | None) -> RenderableType:
    """Return a score for the terminal, above its difference and whether that is unclear; a dash for None."""
    if cell is None:
        return Text(NONE)
    number = Text.assemble((cell.printed, _STYLES[cell.mark]), cell.spread_text)
    return Group(number, *(Text(line) for line in (cell.interval_text, cell.unclear_text) if line))
