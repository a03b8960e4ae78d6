"""Check that the GPU kernels select what ``gstep.selection.reference`` selects.

Importing this module needs Triton.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from gstep.selection.gpu.gram import Task, Tuning, prepare_task, select_by_gram
from gstep.selection.gpu.lazy import LazyForm
from gstep.selection.reference import compute_distances, compute_inverse_norms, density_guided_fps

_TOKENS = 1300  # more tokens than a round of the lazy form has candidates
_BUDGET = 96
_LEVELS = 4  # few different densities, so that there are ties
_FRAMES = 8  # frames of the static video
_BETA = 1e-6
_TOLERANCE = 2e-5  # allowed error of a distance between different tokens: tensor cores lose up to 1e-5 of a product


@cache
def check_kernels(device: torch.device, dtype: torch.dtype, hidden: int) -> None:
    """Check both GPU forms on small videos, once per process for each device, dtype and hidden size.

    Raises:
        RuntimeError: A form picks other tokens than the reference. The next call then checks again.
    """
    check_forms(device, dtype, hidden, _TOKENS, _BUDGET)


def check_forms(
    device: torch.device, dtype: torch.dtype, hidden: int, n_tokens: int, budget: int, tuning: Tuning | None = None
) -> None:
    """Check both GPU forms against the reference on three videos.

    1. Small integers, whose products are exact in float32: the order must be the reference's, ties included. 2. Random
    tokens: each pick must be a best remaining token, up to the precision of tensor cores. 3. A static video of 8 equal
    frames of random tokens: the first frame's tokens must come first, in any order, then the second frame's in
    ascending index.

    Args:
        n_tokens: M; the static video may have up to 7 tokens fewer.
        budget: B of the first two videos; of the static video, two frames are selected.
        tuning: None means ``choose_tuning``.

    Raises:
        RuntimeError: A form picks other tokens; the message gives the first wrong pick.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    integers_MD = torch.randint(-1, 2, (n_tokens, hidden), generator=generator, device="cpu").to(device, dtype)
    integers_MD[n_tokens // 2 :: 7] = integers_MD[: len(integers_MD[n_tokens // 2 :: 7])]  # copies
    random_MD = torch.randn(n_tokens, hidden, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)
    levels_M = torch.randint(0, _LEVELS, (n_tokens,), generator=generator, device="cpu").to(device, torch.float64)
    frame = n_tokens // _FRAMES
    static_MD = random_MD[:frame].repeat(_FRAMES, 1)
    for tokens_MD, density_M, size in (
        (integers_MD, levels_M / _LEVELS, budget),
        (random_MD, levels_M / _LEVELS, budget),
        (static_MD, torch.zeros_like(levels_M[: len(static_MD)]), 2 * frame),
    ):
        task = prepare_task(tokens_MD, density_M, size, alpha=0.5, beta=_BETA, start="density", tuning=tuning)
        assert task is not None  # the tokens are not float64, and alpha and beta are not extreme
        for name, order_B in (("Gram", select_by_gram(task)), ("lazy", LazyForm(task).select())):
            if tokens_MD is integers_MD:
                wrong = order_B != density_guided_fps(tokens_MD, density_M, size)
            elif tokens_MD is static_MD:
                index_B = torch.arange(size, device=device)
                wrong = torch.cat([order_B[:frame].sort().values, order_B[frame:]]) != index_B
            else:
                wrong = find_worse_picks(order_B, task)
            if wrong.any():
                raise RuntimeError(
                    f"on {device} the {name} form selects other {dtype} tokens of width {hidden} than the reference, "
                    f"from pick {int(wrong.nonzero()[0])} of {size} on"
                )


def find_worse_picks(order_B: Tensor, task: Task) -> Tensor:
    """Return [B] bool, True for picks that were not a best remaining token by the reference's distances.

    Each pick is judged given the picks before it; its distance may be off by 2e-5. The first must be the task's start.
    """
    tokens_MD = task.tokens.float()
    inverse_M = compute_inverse_norms(tokens_MD)
    nearest_M = torch.full_like(inverse_M, torch.inf)
    wrong_B = torch.zeros_like(order_B, dtype=torch.bool)
    wrong_B[0] = order_B[0] != task.start[0]
    for step in range(1, len(order_B)):
        previous_1 = order_B[step - 1 : step]
        pick = order_B[step]
        nearest_M = torch.minimum(nearest_M, compute_distances(previous_1, tokens_MD, inverse_M))
        nearest_M.index_fill_(0, previous_1, -torch.inf)
        best = ((nearest_M + _BETA) * task.weight).amax()
        wrong_B[step] = (nearest_M[pick] + _BETA + _TOLERANCE) * task.weight[pick] < best
    return wrong_B
