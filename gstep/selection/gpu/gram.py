"""Density-guided farthest point sampling on a GPU from the dot products of all pairs, M * M * 4 bytes.

They are computed at once, and then all steps of all videos of a batch, side by side, in one launch. Importing this
needs Triton.

Shapes: M tokens, D hidden size, B budget, R rows, V videos of a batch, S the largest M there, rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from gstep.density import ZERO_DISTANCE, working_copy, working_scale
from gstep.selection.gpu import kernels
from gstep.selection.reference import NO_DISTANCE, density_weight, rounded_sqrt, starting_token

_ROW_MULTIPLE = 16  # of the length of a Gram matrix's rows, which are then read 16 bytes at a time
_GROUP = 8  # rows of tiles that are walked together
UNFUSED = {"enable_fp_fusion": False}  # gstep.selection.reference rounds after each operation


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Sizes that no result depends on; the defaults are reasoned, not tuned on a GPU yet.

    Attributes:
        block: tokens by tokens of a tile of dot products.
        block_hidden: channels of it at a time.
        warps: of its program.
        stages: loads of it in flight.
        candidates: K.
        rounds: of the lazy form between two looks at how far it has come, each of which waits for the GPU.
    """

    block: int = 128
    block_hidden: int = 64
    warps: int = 8
    stages: int = 3
    candidates: int = 1024
    rounds: int = 4


def default_tuning(dtype: torch.dtype, n_tokens: int) -> Tuning:
    """Tiles for tensor cores, or for the float32 units; more candidates a round where there are many tokens."""
    candidates = 2048 if n_tokens > 65536 else 1024
    if dtype == torch.float32:
        return Tuning(block=64, block_hidden=16, warps=4, stages=2, candidates=candidates)
    return Tuning(candidates=candidates)


@dataclass(frozen=True)
class Task:
    """One video, ready for the kernels; all but tokens and start are float64.

    Attributes:
        tokens: [M,D], contiguous, 16 bits or float32, in a range where squares neither overflow nor vanish.
        inverse: [M], 1 / L2 norm, 0 of a zero token.
        weight: [M], ``density_weight`` of gstep.selection.reference.
        start: [1] int64, the first pick.
        constants: [2], beta, ZERO_DISTANCE.
        budget: B.
        tuning: the sizes of the launches.
    """

    tokens: Tensor
    inverse: Tensor
    weight: Tensor
    start: Tensor
    constants: Tensor
    budget: int
    tuning: Tuning


def prepare(
    tokens_MD: Tensor,
    density_M: Tensor,
    budget: int,
    *,
    alpha: float,
    beta: float,
    start: str,
    tuning: Tuning | None = None,
) -> Task | None:
    """What the kernels work on; None where they cannot, as for float64 tokens. Arguments as of density_guided_fps."""
    if tokens_MD.dtype == torch.float64:
        return None
    # Triton's interpreter, which is what runs on a CPU, multiplies bfloat16 by its bits as if they were integers.
    raw = tokens_MD.is_cuda or tokens_MD.dtype != torch.bfloat16
    tokens_MD = (tokens_MD if raw and working_scale(tokens_MD) == 1.0 else working_copy(tokens_MD)).contiguous()
    weight_M = density_weight(density_M, alpha, beta)
    if weight_M is None:
        return None
    return Task(
        tokens=tokens_MD,
        inverse=_inverse_norms(tokens_MD),
        weight=weight_M,
        start=starting_token(start, working_copy(tokens_MD) if start == "isolated" else tokens_MD, density_M),
        constants=torch.tensor([beta, ZERO_DISTANCE], dtype=torch.float64, device=tokens_MD.device),
        budget=budget,
        tuning=tuning or default_tuning(tokens_MD.dtype, len(tokens_MD)),
    )


def _inverse_norms(tokens_MD: Tensor) -> Tensor:
    """``gstep.selection.reference.inverse_norms`` with one order of summation for all rows."""
    n_tokens, hidden = tokens_MD.shape
    square_M = torch.empty(n_tokens, dtype=torch.float64, device=tokens_MD.device)
    grid = (triton.cdiv(n_tokens, 16),)
    kernels.squares_kernel[grid](tokens_MD, square_M, n_tokens, HIDDEN=hidden, BLOCK=16, BLOCK_D=128, num_warps=4)
    return rounded_sqrt(square_M).reciprocal().masked_fill(square_M == 0, 0.0)


def gram_width(n_tokens: int) -> int:
    """The length of the rows of a Gram matrix of ``n_tokens``."""
    return -(-n_tokens // _ROW_MULTIPLE) * _ROW_MULTIPLE


def fill_gram(task: Task, row_R: Tensor, gram_SS: Tensor) -> None:
    """Write the dot products of tokens ``row_R`` into the first R rows and columns."""
    n_rows = len(row_R)
    kernels.gram_kernel[(triton.cdiv(n_rows, task.tuning.block) ** 2,)](
        task.tokens, row_R, gram_SS, n_rows, len(gram_SS), GROUP=_GROUP, **tile_options(task)
    )


def tile_options(task: Task) -> dict[str, int | bool]:
    """The launch options of all kernels that multiply tokens: the same ones, so that their dot products are, too."""
    return {
        "HIDDEN": task.tokens.shape[1],
        "BLOCK": task.tuning.block,
        "BLOCK_D": task.tuning.block_hidden,
        "num_warps": task.tuning.warps,
        "num_stages": task.tuning.stages,
        **UNFUSED,
    }


def gram_form(tasks: Sequence[Task]) -> list[Tensor]:
    """The picks of videos of one device, alpha and beta, [B] int64 each: a launch a video, then one for all steps."""
    n_videos, device = len(tasks), tasks[0].tokens.device
    width = gram_width(max(len(task.tokens) for task in tasks))
    # Zeros, since the kernel reads whole rows: arithmetic on what memory happens to hold may raise.
    gram_VSS = torch.zeros(n_videos, width, width, dtype=torch.float32, device=device)
    row_S = torch.arange(width, device=device)
    for task, gram_SS in zip(tasks, gram_VSS, strict=True):
        fill_gram(task, row_S[: len(task.tokens)], gram_SS)
    # The start comes first, and any distance to it replaces what the others have.
    distances = [torch.full_like(t.inverse, NO_DISTANCE).index_fill_(0, t.start, torch.inf) for t in tasks]
    order_VB = torch.empty(n_videos, max(task.budget for task in tasks), dtype=torch.int64, device=device)
    run_greedy(
        gram_VSS,
        row_S,
        stack_padded(distances, width, -torch.inf),
        stack_padded([task.weight for task in tasks], width, 1.0),
        stack_padded([task.inverse for task in tasks], width, 0.0),
        no_bar(device),
        order_VB,
        torch.zeros(n_videos, dtype=torch.int32, device=device),
        torch.tensor([task.budget for task in tasks], dtype=torch.int32, device=device),
        tasks[0].constants,
    )
    return [order_B[: task.budget] for task, order_B in zip(tasks, order_VB, strict=True)]


def stack_padded(values: Sequence[Tensor], width: int, filling: float) -> Tensor:
    """[V, width] from V tensors of up to ``width`` numbers."""
    return torch.stack([pad(value, (0, width - len(value)), value=filling) for value in values])


def no_bar(device: torch.device) -> tuple[Tensor, Tensor]:
    """What every token passes: the key, [1] float64, and the place, [1] int32."""
    key_1 = torch.full((1,), -torch.inf, dtype=torch.float64, device=device)
    return key_1, torch.zeros(1, dtype=torch.int32, device=device)


def run_greedy(
    gram_VSS: Tensor,
    row_S: Tensor,
    distance_VS: Tensor,
    weight_VS: Tensor,
    inverse_VS: Tensor,
    bar: tuple[Tensor, Tensor],
    order_VB: Tensor,
    count_V: Tensor,
    budget_V: Tensor,
    constants_2: Tensor,
) -> None:
    """Launch ``greedy_kernel``, whose docstring says what each argument is; distances, order and count change."""
    n_videos, width = distance_VS.shape
    block = triton.next_power_of_2(width)
    kernels.greedy_kernel[(n_videos,)](
        gram_VSS,
        row_S,
        distance_VS,
        weight_VS,
        inverse_VS,
        *bar,
        order_VB,
        count_V,
        budget_V,
        constants_2,
        width,
        order_VB.shape[1],
        BLOCK=block,
        num_warps=min(32, max(4, block // 128)),  # a row's load of 16 bytes a thread, up to the most threads there are
        **UNFUSED,
    )
