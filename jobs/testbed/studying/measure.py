"""The study itself: every video once, its questions under every set of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gstep.language import Visual
from jobs.testbed.studying.cases import Case, FilmedCases
from jobs.testbed.studying.knock_out import VARIANTS, TokenSet, kept_by_variant, touched
from jobs.testbed.studying.reading import Reader, grid_of, only
from pipeline.evaluate.shapes.evidence import parts_kept
from pipeline.evaluate.statistics.score_matrix import Arm
from pipeline.generate.late_pruning import LatePruning


class Outcome(NamedTuple):
    """Something that was so or not, about a video.

    Attributes:
        video_id: outcomes of one video are not independent.
        kind: the type of a question, or the kind of a thing.
        so: the question was answered rightly; of a thing, a token of its onset was kept.
        shown: whether kept tokens show all that the answer needs; None where that is not asked.
    """

    video_id: str
    kind: str
    so: bool
    shown: bool | None = None


@dataclass(frozen=True)
class Findings:
    """What came of it.

    Attributes:
        knock_out: answers by variant.
        answers: of each method at each ratio.
        onsets: of each method that chooses among the tokens before the language model.
        short: questions whose evidence touches more than half of all tokens, so that fewer others are left.
    """

    knock_out: dict[str, list[Outcome]] = field(default_factory=lambda: {name: [] for name in VARIANTS})
    answers: dict[Arm, list[Outcome]] = field(default_factory=dict)
    onsets: dict[Arm, list[Outcome]] = field(default_factory=dict)
    short: list[str] = field(default_factory=list)


def measure(
    films: Sequence[FilmedCases],
    reader: Reader,
    prunings: Mapping[Arm, LatePruning],
    *,
    positions: str,
    seed: int = 0,
    least: float = 0.0,
    progress: Callable[[int], None] = lambda done: None,
) -> Findings:
    """Ask all questions of the videos.

    Args:
        positions: of what methods keep, "contiguous" or "original"; knock-outs keep the original ones.
        seed: of the random tokens of a knock-out.
        least: share of its cell that a thing must cover to be seen by a token, not included.
        progress: gets the number of videos that are done.

    Raises UsageError where a video cannot be read.
    """
    findings = Findings()
    for done, film in enumerate(films, 1):
        whole = reader.look(film)
        _knock_out(findings, film, whole, reader, seed)
        for arm, late in prunings.items():
            if late.inside is None:
                _choose(findings, film, whole, reader, arm, late, positions, least)
            else:
                rights = reader.right(film.cases, [whole] * len(film.cases), positions, late.inside)
                findings.answers.setdefault(arm, []).extend(map(_outcome, film.cases, rights))
        progress(done)
    return findings


def _knock_out(findings: Findings, film: FilmedCases, whole: Visual, reader: Reader, seed: int) -> None:
    shown = [touched(case.evidence, grid_of(whole)) for case in film.cases]
    ids = [case.item.question_id for case in film.cases]
    findings.short.extend(one for one, tokens in zip(ids, shown, strict=True) if 2 * tokens.sum() > len(tokens))
    kept = [kept_by_variant(tokens, seed, one) for one, tokens in zip(ids, shown, strict=True)]
    for variant, outcomes in findings.knock_out.items():
        if variant in ("all", "none"):  # one Visual goes through the model once for all questions
            visuals = [only(whole, kept[0][variant])] * len(kept)
        else:
            visuals = [only(whole, sets[variant]) for sets in kept]
        rights = reader.right(film.cases, visuals, "original")
        outcomes.extend(map(_outcome, film.cases, rights))


def _choose(
    findings: Findings,
    film: FilmedCases,
    whole: Visual,
    reader: Reader,
    arm: Arm,
    late: LatePruning,
    positions: str,
    least: float,
) -> None:
    pruned = late.kept(whole, late.select(whole, reader.device))
    kept = kept_cells(pruned, grid_of(whole))
    rights = reader.right(film.cases, [pruned] * len(film.cases), positions)
    shown = [all(parts_kept(case.evidence, kept, least)) for case in film.cases]
    findings.answers.setdefault(arm, []).extend(map(_outcome, film.cases, rights, shown))
    findings.onsets.setdefault(arm, []).extend(
        Outcome(film.cases[0].item.cluster, onset.kind, all(parts_kept(onset.evidence, kept, least)))
        for onset in film.onsets
    )


def kept_cells(visual: Visual, grid: int) -> TokenSet:
    """[T,grid,grid] which tokens of a video were kept; a merged one counts where it is put."""
    kept = np.zeros(visual.n_frames * grid * grid, bool)
    kept[visual.index.numpy()] = True
    return kept.reshape(-1, grid, grid)


def _outcome(case: Case, right: bool, shown: bool | None = None) -> Outcome:
    return Outcome(case.item.cluster, case.type, right, shown)
