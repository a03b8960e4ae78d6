"""Triton kernels of density-guided farthest point sampling, Eqs. (9)-(12), launched by the modules beside this one.

Shapes: D = HIDDEN size, R rows of a launch (all tokens or some), S the number of rows rounded up to a multiple of 16.

Every distance is 1 - dot * (inverse norm of a * inverse norm of b). The dot products of raw tokens are accumulated in
float32, then scaled in float64 without fused multiply-adds (launch with ``enable_fp_fusion=False``). If float32 holds
the dot products exactly, the distances are bit-equal to the reference's, and so are the keys (distance + beta) * weight
by which tokens are ranked.

Norms are square roots of dot products, too: tensor cores drop bits, so that a product over thousands of channels is too
small by more than ZERO_DISTANCE of itself. With exact norms, a token would have that distance to its own copy.

Copies of a token have bit-equal distances, so that ties go to the lowest index. To this end, all products come from
``_compute_dots``, which accumulates each over D in the same order, independent of its position. D is therefore not
split, and all kernels of a selection use the same tile shape.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _compute_dots(
    tokens_ptr: tl.tensor,
    a_token: tl.tensor,
    b_token: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """Compute the dot products of tokens ``a_token`` [BLOCK] with tokens ``b_token`` [BLOCK]: [BLOCK, BLOCK] float32.

    Both are row numbers of ``tokens_ptr`` [M, HIDDEN], not checked against M. float32 tokens are never multiplied in
    TF32.
    """
    offset = tl.arange(0, BLOCK_D)
    a_ptr = tokens_ptr + a_token.to(tl.int64)[:, None] * HIDDEN + offset[None, :]
    b_ptr = tokens_ptr + b_token.to(tl.int64)[None, :] * HIDDEN + offset[:, None]
    dots = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, HIDDEN, BLOCK_D):
        if HIDDEN % BLOCK_D == 0:
            a = tl.load(a_ptr + start)
            b = tl.load(b_ptr + start)
        else:
            a = tl.load(a_ptr + start, mask=(start + offset < HIDDEN)[None, :], other=0.0)
            b = tl.load(b_ptr + start, mask=(start + offset < HIDDEN)[:, None], other=0.0)
        dots = tl.dot(a, b, dots, input_precision="ieee")
    return dots


@triton.jit(do_not_specialize=["n_tokens"])
def squares_kernel(
    tokens_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    n_tokens: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Store each token's dot product with itself in ``squares_ptr`` [n_tokens], as float64.

    The products are bit-equal to the diagonal of ``gram_kernel``. Grid: (ceil(n_tokens / BLOCK),).
    """
    row = tl.arange(0, BLOCK)
    token = tl.program_id(0) * BLOCK + row
    clamped = tl.minimum(token, n_tokens - 1)  # tokens past the end repeat the last token, as in gram_kernel
    dots = _compute_dots(tokens_ptr, clamped, clamped, HIDDEN, BLOCK, BLOCK_D)
    square = tl.sum(tl.where(row[:, None] == row[None, :], dots, 0.0), 1)
    tl.store(squares_ptr + token, square.to(tl.float64), mask=token < n_tokens)


@triton.jit
def _compute_cosine_distances(dot: tl.tensor, inverse: tl.tensor, zero_distance: tl.tensor) -> tl.tensor:
    """Compute cosine distances from raw dot products, in float64; distances below ``zero_distance`` become 0.

    ``inverse`` is the product of both inverse norms.
    """
    distance = 1.0 - dot.to(tl.float64) * inverse
    return tl.where(distance >= zero_distance, distance, 0.0)


@triton.jit(do_not_specialize=["n_rows"])
def gram_kernel(
    tokens_ptr: tl.tensor,
    row_ptr: tl.tensor,
    gram_ptr: tl.tensor,
    n_rows: tl.tensor,
    stride: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Compute the dot products of the tokens ``row_ptr`` [R] with each other into ``gram_ptr``, [R, stride] float32.

    ``row_ptr`` holds row numbers of ``tokens_ptr`` [M, HIDDEN]. Columns from R on are not written.

    Grid: (ceil(R / BLOCK) ** 2,). The program of a tile above the diagonal also writes the mirrored tile below. GROUP
    rows of tiles are traversed column by column, to share tokens in L2.
    """
    n_tiles = tl.cdiv(n_rows, BLOCK)
    program = tl.program_id(0)
    first = program // (GROUP * n_tiles) * GROUP
    height = tl.minimum(n_tiles - first, GROUP)
    tile_row = first + program % (GROUP * n_tiles) % height
    tile_column = program % (GROUP * n_tiles) // height
    if tile_column < tile_row:
        return
    row = tile_row * BLOCK + tl.arange(0, BLOCK)
    column = tile_column * BLOCK + tl.arange(0, BLOCK)
    # Rows past the end repeat the last row: cheaper than a mask on every load, and never stored.
    row_token = tl.load(row_ptr + tl.minimum(row, n_rows - 1))
    column_token = tl.load(row_ptr + tl.minimum(column, n_rows - 1))
    dots = _compute_dots(tokens_ptr, row_token, column_token, HIDDEN, BLOCK, BLOCK_D)
    inside = (row < n_rows)[:, None] & (column < n_rows)[None, :]
    tl.store(gram_ptr + row.to(tl.int64)[:, None] * stride + column[None, :], dots, mask=inside)
    if tile_column > tile_row:
        tl.store(gram_ptr + column.to(tl.int64)[None, :] * stride + row[:, None], dots, mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def fold_kernel(
    row_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    constants_ptr: tl.tensor,
    gram_ptr: tl.tensor,
    distances_ptr: tl.tensor,
    n_rows: tl.tensor,
    stride: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Convert the dot products ``gram_ptr`` of the tokens ``row_ptr`` [R] to distances.

    ``gram_ptr`` and ``distances_ptr`` are [R, stride]; distances are 0 from column R on. ``inverse_ptr`` [M] has the
    inverse norms of all tokens, float64. ``constants_ptr`` [2] holds beta, which is not used here, and ZERO_DISTANCE.

    The distances are float64, because float32 would make distances equal that the reference distinguishes.

    Grid: (ceil(R / ROWS), ceil(stride / BLOCK)).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < n_rows)[:, None] & (column < n_rows)[None, :]
    offset = row.to(tl.int64)[:, None] * stride + column[None, :]
    of_row = tl.load(inverse_ptr + tl.load(row_ptr + tl.minimum(row, n_rows - 1)))
    of_column = tl.load(inverse_ptr + tl.load(row_ptr + tl.minimum(column, n_rows - 1)))
    dots = tl.load(gram_ptr + offset, mask=inside, other=0.0)
    distance = _compute_cosine_distances(dots, of_row[:, None] * of_column[None, :], tl.load(constants_ptr + 1))
    in_matrix = (row < n_rows)[:, None] & (column < stride)[None, :]
    tl.store(distances_ptr + offset, tl.where(inside, distance, 0.0), mask=in_matrix)


@triton.jit(do_not_specialize=["n_rows"])
def refresh_kernel(
    tokens_ptr: tl.tensor,
    row_ptr: tl.tensor,
    distance_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    mark_ptr: tl.tensor,
    order_ptr: tl.tensor,
    count_ptr: tl.tensor,
    constants_ptr: tl.tensor,
    n_rows: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Lower the distances of the tokens ``row_ptr`` [R] to the minimum over the picks since their marks, Eq. (10).

    ``distance_ptr`` [M] is float64 viewed as int64: both types order non-negative numbers the same way, with -inf
    below. ``mark_ptr`` [M] has the number of picks that a token's distance includes; it is only read. A program updates
    all its rows from their smallest mark on, because including a pick twice changes nothing. The picks are the first
    ``count_ptr`` [1] entries of ``order_ptr``. Picked tokens stay at -inf.

    Grid: (ceil(R / BLOCK), ceil(picks / BLOCK)); programs beyond the actual picks do nothing.
    """
    count = tl.load(count_ptr)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(row_ptr + tl.minimum(row, n_rows - 1))
    oldest = tl.min(tl.load(mark_ptr + token), 0)
    first = tl.program_id(1) * BLOCK
    if (first >= count) | (first + BLOCK <= oldest):
        return
    pick = tl.load(order_ptr + tl.minimum(index, count - 1))
    dots = _compute_dots(tokens_ptr, token, pick, HIDDEN, BLOCK, BLOCK_D)
    inverse = tl.load(inverse_ptr + token)[:, None] * tl.load(inverse_ptr + pick)[None, :]
    nearest = tl.min(_compute_cosine_distances(dots, inverse, tl.load(constants_ptr + 1)), 1)
    tl.atomic_min(distance_ptr + token, nearest.to(tl.int64, bitcast=True), mask=row < n_rows, sem="relaxed")


@triton.jit(do_not_specialize=["sixteenths", "budget"])
def greedy_kernel(
    distances_ptr: tl.tensor,
    row_ptr: tl.tensor,
    distance_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bar_ptr: tl.tensor,
    bar_index_ptr: tl.tensor,
    order_ptr: tl.tensor,
    count_ptr: tl.tensor,
    constants_ptr: tl.tensor,
    sixteenths: tl.tensor,
    budget: tl.tensor,
    SLOTS: tl.constexpr,
) -> None:
    """Pick by Eqs. (10)-(12), one token after the other, until the budget is spent or no row passes the bar.

    Grid: (1,). The program keeps all distances and weights in registers: SLOTS of each, a power of 2 that is at least
    the width S. On an H200, 32 warps were fastest.

    ``distances_ptr`` [S, S], ``distance_ptr`` [S] and ``weight_ptr`` [S] are float64. ``distance_ptr`` is updated by
    every pick; picked tokens and padding have -inf. ``row_ptr`` [S] has each row's token, ascending.

    The bar is the best token that has no row here. ``bar_ptr`` [1] has its key, and ``bar_index_ptr`` [1] the number of
    rows with a lower token index; they are -inf and 0 if there is no bar. A row passes the bar if its key is higher, or
    if the key is equal and the token index lower: best < ``bar_index_ptr``.

    Picks are written to ``order_ptr`` [budget] int64 from position ``count_ptr`` [1] on, which is raised.
    ``constants_ptr`` [2] holds beta, and ZERO_DISTANCE, which is not used here. ``sixteenths`` is S / 16.
    """
    width = sixteenths * 16  # so that the compiler knows a bound of 16 and loads 16 bytes at a time
    beta = tl.load(constants_ptr)
    bar_key, bar_index = tl.load(bar_ptr), tl.load(bar_index_ptr)
    count = tl.load(count_ptr)
    slot = tl.arange(0, SLOTS)
    distance = tl.load(distance_ptr + slot, mask=slot < width, other=-float("inf"))
    weight = tl.load(weight_ptr + slot, mask=slot < width, other=1.0)
    is_running = count < budget
    while is_running:
        # The lowest slot wins among equal keys.
        top, best = tl.max((distance + beta) * weight, 0, return_indices=True, return_indices_tie_break_left=True)
        is_running = (top > bar_key) | ((top == bar_key) & (best < bar_index))
        if is_running:
            row = distances_ptr + best.to(tl.int64) * width
            to_best = tl.load(row + slot, mask=slot < width, other=0.0, eviction_policy="evict_first")
            distance = tl.where(slot == best, -float("inf"), tl.minimum(distance, to_best))
            tl.store(order_ptr + count, tl.load(row_ptr + best))
            count += 1
            is_running = count < budget
    tl.store(distance_ptr + slot, distance, mask=slot < width)
    tl.store(count_ptr, count)
