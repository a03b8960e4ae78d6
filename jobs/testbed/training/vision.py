"""The vision half: the token of each cell is to be the sum of the words for what the cell shows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from jobs.testbed.training.frames import Difficulty, busy_frames
from jobs.testbed.training.network import Eyes
from jobs.testbed.training.space import Cells, ideal_tokens, readers
from jobs.testbed.training.stage import Meter, Stage

_BATCH = 40  # frames
#: Steps with things that fill patches, then as many until all are free. A tower that starts on free ones learns no
#: shape for hundreds of steps.
_ALIGNED = 150
_HARD_FROM, _HARD = 400, 0.5  # the step from which this share of frames is hard
_SHARP = 8.0  # of the logits
_THING = 3.0  # how much more a cell with a thing counts
_GROUPS = ("scene", "corner", "name", "color")


def train(stage: Stage) -> Eyes:
    """Through the path of the real class, pooling included."""
    torch.manual_seed(stage.seed)
    eyes = Eyes()

    def step(number: int, rng: np.random.Generator, meter: Meter) -> Tensor:
        free = min(1.0, max(0.0, (number - _ALIGNED) / _ALIGNED))
        frames, cells = busy_frames(rng, _BATCH, Difficulty(free, _HARD if number >= _HARD_FROM else 0.0))
        return _loss(eyes(frames), cells, meter)

    stage.run(eyes, step)
    return eyes


def _loss(made: Tensor, cells: Cells, meter: Meter) -> Tensor:
    """Squared distance to the ideal token, and cross-entropies of its words."""
    named = torch.from_numpy(cells.name > 0)
    weight = torch.where(named, _THING, 1.0)
    weight = weight / weight.sum()
    distance = ((made - ideal_tokens(cells)).square().sum(-1) * weight).sum()
    meter.add("distance", distance.item())
    loss = 0.3 * distance
    for group, reader, wanted in zip(_GROUPS, readers(), cells, strict=False):
        logits, target = _SHARP * made @ reader.T, torch.from_numpy(np.ascontiguousarray(wanted))
        of_things = group in {"name", "color"}
        if of_things:  # "no thing" wins where no word is half there
            logits = torch.cat([torch.full_like(logits[..., :1], _SHARP / 2), logits], -1)
        each = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        loss = loss + (each * weight.flatten()).sum() * (2 if group == "name" else 1)
        hit = (logits.argmax(-1) == target)[target > 0 if of_things else slice(None)]
        meter.add(group, hit.float().sum().item(), hit.numel())
    return loss
