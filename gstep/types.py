"""The data that methods and models exchange, and the shape legend of this package.

Shapes: T frames (temporal patches on Qwen models), N tokens a frame, D hidden size of the LLM, M = T*N tokens of the
video, B budget (kept tokens). A token's flat index is n = t*N + i, counted from 0. Tensor names end in their shape
where it helps: ``tokens_MD`` is [M, D].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what only counts or passes tokens on does not wait for torch
    from torch import Tensor


def budget_for(retention_ratio: float, n_total: int) -> int:
    """Compute B = max(1, floor(r*M + 1e-9)) tokens: "at most B", robust to r*M a rounding error below an integer.

    Raises ValueError where ``retention_ratio`` lies outside (0, 1].
    """
    is_number = isinstance(retention_ratio, Real) and not isinstance(retention_ratio, bool)
    if not (is_number and 0.0 < retention_ratio <= 1.0):
        raise ValueError(f"retention_ratio is the share of tokens kept, in (0, 1]; got {retention_ratio!r}")
    return max(1, math.floor(float(retention_ratio) * n_total + 1e-9))


class _Compared:
    """The base of dataclasses with tensor fields: ``==`` compares dtype, device and values of tensors.

    No hash goes with it: equal tensors have different ones.
    """

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return _same(vars(self), vars(other))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class VisualTokens(_Compared):
    """The tokens of one video as a backbone makes them.

    Attributes:
        tokens: [T,N,D], all its visual tokens.
        evidence: what a method asked for besides.
        deepstack: [T,N,D] each, further vectors of the same tokens that enter the LLM's first layers (Qwen3-VL).
    """

    tokens: Tensor
    evidence: Mapping[str, Tensor] = field(default_factory=dict)
    deepstack: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class PrunedTokens(_Compared):
    """The kept tokens of one video, in ascending flat index.

    Attributes:
        tokens: [B,D], dtype and device of the input.
        index: [B] int64, flat index t*N + i, ascending. A merged token carries its target's index.
        rank: [B] int64, the order in which each token was selected (0 first); None for a method without an order.
        merged: [B] bool, or None where the method never merges.
        order: [B] int64, positions into these rows in the order in which the method's own code puts them into a prompt;
            None where that is ascending index.
        n_total: M = T*N, the number of tokens before pruning.
        retention_ratio: the nominal share asked for (budget / n_total where a budget was given); ``kept_ratio`` is the
            real one.
        density: [B] float32, rho of each kept token (Eq. 8); None for a method without a density.
        temporal_density: [T] float32, the normalised temporal density (Eq. 7); None for a method without one.
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
        """The number of kept tokens. Methods that count frame by frame come near their budget, not always to it."""
        return len(self.index)

    @property
    def budget(self) -> int:
        """B, the nominal number of tokens: that of ``retention_ratio``."""
        return budget_for(self.retention_ratio, self.n_total)

    @property
    def kept_ratio(self) -> float:
        """The real share of tokens kept, n_kept / n_total."""
        return self.n_kept / self.n_total

    @property
    def nested(self) -> bool:
        """Whether every smaller selection is a prefix of this one in order of rank."""
        return self.rank is not None

    def selection_order(self) -> Tensor:
        """Return [B] int64 positions into the rows of ``tokens``, first selected first.

        Without a rank, it is the order of the method's own prompt, which is ascending index where it has none.
        """
        if self.order is not None:
            return self.order
        if self.rank is None:
            import torch  # noqa: PLC0415 - it made the tensors, so it is loaded

            return torch.arange(len(self.index), device=self.index.device)
        return self.rank.argsort()

    def at(self, retention_ratio: float) -> PrunedTokens:
        """Return the nested smaller selection, ``retention_ratio`` being a share of all T*N tokens.

        Raises ValueError where the ratio is larger than this selection's, or smaller and the method is not nested.
        """
        budget = budget_for(retention_ratio, self.n_total)
        if retention_ratio > self.retention_ratio + 1e-9:
            raise ValueError(f"retention ratio {retention_ratio} is larger than the {self.retention_ratio} kept here")
        if self.rank is None:
            if abs(retention_ratio - self.retention_ratio) > 1e-9:
                raise ValueError(
                    f"this method has no order of selection, so only its own retention ratio {self.retention_ratio} "
                    f"is available, not {retention_ratio}: prune again at that ratio"
                )
            return self
        keep = self.rank < budget
        return PrunedTokens(
            tokens=self.tokens[keep],
            index=self.index[keep],
            rank=self.rank[keep],
            merged=None if self.merged is None else self.merged[keep],
            n_total=self.n_total,
            retention_ratio=float(retention_ratio),
            density=None if self.density is None else self.density[keep],
            temporal_density=self.temporal_density,
        )


def _same(a: object, b: object) -> bool:
    """Return whether two field values are equal: tensors by dtype, device and values, others by ==."""
    import torch  # noqa: PLC0415 - as above

    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(value, b[name]) for name, value in a.items())
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return not any(isinstance(value, torch.Tensor) for value in (a, b)) and bool(a == b)


@dataclass(frozen=True)
class Visual:
    """The kept tokens of one video, as a prompt needs them.

    Attributes:
        tokens: [K,D], in the order of the prompt: ascending flat index, or a method's own (on LLaVA-OneVision alone).
        index: [K] int64, flat index t*N + i before pruning; a merged token carries its target's index.
        n_frames: T (temporal patches on Qwen).
        tokens_per_frame: N.
        extra: what the model family needs besides (``Backbone.model_extra``): grid, seconds a patch, patch times.
        deepstack: [K,D] a level, the same rows as ``tokens``; Qwen3-VL alone has any.
        newline: [D], the row that follows the tokens of a video; LLaVA-OneVision alone has one.
        evidence: what the cache holds of the same tokens besides, for a method that has yet to prune them; no part of a
            prompt.
        frame_indices: the sampled frames, by their places in the source; a place repeats where a frame does. Empty
            where nobody knows them.
        fps: average frames a second of the whole source; None where nobody knows.
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

    @cached_property
    def placeholder_rows(self) -> Tensor:
        """[P,D*(1+levels)], what stands for the placeholders in a prompt: deepstack levels side by side, newline last.

        Kept, as all questions on a video share them.
        """
        import torch  # noqa: PLC0415 - as above

        rows = torch.cat([self.tokens, *self.deepstack], dim=1) if self.deepstack else self.tokens
        return rows if self.newline is None else torch.cat([rows, self.newline[None].to(rows)])

    @cached_property
    def placeholder_hash(self) -> str:
        """A hash of ``placeholder_rows``, their dtype and their shape."""
        rows = self.placeholder_rows
        return hash_of(f"{rows.dtype} {tuple(rows.shape)} ", rows)


def hash_of(text: str, tensor: Tensor) -> str:
    """Compute the SHA-256 of a text and a tensor's bytes."""
    import torch  # noqa: PLC0415 - as above

    digest = hashlib.sha256(text.encode())
    digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
