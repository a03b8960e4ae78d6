"""The codecs that store token vectors: as bfloat16 numbers, or as small integers with scales.

A coded vector takes three columns: ``token``, 8-bit or 4-bit integers; ``token_scale``, a float16 for each group of
neighboring channels; and ``token_kept``, the channels of largest magnitude, unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.errors import VideoFault

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True)
class TokenCodec:
    """A way of storing vectors of D bfloat16 numbers.

    Attributes:
        bits: the bits per stored number.
        group: the number of neighboring channels that share a scale; 0 for bfloat16, which has no scales.
        kept: the number of channels per vector, those of largest magnitude, that stay bfloat16.
    """

    name: str
    bits: int = 16
    group: int = 0
    kept: int = 0

    def widths(self, column: str, hidden_size: int) -> dict[str, int]:
        """Return the names of the Parquet columns that store a vector -> their bytes per row, which are even.

        They are ``column`` for the numbers, ``column``_scale and, if channels are kept, ``column``_kept. bfloat16 has
        only ``column``.
        """
        if not self.group:
            return {column: 2 * hidden_size}
        numbers = {
            column: 2 * -(-hidden_size * self.bits // 16)
        }  # an even number, like the widths of all vectors in the cache
        scales = {f"{column}_scale": 2 * -(-hidden_size // self.group)}
        return {**numbers, **scales, **({f"{column}_kept": 4 * min(self.kept, hidden_size)} if self.kept else {})}

    def token_bytes(self, hidden_size: int, deepstack_levels: int = 0) -> int:
        """Return the stored bytes per token with its deepstack levels, without other columns such as ``rank``."""
        return (1 + deepstack_levels) * sum(self.widths("", hidden_size).values())

    @property
    def share(self) -> float:
        """The stored size of wide vectors relative to bfloat16, without kept channels, which add 2 * kept / D."""
        return (self.bits + (16 / self.group if self.group else 0)) / 16

    @property
    def largest(self) -> float:
        """The largest magnitude that the codec can store; infinity for bfloat16."""
        return 65504.0 * (2 ** (self.bits - 1) - 1) if self.group else math.inf

    def check_range(self, *levels: Tensor) -> None:
        """Raise VideoFault if tokens are not finite or too large for this codec's float16 scales; bfloat16 accepts all.

        Args:
            levels: the tokens, and the vectors of each deepstack level; none may be empty.
        """
        if self.group and not all(float(values.abs().max()) <= self.largest for values in levels):
            message = f"the tokens are not finite or are larger than {self.largest:g}, the limit of {self.name}"
            raise VideoFault("internal", message, stage="encode")

    def encode(self, column: str, values: NDArray[np.int16]) -> dict[str, NDArray[np.int16]]:
        """Encode vectors, and return the columns that ``widths`` names, each [K, width / 2] int16.

        bfloat16 returns ``values`` without a copy.

        Args:
            values: [K, D] bits of bfloat16.

        Raises:
            ValueError: a number outside the kept channels is not finite or is too large for a float16 scale.
        """
        if not self.group:
            return {column: values}
        from pipeline.cache.codec_arithmetic import encode_vectors  # noqa: PLC0415 - torch is loaded only where tokens are coded

        columns = encode_vectors(values, self.bits, self.group, self.kept)
        return dict(zip(self.widths(column, values.shape[1]), columns, strict=True))

    def decode(self, column: str, hidden_size: int, read_part: Callable[[str], Tensor]) -> Tensor:
        """Decode the vectors of a column to [K, D] bfloat16, on the device of the tensors that ``read_part`` returns.

        bfloat16 returns the result of ``read_part`` itself.

        Args:
            read_part: called with each name of ``widths``; returns the column's bytes as [K, width / 2] bfloat16.
        """
        if not self.group:
            return read_part(column)
        from pipeline.cache.codec_arithmetic import decode_vectors  # noqa: PLC0415 - as above

        columns = [read_part(name) for name in self.widths(column, hidden_size)]
        return decode_vectors(columns, hidden_size, self.bits, self.group)

    def round_trip(self, values: NDArray[np.int16]) -> Tensor:
        """Encode and decode [K, D] bits of bfloat16; return [K, D] bfloat16 as readers of the cache get them.

        Raises:
            ValueError: a number cannot be encoded.
        """
        import torch  # noqa: PLC0415 - as above

        columns = self.encode("token", values)
        return self.decode("token", values.shape[1], lambda name: torch.from_numpy(columns[name]).view(torch.bfloat16))


BFLOAT16 = TokenCodec("bfloat16")
# At 3,584 channels int4 takes 0.286 of bfloat16's bytes, int8 0.518. Relative errors of normal numbers by group, int4:
# 0.083 (16), 0.093 (32), 0.102 (64); int8: 0.0054 (32), 0.0062 (128).
CODECS = {
    codec.name: codec for codec in (BFLOAT16, TokenCodec("int8", 8, 128, kept=8), TokenCodec("int4", 4, 32, kept=8))
}
