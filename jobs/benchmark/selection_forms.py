"""The forms of the selection that are measured side by side, and the whole methods beside them.

Shapes: M tokens, D hidden size, B budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gstep import VisualTokens, budget_for, make_pruner
from gstep.density import ZERO_DISTANCE, row_slices
from gstep.selection.dispatch import fast_density_guided_fps
from gstep.selection.lazy import Counts, lazy_density_guided_fps

ALPHA, BETA = 0.5, 1e-6  # those of gstep.prune
PREFIX = 200  # steps of the plain form that are timed where all of them would take too long
# The plain form runs whole up to here: about 20 s at 10 GB/s.
_WHOLE_TOKENS, _WHOLE_BYTES = 25_000, 2e11


class Task(NamedTuple):
    """What every form gets: tokens [T,N,D] as an encoder gives them, their density [M] float64 and the ratio."""

    tokens: Tensor
    density: Tensor
    ratio: float

    @property
    def rows(self) -> Tensor:
        """The tokens as [M,D]."""
        return self.tokens.flatten(0, 1)

    @property
    def budget(self) -> int:
        return budget_for(self.ratio, len(self.density))


class Outcome(NamedTuple):
    """What a run selected: indices, of a selection in its order; ``counts`` where the form counts."""

    kept: Tensor
    counts: Counts | None = None


Run = Callable[[Task], Outcome]


class Form(NamedTuple):
    """One way to select; ``start`` gets the tokens [T,N,D], does what is not timed, and gives what is."""

    start: Callable[[Tensor], Run]


def plain_steps(n_tokens: int, hidden: int, budget: int) -> int:
    """How many steps of the plain form are timed, of the B - 1 that it has."""
    whole = n_tokens <= _WHOLE_TOKENS and 4.0 * n_tokens * hidden * budget <= _WHOLE_BYTES
    return max(1, budget - 1 if whole else min(budget - 1, PREFIX))


@dataclass(frozen=True)
class Plain:
    """The baseline: Eqs. (9)-(12) by one matrix-vector product a step, with nothing between that costs.

    Attributes:
        unit: [D,M] normalised tokens, float32, in the layout that torch.mv reads fastest.
        tokens: [M,D] as they came, whose picked row is nearer by than its column of ``unit``.
        inverse: [M] 1 / norm, 0 of a zero token.
    """

    unit: Tensor
    tokens: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, tokens_MD: Tensor) -> Plain:
        """The copy takes 4 D bytes a token; the time it takes is not counted."""
        n_tokens, hidden = tokens_MD.shape
        unit_DM, inverse_M = torch.empty(hidden, n_tokens), torch.empty(n_tokens)
        for rows in row_slices(tokens_MD):
            part = tokens_MD[rows].float()
            norm = torch.linalg.vector_norm(part, dim=1)
            inverse_M[rows] = norm.reciprocal().masked_fill_(norm == 0, 0.0)
            unit_DM[:, rows] = part.mul_(inverse_M[rows, None]).T
        return cls(unit_DM, tokens_MD, inverse_M)

    def select(self, density_M: Tensor, steps: int) -> Tensor:
        """The first ``steps`` + 1 tokens in order of selection, [steps + 1] int64; ties go to the lowest index."""
        order = torch.empty(steps + 1, dtype=torch.int64)
        term_M = density_M.float().add_(BETA).log_().mul_(1 - ALPHA)
        distance_M, score_M = torch.empty_like(term_M), torch.empty_like(term_M)
        nearest_M = torch.full_like(term_M, torch.inf)
        order[0] = picked = int(density_M.argmax())
        for step in range(1, steps + 1):
            term_M[picked] = -torch.inf
            picked_D = self.tokens[picked].float().mul_(self.inverse[picked])
            torch.mv(self.unit.T, picked_D, out=distance_M)
            torch.threshold_(distance_M.neg_().add_(1), ZERO_DISTANCE, 0.0)
            torch.minimum(nearest_M, distance_M, out=nearest_M)
            torch.add(nearest_M, BETA, out=score_M).log_().mul_(ALPHA).add_(term_M)
            order[step] = picked = int(score_M.argmax())
        return order


def _plain(tokens: Tensor) -> Run:
    plain = Plain.of(tokens.flatten(0, 1))

    def run(task: Task) -> Outcome:
        return Outcome(plain.select(task.density, plain_steps(len(task.density), tokens.shape[-1], task.budget)))

    return run


def _lazy(dims: int | None) -> Form:
    def run(task: Task) -> Outcome:
        counts = Counts()
        kept = lazy_density_guided_fps(
            task.rows, task.density, task.budget, alpha=ALPHA, beta=BETA, dims=dims, counts=counts
        )
        return Outcome(kept, counts)

    return Form(lambda tokens: run)


def _cuda(tokens: Tensor) -> Run:
    """What gstep.prune does with tokens on a GPU, where they are there already."""
    there = tokens.flatten(0, 1).cuda()

    def run(task: Task) -> Outcome:
        order = fast_density_guided_fps(there, task.density.to(there.device), task.budget, alpha=ALPHA, beta=BETA)
        return Outcome(order.cpu())  # waits for the GPU

    return run


def _whole(name: str) -> Form:
    pruner = make_pruner(name)

    def run(task: Task) -> Outcome:
        return Outcome(pruner.prune(VisualTokens(task.tokens), task.ratio).index)

    return Form(lambda tokens: run)


def all_forms() -> dict[str, Form]:
    """By name; "prune:" names a whole method of gstep.prune, with its density and the copy of what it keeps."""
    forms = {"plain": Form(_plain), "lazy": _lazy(0), "lazy+bound": _lazy(None)}
    if torch.cuda.is_available():
        forms["cuda"] = Form(_cuda)
    return forms | {f"prune:{name}": _whole(name) for name in ("gstep", "topk", "vidcom2", "uniform", "random")}
