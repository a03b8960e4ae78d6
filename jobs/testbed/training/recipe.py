"""What a training's weights follow from, beside the code and the machine's arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field


def _number(default: int, text: str) -> int:
    number: int = field(default=default, metadata={"help": f"{text} [{default}]"})
    return number


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """Numbers that ``python -m jobs.testbed train`` takes as flags; what each means is its help."""

    seed: int = _number(0, "of weights, order and noise; the videos are the same")
    vision: int = _number(2500, "steps of the vision half")
    reading: int = _number(1200, "steps of the language half on ideal tokens")
    videos: int = _number(800, "training videos of each length that the vision half looks at")
    sight: int = _number(2400, "steps of the language half on what it says of them")
    held_out: int = _number(40, "development videos of each length and hardness for the model card")
