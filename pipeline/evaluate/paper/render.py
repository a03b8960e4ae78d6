"""Sheets to read: Markdown, LaTeX and one HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.evaluate.paper.sheets import Number, Sheet
from pipeline.evaluate.report.page import templates
from pipeline.evaluate.statistics.render import escape_latex, escape_markdown

_NONE = "–"


def markdown(sheets: Sequence[Sheet]) -> str:
    """The sheets as GitHub Markdown; a box is [ ]."""
    return "\n\n".join("\n".join(_markdown(sheet)) for sheet in sheets) + "\n"


def latex(sheets: Sequence[Sheet]) -> str:
    """The sheets as LaTeX tabulars; they need booktabs."""
    return "\n".join("\n".join(_latex(sheet)) for sheet in sheets) + "\n"


def page(title: str, sheets: Sequence[Sheet], facts: Sequence[tuple[str, str]], notes: Sequence[str]) -> str:
    """One HTML page that loads nothing."""
    return (
        templates().get_template("paper.html").render(title=title, sheets=sheets, facts=facts, notes=notes, none=_NONE)
    )


def _markdown(sheet: Sheet) -> list[str]:
    lines = [f"### {escape_markdown(sheet.title)}", "", _row([sheet.corner, *map(escape_markdown, sheet.columns)])]
    lines.append("|---|" + "---:|" * len(sheet.columns))
    for group in sheet.groups:
        if group.heading:
            lines.append(_row([f"*{escape_markdown(group.heading)}*", *[""] * len(sheet.columns)]))
        lines += [_row([escape_markdown(title), *map(_marked, numbers)]) for title, numbers in group.rows]
    return lines


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _marked(number: Number | None) -> str:
    if number is None:
        return _NONE
    text = {"best": f"**{number.printed}**", "second": f"<ins>{number.printed}</ins>", "": number.printed}[number.mark]
    return f"[{text}]" if number.boxed else text


def _latex(sheet: Sheet) -> list[str]:
    width = len(sheet.columns) + 1
    head = " & ".join(rf"\textbf{{{escape_latex(name)}}}" for name in (sheet.corner, *sheet.columns))
    lines = [f"% {sheet.title}", rf"\begin{{tabular}}{{l{'c' * (width - 1)}}}", r"\toprule", rf"{head} \\"]
    for group in sheet.groups:
        lines.append(r"\midrule")
        if group.heading:
            lines += [rf"\multicolumn{{{width}}}{{l}}{{\textit{{{escape_latex(group.heading)}}}}} \\", r"\midrule"]
        for title, numbers in group.rows:
            lines.append(rf"{' & '.join([escape_latex(title), *map(_latex_number, numbers)])} \\")
    return [*lines, r"\bottomrule", r"\end{tabular}"]


def _latex_number(number: Number | None) -> str:
    if number is None:
        return "--"
    text = escape_latex(number.printed)
    marked = {"best": rf"\textbf{{{text}}}", "second": rf"\underline{{{text}}}", "": text}[number.mark]
    return rf"\fbox{{{marked}}}" if number.boxed else marked
