"""Density-guided farthest point sampling on a GPU from the distances of all pairs, in M * M * 12 bytes.

``launch`` tries this form first, up to MAX_GRAM_TOKENS tokens. It computes all distances, and then runs all steps in
one launch. On an H200 it takes a third of the lazy form's time. Importing this needs Triton.

Shapes: M tokens, D hidden size, B budget, R rows, S their number rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from gstep.density import ZERO_DISTANCE, row_factors, scale_rows, work_dtype
from gstep.selection.gpu import kernels
from gstep.selection.reference import NO_DISTANCE, density_weight, inverse_roots, starting_token

_ROW_MULTIPLE = 16  # matrix rows are a multiple of this long, to be read 16 bytes at a time
_GROUP = 8  # rows of tiles that are walked together
_FOLD = (8, 256)  # tile of products that one program turns into distances
UNFUSED = {"enable_fp_fusion": False}  # gstep.selection.reference rounds after each operation


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The tile and batch sizes of the kernels; no result depends on them. Reasoned defaults, not tuned.

    Attributes:
        block: tokens along each side of a tile of dot products.
        block_hidden: channels of a tile that are multiplied at a time.
        warps: warps of a tile's program.
        stages: loads of a tile in flight.
        candidates: K, candidates of a round of the lazy form.
        rounds: rounds of the lazy form between two reads of its progress; each read waits for the GPU.
    """

    block: int = 128
    block_hidden: int = 64
    warps: int = 8
    stages: int = 3
    candidates: int = 1024
    rounds: int = 4


def default_tuning(dtype: torch.dtype, n_tokens: int) -> Tuning:
    """Choose tiles for tensor cores, or for the float32 units, and more candidates a round for many tokens."""
    candidates = 2048 if n_tokens > 65536 else 1024
    if dtype == torch.float32:
        return Tuning(block=64, block_hidden=16, warps=4, stages=2, candidates=candidates)
    return Tuning(candidates=candidates)


@dataclass(frozen=True)
class Task:
    """The tensors of one video for the kernels; all but tokens and start are float64.

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


def prepare_task(
    tokens_MD: Tensor,
    density_M: Tensor,
    budget: int,
    *,
    alpha: float,
    beta: float,
    start: str,
    tuning: Tuning | None = None,
) -> Task | None:
    """Prepare a video's tensors for the kernels; None if the kernels cannot serve it, as with float64 tokens.

    The arguments are the arguments of ``density_guided_fps``.
    """
    if tokens_MD.dtype == torch.float64:
        return None
    weight_M = density_weight(density_M, alpha, beta)
    if weight_M is None:
        return None
    tokens_MD = _prepare_tokens(tokens_MD)
    tuning = tuning or default_tuning(tokens_MD.dtype, len(tokens_MD))
    return Task(
        tokens=tokens_MD,
        inverse=_compute_inverse_norms(tokens_MD, tuning),
        weight=weight_M,
        start=starting_token(
            start, tokens_MD.to(work_dtype(tokens_MD)) if start == "isolated" else tokens_MD, density_M
        ),
        constants=torch.tensor([beta, ZERO_DISTANCE], dtype=torch.float64, device=tokens_MD.device),
        budget=budget,
        tuning=tuning,
    )


def _prepare_tokens(tokens_MD: Tensor) -> Tensor:
    """Return the tokens contiguous for the kernels; they are scaled row by row if one row's magnitude is out of range.

    Tokens on a CPU that are bfloat16 become float32.
    """
    dtype = tokens_MD.dtype
    if not tokens_MD.is_cuda and dtype == torch.bfloat16:
        dtype = torch.float32  # Triton's interpreter multiplies bfloat16 by its bits as if they were integers
    factor_M = row_factors(tokens_MD)
    return (tokens_MD if factor_M is None else scale_rows(tokens_MD, factor_M)).to(dtype).contiguous()


def _compute_inverse_norms(tokens_MD: Tensor, tuning: Tuning) -> Tensor:
    """Compute 1 / L2 norm, [M] float64, 0 of a zero token, by the kernels' own products: copies get distance 0."""
    n_tokens, hidden = tokens_MD.shape
    square_M = torch.empty(n_tokens, dtype=torch.float64, device=tokens_MD.device)
    grid = (triton.cdiv(n_tokens, tuning.block),)
    kernels.squares_kernel[grid](tokens_MD, square_M, n_tokens, **tile_options(hidden, tuning))
    return inverse_roots(square_M)


def gram_width(n_tokens: int) -> int:
    """Return S, the row length of the matrix of all pairs: ``n_tokens`` rounded up to 16."""
    return -(-n_tokens // _ROW_MULTIPLE) * _ROW_MULTIPLE


def pair_distances(task: Task, row_R: Tensor) -> Tensor:
    """Compute the cosine distances of tokens ``row_R`` to each other: [S,S] float64, S the padded width of R.

    Columns from R on are zero; rows from R on are uninitialised.
    """
    n_rows, width = len(row_R), gram_width(len(row_R))
    gram_SS = torch.empty(width, width, dtype=torch.float32, device=row_R.device)
    kernels.gram_kernel[(triton.cdiv(n_rows, task.tuning.block) ** 2,)](
        *(task.tokens, row_R, gram_SS, n_rows, width), GROUP=_GROUP, **tile_options(task.tokens.shape[1], task.tuning)
    )
    distances_SS = torch.empty_like(gram_SS, dtype=torch.float64)
    kernels.fold_kernel[(triton.cdiv(n_rows, _FOLD[0]), triton.cdiv(width, _FOLD[1]))](
        *(row_R, task.inverse, task.constants, gram_SS, distances_SS, n_rows, width, *_FOLD), num_warps=4, **UNFUSED
    )
    return distances_SS


def tile_options(hidden: int, tuning: Tuning) -> dict[str, int | bool]:
    """Return the launch options of all kernels that multiply tokens: equal options give equal dot products."""
    return {
        "HIDDEN": hidden,
        "BLOCK": tuning.block,
        "BLOCK_D": tuning.block_hidden,
        "num_warps": tuning.warps,
        "num_stages": tuning.stages,
        **UNFUSED,
    }


def select_by_gram(task: Task) -> Tensor:
    """Select the picks of a video, [B] int64: all distances at once, then one launch for all steps."""
    n_tokens, device = len(task.tokens), task.tokens.device
    row_M = torch.arange(n_tokens, device=device)
    # The start is picked first, and its distances replace the initial value of all other tokens.
    distance_M = torch.full_like(task.inverse, NO_DISTANCE).index_fill_(0, task.start, torch.inf)
    order_B = torch.empty(task.budget, dtype=torch.int64, device=device)
    count_1 = torch.zeros(1, dtype=torch.int32, device=device)
    run_greedy(task, row_M, distance_M, no_bar(device), order_B, count_1)
    return order_B


def no_bar(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a bar below every token, for :func:`run_greedy`: its key, [1] float64 -inf, and its index, [1] int32 0."""
    key_1 = torch.full((1,), -torch.inf, dtype=torch.float64, device=device)
    return key_1, torch.zeros(1, dtype=torch.int32, device=device)


def run_greedy(
    task: Task, row_R: Tensor, distance_R: Tensor, bar: tuple[Tensor, Tensor], order_B: Tensor, count_1: Tensor
) -> Tensor:
    """Pick greedily among tokens ``row_R``, ascending; return their distances after the picks, [R].

    Picking ends with the budget, or if no token of ``row_R`` passes the ``bar``. The picks are appended to ``order_B``,
    from ``count_1`` on, and ``count_1`` is raised; both are changed in place. Launches three kernels and does not wait
    for the GPU.
    """
    distances_SS = pair_distances(task, row_R)
    width, n_rows = len(distances_SS), len(row_R)
    distance_S = pad(distance_R, (0, width - n_rows), value=-torch.inf)
    weight_S = pad(task.weight[row_R], (0, width - n_rows), value=1.0)
    slots = triton.next_power_of_2(width)
    kernels.greedy_kernel[(1,)](
        *(distances_SS, row_R, distance_S, weight_S, *bar, order_B, count_1, task.constants, width // _ROW_MULTIPLE),
        *(task.budget, slots),
        num_warps=min(32, max(4, slots // 128)),  # a row's load of 16 bytes a thread, up to the maximum of warps
        **UNFUSED,
    )
    return distance_S[:n_rows]
