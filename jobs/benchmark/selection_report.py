"""The figures of jobs.benchmark.selection_times as tables and for machines, and how fast they grow with the tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from jobs.benchmark.selection_times import Agreement, FormTime
from jobs.benchmark.tokens import INPUTS

_COLUMNS = ("input", "tokens", "ratio", "form", "seconds", "to plain", "products", "bounds", "memory MB", "GB/s")
_WORDS = ("input", "form", "against")  # columns of words


@dataclass(frozen=True)
class Growth:
    """How a form's time grows with M at a fixed ratio: as M^exponent, over ``sizes`` numbers of tokens."""

    input: str
    ratio: float
    form: str
    exponent: float
    sizes: int


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """The least-squares slope of log y over log x; None for fewer than two different x."""
    across, up = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    return statistics.linear_regression(across, up).slope if len(set(across)) > 1 else None


def growths(times: Sequence[FormTime]) -> list[Growth]:
    """Of every input, ratio and form that was measured on at least two sizes."""
    lines: dict[tuple[str, float, str], list[tuple[float, float]]] = {}
    for item in times:
        lines.setdefault((item.input, item.ratio, item.form), []).append((item.n_tokens, item.seconds))
    found = ((key, slope(points), len(points)) for key, points in lines.items())
    return [Growth(*key, exponent, sizes) for key, exponent, sizes in found if exponent is not None]


def time_table(times: Sequence[FormTime], title: str) -> Table:
    """A row a form, a section an input, size and ratio; the caption says what the columns mean."""
    table = _table(_COLUMNS, title)
    table.caption = _caption(times)
    for before, item in zip([None, *times[:-1]], times, strict=True):
        if before is not None and _section(before) != _section(item):
            table.add_section()
        table.add_row(*_row(item))
    return table


def time_line(item: FormTime) -> str:
    """One figure as a line of progress."""
    form = f"{item.form} (extrapolated)" if item.extrapolated else item.form
    return f"{item.input}, {item.n_tokens} tokens, ratio {item.ratio:g}, {form}: {seconds_text(item.seconds)} s"


def growth_table(found: Sequence[Growth]) -> Table:
    """The exponent of M, a row an input and form, a column a ratio."""
    ratios = list(dict.fromkeys(item.ratio for item in found))
    table = _table(("input", "form", *(f"ratio {ratio:g}" for ratio in ratios)), "Time grows as tokens to the power of")
    exponents = {(item.input, item.form, item.ratio): item.exponent for item in found}
    for name, form in dict.fromkeys((item.input, item.form) for item in found):
        cells = (exponents.get((name, form, ratio)) for ratio in ratios)
        table.add_row(name, form, *("" if cell is None else f"{cell:.2f}" for cell in cells))
    return table


def agreement_table(agreements: Sequence[Agreement]) -> Table:
    """Whether the forms select the same tokens."""
    table = _table(("input", "tokens", "ratio", "against", "first", "the same"), "Of lazy+bound, beside others")
    for item in agreements:
        row = (item.input, str(item.n_tokens), f"{item.ratio:g}", item.against, str(item.compared))
        table.add_row(*row, f"{100 * item.share:.3f} %")
    return table


def as_record(times: Sequence[FormTime], agreements: Sequence[Agreement], **more: object) -> dict[str, object]:
    """For machines, JSON-able."""
    inputs = {name: INPUTS[name].note for name in dict.fromkeys(item.input for item in times)}
    return {
        **more,
        "inputs": inputs,
        "times": [asdict(item) for item in times],
        "growth": [asdict(item) for item in growths(times)],
        "agreements": [asdict(item) for item in agreements],
    }


def seconds_text(seconds: float) -> str:
    """Three digits that count, without an exponent."""
    digits = max(0, 2 - math.floor(math.log10(seconds))) if seconds > 0 else 0
    return f"{seconds:.{min(digits, 6)}f}"


def _table(names: Sequence[str], title: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", show_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in _WORDS else "right", no_wrap=True)
    return table


def _section(item: FormTime) -> tuple[str, int, float]:
    return item.input, item.n_tokens, item.ratio


def _row(item: FormTime) -> list[str]:
    return [
        item.input,
        str(item.n_tokens),
        f"{item.ratio:g}",
        item.form,
        f"{'~' if item.extrapolated else ''}{seconds_text(item.seconds)}",
        "" if item.to_plain is None else f"{item.to_plain:.4f}",
        *("" if share is None else f"{100 * share:.2f} %" for share in (item.products, item.bounds)),
        "" if item.memory_mb is None else f"{item.memory_mb:.0f}",
        "" if item.gb_per_s is None else f"{item.gb_per_s:.1f}",
    ]


def _caption(times: Sequence[FormTime]) -> str:
    lines = [f"{name}: {INPUTS[name].note}" for name in dict.fromkeys(item.input for item in times)]
    if any(item.extrapolated for item in times):
        lines.append("~: extrapolated from the first steps, which all cost the same")
    lines.append("prune:NAME is gstep.prune with that method, whole; the other forms are given the density")
    lines.append("products, bounds: pairs multiplied in all dimensions, in the subspace, of tokens x kept tokens")
    lines.append("memory: at the peak, beyond the tokens; GB/s: what plain reads of its tokens")
    return "\n".join(lines)
