"""The data that methods and models exchange, and the shape legend of this package.

Shapes: T frames (temporal patches on Qwen models), N tokens per frame, D hidden size of the LLM, M = T*N tokens of the
video, B budget (kept tokens). The flat index of token i of frame t is n = t*N + i, counted from 0. Names of tensors may
end in their shape: ``tokens_MD`` is [M, D].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # code that only counts tokens or passes them on does not import torch
    from torch import Tensor


def budget_for(retention_ratio: float, n_total: int) -> int:
    """Compute the budget B = max(1, floor(r*M + 1e-9)) of a video with M = ``n_total`` tokens at retention ratio r.

    Raises:
        ValueError: ``retention_ratio`` is not a number in (0, 1].
    """
    is_number = isinstance(retention_ratio, Real) and not isinstance(retention_ratio, bool)
    if not (is_number and 0.0 < retention_ratio <= 1.0):
        raise ValueError(f"retention_ratio is the share of tokens kept, in (0, 1]; got {retention_ratio!r}")
    return max(1, math.floor(float(retention_ratio) * n_total + 1e-9))


class _TensorFields:
    """The base of dataclasses with tensor fields: ``==`` compares tensors by dtype, device, shape and values.

    This includes tensors in tuples and mappings. The objects are not hashable.
    """

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return _is_equal(vars(self), vars(other))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class VisualTokens(_TensorFields):
    """All visual tokens of one video as a backbone makes them, before pruning.

    Attributes:
        tokens: [T,N,D].
        evidence: Further outputs of the encoder that a method needs, by label (gstep.evidence).
        deepstack: One tensor [T,N,D] per level: further vectors of the same tokens that are added in the first layers
            of the LLM.
        extra: JSON values about this video that only the encoder knows and a prompt needs.
        grid: (rows, columns) of the N tokens of a frame, which are in row-major order; None if unknown.
        times: The time of each of the T frames in seconds (for a temporal patch, of its first frame); None if unknown.
    """

    tokens: Tensor
    evidence: Mapping[str, Tensor] = field(default_factory=dict)
    deepstack: tuple[Tensor, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    grid: tuple[int, int] | None = None
    times: tuple[float, ...] | None = None

    @property
    def known_grid(self) -> tuple[int, int]:
        """``grid``, or if it is None, the factors of N that are closest to each other, with rows <= columns."""
        if self.grid is not None:
            return self.grid
        size = self.tokens.shape[1]
        rows = next(rows for rows in range(math.isqrt(size), 0, -1) if size % rows == 0)
        return rows, size // rows

    @property
    def known_times(self) -> tuple[float, ...]:
        """``times``, or if they are None, one second per frame from 0.0 on."""
        return self.times if self.times is not None else tuple(map(float, range(len(self.tokens))))

    def with_positions(self, grid: Sequence[int] | None, timestamps: Sequence[float]) -> VisualTokens:
        """Return a copy with this grid, and with times from the timestamps of the sampled frames; tensors are shared.

        Args:
            grid: [rows, columns] as in ``ModelExtra["grid"]``; None if unknown.
            timestamps: The time of each sampled frame in seconds. Each of the T temporal patches gets that of the first
                of its ceil(len(timestamps) / T) frames; if this does not give T times, the times are None.
        """
        n_frames = len(self.tokens)
        times = tuple(map(float, timestamps[:: max(1, math.ceil(len(timestamps) / n_frames))]))
        return replace(
            self,
            grid=None if grid is None else (int(grid[0]), int(grid[1])),
            times=times if len(times) == n_frames else None,
        )


@dataclass(frozen=True, eq=False)
class PrunedTokens(_TensorFields):
    """The kept tokens of one video, in ascending flat index.

    Attributes:
        tokens: [B,D], with the dtype and device of the input.
        index: [B] int64, the flat indices t*N + i. A merged token has the index of the token that the others were
            merged into.
        rank: [B] int64, the position of each token in the order of selection (0 was selected first); None for a method
            that is not nested.
        merged: [B] bool, True for a token that is a mixture of input tokens; None for a method that never merges.
        order: [B] int64, the row numbers of ``tokens`` in the order of the method's own prompt; None for ascending
            index.
        n_total: M = T*N, the number of tokens before pruning.
        retention_ratio: The nominal ratio, which is budget / M if a budget was given. ``kept_ratio`` is the actual one.
        density: [B] float32, rho of each kept token (Eq. 8); None for a method without a density.
        temporal_density: [T] float32, the normalized temporal density (Eq. 7); None for a method without one.
    """

    tokens: Tensor
    index: Tensor
    rank: Tensor | None
    merged: Tensor | None
    n_total: int
    retention_ratio: float
    density: Tensor | None = None
    temporal_density: Tensor | None = None
    order: Tensor | None = None

    @property
    def n_kept(self) -> int:
        """The number of kept tokens, which may differ from ``budget`` for methods that are not ``exact``."""
        return len(self.index)

    @property
    def budget(self) -> int:
        """The nominal number of tokens B at ``retention_ratio``."""
        return budget_for(self.retention_ratio, self.n_total)

    @property
    def kept_ratio(self) -> float:
        """The share of tokens that were actually kept."""
        return self.n_kept / self.n_total

    @property
    def nested(self) -> bool:
        """True if the first tokens in order of rank are also the selection for any smaller budget."""
        return self.rank is not None

    def compute_selection_order(self) -> Tensor:
        """Return the row numbers of ``tokens`` in order of selection, [B] int64.

        If ``order`` is set, the result is that; for another method without ranks, it is ascending index.
        """
        if self.order is not None:
            return self.order
        if self.rank is None:
            import torch  # noqa: PLC0415 - loaded already, since the tensors exist

            return torch.arange(len(self.index), device=self.index.device)
        return self.rank.argsort()

    def at(self, retention_ratio: float) -> PrunedTokens:
        """Return the nested selection at a smaller ratio: the tokens of the lowest ranks, still in ascending index.

        Args:
            retention_ratio: A share of all T*N tokens, not of the kept ones.

        Returns:
            A copy with the first B ranks and this nominal ratio, without ``order``; or this object itself if the method
            is not nested and the ratio is its own.

        Raises:
            ValueError: The ratio is outside (0, 1], is larger than this selection's ratio, or differs from it although
                the method is not nested.
        """
        budget = budget_for(retention_ratio, self.n_total)
        if retention_ratio > self.retention_ratio + 1e-9:
            raise ValueError(
                f"retention ratio {retention_ratio} is larger than the {self.retention_ratio} kept here: prune again"
            )
        if self.rank is None:
            if abs(retention_ratio - self.retention_ratio) > 1e-9:
                raise ValueError(
                    f"this method has no order of selection, so only its own retention ratio {self.retention_ratio} "
                    f"is available, not {retention_ratio}: prune again at that ratio"
                )
            return self
        mask = self.rank < budget
        return PrunedTokens(
            tokens=self.tokens[mask],
            index=self.index[mask],
            rank=self.rank[mask],
            merged=None if self.merged is None else self.merged[mask],
            n_total=self.n_total,
            retention_ratio=float(retention_ratio),
            density=None if self.density is None else self.density[mask],
            temporal_density=self.temporal_density,
        )


def _is_equal(a: object, b: object) -> bool:
    """Return True if two field values are equal; tensors are compared by dtype, device, shape and values.

    Mappings and tuples are compared item by item, everything else by ``==``.
    """
    import torch  # noqa: PLC0415 - as above

    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_is_equal(value, b[name]) for name, value in a.items())
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    return not any(isinstance(value, torch.Tensor) for value in (a, b)) and bool(a == b)


@dataclass(frozen=True)
class Visual:
    """The kept tokens of one video as a prompt needs them.

    Attributes:
        tokens: [K,D], in the order of the prompt: ascending flat index, or on LLaVA-OneVision the method's own order.
        index: [K] int64, the flat index t*N + i before pruning. A merged token has its target's index.
        n_frames: T, the number of frames, or of temporal patches on Qwen.
        tokens_per_frame: N, before pruning.
        extra: Further values for the model family's positions (``Backbone.model_extra``).
        deepstack: One tensor [K,D] per level with the same rows as ``tokens``.
        newline: [D], the row that follows the tokens of a video. None for families without one.
        evidence: The cached evidence of the same tokens, for a method that prunes them at generation.
        frame_indices: The index in the source of each sampled frame, with repetitions; empty if unknown.
        fps: The average frame rate of the whole source; None if unknown.
        timestamps: The time of each sampled frame in seconds, with repetitions; empty if unknown.
    """

    tokens: Tensor
    index: Tensor
    n_frames: int
    tokens_per_frame: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    deepstack: tuple[Tensor, ...] = ()
    newline: Tensor | None = None
    evidence: Mapping[str, Tensor] = field(default_factory=dict)
    frame_indices: Sequence[int] = ()
    fps: float | None = None
    timestamps: Sequence[float] = ()

    @cached_property
    def placeholder_rows(self) -> Tensor:
        """The embeddings that replace the placeholders of a prompt, [P, D*(1+levels)], cached.

        A row is a token followed by its deepstack vectors. The newline, if any, is the last row.
        """
        import torch  # noqa: PLC0415 - as above

        rows = torch.cat([self.tokens, *self.deepstack], dim=1) if self.deepstack else self.tokens
        return rows if self.newline is None else torch.cat([rows, self.newline[None].to(rows)])

    @cached_property
    def placeholder_hash(self) -> str:
        """The SHA-256 of the bytes, dtype and shape of ``placeholder_rows``, as hex, cached."""
        rows = self.placeholder_rows
        return hash_tensor(f"{rows.dtype} {tuple(rows.shape)} ", rows)


def hash_tensor(text: str, tensor: Tensor) -> str:
    """Compute the SHA-256 of ``text`` followed by the bytes of a CPU tensor, as hex.

    The tensor's dtype and shape do not enter the hash, so ``text`` should contain them.
    """
    import torch  # noqa: PLC0415 - as above

    digest = hashlib.sha256(text.encode())
    digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
