"""The section *Where it breaks*: for each kind of ability, what pruning loses and the lowest safe retention ratio.

The ratios of a method are tested from the largest down, and the first one that fails ends the test. In this fixed
order, the probability of calling some unsafe ratio safe is that of a single test, however many ratios there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from pipeline.evaluate.statistics import FEWEST_VIDEOS
from pipeline.evaluate.table import format_interval, format_points, format_score
from pipeline.rows import JsonObject

BREAKS_TITLE = "Where it breaks"
Outcome = Literal[
    "passes", "no change", "loses", "may lose", "few videos", "nothing to lose", "wide", "no interval", "not run"
]
_PASSED: Sequence[Outcome] = ("passes", "no change")
_UNKNOWN: Sequence[Outcome] = ("few videos", "nothing to lose", "wide", "no interval")
UNKNOWN, UNSAFE = "cannot be told", "none"  # answers that name no ratio
_FROM_ELSEWHERE = ("grounding", "hallucination")  # kinds that hardly any questions of the built-in benchmarks test


@dataclass(frozen=True, kw_only=True)
class Task:
    """The questions of one benchmark that test one kind of ability; ``title`` is the benchmark's title."""

    title: str
    n_questions: int
    n_videos: int

    @property
    def text(self) -> str:
        """The benchmark's title with the numbers of questions and videos in parentheses."""
        return f"{self.title} ({self.n_questions:,} questions, {self.n_videos:,} videos)"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of ability, whose score is the unweighted mean of the scores of its tasks, at least one.

    Attributes:
        full_score: the score of full retention in percent; nan unless full retention was run on every task.
    """

    name: str
    tasks: Sequence[Task]
    full_score: float

    @property
    def n_videos(self) -> int:
        """The smallest number of videos among the tasks."""
        return min(task.n_videos for task in self.tasks)

    @property
    def text(self) -> str:
        """The tasks in one line, with the score of full retention unless it is nan."""
        full = "" if math.isnan(self.full_score) else f"; full retention {format_score(self.full_score)}"
        return " + ".join(task.text for task in self.tasks) + full


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The score of a method at one ratio minus that of full retention, on the questions of one kind, in points.

    Attributes:
        outcome: the result of testing this ratio alone, whatever larger ratios gave.
        difference: negative if pruning loses; None if the method or full retention was not run on every task.
        low, high: the ends of the 95 % interval; None if there is no interval.
        lacking: why ``difference`` is None; "" if it is a number.
    """

    ratio: float
    outcome: Outcome
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    lacking: str = ""

    @property
    def share(self) -> str:
        """The retention ratio as a percentage, such as "25%"."""
        return f"{100 * self.ratio:g}%"

    @property
    def passed(self) -> bool:
        """True if the test continues with lower ratios."""
        return self.outcome in _PASSED

    @property
    def half_width(self) -> float:
        """Half the width of the interval in points; 0 without an interval."""
        return 0.0 if self.low is None or self.high is None else (self.high - self.low) / 2

    @property
    def interval(self) -> str:
        """The interval as text, such as "[-1.2, +0.3]"; "" without an interval."""
        return format_interval(self.low, self.high)

    @property
    def number(self) -> str:
        """The difference with its sign, "no change", or the reason why there is no number."""
        if self.difference is None:
            return self.lacking
        return self.outcome if self.outcome == "no change" else format_points(self.difference)

    @property
    def text(self) -> str:
        """The number, followed by the interval if there is one."""
        return f"{self.number} {self.interval}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The lowest safe ratio of a method on one kind of questions, and the losses that it was derived from.

    Attributes:
        title: the method's printed name.
        method: the method with its parameters, and with its seed if there is only one.
        positions: the positions of the kept tokens; "" for the model family's default.
        losses: one for each ratio of the method, largest first.
        within: the number of points that a safe ratio may lose.
    """

    kind: Kind
    title: str
    method: str
    positions: str
    losses: Sequence[Loss]
    within: float

    def at(self, ratio: float) -> Loss | None:
        """Return the loss at exactly this ratio, or None if the method has no row there."""
        return next((loss for loss in self.losses if loss.ratio == ratio), None)

    @property
    def tested(self) -> list[Loss]:
        """The losses that have a number, largest ratio first."""
        return [loss for loss in self.losses if loss.difference is not None]

    @property
    def passed(self) -> list[Loss]:
        """The losses at the safe ratios: those before the first tested ratio that did not pass."""
        return list(takewhile(lambda loss: loss.passed, self.tested))

    @property
    def stop(self) -> Loss | None:
        """The first tested loss that did not pass; None if every tested ratio passed or none has a number."""
        return next((loss for loss in self.tested if not loss.passed), None)

    @property
    def lowest_safe_ratio(self) -> float | None:
        """The smallest of the safe ratios, or None if there is none."""
        return self.passed[-1].ratio if self.passed else None

    @property
    def answer(self) -> str:
        """The lowest safe ratio as a percentage. Without one, UNSAFE or, if the data cannot tell, UNKNOWN."""
        if self.passed:
            return self.passed[-1].share
        return UNKNOWN if self.stop is None or self.stop.outcome in _UNKNOWN else UNSAFE

    @property
    def reason(self) -> str:
        """The reason for the answer, with "; " between its clauses.

        It says if no answer's score changed at the named ratio, then what ended the test, or that the lowest tested
        ratio passed, then which ratios have no number. If no ratio has a number, it says only why. If too few videos or
        a full score of at most ``within`` ruled out the test, it says only that.
        """
        if not self.tested:
            return "; ".join(dict.fromkeys(loss.lacking for loss in self.losses))
        if self.tested[0].outcome in ("few videos", "nothing to lose"):  # at every ratio
            return self._describe_stop()
        parts = list[str]()
        if self.answer == UNSAFE:
            parts.append(f"no tested ratio is safe: {self._describe_stop()}")
        else:
            if self.passed and self.passed[-1].outcome == "no change":
                parts.append(f"no change in {sum(task.n_questions for task in self.kind.tasks):,}")
            parts.append(self._describe_stop() or "the lowest ratio that was tested")
        skipped = [f"{loss.share} {loss.lacking}" for loss in self.losses if loss.difference is None]
        return "; ".join([*parts, *skipped])

    def _describe_stop(self) -> str:
        """Return why the ratio that ended the test did not pass; "" if ``stop`` is None."""
        loss = self.stop
        if loss is None:
            return ""
        if loss.outcome == "few videos":
            title = next(task.title for task in self.kind.tasks if task.n_videos == self.kind.n_videos)
            return f"{self.kind.n_videos:,} videos" + (f" of {title}" if len(self.kind.tasks) > 1 else "")
        if loss.outcome == "nothing to lose":
            return f"full retention scores {format_score(self.kind.full_score)}"
        at = f"at {loss.share}"
        if loss.outcome in _UNKNOWN:
            why = "no interval" if loss.outcome == "no interval" else f"half width {loss.half_width:.2f}"
            return f"{at} it cannot be told: {why}" if self.passed else f"{why} {at}"
        if loss.outcome == "loses":
            return f"{at} it loses {-(loss.difference or 0.0):.1f} points {loss.interval}"
        return f"{at} it may lose more than {self.within:g} points: {loss.text}"

    def as_record(self) -> JsonObject:
        """Return the verdict as a JSON-able record; a loss is ``safe`` only if all larger tested ratios passed too."""
        return {
            "kind": self.kind.name,
            "method": self.method,
            "positions": self.positions or None,
            "lowest_safe_ratio": self.lowest_safe_ratio,
            "answer": self.answer,
            "reason": self.reason,
            "losses": [
                {"retention_ratio": loss.ratio}
                | {name: vars(loss)[name] for name in ("outcome", "difference", "low", "high")}
                | {"safe": loss in self.passed}
                for loss in self.losses
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Breaks:
    """The contents of the section *Where it breaks*.

    Attributes:
        kinds: in display order.
        verdicts: for each kind in turn, one verdict per method and positions.
        within: the number of points that a safe ratio may lose.
        draws, seed: of the bootstrap behind the intervals.
        not_measured: built-in abilities that no question tests.
        notes: sentences about benchmarks that are left out, and about unused rules of the user.
    """

    kinds: Sequence[Kind]
    verdicts: Sequence[Verdict]
    within: float
    draws: int
    seed: int
    not_measured: Sequence[str] = ()
    notes: Sequence[str] = ()

    def select_verdicts(self, kind: Kind) -> list[Verdict]:
        """Return the verdicts on one kind, in order."""
        return [verdict for verdict in self.verdicts if verdict.kind == kind]

    @property
    def ratios(self) -> list[float]:
        """The distinct ratios of all verdicts, largest first."""
        return sorted({loss.ratio for verdict in self.verdicts for loss in verdict.losses}, reverse=True)

    @property
    def explanation(self) -> list[str]:
        """Sentences that explain how to read the verdicts; without verdicts, one sentence that nothing can be said."""
        if not self.verdicts:
            return ["No method was run on questions that each have a score, so nothing can be said."]
        n_methods = len({verdict.title for verdict in self.verdicts})
        counts = f"{len(self.kinds)} kinds and {n_methods} methods"
        return [
            "A loss is the score of the pruned run minus that of full retention on the same questions, in points, with "
            f"the 95 % interval of {self.draws:,} draws of whole videos (seed {self.seed}). A kind is the equal mean "
            "of its tasks, which are drawn independently. A task is the part of a benchmark that tests this ability, "
            "averaged as the benchmark is.",
            "The lowest safe ratio is found from the largest ratio down, up to the first that fails. A ratio passes if "
            f"the lower end of its interval is above -{self.within:g} points (--within), or if no answer's score "
            "changed. This order needs no correction for the number of ratios. Nothing is corrected for the "
            f"{counts}: in up to 1 of 40 lines the named ratio is too low by chance.",
            f"Cannot be told: a task has fewer than {FEWEST_VIDEOS} videos, full retention itself scores "
            f"{self.within:g} or less, or half the width of the interval is above {self.within:g} points (unless it "
            f"lies wholly below -{self.within:g}, which is a loss).",
        ]

    @property
    def remarks(self) -> list[str]:
        """Sentences to print below the verdicts: the abilities that were not measured, if any, then the notes.

        For grounding and hallucination, the sentence also says how to measure them.
        """
        lines = []
        if self.not_measured:
            sentence = f"Not measured here: {', '.join(self.not_measured)}."
            elsewhere = [name.capitalize() for name in _FROM_ELSEWHERE if name in self.not_measured]
            kinds_text = " and ".join(elsewhere[:1] + [name.lower() for name in elsewhere[1:]])
            remedy = f" {kinds_text}: use tasks of lmms-eval, or name questions with --abilities." if elsewhere else ""
            lines.append(sentence + remedy)
        return [*lines, *self.notes]

    def as_record(self) -> JsonObject:
        """Return the section as a JSON-able record; its "notes" are the explanation and the remarks."""
        return {
            "within": self.within,
            "draws": self.draws,
            "seed": self.seed,
            "kinds": [
                {
                    "kind": kind.name,
                    "full_score": None if math.isnan(kind.full_score) else kind.full_score,
                    "tasks": [vars(task) for task in kind.tasks],
                }
                for kind in self.kinds
            ],
            "lines": [verdict.as_record() for verdict in self.verdicts],
            "not_measured": list(self.not_measured),
            "notes": [*self.explanation, *self.remarks],
        }
