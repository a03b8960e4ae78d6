"""Density-guided farthest point sampling on a GPU from the distances of all pairs, M * M * 12 bytes.

``launch`` tries this form first, up to MAX_GRAM_TOKENS tokens. It computes the distances at once, and then runs all
steps in one launch. On an H200 it takes a third of the lazy form's time. Importing this needs Triton.

Shapes: M tokens, D hidden size, B budget, R rows, S their number rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from gstep.density import ZERO_DISTANCE, level_copy, row_factors, work_dtype
from gstep.selection.gpu import kernels
from gstep.selection.reference import NO_DISTANCE, density_weight, inverse_roots, starting_token

_ROW_MULTIPLE = 16  # matrix rows are a multiple of this long, to be read 16 bytes at a time
_GROUP = 8  # rows of tiles that are walked together
_FOLD = (8, 256)  # tile of products that one program turns into distances
UNFUSED = {"enable_fp_fusion": False}  # gstep.selection.reference rounds after each operation


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The tile and batch sizes of the kernels, on which no result depends; reasoned defaults, not tuned.

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
    """Return a video's tensors ready for the kernels, or None where the kernels cannot work, as for float64 tokens.

    The arguments are those of ``density_guided_fps``.
    """
    if tokens_MD.dtype == torch.float64:
        return None
    weight_M = density_weight(density_M, alpha, beta)
    if weight_M is None:
        return None
    tokens_MD = _multiplied(tokens_MD)
    tuning = tuning or default_tuning(tokens_MD.dtype, len(tokens_MD))
    return Task(
        tokens=tokens_MD,
        inverse=_inverse_norms(tokens_MD, tuning),
        weight=weight_M,
        start=starting_token(
            start, tokens_MD.to(work_dtype(tokens_MD)) if start == "isolated" else tokens_MD, density_M
        ),
        constants=torch.tensor([beta, ZERO_DISTANCE], dtype=torch.float64, device=tokens_MD.device),
        budget=budget,
        tuning=tuning,
    )


def _multiplied(tokens_MD: Tensor) -> Tensor:
    """Convert tokens to the values that the kernels multiply: unchanged unless a row's magnitude is out of range."""
    dtype = tokens_MD.dtype
    if not tokens_MD.is_cuda and dtype == torch.bfloat16:
        dtype = torch.float32  # Triton's interpreter multiplies bfloat16 by its bits as if they were integers
    far = row_factors(tokens_MD) is not None
    return (level_copy(tokens_MD) if far else tokens_MD).to(dtype).contiguous()


def _inverse_norms(tokens_MD: Tensor, tuning: Tuning) -> Tensor:
    """Compute 1 / L2 norm, [M] float64, 0 of a zero token, from the diagonal of the products: see ``kernels``."""
    n_tokens, hidden = tokens_MD.shape
    square_M = torch.empty(n_tokens, dtype=torch.float64, device=tokens_MD.device)
    grid = (triton.cdiv(n_tokens, tuning.block),)
    kernels.squares_kernel[grid](tokens_MD, square_M, n_tokens, **tile_options(hidden, tuning))
    return inverse_roots(square_M)


def gram_width(n_tokens: int) -> int:
    """Return the length of the rows of a matrix of ``n_tokens``."""
    return -(-n_tokens // _ROW_MULTIPLE) * _ROW_MULTIPLE


def distances(task: Task, row_R: Tensor) -> Tensor:
    """Compute [S,S] float64, whose first R rows hold the distances of tokens ``row_R`` to each other, then zeros."""
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
    """Return the launch options of all kernels that multiply tokens: the same ones give the same dot products."""
    return {
        "HIDDEN": hidden,
        "BLOCK": tuning.block,
        "BLOCK_D": tuning.block_hidden,
        "num_warps": tuning.warps,
        "num_stages": tuning.stages,
        **UNFUSED,
    }


def gram_form(task: Task) -> Tensor:
    """Select the picks of a video, [B] int64: all distances at once, then one launch for all steps."""
    n_tokens, device = len(task.tokens), task.tokens.device
    row_M = torch.arange(n_tokens, device=device)
    # The start is picked first, and any distance to it replaces the others' initial value.
    distance_M = torch.full_like(task.inverse, NO_DISTANCE).index_fill_(0, task.start, torch.inf)
    order_B = torch.empty(task.budget, dtype=torch.int64, device=device)
    count_1 = torch.zeros(1, dtype=torch.int32, device=device)
    run_greedy(task, row_M, distance_M, no_bar(device), order_B, count_1)
    return order_B


def no_bar(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a bar that every token passes, for ``greedy_kernel``: its key, [1] float64, and its place, [1] int32."""
    key_1 = torch.full((1,), -torch.inf, dtype=torch.float64, device=device)
    return key_1, torch.zeros(1, dtype=torch.int32, device=device)


def run_greedy(
    task: Task, row_R: Tensor, distance_R: Tensor, bar: tuple[Tensor, Tensor], order_B: Tensor, count_1: Tensor
) -> Tensor:
    """Launch ``greedy_kernel`` on tokens ``row_R``, appending picks to ``order_B``; return distances after it, [R]."""
    distances_SS = distances(task, row_R)
    width, n_rows = len(distances_SS), len(row_R)
    distance_S = pad(distance_R, (0, width - n_rows), value=-torch.inf)
    weight_S = pad(task.weight[row_R], (0, width - n_rows), value=1.0)
    places = triton.next_power_of_2(width)
    kernels.greedy_kernel[(1,)](
        *(distances_SS, row_R, distance_S, weight_S, *bar, order_B, count_1, task.constants, width // _ROW_MULTIPLE),
        *(task.budget, places),
        num_warps=min(32, max(4, places // 128)),  # a row's load of 16 bytes a thread, up to the most there are
        **UNFUSED,
    )
    return distance_S[:n_rows]
