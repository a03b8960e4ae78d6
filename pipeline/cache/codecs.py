"""How token vectors are stored, by name: as bfloat16 numbers, or as small whole numbers with scales beside them.

A coded vector takes three columns: ``token``, whole numbers of 8 or 4 bits; ``token_scale``, a float16 for each group
of neighbouring channels; and ``token_kept``, the channels of largest magnitude as they were. Kept channels are what
outliers ask for: a few channels that are far larger than the others would otherwise leave the rest of their groups with
nothing. Each token names its own, so that a row is read without anything else.
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
    """One way of storing vectors of D bfloat16 numbers.

    Attributes:
        bits: of a stored number.
        group: channels that share a scale; 0 where numbers are bfloat16.
        kept: channels of a vector, those of largest magnitude, that stay bfloat16.
    """

    name: str
    bits: int = 16
    group: int = 0
    kept: int = 0

    def widths(self, column: str, hidden_size: int) -> dict[str, int]:
        """Return the bytes a row of each column that stores a vector of ``hidden_size`` numbers."""
        if not self.group:
            return {column: 2 * hidden_size}
        numbers = {column: 2 * -(-hidden_size * self.bits // 16)}  # even, as all vectors of the cache
        scales = {f"{column}_scale": 2 * -(-hidden_size // self.group)}
        return {**numbers, **scales, **({f"{column}_kept": 4 * min(self.kept, hidden_size)} if self.kept else {})}

    def token_bytes(self, hidden_size: int, deepstack_levels: int = 0) -> int:
        """Return the stored bytes of a token and its deepstack levels, without the columns beside them."""
        return (1 + deepstack_levels) * sum(self.widths("", hidden_size).values())

    @property
    def share(self) -> float:
        """The share of bfloat16's bytes that wide vectors take, for planning; kept channels add 16 / D."""
        return (self.bits + (16 / self.group if self.group else 0)) / 16

    @property
    def largest(self) -> float:
        """The largest magnitude that float16 scales reach."""
        return 65504.0 * (2 ** (self.bits - 1) - 1) if self.group else math.inf

    def check_reach(self, *levels: Tensor) -> None:
        """Raise VideoFault where this codec has no scales for a video's tokens, or tokens are not finite.

        bfloat16 takes any numbers. ``levels``: the tokens, and the vectors of each deepstack level.
        """
        if self.group and not all(float(values.abs().max()) <= self.largest for values in levels):
            message = f"the tokens are larger than {self.largest:g}, or no numbers: {self.name} has no scales for them"
            raise VideoFault("internal", message, stage="encode")

    def encode(self, column: str, values: NDArray[np.int16]) -> dict[str, NDArray[np.int16]]:
        """Encode [K,D] bits of bfloat16 as the columns of ``widths``, each [K,width / 2].

        bfloat16 returns ``values`` themselves. Raises ValueError for numbers that no float16 scale reaches, or not
        finite.
        """
        if not self.group:
            return {column: values}
        from pipeline.cache.codec_arithmetic import encode  # noqa: PLC0415 - torch loads where something is coded

        columns = encode(values, self.bits, self.group, self.kept)
        return dict(zip(self.widths(column, values.shape[1]), columns, strict=True))

    def decode(self, column: str, hidden_size: int, read_part: Callable[[str], Tensor]) -> Tensor:
        """Decode the vectors of a column to [K,D] bfloat16, on the device of the result of ``read_part``.

        ``read_part`` returns the bytes of the column with this name as [K,width / 2] bfloat16.
        """
        if not self.group:
            return read_part(column)
        from pipeline.cache.codec_arithmetic import decode  # noqa: PLC0415 - as above

        columns = [read_part(name) for name in self.widths(column, hidden_size)]
        return decode(columns, hidden_size, self.bits, self.group)

    def round_trip(self, values: NDArray[np.int16]) -> Tensor:
        """Encode and decode [K,D] bits of bfloat16; return the stored values as a reader gets them, [K,D] bfloat16."""
        import torch  # noqa: PLC0415 - as above

        columns = self.encode("token", values)
        return self.decode("token", values.shape[1], lambda name: torch.from_numpy(columns[name]).view(torch.bfloat16))


BFLOAT16 = TokenCodec("bfloat16")
# At 3,584 channels int4 takes 0.286 of bfloat16's bytes, int8 0.518. Relative errors of normal numbers by group, int4:
# 0.083 (16), 0.093 (32), 0.102 (64); int8: 0.0054 (32), 0.0062 (128).
CODECS = {
    codec.name: codec for codec in (BFLOAT16, TokenCodec("int8", 8, 128, kept=8), TokenCodec("int4", 4, 32, kept=8))
}
