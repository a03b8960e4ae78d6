"""Compute *Where it breaks* from the scores of several benchmarks: the loss of each method on each kind of ability."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluate.abilities import (
    ABILITIES,
    AbilityRule,
    classify_questions,
    list_unused_rules,
    order_abilities,
)
from pipeline.evaluate.breaks import Breaks, Kind, Loss, Outcome, Task, Verdict
from pipeline.evaluate.statistics import (
    FEWEST_VIDEOS,
    NO_PART,
    Estimate,
    ScoreMatrix,
    average_estimates,
    make_score_matrix,
)
from pipeline.evaluate.table import FULL_ROW, ArmGroup
from pipeline.evaluate.tabulate import ScoredBenchmark, estimate_rows, format_row_title, group_arms

_DIGITS = 9  # decimals of points; further ones are rounding errors


class _MeasuredTask(NamedTuple):
    """The measurements of one task.

    Attributes:
        estimate: the score of each row of the table, with its bootstrap draws.
        changed: for each row, True if the score of any question differs from full retention under any of its seeds.
    """

    ability: str
    task: Task
    estimate: Estimate
    changed: NDArray[np.bool_]


def find_breaks(
    benchmarks: Mapping[str, ScoredBenchmark],
    rules: Sequence[AbilityRule],
    *,
    within: float,
    methods: Sequence[str] | None = None,
    draws: int = 10_000,
    seed: int = 0,
) -> Breaks:
    """Find the lowest safe retention ratio of each method on each kind of ability.

    A ratio is safe if it and all larger tested ratios pass: the loss has an interval whose lower end is above
    -``within`` points and whose half width is at most ``within``, or no score changed. No ratio passes if a task has
    fewer than FEWEST_VIDEOS videos or full retention scores at most ``within``. The seeds of a method are averaged.
    Notes name benchmarks that are left out because their questions have no scores of their own, and rules of the user
    that match no question.

    Args:
        benchmarks: by the name that the rules match.
        rules: the first rule that matches a question counts.
        methods: a name without a seed or positions means all of them. None includes all methods.
        draws: the number of bootstrap draws of whole videos.

    Raises:
        ValueError: the arms of a benchmark were not scored on the same questions, once each.
        UsageError: a question lacks the split that the benchmark averages over.
    """
    scored = {name: benchmark for name, benchmark in benchmarks.items() if benchmark.per_question}
    notes = [
        f"{benchmark.title} is left out here: its numbers are not means over the scores of questions."
        for benchmark in benchmarks.values()
        if not benchmark.per_question
    ]
    splits = {
        name: [dict(row) for row in benchmark.scores["splits"].to_pylist()] for name, benchmark in benchmarks.items()
    }
    notes += [f"{line}." for line in list_unused_rules(rules, splits)]
    arms, groups = group_arms(list(scored.values()), methods)
    measured = list[_MeasuredTask]()
    for name, benchmark in scored.items():
        matrix = make_score_matrix(benchmark.scores, arms)
        abilities = classify_questions(rules, name, matrix.splits)
        measured += _measure_tasks(benchmark, matrix, groups, abilities, draws, seed)
    kinds = list[Kind]()
    verdicts = list[Verdict]()
    titles = {path: title for benchmark in scored.values() for path, title in benchmark.names.items()}
    for ability in order_abilities([measured_task.ability for measured_task in measured]):
        tasks = [measured_task for measured_task in measured if measured_task.ability == ability]
        kinds.append(
            Kind(
                name=ability,
                tasks=[measured_task.task for measured_task in tasks],
                full_score=100 * float(np.mean([measured_task.estimate.value[FULL_ROW] for measured_task in tasks])),
            )
        )
        verdicts += _judge_methods(kinds[-1], tasks, groups, titles, within)
    present = {kind.name for kind in kinds}
    return Breaks(
        kinds=kinds,
        verdicts=verdicts,
        within=within,
        draws=draws,
        seed=seed,
        not_measured=[ability for ability in ABILITIES if ability not in present],
        notes=notes,
    )


def _measure_tasks(
    benchmark: ScoredBenchmark,
    matrix: ScoreMatrix,
    groups: Sequence[ArmGroup],
    abilities: Sequence[str],
    draws: int,
    seed: int,
) -> Iterator[_MeasuredTask]:
    """Yield a task for each ability with a question that counts in the benchmark's overall score.

    All tasks share the benchmark's draws of videos. ``abilities`` has one entry per question.
    """
    whole = benchmark.average(matrix)
    ability_Q = np.array(abilities)
    parts = {name: whole.within(ability_Q == name) for name in dict.fromkeys(abilities)}
    parts = {name: subset for name, subset in parts.items() if (subset.numbers != NO_PART).any()}
    measured = estimate_rows(benchmark, matrix, groups, list(parts.values()), draws, seed)
    for (name, subset), numbers in zip(parts.items(), measured, strict=True):
        inside_Q = subset.numbers != NO_PART
        scores_AQ = matrix.scores[:, inside_Q]
        differs_A = (scores_AQ != scores_AQ[FULL_ROW]).any(1)
        yield _MeasuredTask(
            ability=name,
            task=Task(title=benchmark.title, n_questions=int(inside_Q.sum()), n_videos=numbers.n_videos),
            estimate=numbers,
            changed=np.array([differs_A[group.arms].any() for group in groups]),
        )


def _judge_methods(
    kind: Kind, tasks: Sequence[_MeasuredTask], groups: Sequence[ArmGroup], titles: Mapping[str, str], within: float
) -> list[Verdict]:
    """Return a verdict for each method and positions except full retention; ``titles`` are names by import path."""
    estimate = average_estimates([task.estimate for task in tasks])
    rows: dict[tuple[str, str], list[int]] = {}
    for row in range(FULL_ROW + 1, len(groups)):
        rows.setdefault((groups[row].method, groups[row].positions), []).append(row)
    return [
        Verdict(
            kind=kind,
            title=format_row_title(groups[method_rows[0]], titles),
            method=method,
            positions=positions,
            losses=[_measure_loss(estimate, kind, tasks, row, groups[row], within) for row in method_rows],
            within=within,
        )
        for (method, positions), method_rows in rows.items()
    ]


def _measure_loss(
    estimate: Estimate, kind: Kind, tasks: Sequence[_MeasuredTask], row: int, group: ArmGroup, within: float
) -> Loss:
    """Return the loss of a row against full retention on the tasks of a kind, with the outcome of its test.

    The first of these outcomes that applies counts: "not run" if a score is missing, which has a reason and no
    difference; "few videos" if a task has fewer than FEWEST_VIDEOS; "nothing to lose" if full retention scores at most
    ``within``; "no change" if no question's score changed; "no interval" if no draw is defined; "loses" if the whole
    interval is below -``within``; "wide" if half its width is above ``within``; "passes" if its lower end is above
    -``within``; otherwise "may lose". Only the last four have an interval, which is a single number if all draws have
    the same difference.
    """
    difference = estimate.difference(row, FULL_ROW)
    if math.isnan(difference.value):
        return Loss(ratio=group.ratio, outcome="not run", lacking=_explain_missing_loss(tasks, row, group))
    number = 100 * difference.value
    if estimate.n_videos < FEWEST_VIDEOS:
        return Loss(ratio=group.ratio, outcome="few videos", difference=number)
    if round(kind.full_score, _DIGITS) <= within:
        return Loss(ratio=group.ratio, outcome="nothing to lose", difference=number)
    if not any(task.changed[row] for task in tasks):
        return Loss(ratio=group.ratio, outcome="no change", difference=0.0)
    if not np.isfinite(estimate.drawn[:, row] - estimate.drawn[:, FULL_ROW]).any():
        return Loss(ratio=group.ratio, outcome="no interval", difference=number)
    # There are draws but no interval: all draws have the same difference.
    ends = (number, number) if math.isnan(difference.low) else (100 * difference.low, 100 * difference.high)
    low, high = (round(end, _DIGITS) for end in ends)
    return Loss(ratio=group.ratio, outcome=_judge(low, high, within), difference=number, low=low, high=high)


def _judge(low: float, high: float, within: float) -> Outcome:
    """Return the outcome of a ratio from the ends of its interval in points."""
    if high < -within:
        return "loses"
    if round((high - low) / 2, _DIGITS) > within:
        return "wide"
    return "passes" if low > -within else "may lose"


def _explain_missing_loss(tasks: Sequence[_MeasuredTask], row: int, group: ArmGroup) -> str:
    """Return why a row has no loss: "not run on" or "not run with all N seeds on", and the titles of benchmarks.

    If full retention is missing on any benchmark, return "full retention not run on" and their titles instead.
    """

    def list_missing(row: int) -> str:
        return ", ".join(
            measured_task.task.title for measured_task in tasks if math.isnan(measured_task.estimate.value[row])
        )

    if without_full := list_missing(FULL_ROW):
        return f"full retention not run on {without_full}"
    seeds = f" with all {len(group.seeds)} seeds" if len(group.seeds) > 1 else ""
    return f"not run{seeds} on {list_missing(row)}"
