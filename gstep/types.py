"""The data that methods and models exchange, and the shape legend of this package.

Shapes: T frames (temporal patches on Qwen models), N tokens a frame, D hidden size of the LLM, M = T*N tokens of the
video, B budget (kept tokens). A token's flat index is n = t*N + i, counted from 0. Tensor names end in their shape
where it helps: ``tokens_MD`` is [M, D].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # code that only counts tokens or passes them on does not wait for torch
    from torch import Tensor


def budget_for(retention_ratio: float, n_total: int) -> int:
    """Compute B = max(1, floor(r*M + 1e-9)), the budget of a video of ``n_total`` tokens.

    The 1e-9 is for products that lie a rounding error below an integer.

    Raises ValueError if ``retention_ratio`` lies outside (0, 1].
    """
    is_number = isinstance(retention_ratio, Real) and not isinstance(retention_ratio, bool)
    if not (is_number and 0.0 < retention_ratio <= 1.0):
        raise ValueError(f"retention_ratio is the share of tokens kept, in (0, 1]; got {retention_ratio!r}")
    return max(1, math.floor(float(retention_ratio) * n_total + 1e-9))


class _TensorFields:
    """The base of dataclasses with tensor fields: ``==`` compares dtype, device and values of tensors.

    Objects have no hash, because equal tensors have different hashes.
    """

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return _is_equal(vars(self), vars(other))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class VisualTokens(_TensorFields):
    """The tokens of one video as a backbone makes them.

    Attributes:
        tokens: [T,N,D], all visual tokens of the video.
        evidence: further outputs of the encoder that a method needs, by label (gstep.evidence).
        deepstack: [T,N,D] each, further vectors of the same tokens that enter the LLM's first layers (Qwen3-VL).
        extra: facts of this video that only the encoder knows and a prompt needs, JSON values; they are stored beside
            ``Backbone.model_extra``.
        grid: (rows, columns) of the N tokens of a frame, which are in row order; None if unknown.
        times: seconds of each of the T frames (of a temporal patch: its first frame); None if unknown.
    """

    tokens: Tensor
    evidence: Mapping[str, Tensor] = field(default_factory=dict)
    deepstack: tuple[Tensor, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    grid: tuple[int, int] | None = None
    times: tuple[float, ...] | None = None

    @property
    def known_grid(self) -> tuple[int, int]:
        """The grid, or if it is unknown the factors of N that are nearest to each other, rows <= columns."""
        if self.grid is not None:
            return self.grid
        size = self.tokens.shape[1]
        rows = next(rows for rows in range(math.isqrt(size), 0, -1) if size % rows == 0)
        return rows, size // rows

    @property
    def known_times(self) -> tuple[float, ...]:
        """The times, or if they are unknown one second per frame."""
        return self.times if self.times is not None else tuple(map(float, range(len(self.tokens))))

    def add_places(self, grid: Sequence[int] | None, timestamps: Sequence[float]) -> VisualTokens:
        """Return the tokens with their grid and times.

        Args:
            grid: [rows, columns], ``ModelExtra["grid"]``; None if unknown.
            timestamps: seconds of each sampled frame. T temporal patches share them evenly; if they cannot, the times
                stay unknown.
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
        tokens: [B,D], dtype and device of the input.
        index: [B] int64, flat index t*N + i, ascending. A merged token carries its target's index.
        rank: [B] int64, the order in which each token was selected (0 first); None for a method without an order.
        merged: [B] bool, True for a token that is a mixture of input tokens; None for a method that never merges.
        order: [B] int64, row numbers in the order of the method's own prompt; None for ascending index.
        n_total: M = T*N, the number of tokens before pruning.
        retention_ratio: the nominal share, budget / n_total if a budget was passed; ``kept_ratio`` is the real share.
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
        """The number of kept tokens; methods that are not ``exact`` may miss the budget."""
        return len(self.index)

    @property
    def budget(self) -> int:
        """B, the nominal number of tokens at ``retention_ratio``."""
        return budget_for(self.retention_ratio, self.n_total)

    @property
    def kept_ratio(self) -> float:
        """The real share of tokens kept, n_kept / n_total."""
        return self.n_kept / self.n_total

    @property
    def nested(self) -> bool:
        """True if every smaller selection is a prefix of this selection in order of rank."""
        return self.rank is not None

    def selection_order(self) -> Tensor:
        """Return the row numbers of ``tokens`` in order of selection, [B] int64.

        A method without ranks has the order of its own prompt instead, or ascending index.
        """
        if self.order is not None:
            return self.order
        if self.rank is None:
            import torch  # noqa: PLC0415 - loaded already, since the tensors exist

            return torch.arange(len(self.index), device=self.index.device)
        return self.rank.argsort()

    def at(self, retention_ratio: float) -> PrunedTokens:
        """Return the nested smaller selection at ``retention_ratio``, a share of all T*N tokens.

        Raises ValueError if the ratio is larger than this selection's, or if it differs and the method is not nested.
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
    """Return True if two field values are equal: tensors by dtype, device and values, anything else by ==."""
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
    """The kept tokens of one video, as a prompt needs them.

    Attributes:
        tokens: [K,D], in the order of the prompt: ascending flat index, or a method's own (on LLaVA-OneVision alone).
        index: [K] int64, flat index t*N + i before pruning; a merged token carries its target's index.
        n_frames: T (temporal patches on Qwen).
        tokens_per_frame: N.
        extra: further facts for the model family's positions (``Backbone.model_extra``): grid, seconds a patch, patch
            times.
        deepstack: [K,D] a level, the same rows as ``tokens``; only Qwen3-VL has levels.
        newline: [D], the row that follows the tokens of a video; only LLaVA-OneVision has it.
        evidence: the cached evidence of the same tokens, for a method that prunes them later; no part of a prompt.
        frame_indices: the index in the source of each sampled frame, repeated frames included; empty if unknown.
        fps: average frames a second of the whole source; None if unknown.
        timestamps: seconds of each sampled frame, repeated frames included; empty if unknown.
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
        """The embeddings of the placeholders in a prompt, [P,D*(1+levels)]: deepstack levels alongside, newline last.

        Cached, because all questions on a video share them.
        """
        import torch  # noqa: PLC0415 - as above

        rows = torch.cat([self.tokens, *self.deepstack], dim=1) if self.deepstack else self.tokens
        return rows if self.newline is None else torch.cat([rows, self.newline[None].to(rows)])

    @cached_property
    def placeholder_hash(self) -> str:
        """A hash of ``placeholder_rows``, their dtype and their shape."""
        rows = self.placeholder_rows
        return hash_tensor(f"{rows.dtype} {tuple(rows.shape)} ", rows)


def hash_tensor(text: str, tensor: Tensor) -> str:
    """Compute the SHA-256 of a text followed by a tensor's bytes, as hex; the tensor is on the CPU."""
    import torch  # noqa: PLC0415 - as above

    digest = hashlib.sha256(text.encode())
    digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
