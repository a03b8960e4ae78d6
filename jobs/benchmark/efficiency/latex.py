"""The paper's Table 3 (tab:efficiency) in its own layout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from jobs.benchmark.efficiency.report import GIB, MIB
from jobs.benchmark.efficiency.samples import Found
from pipeline.evaluate.table import escape_latex, method_title

_HEADS = ("E2E (s)↓", "LLM Time (s)↓", "GPU (GB)↓", "KV (MB)↓")


def table3(found: Sequence[Found], title: str, memory: str) -> str:
    """Return the paper's Table 3 in LaTeX; seconds are summed over all questions, LLM time with tower and pruning.

    GiB and MiB are what the paper calls GB and MB. In brackets is the change to full retention, which is the first of
    ``found``.
    """
    full, *others = found
    groups = [("", [("Original (100%)", _numbers(full, None))])]
    by_ratio = sorted(others, key=lambda one: -one.arm.retention_ratio)
    for ratio, block in groupby(by_ratio, key=lambda one: one.arm.retention_ratio):
        rows = [(method_title(one.arm.method), _numbers(one, full)) for one in block]
        groups.append((f"Pruning Ratio (↓ {100 * (1 - ratio):g}%)", rows))
    note = f"{len(full.online)} questions a line; memory: {memory}."
    head = " & ".join(rf"\textbf{{{escape_latex(name)}}}" for name in ("Method", *_HEADS))
    lines = [f"% {title}", "% Needs booktabs.", r"\begin{tabular}{l cccc}", r"\toprule", rf"{head} \\"]
    for heading, rows in groups:
        lines.append(r"\midrule")
        if heading:
            lines.append(rf"\multicolumn{{5}}{{c}}{{\textit{{{escape_latex(heading)}}}}} \\")
        for name, numbers in rows:
            bold = r"\textbf{GSTEP (Ours)}" if name == "GSTEP" else escape_latex(name)
            lines.append(" & ".join([bold, *map(escape_latex, numbers)]) + r" \\")
    lines += [r"\bottomrule", rf"\multicolumn{{5}}{{p{{0.95\linewidth}}}}{{\footnotesize {escape_latex(note)}}} \\"]
    return "\n".join([*lines, r"\end{tabular}"]) + "\n"


def _numbers(one: Found, full: Found | None) -> list[str]:
    """Return a row's table numbers, each with its change to full retention; a dash where not measured."""
    values = _values(one)
    before = [None] * len(values) if full is None else _values(full)
    return [
        "–" if value is None else f"{value:.{digits}f}{_change(value, old)}"
        for value, old, digits in zip(values, before, (1, 1, 2, 0), strict=True)
    ]


def _values(one: Found) -> tuple[float | None, ...]:
    """Return an arm's total E2E seconds, LLM seconds, peak GiB (or None) and KV MiB."""
    kv = max(sample.kv_bytes for sample in one.online) / MIB
    peak = None if one.online_peak is None else one.online_peak / GIB
    return sum(s.total_s for s in one.online), sum(s.llm_with_tower_s for s in one.online), peak, kv


def _change(value: float, full: float | None) -> str:
    """Format the change to full retention with an arrow, "" where there is nothing to compare with."""
    if not full:
        return ""
    change = 100 * (value / full - 1)
    return f" ({'↑' if change > 0 else '↓'}{abs(change):.1f}%)"
