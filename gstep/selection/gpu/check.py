"""Whether the GPU kernels select on this GPU what ``gstep.selection.reference`` does: checked once, before they are
used.

Importing this needs Triton. Shapes: M tokens, D hidden size, B budget.
"""

from __future__ import annotations

from functools import cache

import torch

from gstep.selection.gpu.gram import Tuning, gram_form, prepare
from gstep.selection.gpu.lazy import LazyForm
from gstep.selection.reference import density_guided_fps

_TOKENS, _BUDGET = 1300, 96  # more tokens than a round of the lazy form has candidates
_LEVELS = 4  # few different densities, so that scores tie


@cache
def check_kernels(device: torch.device, dtype: torch.dtype, hidden: int) -> None:
    """Raises RuntimeError where a form selects other tokens than the plain one. Once passed, it is not run again."""
    check_forms(device, dtype, hidden, _TOKENS, _BUDGET)


def check_forms(
    device: torch.device, dtype: torch.dtype, hidden: int, n_tokens: int, budget: int, tuning: Tuning | None = None
) -> None:
    """Both forms on small integers, whose products float32 holds: the order must be the plain form's, ties included."""
    seeded = torch.Generator().manual_seed(0)
    tokens_MD = torch.randint(-1, 2, (n_tokens, hidden), generator=seeded).to(device, dtype)
    tokens_MD[n_tokens // 2 :: 7] = tokens_MD[: len(tokens_MD[n_tokens // 2 :: 7])]  # copies
    density_M = torch.randint(0, _LEVELS, (n_tokens,), generator=seeded).to(device, torch.float64) / _LEVELS
    expected_B = density_guided_fps(tokens_MD, density_M, budget)
    task = prepare(tokens_MD, density_M, budget, alpha=0.5, beta=1e-6, start="density", tuning=tuning)
    assert task is not None  # neither float64 nor extreme
    for name, order_B in (("Gram", gram_form([task])[0]), ("lazy", LazyForm(task).select())):
        if not torch.equal(order_B, expected_B):
            first = int((order_B != expected_B).nonzero()[0])
            raise RuntimeError(
                f"on {device} the {name} form selects other {dtype} tokens of width {hidden} than the plain one, "
                f"from pick {first} of {budget} on"
            )
