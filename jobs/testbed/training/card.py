"""The model card."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.evaluate.shapes.questions import TYPES
from pipeline.evaluate.shapes.world import DURATIONS

WEIGHTS = "model.safetensors"


class Score(NamedTuple):
    """How many questions of a kind were answered rightly, with all tokens."""

    hardness: str
    type: str
    n_frames: int
    right: int
    asked: int


def scores_of(hardness: str, answers: Sequence[tuple[str, int, bool]]) -> list[Score]:
    """Counts by type and length. ``answers``: (type, frames, right)."""
    made = []
    for name in TYPES:
        for n_frames in DURATIONS.values():
            hits = [right for kind, frames, right in answers if (kind, frames) == (name, n_frames)]
            made.append(Score(hardness, name, n_frames, sum(hits), len(hits)))
    return made


def card(checkpoint: Path, recipe: Mapping[str, Any], scores: Sequence[Score]) -> str:
    """Markdown."""
    digest = hashlib.sha256((checkpoint / WEIGHTS).read_bytes()).hexdigest()
    steps = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in recipe.items())
    kinds = list(dict.fromkeys(score.hardness for score in scores))
    plain = [score for score in scores if score.hardness == "plain"]
    return f"""\
# shapes: a LLaVA-OneVision of 1.3 million parameters that answers questions about made-up videos

A `LlavaOnevisionForConditionalGeneration` of transformers, trained from nothing on one CPU for the benchmark `shapes`:
H.264 videos of 8, 16 or 32 frames of 96 x 96 pixels in which things come, stand, move, change and go. It is there to
show what pruning visual tokens costs, with answers that can be checked, where nothing can be downloaded.

- **Weights:** bfloat16, `{WEIGHTS}`, sha256 `{digest}`.
- **Recipe:** `python -m jobs.testbed train DIR {steps}`
- **Data:** made from seeds 1,000,000 to 4,999,999; nothing was taken from anywhere. 36 tokens a frame.
- **Positions:** trained with all tokens and with random shares of them down to 3 %, half of the time at their original
  positions, half closed up.

## Accuracy with all tokens

Development videos that no training saw, {recipe["held_out"]} of each length and hardness; chance is 25 %.

By type and length, hardness `plain`:

{_table("type", TYPES, DURATIONS, plain, lambda s: s.type, lambda s: s.n_frames)}

By hardness and length, all types:

{_table("hardness", kinds, DURATIONS, scores, lambda s: s.hardness, lambda s: s.n_frames)}

## Limits

It knows about a hundred words and no other world: any other video or question gets a letter that means nothing. What a
pruning method is worth on real videos cannot be told from it; what a method keeps and loses, and for which reason, can.
"""


def _table(
    title: str, rows: Sequence[str], columns: Mapping[str, int], scores: Sequence[Score], row_of: Any, column_of: Any
) -> str:
    """Percent right with the number of questions."""
    lines = [f"| {title} | {' | '.join(f'{name} ({n} frames)' for name, n in columns.items())} | all |"]
    lines.append("|---|" + "---|" * (len(columns) + 1))
    for row in [*rows, "all"]:
        mine = [s for s in scores if row in ("all", row_of(s))]
        groups = [[s for s in mine if column_of(s) == n] for n in columns.values()]
        lines.append(f"| {row} | " + " | ".join(_share(group) for group in [*groups, mine]) + " |")
    return "\n".join(lines)


def _share(scores: Sequence[Score]) -> str:
    right, asked = sum(s.right for s in scores), sum(s.asked for s in scores)
    return f"{100 * right / asked:.1f} % ({asked})" if asked else "-"
