"""Whole numbers with a scale a group: the arithmetic, on any device, the same bits on all.

A number is its whole number times its group's float16 scale, a product that float32 holds exactly, rounded once to
bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from pipeline.cache.codecs import TokenCodec

_ROWS = 128  # at a time on a CPU: what is between two steps stays in its caches, which takes a third of the time
_MAGNITUDE = 0x7FFF  # of the bits of a bfloat16 number; without its sign they sort as the numbers do


def encode(codec: TokenCodec, values: NDArray[np.int16]) -> list[NDArray[np.int16]]:
    """Encode [K,D] bits of bfloat16 as whole numbers, scales and kept channels, each [K,width / 2] of raw bits.

    Raises ValueError for numbers that no float16 scale reaches, and for those that are not finite.
    """
    bits_KD = torch.from_numpy(np.ascontiguousarray(values))
    parts = [_encoded(codec, bits_KD[start : start + _ROWS]) for start in range(0, len(bits_KD), _ROWS)]
    return [np.asarray(torch.cat(part).numpy()) for part in zip(*parts, strict=True)]


def _encoded(codec: TokenCodec, bits_KD: Tensor) -> list[Tensor]:
    values_KD = bits_KD.view(torch.bfloat16).float()
    kept = _largest(bits_KD, min(codec.kept, bits_KD.shape[1]))
    values_KD.scatter_(1, kept, 0.0)
    grouped = pad(values_KD, (0, -values_KD.shape[1] % codec.group)).view(len(values_KD), -1, codec.group)
    top = 2 ** (codec.bits - 1) - 1
    scale = (grouped.abs().amax(-1) / top).half()
    if not scale.isfinite().all():
        raise ValueError(f"tokens up to {values_KD.abs().max():g} are beyond the scales of {codec.name}")
    # A scale of 0 stands for a group of zeros, or of numbers below all that float16 has.
    numbers = (grouped / scale.float().unsqueeze(-1)).nan_to_num(0.0, 0.0, 0.0).round().clamp(-top, top)
    numbers = numbers.flatten(1)[:, : values_KD.shape[1]].to(torch.int8)
    places = torch.stack([kept.to(torch.int32).to(torch.int16), bits_KD.gather(1, kept)], dim=-1).flatten(1)
    stored = [_packed(numbers, codec.bits), scale, places] if codec.kept else [_packed(numbers, codec.bits), scale]
    return [part.contiguous().view(torch.int16) for part in stored]


def decode(codec: TokenCodec, stored: Sequence[Tensor], hidden_size: int) -> Tensor:
    """Decode what ``encode`` gave, each [K,width / 2] of two bytes, to [K,D] bfloat16 on its device."""
    values = torch.empty(len(stored[0]), hidden_size, dtype=torch.bfloat16, device=stored[0].device)
    rows = _ROWS if values.device.type == "cpu" else max(1, len(values))
    for start in range(0, len(values), rows):
        values[start : start + rows] = _decoded(codec, [part[start : start + rows] for part in stored], hidden_size)
    return values


def _decoded(codec: TokenCodec, stored: Sequence[Tensor], hidden_size: int) -> Tensor:
    numbers, scale = _unpacked(stored[0], codec.bits), stored[1].view(torch.float16).float()
    missing = scale.shape[1] * codec.group - numbers.shape[1]
    if missing > 0:
        numbers = pad(numbers, (0, missing))
    grouped = numbers[:, : scale.shape[1] * codec.group].reshape(*scale.shape, codec.group)
    values: Tensor = (grouped * scale.unsqueeze(-1)).to(torch.bfloat16).flatten(1)[:, :hidden_size]
    if codec.kept:
        places = stored[2].view(torch.int16).view(len(values), -1, 2)
        values.scatter_(1, places[..., 0].int().bitwise_and(0xFFFF).long(), places[..., 1].view(torch.bfloat16))
    return values


def _largest(bits_KD: Tensor, count: int) -> Tensor:
    """Return the places [K,count] of the channels of largest magnitude, ascending.

    Of equals the first, on every device.
    """
    magnitude = (bits_KD & _MAGNITUDE).int() << 16
    key = magnitude + torch.arange(2**16 - 1, 2**16 - 1 - bits_KD.shape[1], -1, dtype=torch.int32)
    return key.topk(count, dim=1, sorted=False).indices.sort(dim=1).values


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """Pack [K,D] int8 into an even number of bytes; of 4 bits the first number of a byte is its high half, plus 8."""
    if bits == 8:
        return pad(numbers, (0, numbers.shape[1] % 2)).view(torch.int16)
    halves = (pad(numbers, (0, -numbers.shape[1] % 4)) + 8).view(torch.uint8)
    return ((halves[:, 0::2] << 4) | halves[:, 1::2]).view(torch.int16)


def _unpacked(stored: Tensor, bits: int) -> Tensor:
    """Unpack to int8 what ``_packed`` gave, including the numbers that filled it up to whole bytes."""
    if bits == 8:
        return stored.view(torch.int8)
    packed = stored.view(torch.uint8)
    return torch.stack([packed >> 4, packed & 15], dim=-1).flatten(1).view(torch.int8) - 8
