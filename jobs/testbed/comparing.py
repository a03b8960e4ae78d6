"""One method held against others: differences of paired scores in each part of the videos, and their tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import UsageError
from pipeline.evaluate.statistics import (
    ORIGINAL,
    OUTSIDE,
    SIGNIFICANT,
    Difference,
    arms_of,
    estimates,
    holm,
    score_matrix,
)
from pipeline.evaluate.table import escape_markdown, method_title, table_head, table_row

_EVERYWHERE = "all"


class Compared(NamedTuple):
    """The paired difference of a method minus another on the questions of one part.

    Attributes:
        by: the difference, as a share; its p is two-sided, by draws of whole videos.
        p_holm: that p, adjusted for all comparisons.
    """

    part: str
    ratio: float
    other: str
    by: Difference
    p_holm: float


class Comparison(NamedTuple):
    """The differences between a method and its rivals in each part of the videos.

    Attributes:
        scores: (part, method, ratio) -> percent right.
        kept: (method, ratio) -> share of the tokens that was kept.
        asked: part -> (questions, videos).
    """

    method: str
    compared: list[Compared]
    scores: dict[tuple[str, str, float], float]
    kept: dict[tuple[str, float], float | None]
    asked: dict[str, tuple[int, int]]
    draws: int


def compare(
    scores: pa.Table, method: str, against: Sequence[str] | None, split: str, draws: int, seed: int = 0
) -> Comparison:
    """Compare a method with others in each part of the videos, at every ratio.

    Args:
        scores: rows of ``scores.parquet``.
        against: names of methods; None: all others.
        split: whose values part the videos; the whole of them is compared too.

    Raises UsageError for a method or a split that the scores do not have, where no other method was evaluated at a
    ratio of this one, and for scores that are not paired or of answers that nobody published.
    """
    if scores.filter(pc.equal(scores["status"], "ok"))["score"].null_count:
        raise UsageError("there are answers without a score: their right answers are not published")
    arms = arms_of(scores)
    methods = list(dict.fromkeys(arm.method for arm in arms))
    others = [one for one in methods if one not in (method, ORIGINAL.method)] if against is None else list(against)
    if odd := [name for name in (method, *others) if name not in methods]:
        raise UsageError(f"{odd[0]} was not evaluated there; there are {', '.join(methods)}")
    try:
        matrix = score_matrix(scores, arms)
    except ValueError as error:
        raise UsageError(str(error)) from error
    values = sorted({of_one[split] for of_one in matrix.splits if split in of_one})
    if not values:
        there = ", ".join(matrix.splits[0]) or "none"
        raise UsageError(f"--split {split}: the questions have no such split; they have {there}")
    pairs = [
        (arms.index(arm), arms.index(other))
        for arm, other in product(arms, arms)
        if arm.method == method and other.method in others and arm.ratio == other.ratio
    ]
    if not pairs:
        raise UsageError(f"no other method was evaluated at a retention ratio of {method}: there is nothing to compare")
    found, shown, asked = list[tuple[str, float, str, Difference]](), {}, {}
    for number, part in enumerate([_EVERYWHERE, *values]):
        part_Q = matrix.whole() if part == _EVERYWHERE else matrix.split(split, part)
        inside_Q = part_Q != OUTSIDE
        videos, cluster_Q = np.unique(matrix.clusters[inside_Q], return_inverse=True)
        generator = np.random.default_rng([seed, number])
        (numbers,) = estimates(matrix.scores[:, inside_Q], cluster_Q, [part_Q[inside_Q]], draws, generator)
        asked[part] = (int(inside_Q.sum()), len(videos))
        shown.update({(part, arm.method, arm.ratio): 100 * float(numbers.value[a]) for a, arm in enumerate(arms)})
        found += [(part, arms[a].ratio, arms[other].method, numbers.difference(a, other)) for a, other in pairs]
    adjusted = holm([by.p for *_, by in found])
    compared = [Compared(*one, p) for one, p in zip(found, adjusted, strict=True)]
    kept = {(arm.method, arm.ratio): tally.kept_share for arm, tally in zip(arms, matrix.tallies, strict=True)}
    return Comparison(method, compared, shown, kept, asked, draws)


def markdown(found: Comparison) -> str:
    """Return Markdown: a table of scores, then for each ratio a table of differences."""
    ours, questions, videos = method_title(found.method), *found.asked[_EVERYWHERE]
    others = list(dict.fromkeys(one.other for one in found.compared))
    ratios = sorted({one.ratio for one in found.compared}, reverse=True)
    sections = [
        f"# {ours} against {', '.join(map(method_title, others))}",
        f"{questions:,} questions about {videos} videos. Right answers in percent, and in brackets the share of tokens "
        "that was kept where it is not the one asked for.",
        "\n".join(_scores(found, [found.method, *others], ratios)),
        f"{ours} minus each other method on the same questions, in points, with the 95 % interval of {found.draws:,} "
        f"draws of whole videos. **Bold**: p < 0.05 by Holm's rule over all {len(found.compared)} comparisons below, "
        "to either side.",
    ]
    for ratio in ratios:
        sections += [f"## {100 * ratio:g} % kept", "\n".join(_differences(found, others, ratio))]
    return "\n\n".join(sections) + "\n"


def _scores(found: Comparison, methods: Sequence[str], ratios: Sequence[float]) -> Iterator[str]:
    """Yield the Markdown lines of the score table, a row a method and a column a ratio."""
    yield from table_head(["Method", *(f"{100 * ratio:g} %" for ratio in ratios)])
    full = next(
        (value for (part, name, _), value in found.scores.items() if (part, name) == (_EVERYWHERE, ORIGINAL.method)),
        None,
    )
    if full is not None:
        yield table_row(["all tokens", f"{full:.1f}", *[""] * (len(ratios) - 1)])
    for name in methods:
        cells = []
        for ratio in ratios:
            kept, score = found.kept.get((name, ratio)) or ratio, found.scores.get((_EVERYWHERE, name, ratio))
            odd = abs(kept - ratio) > 0.02 * ratio
            cells.append("–" if score is None else f"{score:.1f}" + (f" ({100 * kept:.1f} %)" if odd else ""))
        yield table_row([escape_markdown(method_title(name)), *cells])


def _differences(found: Comparison, others: Sequence[str], ratio: float) -> Iterator[str]:
    """Yield the Markdown lines of one ratio's differences, a row a part and a column a rival."""
    yield from table_head(["", "all tokens", method_title(found.method), *map(method_title, others)])
    for part, (questions, _) in found.asked.items():
        full = found.scores.get((part, *ORIGINAL))
        cells = [f"{escape_markdown(part)} ({questions})", "–" if full is None else f"{full:.1f}"]
        cells.append(f"{found.scores[part, found.method, ratio]:.1f}")
        here = {one.other: one for one in found.compared if (one.part, one.ratio) == (part, ratio)}
        yield table_row(cells + [_cell(here[name]) if name in here else "–" for name in others])


def _cell(one: Compared) -> str:
    """Format a difference with its interval, bold where it is significant."""
    if math.isnan(one.by.p):
        return f"{100 * one.by.value:+.1f} (no interval)"
    text = f"{100 * one.by.value:+.1f} [{100 * one.by.low:+.1f}, {100 * one.by.high:+.1f}]"
    return f"**{text}**" if one.p_holm < SIGNIFICANT else text
