"""Encode vectors as integers with one float16 scale per group, and decode them: bit-identical results on any device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

_ROWS = 128  # rows at a time on a CPU: intermediate results stay in its caches, which takes a third of the time
_MAGNITUDE = 0x7FFF  # masks the sign of a bfloat16 number; the other bits have the order of the magnitudes


def encode_vectors(values: NDArray[np.int16], bits: int, group: int, n_kept: int) -> list[NDArray[np.int16]]:
    """Encode [K, D] bits of bfloat16 on the CPU as integers, scales and kept channels, each [K, width / 2] int16 bits.

    The ``n_kept`` channels of largest magnitude (infinity and NaN are larger than all numbers) are stored unchanged and
    count as zero in their groups; of equal magnitudes the first channel is kept. If ``n_kept`` is 0, the list has no
    third array.

    Raises:
        ValueError: a number outside the kept channels is not finite or is too large for a float16 scale.
    """
    parts = list[list[Tensor]]()
    for start in range(0, len(values), _ROWS):
        raw_KD = torch.from_numpy(np.ascontiguousarray(values[start : start + _ROWS]))
        # The channels of largest magnitude, ascending. Of equal values the first wins, on every device.
        magnitude = (raw_KD & _MAGNITUDE).int() << 16
        key = magnitude + torch.arange(2**16 - 1, 2**16 - 1 - raw_KD.shape[1], -1, dtype=torch.int32)
        largest = key.topk(min(n_kept, raw_KD.shape[1]), dim=1, sorted=False).indices.sort(dim=1).values
        values_KD = raw_KD.view(torch.bfloat16).float()
        values_KD.scatter_(1, largest, 0.0)
        groups = pad(values_KD, (0, -values_KD.shape[1] % group)).view(len(values_KD), -1, group)
        top = 2 ** (bits - 1) - 1
        scale = (groups.abs().amax(-1) / top).half()
        if not scale.isfinite().all():
            raise ValueError(f"tokens up to {values_KD.abs().max():g} are beyond the scales of int{bits}")
        # A scale of 0 is that of a group of zeros, or of numbers that are too small for float16.
        numbers = (groups / scale.float().unsqueeze(-1)).nan_to_num(0.0, 0.0, 0.0).round().clamp(-top, top)
        numbers = numbers.flatten(1)[:, : values_KD.shape[1]].to(torch.int8)
        columns = [_pack_integers(numbers, bits), scale]
        if n_kept:
            channels = largest.to(torch.int32).to(torch.int16)
            columns.append(torch.stack([channels, raw_KD.gather(1, largest)], dim=-1).flatten(1))
        parts.append([column.contiguous().view(torch.int16) for column in columns])
    return [np.asarray(torch.cat(column).numpy()) for column in zip(*parts, strict=True)]


def decode_vectors(parts: Sequence[Tensor], hidden_size: int, bits: int, group: int) -> Tensor:
    """Decode the arrays that ``encode_vectors`` returns to [K, D] bfloat16, on the device of ``parts``.

    Args:
        parts: integers, scales and, if there are any, kept channels: each [K, width / 2] of a 2-byte dtype.
        hidden_size: D; numbers beyond it are padding and are dropped.
    """
    values = torch.empty(len(parts[0]), hidden_size, dtype=torch.bfloat16, device=parts[0].device)
    n_rows = _ROWS if values.device.type == "cpu" else max(1, len(values))
    for start in range(0, len(values), n_rows):
        packed, raw_scale, *kept = (column[start : start + n_rows] for column in parts)
        numbers = _unpack_integers(packed, bits)
        scale = raw_scale.view(torch.float16).float()
        n_padding = scale.shape[1] * group - numbers.shape[1]
        if n_padding > 0:
            numbers = pad(numbers, (0, n_padding))
        groups = numbers[:, : scale.shape[1] * group].reshape(*scale.shape, group)
        rows = (groups * scale.unsqueeze(-1)).to(torch.bfloat16).flatten(1)[:, :hidden_size]
        if kept:
            channels = kept[0].view(torch.int16).view(len(rows), -1, 2)
            rows.scatter_(1, channels[..., 0].int().bitwise_and(0xFFFF).long(), channels[..., 1].view(torch.bfloat16))
        values[start : start + n_rows] = rows
    return values


def _pack_integers(numbers: Tensor, bits: int) -> Tensor:
    """Pack [K, D] int8 numbers into [K, width / 2] int16, padded to an even number of bytes.

    A byte holds two 4-bit numbers, the first in its high half; 8 is added to each.
    """
    if bits == 8:
        return pad(numbers, (0, numbers.shape[1] % 2)).view(torch.int16)
    halves = (pad(numbers, (0, -numbers.shape[1] % 4)) + 8).view(torch.uint8)
    return ((halves[:, 0::2] << 4) | halves[:, 1::2]).view(torch.int16)


def _unpack_integers(packed_bytes: Tensor, bits: int) -> Tensor:
    """Unpack the integers of ``_pack_integers`` to int8; the padding is included."""
    if bits == 8:
        return packed_bytes.view(torch.int8)
    packed = packed_bytes.view(torch.uint8)
    return torch.stack([packed >> 4, packed & 15], dim=-1).flatten(1).view(torch.int8) - 8
