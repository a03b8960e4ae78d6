"""Bytes, seconds and error of storing the tokens of one video each way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

from jobs.benchmark.shown import figure_table
from jobs.benchmark.timing import median_seconds, seconds_of
from jobs.benchmark.tokens import structured_tokens
from pipeline.cache.codecs import CODECS, TokenCodec

OUTLIERS, OUTLIER_SCALE = 8, 50.0
PLAIN = TokenCodec("int4 without kept channels", 4, 32)


@dataclass(frozen=True)
class Cost:
    """What one way of storing [K,D] tokens costs.

    Attributes:
        token_bytes: bytes a token.
        encode_ms, decode_ms: of a video.
        error: norm of the difference against that of the tokens.
        cosine: mean over tokens.
        rest_error: the error of the channels beside OUTLIERS fixed ones that are OUTLIER_SCALE times as large.
    """

    name: str
    token_bytes: float
    encode_ms: float
    decode_ms: float
    error: float = 0.0
    cosine: float = 1.0
    rest_error: float = 0.0


def costs(tokens: int, hidden: int, repeats: int) -> Iterator[Cost]:
    """Yield the cost of each codec, of zstd on bfloat16, and of int4 by ways that were tried and are not shipped."""
    per_frame = 196
    made = structured_tokens(-(-tokens // per_frame), per_frame, hidden).flatten(0, 1)[:tokens]
    large = made.clone()
    channels = torch.randperm(hidden, generator=torch.Generator().manual_seed(0))[:OUTLIERS]
    large[:, channels] *= OUTLIER_SCALE
    rest = torch.ones(hidden, dtype=torch.bool)
    rest[channels] = False
    bits, large_bits = (np.asarray(one.view(torch.int16).numpy()) for one in (made, large))
    for shuffled in (False, True):
        yield _compressed(bits, shuffled, repeats)
    for codec in (*CODECS.values(), PLAIN):
        encode_s, columns = median_seconds(lambda c=codec: c.encode("token", bits), repeats)  # type: ignore[misc]
        stored = {name: torch.from_numpy(part).view(torch.bfloat16) for name, part in columns.items()}
        decode_s, found = median_seconds(lambda c=codec, s=stored: c.decode("token", hidden, s.__getitem__), repeats)  # type: ignore[misc]
        with_outliers = codec.restored(large_bits)
        yield Cost(
            codec.name,
            codec.token_bytes(hidden),
            1e3 * encode_s,
            1e3 * decode_s,
            _error(made, found),
            float(torch.cosine_similarity(made.float(), found.float()).mean()),
            _error(large[:, rest], with_outliers[:, rest]),
        )
    yield _rotated(made, large, rest)


def _error(expected: Tensor, found: Tensor) -> float:
    return float((expected.float() - found.float()).norm() / expected.float().norm())


def _compressed(bits: NDArray[np.int16], shuffled: bool, repeats: int) -> Cost:
    """Measure zstd on bfloat16, on its bytes as they are or by their planes."""
    codec, shape = pa.Codec("zstd", compression_level=1), (*bits.shape, 2)

    def encode() -> pa.Buffer:
        planes = np.ascontiguousarray(bits.view(np.uint8).reshape(-1, 2).T) if shuffled else bits
        return codec.compress(pa.py_buffer(planes))

    def decode() -> NDArray[np.uint8]:
        flat = np.frombuffer(codec.decompress(packed, bits.nbytes), np.uint8)
        return np.ascontiguousarray(flat.reshape(2, -1).T).reshape(shape) if shuffled else flat

    encode_s, packed = median_seconds(encode, repeats)
    decode_s, _ = median_seconds(decode, repeats)
    name = "bfloat16, byte planes, zstd 1" if shuffled else "bfloat16, zstd 1"
    return Cost(name, packed.size / len(bits), 1e3 * encode_s, 1e3 * decode_s)


def _rotated(made: Tensor, large: Tensor, rest: Tensor) -> Cost:
    """Measure int4 without kept channels after a Hadamard rotation in blocks of the largest power of two dividing D."""
    block = made.shape[1] & -made.shape[1]
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix /= block**0.5

    def turned(values: Tensor) -> Tensor:
        return (values.float().view(len(values), -1, block) @ matrix).flatten(1)

    def restored(values: Tensor) -> Tensor:
        rotated = turned(values).to(torch.bfloat16).view(torch.int16).numpy()
        return turned(PLAIN.restored(rotated))

    seconds, found = seconds_of(lambda: restored(made))  # there and back
    cosine = float(torch.cosine_similarity(made.float(), found).mean())
    name = f"int4 after Hadamard blocks of {block}"
    rest_error = _error(large[:, rest], restored(large)[:, rest])
    return Cost(name, PLAIN.token_bytes(made.shape[1]), 1e3 * seconds, 0.0, _error(made, found), cosine, rest_error)


def cost_table(found: list[Cost], title: str) -> Table:
    """Lay the costs out for the terminal."""
    rows = []
    for cost in found:
        shown = (f"{cost.token_bytes:,.0f}", f"{cost.encode_ms:.1f}", f"{cost.decode_ms:.1f}", f"{cost.error:.4f}")
        rows.append((cost.name, *shown, f"{cost.cosine:.5f}", f"{cost.rest_error:.4f}"))
    return figure_table(title, [field.name.replace("_", " ") for field in fields(Cost)], rows)
