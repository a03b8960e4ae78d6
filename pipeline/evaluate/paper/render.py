"""Sheets to read: Markdown, LaTeX and one HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.evaluate.report.page import templates
from pipeline.evaluate.statistics.sheets import NONE, Sheet, sheet_latex, sheet_markdown


def markdown(sheets: Sequence[Sheet]) -> str:
    """Return the sheets as GitHub Markdown."""
    return "\n\n".join(map(sheet_markdown, sheets)) + "\n"


def latex(sheets: Sequence[Sheet]) -> str:
    """Return the sheets as LaTeX tabulars."""
    return "\n".join(map(sheet_latex, sheets))


def page(title: str, sheets: Sequence[Sheet], facts: Sequence[tuple[str, str]]) -> str:
    """Return one HTML page of all sheets, which loads no other file."""
    return templates().get_template("paper.html").render(title=title, sheets=sheets, facts=facts, none=NONE)
