"""Density-guided farthest point sampling on a GPU from the distances of all pairs, in M * M * 12 bytes.

On an H200 this form takes a third of the lazy form's time. Importing this module needs Triton.

Shapes: R rows, S the number of rows rounded up to a multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from gstep.density import ZERO_DISTANCE, compute_row_factors, get_work_dtype, scale_rows
from gstep.selection.gpu import kernels
from gstep.selection.reference import NO_DISTANCE, choose_first_token, compute_density_weight, compute_inverse_roots

_ROW_MULTIPLE = 16  # the length of matrix rows is a multiple of this, so that 16 bytes can be read at a time
_GROUP = 8  # rows of tiles that are traversed together
_FOLD = (8, 256)  # tile of products that one program turns into distances
UNFUSED = {"enable_fp_fusion": False}  # because gstep.selection.reference rounds after each operation


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The tile and batch sizes of the kernels, which do not change any result.

    Attributes:
        block: Tokens along each side of a tile of dot products.
        block_hidden: Channels of a tile that are multiplied at a time.
        warps: Warps of a tile's program.
        stages: Loads of a tile in flight.
        candidates: K, the candidates per round of the lazy form.
        rounds: Rounds of the lazy form between two reads of its progress; each read waits for the GPU.
    """

    block: int = 128
    block_hidden: int = 64
    warps: int = 8
    stages: int = 3
    candidates: int = 1024
    rounds: int = 4


def choose_tuning(dtype: torch.dtype, n_tokens: int) -> Tuning:
    """Return tile sizes for tensor cores, or smaller ones for float32; above 65,536 tokens, more candidates."""
    candidates = 2048 if n_tokens > 65536 else 1024
    if dtype == torch.float32:
        return Tuning(block=64, block_hidden=16, warps=4, stages=2, candidates=candidates)
    return Tuning(candidates=candidates)


@dataclass(frozen=True)
class Task:
    """The tensors of one video that the kernels read; all except ``tokens`` and ``start`` are float64.

    Attributes:
        tokens: [M,D], contiguous, 16 bits or float32, scaled so that squares neither overflow nor vanish.
        inverse: [M], 1 / L2 norm; 0 for a zero token.
        weight: [M], the result of ``compute_density_weight``.
        start: [1] int64, the first pick.
        constants: [2], beta and ZERO_DISTANCE.
        budget: B.
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
    """Prepare a video's tensors for the kernels, on the tokens' device.

    The arguments have the meaning that they have in ``density_guided_fps``, and are not checked. ``tuning`` None means
    ``choose_tuning``.

    Returns:
        The task; None if the kernels cannot serve it: the tokens are float64, or keys could leave the range of float64
        (a tiny alpha or an extreme beta).
    """
    if tokens_MD.dtype == torch.float64:
        return None
    weight_M = compute_density_weight(density_M, alpha, beta)
    if weight_M is None:
        return None
    tokens_MD = _prepare_tokens(tokens_MD)
    tuning = tuning or choose_tuning(tokens_MD.dtype, len(tokens_MD))
    return Task(
        tokens=tokens_MD,
        inverse=_compute_inverse_norms(tokens_MD, tuning),
        weight=weight_M,
        start=choose_first_token(
            start, tokens_MD.to(get_work_dtype(tokens_MD)) if start == "isolated" else tokens_MD, density_M
        ),
        constants=torch.tensor([beta, ZERO_DISTANCE], dtype=torch.float64, device=tokens_MD.device),
        budget=budget,
        tuning=tuning,
    )


def _prepare_tokens(tokens_MD: Tensor) -> Tensor:
    """Return contiguous tokens for the kernels, with rows scaled by ``compute_row_factors`` if any row is out of range.

    The dtype stays the same, except that bfloat16 tokens on a CPU become float32.
    """
    dtype = tokens_MD.dtype
    if not tokens_MD.is_cuda and dtype == torch.bfloat16:
        dtype = torch.float32  # Triton's interpreter multiplies bfloat16 by its bits as if they were integers
    factor_M = compute_row_factors(tokens_MD)
    return (tokens_MD if factor_M is None else scale_rows(tokens_MD, factor_M)).to(dtype).contiguous()


def _compute_inverse_norms(tokens_MD: Tensor, tuning: Tuning) -> Tensor:
    """Compute 1 / L2 norm, [M] float64, 0 for a zero token, from the kernels' own products."""
    n_tokens, hidden = tokens_MD.shape
    square_M = torch.empty(n_tokens, dtype=torch.float64, device=tokens_MD.device)
    grid = (triton.cdiv(n_tokens, tuning.block),)
    kernels.squares_kernel[grid](tokens_MD, square_M, n_tokens, **make_tile_options(hidden, tuning))
    return compute_inverse_roots(square_M)


def compute_gram_width(n_tokens: int) -> int:
    """Return ``n_tokens`` rounded up to a multiple of 16, the row length of the matrix of all pairs."""
    return -(-n_tokens // _ROW_MULTIPLE) * _ROW_MULTIPLE


def compute_pair_distances(task: Task, row_R: Tensor) -> Tensor:
    """Compute the cosine distances of the tokens ``row_R`` to each other, [S,S] float64.

    Columns from R on are zero. Rows from R on are uninitialized memory.
    """
    n_rows = len(row_R)
    width = compute_gram_width(len(row_R))
    gram_SS = torch.empty(width, width, dtype=torch.float32, device=row_R.device)
    kernels.gram_kernel[(triton.cdiv(n_rows, task.tuning.block) ** 2,)](
        *(task.tokens, row_R, gram_SS, n_rows, width),
        GROUP=_GROUP,
        **make_tile_options(task.tokens.shape[1], task.tuning),
    )
    distances_SS = torch.empty_like(gram_SS, dtype=torch.float64)
    kernels.fold_kernel[(triton.cdiv(n_rows, _FOLD[0]), triton.cdiv(width, _FOLD[1]))](
        *(row_R, task.inverse, task.constants, gram_SS, distances_SS, n_rows, width, *_FOLD), num_warps=4, **UNFUSED
    )
    return distances_SS


def make_tile_options(hidden: int, tuning: Tuning) -> dict[str, int | bool]:
    """Return the launch options of all kernels that multiply tokens; only equal options give bit-equal dot products."""
    return {
        "HIDDEN": hidden,
        "BLOCK": tuning.block,
        "BLOCK_D": tuning.block_hidden,
        "num_warps": tuning.warps,
        "num_stages": tuning.stages,
        **UNFUSED,
    }


def select_by_gram(task: Task) -> Tensor:
    """Select a video's tokens from all distances, [B] int64 in order of selection, without waiting for the GPU."""
    n_tokens = len(task.tokens)
    device = task.tokens.device
    row_M = torch.arange(n_tokens, device=device)
    # The start is picked first, and its distances replace the initial value of all other tokens.
    distance_M = torch.full_like(task.inverse, NO_DISTANCE).index_fill_(0, task.start, torch.inf)
    order_B = torch.empty(task.budget, dtype=torch.int64, device=device)
    count_1 = torch.zeros(1, dtype=torch.int32, device=device)
    run_greedy(task, row_M, distance_M, make_open_bar(device), order_B, count_1)
    return order_B


def make_open_bar(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a bar for :func:`run_greedy` that every token passes: key -inf, [1] float64, and index 0, [1] int32."""
    key_1 = torch.full((1,), -torch.inf, dtype=torch.float64, device=device)
    return key_1, torch.zeros(1, dtype=torch.int32, device=device)


def run_greedy(
    task: Task, row_R: Tensor, distance_R: Tensor, bar: tuple[Tensor, Tensor], order_B: Tensor, count_1: Tensor
) -> Tensor:
    """Pick greedily among the tokens ``row_R``, and return their distances after the picks, [R].

    Picking ends when the budget is spent or no token of ``row_R`` passes the bar. The call does not wait for the GPU.

    Args:
        row_R: Token indices, ascending.
        distance_R: Their distances to the picks so far, float64; -inf for picked tokens, as in the result.
        bar: The key of the best other token, and the number of ``row_R`` with a lower index. A token passes if its key
            is higher, or equal with a lower index.
        order_B: The picks are written here from position ``count_1`` on.
        count_1: [1] int32, raised in place by the number of picks.
    """
    distances_SS = compute_pair_distances(task, row_R)
    width = len(distances_SS)
    n_rows = len(row_R)
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
