"""Triton kernels of a vision tower's element-wise steps; each reads and writes its tensors once.

They compute in float32 and round where the stock towers round. Importing this module requires Triton.

Shapes: S rows (patches of a pass), C = WIDTH channels, H heads of E channels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_rows"])
def norm_kernel(
    x_ptr: tl.tensor,
    added_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    out_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    n_rows: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADDED: tl.constexpr,
    CENTRED: tl.constexpr,
) -> None:
    """Normalize rows [S,C] by LayerNorm if CENTRED, otherwise by RMSNorm, into ``out``.

    With ADDED, ``added`` is added to ``x`` first, and the sum is stored in ``sum``; without it both are unused.
    ``bias`` is used only if CENTRED. Grid: (ceil(S / ROWS),). BLOCK is a power of 2, at least WIDTH.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < n_rows)[:, None] & (column < WIDTH)[None, :]
    offset = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0.0)
    if ADDED:
        addend = tl.load(added_ptr + offset, mask=inside, other=0.0)
        x = (x.to(tl.float32) + addend.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(sum_ptr + offset, x, mask=inside)
    values = x.to(tl.float32)
    if CENTRED:
        mean = tl.sum(values, 1) / WIDTH
        values = tl.where(inside, values - mean[:, None], 0.0)
    variance = tl.sum(values * values, 1) / WIDTH
    values = values * tl.rsqrt(variance + eps)[:, None]
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if CENTRED:
        bias = tl.load(bias_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        values = values * weight[None, :] + bias[None, :]
    else:  # the stock RMSNorm rounds before it multiplies by the weight
        values = values.to(out_ptr.dtype.element_ty).to(tl.float32) * weight[None, :]
    tl.store(out_ptr + offset, values.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rotate_kernel(
    qkv_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """Rotate the queries and keys of one row of qkv [S,3,H,E] in place by the angles of that row, [S,E] float32.

    Channels e and e + E/2 rotate together and have the same angle. Grid: (S,). HALF is E/2; BLOCK_HEADS is a power of
    2, at least 2 H, and BLOCK_HALF a power of 2, at least E/2.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)
    channel = tl.arange(0, BLOCK_HALF)
    inside = (head < 2 * HEADS)[:, None] & (channel < HALF)[None, :]
    offset = row * (3 * HEADS * 2 * HALF) + head[:, None] * (2 * HALF) + channel[None, :]
    angle = row * (2 * HALF) + channel
    cos = tl.load(cos_ptr + angle, mask=channel < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=channel < HALF, other=0.0)[None, :]
    first = tl.load(qkv_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv_ptr + offset + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(qkv_ptr + offset, (first * cos - second * sin).to(qkv_ptr.dtype.element_ty), mask=inside)
    tl.store(qkv_ptr + offset + HALF, (second * cos + first * sin).to(qkv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(gate_up_ptr: tl.tensor, out_ptr: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Compute SiLU(gate) * up, [S, WIDTH], for rows [S, 2 * WIDTH] that hold the gate and then up.

    Grid: (S, ceil(WIDTH / BLOCK)).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up_ptr + row * (2 * WIDTH) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * WIDTH) + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    gated = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, (gated * up).to(out_ptr.dtype.element_ty), mask=inside)
