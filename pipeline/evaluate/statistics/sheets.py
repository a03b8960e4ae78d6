"""A table as printed cells, and its one writer: Markdown and the paper's LaTeX, whatever the table was made of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from pipeline.evaluate.statistics.results import Mark

NONE = "–"
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "†": r"\dag{}",
    "‡": r"\ddag{}",
    "–": "--",
    "↓": r"$\downarrow$",
    "↑": r"$\uparrow$",
    "<": "$<$",
    ">": "$>$",
    **{sign: "\\" + sign for sign in "&%$#_{}"},
}
_PRUNED = re.compile(r"\$\\downarrow\$ ([\d.]+\\%)")


class Number(NamedTuple):
    """A number as printed; ``heat`` in [0, 1] is its rank between a heat map's lowest and highest."""

    printed: str
    mark: Mark = ""
    heat: float | None = None
    boxed: bool = False


class Head(NamedTuple):
    """A column's title, and the title that it shares with neighbouring columns ("": none)."""

    title: str
    over: str = ""

    @property
    def text(self) -> str:
        """The whole title in one line."""
        return f"{self.over} {self.title}" if self.over else self.title


@dataclass(frozen=True)
class Group:
    """The rows below one heading ("": none), each a title and a number a column."""

    heading: str
    rows: Sequence[tuple[str, Sequence[Number | None]]]


@dataclass(frozen=True)
class Sheet:
    """A table of printed numbers.

    Attributes:
        corner: the title of the column of titles.
        made_of: what the numbers of each column were made of: a title, and a text a column.
        notes: sentences below the table.
    """

    title: str
    corner: str
    columns: Sequence[Head]
    groups: Sequence[Group] = ()
    made_of: Sequence[tuple[str, Sequence[str]]] = ()
    notes: Sequence[str] = ()


def sheet_markdown(sheet: Sheet) -> str:
    """Return the sheet as GitHub Markdown: title, table and notes; a boxed number is in [ ]."""
    lines = [
        *table_head([sheet.corner, *(head.text for head in sheet.columns)]),
        *(table_row([f"*{escape_markdown(name)}*", *map(escape_markdown, texts)]) for name, texts in sheet.made_of),
    ]
    for group in sheet.groups:
        if group.heading:
            lines.append(table_row([f"*{escape_markdown(group.heading)}*", *[""] * len(sheet.columns)]))
        lines += [table_row([escape_markdown(title), *map(_markdown_number, numbers)]) for title, numbers in group.rows]
    return "\n\n".join([f"### {escape_markdown(sheet.title)}", "\n".join(lines), *map(escape_markdown, sheet.notes)])


def sheet_latex(sheet: Sheet) -> str:
    """Return the sheet as the paper's tabular; it needs the packages booktabs and multirow."""
    width = len(sheet.columns) + 1
    lines = [
        f"% {_one_line(sheet.title)}",
        r"% Needs booktabs and multirow.",
        rf"\begin{{tabular}}{{l {'c' * (width - 1)}}}",
    ]
    lines += [r"\toprule", *_latex_head(sheet)]
    for group in sheet.groups:
        lines.append(r"\midrule")
        if group.heading:
            heading = _PRUNED.sub(r"$\\downarrow \1$", escape_latex(group.heading))
            lines.append(rf"\multicolumn{{{width}}}{{c}}{{\textit{{{heading}}}}} \\")
        for title, numbers in group.rows:
            lines.append(" & ".join([latex_title(title), *map(_latex_number, numbers)]) + r" \\")
    lines.append(r"\bottomrule")
    made_of = [f"{name}: {'; '.join(by_column(sheet.columns, texts))}." for name, texts in sheet.made_of]
    below = rf"\multicolumn{{{width}}}{{p{{0.95\linewidth}}}}{{\footnotesize "
    lines += [rf"{below}{escape_latex(text)}}} \\" for text in (*made_of, *sheet.notes)]
    return "\n".join([*lines, r"\end{tabular}"]) + "\n"


def latex_title(title: str) -> str:
    """Return the title of a row in LaTeX; the paper's own method is bold."""
    method, bracket, rest = title.partition(" (")
    return _bold("GSTEP (Ours)") + escape_latex(bracket + rest) if method == "GSTEP" else escape_latex(title)


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


def escape_latex(text: str) -> str:
    """Convert text to one line of LaTeX that sets it literally."""
    return "".join(_LATEX.get(sign, sign) for sign in _one_line(text))


def _one_line(text: str) -> str:
    """Replace line breaks and repeated spaces by one space."""
    return re.sub(r"\s+", " ", text)


def by_column(columns: Sequence[Head], texts: Sequence[str]) -> list[str]:
    """Return each column's title with its text; the text alone, once, where all columns share it."""
    said = [(head.text, text) for head, text in zip(columns, texts, strict=True) if text]
    if len({text for _, text in said}) == 1 and len(said) > 1:
        return [said[0][1]]
    return [f"{title} {text}" for title, text in said]


def _markdown_number(number: Number | None) -> str:
    """Format a number in Markdown: best bold, second underlined, boxed in [ ]."""
    if number is None:
        return NONE
    text = {"best": f"**{number.printed}**", "second": f"<ins>{number.printed}</ins>", "": number.printed}[number.mark]
    return f"[{text}]" if number.boxed else text


def _latex_head(sheet: Sheet) -> list[str]:
    """Return the LaTeX lines of column titles: two where columns share a title, which spans them, else one."""
    spans = [(over, [*heads]) for over, heads in groupby(sheet.columns, lambda head: head.over or head.text)]
    corner = _bold(escape_latex(sheet.corner))
    if all(len(heads) == 1 for _, heads in spans):
        return [" & ".join([corner, *(_bold(escape_latex(head.text)) for head in sheet.columns)]) + r" \\"]
    upper, lower, rules, start = [rf"\multirow{{2}}{{*}}{{{corner}}}"], [""], [], 2
    for over, heads in spans:
        title, width = _bold(escape_latex(over)), len(heads)
        upper.append(rf"\multirow{{2}}{{*}}{{{title}}}" if width == 1 else rf"\multicolumn{{{width}}}{{c}}{{{title}}}")
        lower += [""] if width == 1 else [_bold(escape_latex(head.title)) for head in heads]
        rules += [] if width == 1 else [rf"\cmidrule(lr){{{start}-{start + width - 1}}}"]
        start += width
    return [" & ".join(upper) + r" \\", " ".join(rules), " & ".join(lower) + r" \\"]


def _latex_number(number: Number | None) -> str:
    """Format a number in LaTeX: best bold, second underlined, boxed in a frame."""
    if number is None:
        return "--"
    text = escape_latex(number.printed)
    marked = {"best": _bold(text), "second": rf"\underline{{{text}}}", "": text}[number.mark]
    return rf"\fbox{{{marked}}}" if number.boxed else marked


def _bold(text: str) -> str:
    """Return LaTeX of bold text."""
    return rf"\textbf{{{text}}}"
